
// Row blocks of A on the tensor cores of sm_90a: C^T = B^T A^T, A's weights from shared memory, zeros included.
//
// GROUPS warpgroups have 64 columns of C each, of the same ROWS rows. One warpgroup more copies for them: the rows of B
// that any of these rows takes, DEPTH at a time, and their weights, to a ring of STAGES in shared memory. A thread
// reads two neighbouring columns of two rows of B, and has the sums of these columns in the end.
//
// The tensor cores cut off what a sum has no place for, each time that they add to it. So a sum of float32 is that of few
// products, FLUSHED columns of A, and such sums are added up by the threads.
//
// Numbers: n, k. Arrays: the rows of each block (-1: none); its first chunk of DEPTH columns (blocks + 1); the rows of B
// of each chunk (k: none), where they are LISTED, and not just all; the weights of each chunk, as lospmm_wgmma takes
// them, of float32 first the large parts, then the rests.

constexpr int SPLIT = LOSPMM_DTYPE == 0 ? 2 : 1;  // float32 is the sum of two TF32 numbers
constexpr int PRODUCTS = ROWS > 128 ? 2 : 1;      // that ROWS are cut into
constexpr int SUMS = ROWS / PRODUCTS / 2;         // of a thread, of each
constexpr int COLS = 64 * GROUPS, STRIDE = COLS + 8;
constexpr int WEIGHTS = ROWS * DEPTH, STAGE_FLOATS = DEPTH * STRIDE + SPLIT * WEIGHTS;
constexpr int FEEDERS = 128, LINES = FEEDERS / 16;  // threads that copy, 16 bytes each, and rows of B at once
constexpr int FLUSHED = SPLIT == 2 ? 64 : 0;
static_assert(DEPTH % 16 == 0 && DEPTH % LINES == 0);

// Two columns of two rows of B, which the tensor cores take as TF32 numbers: the bits below are cut off.
struct Factors {
  unsigned large[4], rest[4];
};

// Half of the last bit that is kept is added first: to the rests of float32, and to numbers of TF32 that are finite.
LOSPMM_INLINE void gather(Factors &factors, const float *two) {
  const float2 upper = *reinterpret_cast<const float2 *>(two), lower = *reinterpret_cast<const float2 *>(two + 4 * STRIDE);
  const float values[4] = {upper.x, upper.y, lower.x, lower.y};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const unsigned bits = __float_as_uint(values[i]);
    if constexpr (SPLIT == 2) {
      factors.large[i] = bits & 0xFFFFE000u;
      factors.rest[i] = __float_as_uint(values[i] - __uint_as_float(factors.large[i])) + 0x1000u;
    } else {
      factors.large[i] = values[i] - values[i] == 0 ? bits + 0x1000u : bits;
    }
  }
}

// The chunks from ``first`` to ``end`` on their way, as the ring has room: what the last warpgroup does.
LOSPMM_INLINE void feed(float *ring, unsigned long long *full, unsigned long long *empty, int first, int end,
                        const Element *b, long long n) {
  const int thread = threadIdx.x - 128 * GROUPS, line = thread / 16, place = thread % 16 * 4;
  const int k = static_cast<int>(lospmm_number(1));
  const int *rows = lospmm_array<int>(2) + static_cast<long long>(first) * DEPTH + line;
  const float *weights = lospmm_array<float>(3) + static_cast<long long>(first) * (SPLIT * WEIGHTS);
  const long long column = static_cast<long long>(blockIdx.x) * COLS + place;
  b += column;
  int stage = 0;
  unsigned parity = 1;  // a ring that is empty
#pragma unroll 1
  for (int chunk = first; chunk < end; ++chunk) {
    float *to = ring + stage * STAGE_FLOATS;
    lospmm_gate_wait(empty + stage, parity);
    if (thread == 0) {
      lospmm_bulk_expect(full + stage, SPLIT * WEIGHTS * sizeof(float));
      lospmm_bulk_copy(to + DEPTH * STRIDE, weights, SPLIT * WEIGHTS * sizeof(float), full + stage);
    }
#pragma unroll
    for (int i = 0; i < DEPTH / LINES; ++i) {
      const int row = LISTED ? __ldg(rows + LINES * i) : (chunk - first) * DEPTH + line + LINES * i;
#pragma unroll
      for (int group = 0; group < GROUPS; ++group)
        lospmm_copy<16>(to + (line + LINES * i) * STRIDE + place + 64 * group, b + row * n + 64 * group,
                        row < k && column + 64 * group < n);
    }
    lospmm_arrive_with_copies(full + stage);
    rows += DEPTH;
    weights += SPLIT * WEIGHTS;
    if (++stage == STAGES) stage = 0, parity ^= 1;
  }
  lospmm_commit();
  lospmm_wait<0>();
}

LOSPMM_KERNEL(lospmm_warpgroups) {
#if !RESIDUAL
  const Element *residual = nullptr;
#endif
  const long long n = lospmm_number(0);
  float *ring = reinterpret_cast<float *>(lospmm_shared);
  unsigned long long *full = reinterpret_cast<unsigned long long *>(ring + STAGES * STAGE_FLOATS), *empty = full + STAGES;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = lane / 4, quad = lane % 4;
  const int *starts = lospmm_array<int>(1) + blockIdx.y;
  const int first = starts[0], end = starts[1];
  if (threadIdx.x == 0)
    for (int stage = 0; stage < STAGES; ++stage) {
      lospmm_gate_make(empty + stage, 4 * GROUPS);
      lospmm_bulk_make(full + stage, FEEDERS);
    }
  __syncthreads();
  if (warp >= 4 * GROUPS) {
    feed(ring, full, empty, first, end, b, n);
    return;
  }

  const int own = warp * 16 + 2 * group;  // the first of two columns
  float sums[PRODUCTS][SUMS] = {}, totals[PRODUCTS][SUMS] = {};
  Factors factors[2];
  int stage = 0;
  unsigned parity = 0;
#pragma unroll 1
  for (int chunk = first; chunk < end; ++chunk) {
    const float *rows = ring + stage * STAGE_FLOATS + quad * STRIDE + own;
    const LospmmWeights weights = lospmm_weights(ring + stage * STAGE_FLOATS + DEPTH * STRIDE);
    lospmm_bulk_wait(full + stage, parity);
#pragma unroll
    for (int step = 0; step < DEPTH / 8; ++step) {
      Factors &of = factors[step % 2];
      gather(of, rows + 8 * step * STRIDE);
      lospmm_wgmma_begin();
#pragma unroll
      for (int product = 0; product < PRODUCTS; ++product) {
        const int at = step * (ROWS * 8) + product * (2 * SUMS * 8);
        if constexpr (SPLIT == 2) {
          lospmm_wgmma(sums[product], of.rest, lospmm_behind(weights, at));
          lospmm_wgmma(sums[product], of.large, lospmm_behind(weights, at + WEIGHTS));
        }
        lospmm_wgmma(sums[product], of.large, lospmm_behind(weights, at));
      }
      lospmm_wgmma_commit();
      lospmm_wgmma_wait<1>();  // the step before, whose factors are written over next
      if (step == 0 && chunk > first && lane == 0) lospmm_gate_arrive(empty + (stage ? stage : STAGES) - 1);
    }
    if (++stage == STAGES) stage = 0, parity ^= 1;
    if (FLUSHED && ((chunk - first + 1) * DEPTH % (FLUSHED ? FLUSHED : 1) == 0 || chunk + 1 == end)) {
      lospmm_wgmma_wait<0>();
#pragma unroll
      for (int i = 0; i < PRODUCTS * SUMS; ++i) {
        totals[i / SUMS][i % SUMS] += sums[i / SUMS][i % SUMS];
        sums[i / SUMS][i % SUMS] = 0;
      }
    }
  }
  lospmm_wgmma_wait<0>();

  const int *rows = lospmm_array<int>(0) + blockIdx.y * ROWS + 2 * quad;
  const long long column = static_cast<long long>(blockIdx.x) * COLS + own;
  const auto &all = FLUSHED ? totals : sums;
  if (column >= n) return;
#pragma unroll
  for (int product = 0; product < PRODUCTS; ++product)
#pragma unroll
    for (int eight = 0; eight < SUMS / 4; ++eight) {
      const int2 pair = __ldg(reinterpret_cast<const int2 *>(rows + product * (2 * SUMS) + 8 * eight));
#pragma unroll
      for (int of = 0; of < 2; ++of) {
        const int row = of ? pair.y : pair.x;
        if (row < 0) continue;
        const long long place = row * n + column;
        *reinterpret_cast<float2 *>(c + place) =
            make_float2(lospmm_finished(all[product][4 * eight + of], row, place, residual),
                        lospmm_finished(all[product][4 * eight + 2 + of], row, place + 1, residual));
      }
    }
}
