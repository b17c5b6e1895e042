// Makes the emitted CUDA C++, as it is, a library that a CPU runs one thread at a time (native_process.py calls it).
//
// B, C and the residual lie at addresses where no memory is (geometry.py). Every access is turned into an element of the
// running thread's own column; any other address ends the process, and stderr says: stray LINE OPERAND OFFSET COLUMN.

#include <cstdint>
#include <cstdio>
#include <cstdlib>

namespace lospmm {

struct Geometry {
  std::uint64_t m, k, n, cols, block_rows, grid_x, takes_residual, is_convolution;
  // Of a convolution's input and window, along the height before along the width:
  std::int64_t batch, channels, height, width, kernel_height, kernel_width, down, right, top, left, dilation_y,
      dilation_x, out_height, out_width;
};

struct Operand {
  char name;
  std::uint64_t address, rows;
  float *elements;  // rows x columns that were chosen
};

struct Index {
  unsigned x, y, z;
};

static Operand b, c, residual;
static const Geometry *sizes;
static std::uint64_t column, slot, chosen;  // the running thread's column, its place among the chosen, their number

// The row of a matrix whose rows are ``row_elements`` apart, ``offset`` bytes from its first; too large where there is none.
static std::uint64_t row_of(std::uint64_t offset, std::uint64_t row_elements) {
  return offset % (sizeof(float) * row_elements) ? ~0ull : offset / (sizeof(float) * row_elements);
}

// The row of B at which the element ``offset`` bytes into the input stands in the thread's window.
static std::uint64_t row_of_window(std::uint64_t offset) {
  const Geometry &s = *sizes;
  const std::int64_t pixels = s.out_height * s.out_width, pixel = column % pixels;
  const std::int64_t at = static_cast<std::int64_t>(offset / sizeof(float)), rest = at / s.width;
  const std::int64_t y = rest % s.height - (pixel / s.out_width * s.down - s.top);
  const std::int64_t x = at % s.width - (pixel % s.out_width * s.right - s.left);
  const std::int64_t channel = rest / s.height, row = y / s.dilation_y, place = x / s.dilation_x;
  const bool is_own = offset % sizeof(float) == 0 && channel / s.channels == static_cast<std::int64_t>(column) / pixels &&
                      channel < s.batch * s.channels && y >= 0 && y % s.dilation_y == 0 && row < s.kernel_height &&
                      x >= 0 && x % s.dilation_x == 0 && place < s.kernel_width;
  return is_own ? (channel % s.channels * s.kernel_height + row) * s.kernel_width + place : ~0ull;
}

static std::uint64_t own_row(const Operand &operand, std::uint64_t offset) {
  if (!sizes->is_convolution) return row_of(offset - sizeof(float) * column, sizes->n);
  if (&operand == &b) return row_of_window(offset);
  const std::uint64_t pixels = sizes->out_height * sizes->out_width;
  return row_of(offset - sizeof(float) * (column / pixels * sizes->m * pixels + column % pixels), pixels);
}

static float &element(const Operand &operand, const float *pointer, int line) {
  const std::uint64_t address = reinterpret_cast<std::uint64_t>(pointer);
  const std::uint64_t row = own_row(operand, address - operand.address);
  if (column >= sizes->n || row >= operand.rows) {
    std::fprintf(stderr, "stray %d %c %lld %llu\n", line, operand.name,
                 static_cast<long long>(address - operand.address), static_cast<unsigned long long>(column));
    std::_Exit(1);
  }
  return operand.elements[row * chosen + slot];
}

// What a load goes to.
static const Operand &read_from(const float *pointer) {
  const bool is_residual = reinterpret_cast<std::uint64_t>(pointer) >> 60 == residual.address >> 60;
  return sizes->takes_residual && is_residual ? residual : b;
}

}  // namespace lospmm

static lospmm::Index blockIdx, threadIdx, blockDim, gridDim;

#define __global__
#define __device__
#define __launch_bounds__(threads)
#define __ldcs(pointer) lospmm::element(lospmm::read_from(pointer), pointer, __LINE__)
#define __stcs(pointer, value) static_cast<void>(lospmm::element(lospmm::c, pointer, __LINE__) = (value))
#define __fmaf_rn(x, y, z) __builtin_fmaf(x, y, z)
#define __fadd_rn(x, y) ((x) + (y))

// A tile is the last thing that its thread does, so returning from it ends the thread.
#define LOSPMM_TILE extern "C" void
#define LOSPMM_END return

using Kernel = void (*)(const float *, float *);
using KernelOfResidual = void (*)(const float *, float *, const float *);

static void start(Kernel kernel, const std::uint64_t *addresses) {
  const float *b = reinterpret_cast<const float *>(addresses[0]);
  float *c = reinterpret_cast<float *>(addresses[1]);
  const float *residual = reinterpret_cast<const float *>(addresses[2]);
  if (lospmm::sizes->takes_residual)
    reinterpret_cast<KernelOfResidual>(kernel)(b, c, residual);
  else
    kernel(b, c);
}

// ``addresses`` are those of B, C and the residual; the Geometry follows them.
extern "C" void lospmm_run(Kernel kernel, const std::uint64_t *addresses, const std::int64_t *columns,
                           std::uint64_t count, const void *, float *b, float *c, float *residual) {
  const auto *geometry = reinterpret_cast<const lospmm::Geometry *>(addresses + 3);
  lospmm::b = {'B', addresses[0], geometry->k, b};
  lospmm::c = {'C', addresses[1], geometry->m, c};
  lospmm::residual = {'R', addresses[2], geometry->m, residual};
  lospmm::sizes = geometry;
  lospmm::chosen = count;
  blockDim = {static_cast<unsigned>(geometry->cols), 1, 1};
  gridDim = {static_cast<unsigned>(geometry->grid_x), 1, 1};
  std::uint64_t dots = 0;
  for (unsigned block_row = 0; block_row < geometry->block_rows; ++block_row) {
    for (lospmm::slot = 0; lospmm::slot < count; ++lospmm::slot) {
      lospmm::column = static_cast<std::uint64_t>(columns[lospmm::slot]);
      const unsigned block_column = static_cast<unsigned>(lospmm::column / geometry->cols);
      blockIdx = {block_column % gridDim.x, block_row, block_column / gridDim.x};
      threadIdx = {static_cast<unsigned>(lospmm::column % geometry->cols), 0, 0};
      start(kernel, addresses);
    }
    for (; dots < 100 * (block_row + std::uint64_t{1}) / geometry->block_rows; ++dots) std::putchar('.');  // each hundredth is one
    std::fflush(stdout);
  }
}
