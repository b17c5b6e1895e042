
// Numbers: n. Arrays: the rows by bucket; of each block its bucket and first place; the buckets; the lists.

LOSPMM_KERNEL(lospmm_hyb_buckets) {
#if !RESIDUAL
  const Element *residual = nullptr;
#endif
  const long long block = blockIdx.z * static_cast<long long>(gridDim.y) + blockIdx.y;
  const int2 here = __ldg(lospmm_array<int2>(1) + block);
  if (here.x < 0) return;  // the grid is larger than the number of blocks
  lospmm_ell(lospmm_part(here.x), here.y, static_cast<unsigned>(lospmm_number(0)), b, c, residual);
}
