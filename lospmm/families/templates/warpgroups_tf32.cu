
// Row blocks of A on the tensor cores of sm_90a: C^T = B^T A^T, A's weights from shared memory, zeros included.
//
// GROUPS warpgroups have 64 columns of C each, of the same ROWS rows. One warpgroup more copies for them: the rows of B
// that any of these rows takes, DEPTH at a time, and their weights, to a ring of STAGES in shared memory. A thread
// reads two neighbouring columns of two rows of B, and has the sums of these columns in the end.
//
// Numbers: n, k. Arrays: the rows of each block (-1: none); its first chunk of DEPTH columns (blocks + 1); the rows of B
// of each chunk (k: none), where they are LISTED, and not just all; the weights of each chunk, as lospmm_wgmma takes them.

constexpr int FEEDERS = 128, LINES = FEEDERS / 16;  // threads that copy, 16 bytes each, and rows of B at once
static_assert(DEPTH % 16 == 0 && DEPTH % LINES == 0);

// Two columns of two rows of B, which the tensor cores take as TF32 numbers: the bits below are cut off. So half of the
// last bit that is kept is added first, where a number is finite.
LOSPMM_INLINE void gather(unsigned (&factors)[4], const float *two) {
  const float2 upper = *reinterpret_cast<const float2 *>(two), lower = *reinterpret_cast<const float2 *>(two + 4 * STRIDE);
  const float values[4] = {upper.x, upper.y, lower.x, lower.y};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const unsigned bits = __float_as_uint(values[i]);
    factors[i] = values[i] - values[i] == 0 ? bits + 0x1000u : bits;
  }
}

// The chunks from ``first`` to ``end`` on their way, as the ring has room: what the last warpgroup does.
LOSPMM_INLINE void feed(float *ring, unsigned long long *full, unsigned long long *empty, int first, int end,
                        const Element *b, long long n) {
  const int thread = threadIdx.x - 128 * GROUPS, line = thread / 16, place = thread % 16 * 4;
  const int k = static_cast<int>(lospmm_number(1));
  const int *rows = lospmm_array<int>(2) + static_cast<long long>(first) * DEPTH + line;
  const float *weights = lospmm_array<float>(3) + static_cast<long long>(first) * WEIGHTS;
  const long long column = static_cast<long long>(blockIdx.x) * COLS + place;
  b += column;
  int stage = 0;
  unsigned parity = 1;  // a ring that is empty
#pragma unroll 1
  for (int chunk = first; chunk < end; ++chunk) {
    float *to = ring + stage * STAGE_FLOATS;
    lospmm_gate_wait(empty + stage, parity);
    if (thread == 0) {
      lospmm_bulk_expect(full + stage, WEIGHTS * sizeof(float));
      lospmm_bulk_copy(to + DEPTH * STRIDE, weights, WEIGHTS * sizeof(float), full + stage);
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
    weights += WEIGHTS;
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
  float sums[PRODUCTS][SUMS] = {};
  unsigned factors[2][4];
  int stage = 0;
  unsigned parity = 0;
#pragma unroll 1
  for (int chunk = first; chunk < end; ++chunk) {
    const float *rows = ring + stage * STAGE_FLOATS + quad * STRIDE + own;
    const LospmmWeights weights = lospmm_weights(ring + stage * STAGE_FLOATS + DEPTH * STRIDE);
    lospmm_bulk_wait(full + stage, parity);
#pragma unroll
    for (int step = 0; step < DEPTH / 8; ++step) {
      unsigned (&of)[4] = factors[step % 2];
      gather(of, rows + 8 * step * STRIDE);
      lospmm_wgmma_begin();
#pragma unroll
      for (int product = 0; product < PRODUCTS; ++product) {
        const int at = step * (ROWS * 8) + product * (2 * SUMS * 8);
        lospmm_wgmma(sums[product], of, lospmm_behind(weights, at));
      }
      lospmm_wgmma_commit();
      lospmm_wgmma_wait<1>();  // the step before, whose factors are written over next
      if (step == 0 && chunk > first && lane == 0) lospmm_gate_arrive(empty + (stage ? stage : STAGES) - 1);
    }
    if (++stage == STAGES) stage = 0, parity ^= 1;
  }
  lospmm_wgmma_wait<0>();

  const long long column = static_cast<long long>(blockIdx.x) * COLS + own;
  if (column < n) lospmm_store<false>(c, sums, blockIdx.y * ROWS + 2 * quad, column, n, residual);
}
