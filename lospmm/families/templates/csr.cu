
// Rows of A in compressed form. A warp has 32 / (TEAM x SLICES) rows; the entries of a row are dealt to SLICES teams,
// whose TEAM threads have VECTOR columns each, and the teams' sums are added up at the end.
// Numbers: m, n. Arrays: the rows by falling length, where the list of each begins, in groups (m + 1), the lists.

LOSPMM_KERNEL(lospmm_csr) {
#if !RESIDUAL
  const Element *residual = nullptr;
#endif
  const long long m = lospmm_number(0);
  const unsigned n = static_cast<unsigned>(lospmm_number(1));
  const unsigned team = threadIdx.x / TEAM, slice = team % SLICES;
  const long long block = blockIdx.z * static_cast<long long>(gridDim.y) + blockIdx.y;
  const long long place = block * (WARPS * 32 / (TEAM * SLICES)) + team / SLICES;
  const long long column = (static_cast<long long>(blockIdx.x) * TEAM + threadIdx.x % TEAM) * VECTOR;
  const bool mine = place < m && column < n;
  float sums[VECTOR] = {};
  if (mine) {
    const long long *starts = lospmm_array<long long>(1);
    const long long start = __ldg(starts + place);
    const int groups = static_cast<int>(__ldg(starts + place + 1) - start);
    lospmm_gather(sums, lospmm_array<unsigned>(2) + start * (GROUP * WORDS), slice, groups, SLICES, b + column, n);
  }
#pragma unroll
  for (int apart = TEAM; apart < TEAM * SLICES; apart *= 2)
#pragma unroll
    for (int of = 0; of < VECTOR; ++of) sums[of] += __shfl_xor_sync(~0u, sums[of], apart);
  if (mine && slice == 0) {
    const int row = __ldg(lospmm_array<int>(0) + place);
    lospmm_finish_row(sums, row, static_cast<long long>(row) * n + column, c, residual);
  }
}
