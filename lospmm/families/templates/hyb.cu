
// Rows of A in buckets of about the same length, their lists padded to one width per bucket (ELL). A team of TEAM
// threads has VECTOR columns for each thread; the teams that share a row, its slices, may be of several warps.
//
// A bucket is 5 numbers: the first of its places, the end of them, where its lists begin (in groups), the groups of a
// list, and its slices.
//
// Numbers: n. Arrays: the rows by bucket; of each block its bucket and first place; the buckets; the lists.

struct Bucket {
  long long first, end, lists;
  int groups, slices;
};

LOSPMM_INLINE Bucket lospmm_bucket(int number) {
  const long long *bucket = lospmm_array<long long>(2) + number * 5;
  return {__ldg(bucket), __ldg(bucket + 1), __ldg(bucket + 2), static_cast<int>(__ldg(bucket + 3)),
          static_cast<int>(__ldg(bucket + 4))};
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

LOSPMM_KERNEL(lospmm_hyb) {
#if !RESIDUAL
  const Element *residual = nullptr;
#endif
  const long long block = blockIdx.z * static_cast<long long>(gridDim.y) + blockIdx.y;
  const int2 here = __ldg(lospmm_array<int2>(1) + block);
  if (here.x < 0) return;  // the grid is larger than the number of blocks
  const Bucket bucket = lospmm_bucket(here.x);
  const unsigned n = static_cast<unsigned>(lospmm_number(0));
  const unsigned team = threadIdx.x / TEAM, slice = team % bucket.slices;
  const long long place = here.y + static_cast<long long>(team / bucket.slices);
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
