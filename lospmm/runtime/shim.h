// Makes the emitted CUDA C++, as it is, a library that a CPU runs one thread at a time (cpu_process.py calls it).
//
// B and C lie at addresses where no memory is (geometry.py). Every access is turned into an element of the running
// thread's own column; any other address ends the process, and stderr says: stray LINE OPERAND OFFSET COLUMN.

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>

namespace lospmm {

struct Geometry {
  std::uint64_t m, k, n, cols, block_rows, grid_x, takes_n;
};

struct Operand {
  char name;
  std::uint64_t address, rows;
  float *elements;  // rows x columns that were chosen
};

struct Index {
  unsigned x, y, z;
};

static Operand b, c;
static std::uint64_t n;                     // columns of B and C
static std::uint64_t column, slot, chosen;  // the running thread's column, its place among the chosen, their number

static float &element(const Operand &operand, const float *pointer, int line) {
  const std::uint64_t address = reinterpret_cast<std::uint64_t>(pointer);
  const std::uint64_t offset = address - operand.address - sizeof(float) * column;
  const std::uint64_t row = offset / (sizeof(float) * n);
  if (column >= n || offset % (sizeof(float) * n) != 0 || row >= operand.rows) {
    std::fprintf(stderr, "stray %d %c %lld %llu\n", line, operand.name,
                 static_cast<long long>(address - operand.address), static_cast<unsigned long long>(column));
    std::_Exit(1);
  }
  return operand.elements[row * chosen + slot];
}

}  // namespace lospmm

static lospmm::Index blockIdx, threadIdx, blockDim, gridDim;

#define __global__
#define __device__
#define __launch_bounds__(threads)
#define __ldcs(pointer) lospmm::element(lospmm::b, pointer, __LINE__)
#define __stcs(pointer, value) static_cast<void>(lospmm::element(lospmm::c, pointer, __LINE__) = (value))
#define __fmaf_rn(x, y, z) std::fmaf(x, y, z)

// A tile is the last thing that its thread does, so returning from it ends the thread.
#define LOSPMM_TILE extern "C" void
#define LOSPMM_END return

using Kernel = void (*)(const float *, float *);
using KernelOfN = void (*)(const float *, float *, unsigned);

extern "C" void lospmm_run(Kernel kernel, const lospmm::Geometry *geometry, const std::uint64_t *addresses,
                           const std::int64_t *columns, std::uint64_t count, float *b, float *c) {
  lospmm::b = {'B', addresses[0], geometry->k, b};
  lospmm::c = {'C', addresses[1], geometry->m, c};
  lospmm::n = geometry->n;
  lospmm::chosen = count;
  blockDim = {static_cast<unsigned>(geometry->cols), 1, 1};
  gridDim = {static_cast<unsigned>(geometry->grid_x), 1, 1};
  const float *at_b = reinterpret_cast<const float *>(addresses[0]);
  float *at_c = reinterpret_cast<float *>(addresses[1]);
  for (unsigned block_row = 0; block_row < geometry->block_rows; ++block_row) {
    for (lospmm::slot = 0; lospmm::slot < count; ++lospmm::slot) {
      lospmm::column = static_cast<std::uint64_t>(columns[lospmm::slot]);
      const unsigned block_column = static_cast<unsigned>(lospmm::column / geometry->cols);
      blockIdx = {block_column % gridDim.x, block_row, block_column / gridDim.x};
      threadIdx = {static_cast<unsigned>(lospmm::column % geometry->cols), 0, 0};
      if (geometry->takes_n)
        reinterpret_cast<KernelOfN>(kernel)(at_b, at_c, static_cast<unsigned>(geometry->n));
      else
        kernel(at_b, at_c);
    }
  }
}
