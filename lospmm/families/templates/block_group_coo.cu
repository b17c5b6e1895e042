
// Groups of GROUP dense blocks of one block row of A, multiplied by tensor cores (lospmm/families/block_group_coo.py).
//
// A warp has ROWS rows of C and 8 x COLUMNS of its columns; the SPLITS warps that have the same ones share out the block
// row's groups. C is computed transposed, 16 columns by 8 rows of it at a time: B is the left operand. What a lane holds
// of it follows from the instruction (PTX ISA, mma.m16n8k8 and m16n8k16) up to the order of the columns and of the inner
// dimension, which are free as long as A's order is the same. They are such that a lane reads neighbours in memory:
// RUN columns at a time, of as many rows of B as one step takes. No element of B passes through shared memory.
//
// Numbers: n, block rows, m, k. Arrays: where each block row's groups begin (block rows + 1), which block row it is, the
// first row of B of each block, the blocks as the lanes read them.

constexpr bool is_short = sizeof(Element) == 2;
constexpr bool is_split = LOSPMM_DTYPE == 0;       // float32 as two TF32 numbers
constexpr unsigned INNER = is_short ? 16 : 8;      // rows of B of an instruction
constexpr unsigned OWN = INNER / 4;                // of them, a lane's
constexpr unsigned STEPS = GROUP * BLOCK / INNER;  // of a group
constexpr unsigned RUN = COLUMNS * sizeof(Element) < 16 ? COLUMNS : 16 / sizeof(Element);
constexpr unsigned WORDS = COLUMNS * sizeof(Element) / 4;  // of a lane's elements of one row of B
constexpr unsigned PARTS = ROWS / 8;
constexpr unsigned A_WORDS = is_split ? 4 : 2;  // of a lane, for 8 rows of A and a step
constexpr unsigned WARPS_ALONG = WARPS / SPLITS;

struct Step {
  unsigned b[OWN][WORDS];
  unsigned a[PARTS][A_WORDS];
};

using Piece = Word<sizeof(Element) * VECTOR>::type;

// The columns of a lane: runs of RUN, 8 x RUN apart.
LOSPMM_INLINE unsigned column_of(unsigned first, unsigned i) { return first + i / RUN * 8 * RUN + i % RUN; }

LOSPMM_INLINE void load_b(unsigned (&words)[WORDS], const unsigned char *const (&from)[COLUMNS / VECTOR],
                          unsigned long long offset) {
  union {
    Piece pieces[COLUMNS / VECTOR];
    unsigned words[WORDS];
  } held;
#pragma unroll
  for (unsigned i = 0; i < COLUMNS / VECTOR; ++i)
    held.pieces[i] = __ldg(reinterpret_cast<const Piece *>(from[i] + offset));
#pragma unroll
  for (unsigned i = 0; i < WORDS; ++i) words[i] = held.words[i];
}

LOSPMM_INLINE void load_a(unsigned (&a)[PARTS][A_WORDS], const uint2 *blocks, long long step, unsigned lane) {
  if (is_split || PARTS % 2 == 0) {
    constexpr unsigned COUNT = PARTS * A_WORDS / 4;
    const uint4 *from = reinterpret_cast<const uint4 *>(blocks) + step * COUNT * 32 + lane;
#pragma unroll
    for (unsigned i = 0; i < COUNT; ++i) {
      const uint4 four = __ldg(from + i * 32);
      unsigned *to = &a[0][0] + i * 4;
      to[0] = four.x, to[1] = four.y, to[2] = four.z, to[3] = four.w;
    }
  } else {
#pragma unroll
    for (unsigned i = 0; i < PARTS; ++i) {
      const uint2 two = __ldg(blocks + (step * PARTS + i) * 32 + lane);
      a[i][0] = two.x, a[i][1] = two.y;
    }
  }
}

// The left operand for 16 columns of C: the lane's columns 2 t and 2 t + 1.
LOSPMM_INLINE void left_of(unsigned (&left)[4], const unsigned (&b)[OWN][WORDS], unsigned t) {
  if constexpr (is_short) {
    left[0] = __byte_perm(b[0][t], b[1][t], 0x5410);
    left[1] = __byte_perm(b[0][t], b[1][t], 0x7632);
    left[2] = __byte_perm(b[2][t], b[3][t], 0x5410);
    left[3] = __byte_perm(b[2][t], b[3][t], 0x7632);
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) left[i] = b[i / 2][2 * t + i % 2];
  }
}

LOSPMM_INLINE void multiply(float (&sums)[PARTS][COLUMNS / 2][4], const Step &step) {
#pragma unroll
  for (unsigned t = 0; t < COLUMNS / 2; ++t) {
    unsigned left[4], rest[4];
    left_of(left, step.b, t);
    if constexpr (!is_short) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float value = __uint_as_float(left[i]);
        left[i] = lospmm_tf32(value);
        if constexpr (is_split) rest[i] = lospmm_tf32(value - __uint_as_float(left[i]));
      }
    }
#pragma unroll
    for (unsigned part = 0; part < PARTS; ++part) {
      const unsigned right[2] = {step.a[part][0], step.a[part][1]};
      if constexpr (is_split) {
        const unsigned right_rest[2] = {step.a[part][2], step.a[part][3]};
        lospmm_mma(sums[part][t], rest, right);
        lospmm_mma(sums[part][t], left, right_rest);
      }
      lospmm_mma(sums[part][t], left, right);
    }
  }
}

LOSPMM_KERNEL(lospmm_block_group_coo) {
#if !RESIDUAL
  const Element *residual = nullptr;
#endif
  const unsigned n = lospmm_number(0), block_rows = lospmm_number(1), m = lospmm_number(2);
  const unsigned place_in_grid = blockIdx.z * gridDim.y + blockIdx.y;
  if (place_in_grid >= block_rows) return;
  const unsigned warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = lane / 4, place = lane % 4;
  const unsigned split = warp / WARPS_ALONG;
  const unsigned first_column = (blockIdx.x * WARPS_ALONG + warp % WARPS_ALONG) * 8 * COLUMNS + group * RUN;
  const unsigned begin = lospmm_array<unsigned>(0)[place_in_grid], end = lospmm_array<unsigned>(0)[place_in_grid + 1];
  const unsigned chunk = (end - begin + SPLITS - 1) / SPLITS;
  const unsigned first = min(begin + split * chunk, end), last = min(first + chunk, end);
  const int *rows_of_b = lospmm_array<int>(2) + static_cast<long long>(first) * GROUP;
  const uint2 *blocks = lospmm_array<uint2>(3);
  const long long first_step = static_cast<long long>(first) * STEPS;
  const unsigned steps = (last - first) * STEPS;
  float sums[PARTS][COLUMNS / 2][4] = {};

  // Columns behind the last are computed like column 0, and not stored.
  const unsigned char *from[COLUMNS / VECTOR];
#pragma unroll
  for (unsigned i = 0; i < COLUMNS / VECTOR; ++i) {
    const unsigned column = column_of(first_column, i * VECTOR);
    from[i] = reinterpret_cast<const unsigned char *>(b + (column < n ? column : 0));
  }
  const unsigned stride = n * sizeof(Element);

  // A step's first row of B of this lane; what lies behind the last step is the last step again.
  auto row_of = [&](unsigned step) -> unsigned {
    const unsigned inner = min(step, steps - 1) * INNER + OWN * place;
    return __ldg(rows_of_b + inner / BLOCK) + inner % BLOCK;
  };
  auto load = [&](Step &into, unsigned step, unsigned row) {
#pragma unroll
    for (unsigned i = 0; i < OWN; ++i) {
#if RAGGED
      const unsigned own = min(row + i, static_cast<unsigned>(lospmm_number(3)) - 1);
#else
      const unsigned own = row + i;
#endif
      load_b(into.b[i], from, static_cast<unsigned long long>(own) * stride);
    }
    load_a(into.a, blocks, first_step + min(step, steps - 1), lane);
  };

  if (steps) {
    Step ring[AHEAD + 1];
    unsigned row = row_of(0);
#pragma unroll
    for (unsigned i = 0; i < AHEAD; ++i) {
      load(ring[i], i, row);
      row = row_of(i + 1);
    }
    for (unsigned step = 0; step < steps; step += AHEAD + 1) {
#pragma unroll
      for (unsigned i = 0; i < AHEAD + 1; ++i) {
        if (step + i >= steps) break;
        load(ring[(i + AHEAD) % (AHEAD + 1)], step + i + AHEAD, row);
        row = row_of(step + i + AHEAD + 1);
        multiply(sums, ring[i]);
      }
    }
  }

#if SPLITS > 1
  // In one order: the first warp adds what the others have.
  constexpr unsigned EACH = PARTS * COLUMNS * 2, TOGETHER = WARPS_ALONG * 32;
  float *const shared = reinterpret_cast<float *>(lospmm_shared);
  const unsigned together = threadIdx.x % TOGETHER;
  float *const flat = &sums[0][0][0];
  if (split) {
#pragma unroll
    for (unsigned i = 0; i < EACH; ++i) shared[((split - 1) * EACH + i) * TOGETHER + together] = flat[i];
  }
  __syncthreads();
  if (split) return;
  for (unsigned other = 0; other + 1 < SPLITS; ++other) {
#pragma unroll
    for (unsigned i = 0; i < EACH; ++i) flat[i] = __fadd_rn(flat[i], shared[(other * EACH + i) * TOGETHER + together]);
  }
#endif

  const unsigned first_row = lospmm_array<int>(1)[place_in_grid] * ROWS + 2 * place;
#pragma unroll
  for (unsigned part = 0; part < PARTS; ++part) {
#pragma unroll
    for (unsigned odd = 0; odd < 2; ++odd) {
      const unsigned row = first_row + part * 8 + odd;
      if (row >= m) continue;
      const long long at_row = static_cast<long long>(row) * n;
#pragma unroll
      for (unsigned i = 0; i < COLUMNS; i += VECTOR) {
        const unsigned column = column_of(first_column, i);
        if (column >= n) continue;
        union {
          Piece piece;
          Element of[VECTOR];
        } result;
#pragma unroll
        for (unsigned j = 0; j < VECTOR; ++j)
          result.of[j] = lospmm_finished(sums[part][(i + j) / 2][(i + j) % 2 * 2 + odd], row, at_row + column + j, residual);
        *reinterpret_cast<Piece *>(c + at_row + column) = result.piece;
      }
    }
  }
}
