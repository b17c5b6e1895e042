
// Buckets of rows (ell.cuh), and strips of SIDE rows with dense blocks (BSR): a row of B that a block takes is read once
// for all rows of the strip. What a strip has beside its blocks are lists of entries, one a row.
// Numbers: n, k. Arrays: the rows by part, of a strip its first; of each block of threads its part and first place; the
// parts; the lists; of each strip where its blocks begin, their number, where its lists begin (in groups) and the groups
// of one; the columns of blocks, in blocks; the weights of blocks, column by column.

struct alignas(sizeof(Element) == 2 ? 2 * SIDE : 16) Weights {
  Element of[SIDE];
};

LOSPMM_INLINE void lospmm_blocks(float (&sums)[SIDE][VECTOR], int first, int end, int stride, const Element *b,
                                 unsigned n, unsigned k) {
  for (int at = first; at < end; at += stride) {
    const unsigned column = static_cast<unsigned>(__ldg(lospmm_array<int>(5) + at)) * SIDE;
    const Weights *weights = lospmm_array<Weights>(6) + static_cast<long long>(at) * SIDE;
    Elements elements[SIDE];
#pragma unroll
    for (int i = 0; i < SIDE; ++i) {
      elements[i] = Elements{};
      if (column + i < k)
        elements[i] = *reinterpret_cast<const Elements *>(b + static_cast<unsigned long long>(column + i) * n);
    }
#pragma unroll
    for (int i = 0; i < SIDE; ++i) {
      const Weights weight = weights[i];
#pragma unroll
      for (int of = 0; of < VECTOR; ++of) {
        const float element = lospmm_float(elements[i].of[of]);
#pragma unroll
        for (int row = 0; row < SIDE; ++row)
          sums[row][of] = __fmaf_rn(lospmm_float(weight.of[row]), element, sums[row][of]);
      }
    }
  }
}

LOSPMM_KERNEL(lospmm_hyb_strips) {
#if !RESIDUAL
  const Element *residual = nullptr;
#endif
  const unsigned n = static_cast<unsigned>(lospmm_number(0)), k = static_cast<unsigned>(lospmm_number(1));
  const int m = static_cast<int>(lospmm_number(2));
  const long long block = blockIdx.z * static_cast<long long>(gridDim.y) + blockIdx.y;
  const int2 here = __ldg(lospmm_array<int2>(1) + block);
  if (here.x < 0) return;  // the grid is larger than the number of blocks
  const Part part = lospmm_part(here.x);
  if (!part.is_strips) {
    lospmm_ell(part, here.y, n, b, c, residual);
    return;
  }
  const int team = threadIdx.x / TEAM, slice = team % part.slices;
  const long long place = here.y + static_cast<long long>(team / part.slices);
  const long long column = (static_cast<long long>(blockIdx.x) * TEAM + threadIdx.x % TEAM) * VECTOR;
  const bool mine = place < part.end && column < n;
  float sums[SIDE][VECTOR] = {};
  if (mine) {
    const int *strip = lospmm_array<int>(4) + place * 4;  // strips come before all rows
    const int first = __ldg(strip), blocks = __ldg(strip + 1), groups = __ldg(strip + 3);
    lospmm_blocks(sums, first + slice, first + blocks, part.slices, b + column, n, k);
    const unsigned *lists = lospmm_array<unsigned>(3) + static_cast<long long>(__ldg(strip + 2)) * (GROUP * WORDS);
#pragma unroll
    for (int row = 0; row < SIDE; ++row)
      lospmm_gather(sums[row], lists + static_cast<long long>(row) * groups * (GROUP * WORDS), slice, groups,
                    part.slices, b + column, n);
  }
#pragma unroll
  for (int row = 0; row < SIDE; ++row) {
    if (row) __syncthreads();  // what the row before has in shared memory was read
    lospmm_add_slices(sums[row], part.slices);
    const int own = mine && slice == 0 ? __ldg(lospmm_array<int>(0) + place) + row : m;
    if (own < m) lospmm_finish_row(sums[row], own, static_cast<long long>(own) * n + column, c, residual);
  }
}
