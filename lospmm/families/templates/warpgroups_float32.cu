
// Row blocks of A on the tensor cores of sm_90a, of float32: C^T = B^T A^T, A's weights from shared memory, zeros included.
//
// GROUPS warpgroups have 64 columns of C each, of the same ROWS rows. Each copies its columns of the rows of B that any of
// these rows takes, DEPTH at a time, to a ring of STAGES in shared memory, and one thread the weights for all; it may be
// BEHIND chunks ahead of the others. A thread reads two neighbouring columns of every fourth row of B, and has the sums of
// these columns in the end.
//
// A factor is the sum of two float16, which have as many bits as TF32 numbers and are multiplied twice as fast; a product is
// that of the large parts and of each with the other's rest. What float16 has not is the range: so a column of B is multiplied
// by a power of two that makes the largest of some 32 or 64 elements 2^10 or more, and a row of A by its own, when it is
// packed. An element is kept to 2^-22 of itself, or to 2^-35 of that largest one, whichever is more.
//
// The tensor cores cut off what a sum has no place for, each time that they add to it. So a sum is that of 64 columns of A,
// or fewer, and the threads add up such sums.
//
// Numbers: n, k. Arrays: the rows of each block (-1: none); its first chunk of DEPTH columns (blocks + 1); the rows of B
// of each chunk (k: none), where they are LISTED, and not just all; the weights of each chunk, as lospmm_wgmma_half takes
// them, first the large parts, then the rests; what undoes the power of two of each row of a block.

constexpr int STEPS = DEPTH / 16;
constexpr int LINES = 128 / 16;  // rows of B that a warpgroup copies at once, 16 bytes a thread
static_assert(DEPTH % 16 == 0 && ROWS % (16 * PRODUCTS) == 0 && STAGES > BEHIND);

// Chunks of one sum: two of 32 columns, where a thread has registers for the sums of all rows.
constexpr int CHUNKS = PRODUCTS <= 2 ? 64 / DEPTH : 1;

// Of two columns of B.
struct Factors {
  unsigned large[STEPS][4], rest[STEPS][4];
  unsigned exponent[2];  // of each column, as in the bits of a float32: that of its largest element
};

// The largest element of a column is made one of this exponent, and those of the next chunk are not made larger than the
// other one: float16 end at 2^16.
constexpr unsigned LARGEST = 10, MOST = 14, BIAS_OF_EXPONENT = 127, FRACTION = 23;

LOSPMM_INLINE float undo_of(unsigned exponent) { return __uint_as_float((exponent - LARGEST) << FRACTION); }

// With the powers of two of the chunk ``before``, where they will do, and else with its own.
LOSPMM_INLINE Factors split(const float *two, const Factors *before) {
  float values[2][4 * STEPS];
#pragma unroll
  for (int i = 0; i < 4 * STEPS; ++i) {
    const float2 both = *reinterpret_cast<const float2 *>(two + 4 * i * STRIDE);
    values[0][i] = both.x, values[1][i] = both.y;
  }
  Factors factors;
#pragma unroll
  for (int column = 0; column < 2; ++column) {
    float largest = 0;
#pragma unroll
    for (int i = 0; i < 4 * STEPS; ++i) largest = fmaxf(largest, fabsf(values[column][i]));
    largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 1));
    largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 2));
    // The power of two and its inverse are both float32.
    unsigned exponent = max(__float_as_uint(largest) >> FRACTION, LARGEST + 1);
    if (before && exponent <= before->exponent[column] + (MOST - LARGEST)) exponent = before->exponent[column];
    const float scale = __uint_as_float((2 * BIAS_OF_EXPONENT + LARGEST - exponent) << FRACTION);
    factors.exponent[column] = exponent;
#pragma unroll
    for (int i = 0; i < 2 * STEPS; ++i) {
      const float first = values[column][2 * i] * scale, second = values[column][2 * i + 1] * scale;
      const unsigned large = lospmm_pair(first, second);
      factors.large[i / 2][i % 2 * 2 + column] = large;
      factors.rest[i / 2][i % 2 * 2 + column] = lospmm_pair(first - lospmm_first(large), second - lospmm_second(large));
    }
  }
  return factors;
}

// What a thread copies of the block's chunks, one after another: four columns of every eighth row of B, and thread 0 the
// weights for all.
struct Copier {
  const Element *b;
  const float *weights;
  const int *rows;  // of B, of a chunk
  long long n;
  int k, row;
  bool is_there;
};

// The next chunk on its way to a stage.
LOSPMM_INLINE void copy(Copier &copier, float *stage, unsigned long long *full) {
  if (threadIdx.x == 0) {
    lospmm_bulk_expect(full, WEIGHTS * sizeof(float));
    lospmm_bulk_copy(stage + DEPTH * STRIDE, copier.weights, WEIGHTS * sizeof(float), full);
  }
  stage += threadIdx.x % 128 / 16 * STRIDE + threadIdx.x / 128 * 64 + threadIdx.x % 16 * 4;
#pragma unroll
  for (int at = 0; at < DEPTH; at += LINES) {
    const int row = LISTED ? __ldg(copier.rows + at) : copier.row + at;
    lospmm_copy<16>(stage + at * STRIDE, copier.b + row * copier.n, row < copier.k && copier.is_there);
  }
  lospmm_arrive_with_copies(full);
  copier.weights += WEIGHTS, copier.rows += DEPTH, copier.row += DEPTH;
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
      lospmm_bulk_make(full + stage, 128 * GROUPS);
    }
  __syncthreads();

  const int line = threadIdx.x % 128 / 16;
  const long long copied = static_cast<long long>(blockIdx.x) * COLS + warp / 4 * 64 + threadIdx.x % 16 * 4;
  Copier copier = {b + copied,
                   lospmm_array<float>(3) + static_cast<long long>(first) * WEIGHTS,
                   lospmm_array<int>(2) + static_cast<long long>(first) * DEPTH + line,
                   n,
                   static_cast<int>(lospmm_number(1)),
                   line,
                   copied < n};
  for (int stage = 0; stage < STAGES - BEHIND && first + stage < end; ++stage)
    copy(copier, ring + stage * STAGE_FLOATS, full + stage);

  const int own = warp * 16 + 2 * group;  // the first of two columns
  const float *const rows_of_b = ring + quad * STRIDE + own;
  float sums[2][SUMS] = {}, totals[PRODUCTS][SUMS] = {};
  int stage = 0, filled = STAGES - BEHIND;
  unsigned parity = 0, parity_of_filled = 1;

  // A product of the chunk in a stage, added to the sums before it where it is not the ``fresh`` beginning of them. Two
  // take turns with their sums: while one is under way, those of the other are added up.
  const auto start = [&](const Factors &factors, int of_stage, int product, bool fresh) {
    const LospmmWeights weights = lospmm_weights(ring + of_stage * STAGE_FLOATS + DEPTH * STRIDE);
    float (&to)[SUMS] = sums[product % 2];
    lospmm_wgmma_begin();
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
      const int at = (step * ROWS + product * 2 * SUMS) * 8;  // of two float16 each
      lospmm_wgmma_half(to, factors.rest[step], lospmm_behind(weights, at), step > 0 || !fresh);
      lospmm_wgmma_half(to, factors.large[step], lospmm_behind(weights, at + WEIGHTS / 2), true);
      lospmm_wgmma_half(to, factors.large[step], lospmm_behind(weights, at), true);
    }
    lospmm_wgmma_commit();
  };
  const auto add = [&](const Factors &factors, int product) {
    const float undo[2] = {undo_of(factors.exponent[0]), undo_of(factors.exponent[1])};
#pragma unroll
    for (int i = 0; i < SUMS; ++i) totals[product][i] = fmaf(sums[product % 2][i], undo[i / 2 % 2], totals[product][i]);
  };
  // A chunk from its factors; and, while its last products are under way, copies, and the factors of the next chunk. Its
  // sums begin with the first of CHUNKS, and are added up behind the last.
  const auto multiply = [&](const Factors &factors, Factors &next, int chunk, bool is_first, bool is_last) {
    constexpr int LAST = PRODUCTS - 1;
    const int own_stage = stage;
    if (++stage == STAGES) stage = 0, parity ^= 1;
    start(factors, own_stage, 0, is_first);
#pragma unroll
    for (int product = 1; product < LAST; ++product) {
      start(factors, own_stage, product, is_first);
      lospmm_wgmma_wait<1>();
      add(factors, product - 1);
    }
    if (LAST > 0) start(factors, own_stage, LAST, is_first);
    if (chunk + STAGES - BEHIND < end) {
      lospmm_gate_wait(empty + filled, parity_of_filled);
      copy(copier, ring + filled * STAGE_FLOATS, full + filled);
      if (++filled == STAGES) filled = 0, parity_of_filled ^= 1;
    }
    bool is_added = chunk + 1 == end;
    if (chunk + 1 < end) {
      lospmm_bulk_wait(full + stage, parity);
      next = split(rows_of_b + stage * STAGE_FLOATS, is_last ? nullptr : &factors);
      if (!is_last) {
        const bool is_other = next.exponent[0] != factors.exponent[0] || next.exponent[1] != factors.exponent[1];
        is_added = __ballot_sync(~0u, is_other) != 0;
      }
    }
    if (is_last && LAST > 0) {
      lospmm_wgmma_wait<1>();
      add(factors, LAST - 1);
    }
    lospmm_wgmma_wait<0>();
    if (lane == 0) lospmm_gate_arrive(empty + own_stage);
    if (is_last) {
      add(factors, LAST);
    } else if (is_added) {
#pragma unroll
      for (int product = 0; product < PRODUCTS; ++product) add(factors, product);
#pragma unroll
      for (int i = 0; i < 2 * SUMS; ++i) sums[i / SUMS][i % SUMS] = 0;
    }
  };
  Factors even, odd;
  if (first < end) {
    lospmm_bulk_wait(full, 0);
    even = split(rows_of_b, nullptr);
  }
#pragma unroll 1
  for (int chunk = first; chunk < end; chunk += 2) {
    multiply(even, odd, chunk, true, CHUNKS == 1);
    if (chunk + 1 == end) break;
    multiply(odd, even, chunk + 1, CHUNKS == 1, true);
  }

  const long long column = static_cast<long long>(blockIdx.x) * COLS + own;
  if (column < n) lospmm_store<true>(c, totals, blockIdx.y * ROWS + 2 * quad, column, n, residual);
}
