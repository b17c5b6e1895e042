
// O[o[p],f] += I[i[p],c] * W[w[p],c,f] by tensor cores (lospmm/einsums/gathered.py).
//
// A warp has a tile of POINTS rows of O and 8 x RUN of their columns. A tile has slots: a slot is one w, and a row of I, or
// none, for each row of the tile. So a slot is a small dense product, rows of I gathered on its left, W[w] on its right;
// neither passes through shared memory. What a lane holds follows from the instruction (PTX ISA, mma.m16n8k8 and m16n8k16)
// up to the order of c and of the columns, which are such that a lane reads neighbours in memory.
//
// Arrays: where each tile's slots begin (tiles + 1), the w of each slot, its rows of I (POINTS, -1 for none), the rows of O
// of each tile (POINTS, -1 for none), and W where it is known.

constexpr bool is_short = sizeof(Element) == 2;
constexpr bool is_split = LOSPMM_DTYPE == 0;         // float32 as two TF32 numbers
constexpr unsigned STEPS = is_short ? OWN / 4 : OWN / 2;  // instructions along the OWN elements of a row of I of a lane
constexpr unsigned TALL = POINTS / 16;
constexpr unsigned LEFT_WORDS = OWN * sizeof(Element) / 4;
constexpr unsigned RIGHT_WORDS = RUN * sizeof(Element) / 4;

template <unsigned count>
union Run {
  typename Word<count * sizeof(Element)>::type word;
  Element of[count];
  unsigned words[count * sizeof(Element) / 4];
};

struct Pair {
  unsigned high, low;
};

// A number of TF32, and, of float32, what is left of it.
LOSPMM_INLINE Pair tf32_of(unsigned bits) {
  Pair pair = {lospmm_tf32(__uint_as_float(bits)), 0};
  if (is_split) pair.low = lospmm_tf32(__uint_as_float(bits) - __uint_as_float(pair.high));
  return pair;
}

LOSPMM_KERNEL(lospmm_gather_gemm) {
#if IS_KNOWN
  const Element *input = b, *weights = lospmm_array<Element>(4);
#elif IS_SWAPPED
  const Element *input = residual, *weights = b;
#else
  const Element *input = b, *weights = residual;
#endif
  const unsigned warp = blockIdx.x * WARPS + threadIdx.x / 32, lane = threadIdx.x % 32;
  const unsigned tile = warp / WIDE, group = lane / 4, place = lane % 4;
  if (tile >= TILES) return;
  const unsigned first_column = warp % WIDE * 8 * RUN;
  const unsigned own_column = first_column + group * RUN;
  const unsigned begin = lospmm_array<unsigned>(0)[tile], end = lospmm_array<unsigned>(0)[tile + 1];
  // Columns behind the last are computed like the first ones, and not stored.
  const Element *right_from = weights + (own_column < COLUMNS ? own_column : 0) + place * OWN * COLUMNS;
  const Element *left_from = input + place * OWN;
  float sums[TALL][RUN][4] = {};
  for (unsigned slot = begin; slot < end; ++slot) {
    const int *at_rows = lospmm_array<int>(2) + static_cast<long long>(slot) * POINTS + group;
    int rows[TALL][2];
#pragma unroll
    for (unsigned tall = 0; tall < TALL; ++tall) {
      rows[tall][0] = __ldg(at_rows + tall * 16);
      rows[tall][1] = __ldg(at_rows + tall * 16 + 8);
    }
    const Element *right_at = right_from + static_cast<long long>(__ldg(lospmm_array<int>(1) + slot)) * DEPTH * COLUMNS;
#pragma unroll 2
    for (unsigned depth = 0; depth < DEPTH; depth += 4 * OWN) {
      Run<OWN> left[TALL][2];
      Run<RUN> right[OWN];
#pragma unroll
      for (unsigned tall = 0; tall < TALL; ++tall)
#pragma unroll
        for (unsigned half = 0; half < 2; ++half) {
          const int row = rows[tall][half];
          left[tall][half].word = {};
          if (row >= 0)
            left[tall][half].word = __ldg(reinterpret_cast<const decltype(left[0][0].word) *>(
                left_from + static_cast<long long>(row) * DEPTH + depth));
        }
#pragma unroll
      for (unsigned i = 0; i < OWN; ++i)
        right[i].word = __ldg(reinterpret_cast<const decltype(right[0].word) *>(right_at + (depth + i) * COLUMNS));
#pragma unroll
      for (unsigned step = 0; step < STEPS; ++step) {
        unsigned a[TALL][4], a_rest[TALL][4];
#pragma unroll
        for (unsigned tall = 0; tall < TALL; ++tall)
#pragma unroll
          for (unsigned i = 0; i < 4; ++i) {
            a[tall][i] = left[tall][i % 2].words[2 * step + i / 2];
            if (!is_short) {
              const Pair pair = tf32_of(a[tall][i]);
              a[tall][i] = pair.high, a_rest[tall][i] = pair.low;
            }
          }
#pragma unroll
        for (unsigned column = 0; column < RUN; ++column) {
          unsigned two[2], two_rest[2];
#pragma unroll
          for (unsigned i = 0; i < 2; ++i) {
            if constexpr (is_short) {
              const Run<RUN> &upper = right[4 * step + 2 * i], &lower = right[4 * step + 2 * i + 1];
              two[i] = __byte_perm(upper.words[column / 2], lower.words[column / 2], column % 2 ? 0x7632 : 0x5410);
            } else {
              const Pair pair = tf32_of(right[2 * step + i].words[column]);
              two[i] = pair.high, two_rest[i] = pair.low;
            }
          }
#pragma unroll
          for (unsigned tall = 0; tall < TALL; ++tall) {
            if constexpr (is_split) {
              lospmm_mma(sums[tall][column], a_rest[tall], two);
              lospmm_mma(sums[tall][column], a[tall], two_rest);
            }
            lospmm_mma(sums[tall][column], a[tall], two);
          }
        }
      }
    }
  }
#pragma unroll
  for (unsigned tall = 0; tall < TALL; ++tall)
#pragma unroll
    for (unsigned half = 0; half < 2; ++half) {
      const int row = lospmm_array<int>(3)[tile * POINTS + tall * 16 + half * 8 + group];
      if (row < 0) continue;
#pragma unroll
      for (unsigned odd = 0; odd < 2; ++odd) {
        const unsigned column = first_column + (2 * place + odd) * RUN;
        if (column >= COLUMNS) continue;
        Run<RUN> results;
#pragma unroll
        for (unsigned i = 0; i < RUN; ++i) results.of[i] = lospmm_element(sums[tall][i][half * 2 + odd]);
        *reinterpret_cast<decltype(results.word) *>(c + static_cast<long long>(row) * COLUMNS + column) = results.word;
      }
    }
}
