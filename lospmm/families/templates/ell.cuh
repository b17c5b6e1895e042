
// Rows of A in buckets of about the same length, their lists padded to one width per bucket (ELL). A team of TEAM
// threads has VECTOR columns for each thread; the teams that share a row, its slices, may be of several warps.
//
// A part, here a bucket, is 8 numbers: the first of its places, the end of them, where its lists begin (in groups), the
// groups of a list, its slices, and 1 for a part of strips (hyb_strips.cu).

struct Part {
  long long first, end, lists;
  int groups, slices, is_strips;
};

LOSPMM_INLINE Part lospmm_part(int number) {
  const long long *part = lospmm_array<long long>(2) + number * 8;
  return {__ldg(part), __ldg(part + 1), __ldg(part + 2), static_cast<int>(__ldg(part + 3)),
          static_cast<int>(__ldg(part + 4)), static_cast<int>(__ldg(part + 5))};
}

// What the slices of a row have, added up in a fixed order; the first slice has the sum. For all threads of a block.
LOSPMM_INLINE void lospmm_add_slices(float (&sums)[VECTOR], int slices) {
  constexpr int in_warp = 32 / TEAM;
  const int team = threadIdx.x / TEAM;
  for (int apart = 1; apart < in_warp && apart < slices; apart *= 2)
#pragma unroll
    for (int of = 0; of < VECTOR; ++of) sums[of] += __shfl_xor_sync(~0u, sums[of], apart * TEAM);
  if (slices > in_warp) {
    float *partial = reinterpret_cast<float *>(lospmm_shared) + threadIdx.x % TEAM * VECTOR;
    const int warps = slices / in_warp;
    if (team % in_warp == 0)
#pragma unroll
      for (int of = 0; of < VECTOR; ++of) partial[threadIdx.x / 32 * (TEAM * VECTOR) + of] = sums[of];
    __syncthreads();
    if (team % slices == 0)
      for (int other = 1; other < warps; ++other)
#pragma unroll
        for (int of = 0; of < VECTOR; ++of)
          sums[of] += partial[(threadIdx.x / 32 + other) * (TEAM * VECTOR) + of];
  }
}

// A block of threads, from ``place`` on in a bucket.
LOSPMM_INLINE void lospmm_ell(const Part &bucket, int place_of_block, unsigned n, const Element *b, Element *c,
                              const Element *residual) {
  const unsigned team = threadIdx.x / TEAM, slice = team % bucket.slices;
  const long long place = place_of_block + static_cast<long long>(team / bucket.slices);
  const long long column = (static_cast<long long>(blockIdx.x) * TEAM + threadIdx.x % TEAM) * VECTOR;
  const bool mine = place < bucket.end && column < n;
  float sums[VECTOR] = {};
  if (mine)
    lospmm_gather(sums, lospmm_array<unsigned>(3) + (bucket.lists + (place - bucket.first) * bucket.groups) *
                                                        (GROUP * WORDS),
                  slice, bucket.groups, bucket.slices, b + column, n);
  lospmm_add_slices(sums, bucket.slices);
  if (mine && slice == 0) {
    const int row = __ldg(lospmm_array<int>(0) + place);
    lospmm_finish_row(sums, row, static_cast<long long>(row) * n + column, c, residual);
  }
}
