
// Rows of A in compressed form: a warp has a row, a thread VECTOR columns of it next to each other.
// Numbers: m, n. Arrays: the rows by falling length, where each row begins (m + 1), columns, weights.

struct alignas(sizeof(Element) * VECTOR) Elements {
  Element of[VECTOR];
};

LOSPMM_KERNEL(lospmm_csr) {
#if !RESIDUAL
  const Element *residual = nullptr;
#endif
  const long long m = lospmm_number(0), n = lospmm_number(1);
  const unsigned warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const long long place = static_cast<long long>(blockIdx.y) * WARPS + warp;
  const long long column = (static_cast<long long>(blockIdx.x) * 32 + lane) * VECTOR;
  if (place >= m || column >= n) return;
  const int row = lospmm_array<int>(0)[place];
  const long long *starts = lospmm_array<long long>(1);
  const int *columns = lospmm_array<int>(2);
  const float *weights = lospmm_array<float>(3);
  const long long end = starts[row + 1];
  float sums[VECTOR] = {};
#pragma unroll 4
  for (long long at = starts[row]; at < end; ++at) {
    const float weight = __ldg(weights + at);
    const Elements elements = *reinterpret_cast<const Elements *>(b + __ldg(columns + at) * n + column);
#pragma unroll
    for (int i = 0; i < VECTOR; ++i) sums[i] = __fmaf_rn(weight, lospmm_float(elements.of[i]), sums[i]);
  }
  Elements results;
#pragma unroll
  for (int i = 0; i < VECTOR; ++i)
    results.of[i] = lospmm_finished(sums[i], row, row * n + column + i, residual);
  *reinterpret_cast<Elements *>(c + row * n + column) = results;
}
