
// Rows of A in buckets of about the same length, their lists padded to one width per bucket (ELL). A team of TEAM
// threads has VECTOR columns for each thread; the teams that share a row, its slices, may be of several warps.
// Numbers: n. Arrays: the rows by bucket; of each block its bucket and first place; of each bucket PART_NUMBERS numbers;
// the lists.

LOSPMM_KERNEL(lospmm_hyb_buckets) {
#if !RESIDUAL
  const Element *residual = nullptr;
#endif
  constexpr int in_warp = 32 / TEAM;
  const unsigned n = static_cast<unsigned>(lospmm_number(0));
  const long long block = blockIdx.z * static_cast<long long>(gridDim.y) + blockIdx.y;
  const int2 here = __ldg(lospmm_array<int2>(1) + block);
  if (here.x < 0) return;  // the grid is larger than the number of blocks
  const long long *bucket = lospmm_array<long long>(2) + here.x * 8;
  const long long first = __ldg(bucket), end = __ldg(bucket + 1), lists = __ldg(bucket + 2);
  const int groups = static_cast<int>(__ldg(bucket + 3)), slices = static_cast<int>(__ldg(bucket + 4));
  const unsigned team = threadIdx.x / TEAM, slice = team % slices;
  const long long place = here.y + static_cast<long long>(team / slices);
  const long long column = (static_cast<long long>(blockIdx.x) * TEAM + threadIdx.x % TEAM) * VECTOR;
  const bool mine = place < end && column < n;
  float sums[VECTOR] = {};
  if (mine)
    lospmm_gather(sums, lospmm_array<unsigned>(3) + (lists + (place - first) * groups) * (GROUP * WORDS), slice, groups,
                  slices, b + column, n);
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
    if (slice == 0)
      for (int other = 1; other < warps; ++other)
#pragma unroll
        for (int of = 0; of < VECTOR; ++of)
          sums[of] += partial[(threadIdx.x / 32 + other) * (TEAM * VECTOR) + of];
  }
  if (mine && slice == 0) {
    const int row = __ldg(lospmm_array<int>(0) + place);
    lospmm_finish_row(sums, row, static_cast<long long>(row) * n + column, c, residual);
  }
}
