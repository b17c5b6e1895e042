
// V[p] += X[r[p],d] * Y[c[p],d]
template <int count> struct alignas(sizeof(Element) * count) Elements { Element of[count]; };
LOSPMM_KERNEL(lospmm_einsum) {
  const int *index_r = lospmm_array<int>(0);
  const int *index_c = lospmm_array<int>(1);
  const long long thread = static_cast<long long>(blockIdx.x) * 256 + threadIdx.x;
  const long long own = thread / 8;
  const long long element = own < 4 ? own : 0;  // teams behind the last go along, and store nothing
  const long long axis_0 = element % 4;
  const long long at_p = axis_0;
  float sum = 0;
  for (long long first_d = thread % 8 * 8; first_d < 64; first_d += 64) {
    long long at_d = first_d;
    const Elements<8> loaded_0 = *reinterpret_cast<const Elements<8> *>(b + static_cast<long long>(index_r[at_p]) * 64 + at_d);
    const Elements<8> loaded_1 = *reinterpret_cast<const Elements<8> *>(residual + static_cast<long long>(index_c[at_p]) * 64 + at_d);
#pragma unroll
    for (int i = 0; i < 8; ++i, ++at_d)
      sum = __fmaf_rn(lospmm_float(loaded_0.of[i]), lospmm_float(loaded_1.of[i]), sum);
  }
  sum = __fadd_rn(sum, __shfl_xor_sync(~0u, sum, 4));
  sum = __fadd_rn(sum, __shfl_xor_sync(~0u, sum, 2));
  sum = __fadd_rn(sum, __shfl_xor_sync(~0u, sum, 1));
  if (own < 4 && thread % 8 == 0) c[element] = lospmm_element(sum);
}
