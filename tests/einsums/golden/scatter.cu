
// C[r[p],n] += A[p] * B[c[p],n]
template <int count> struct alignas(sizeof(Element) * count) Elements { Element of[count]; };
LOSPMM_KERNEL(lospmm_einsum) {
  const int *index_c = lospmm_array<int>(0);
  const long long *starts_0 = lospmm_array<long long>(1);
  const int *sorted_p = lospmm_array<int>(2);
  const long long thread = static_cast<long long>(blockIdx.x) * 256 + threadIdx.x;
  const long long own = thread;
  const long long element = own < 15 ? own : 0;  // teams behind the last go along, and store nothing
  const long long axis_0 = element / 5 % 3;
  const long long axis_1 = element % 5;
  const long long at_n = axis_1;
  float sum = 0;
  for (long long place_0 = starts_0[axis_0]; place_0 < starts_0[axis_0 + 1]; ++place_0) {
    const long long at_p = sorted_p[place_0];
    sum = __fmaf_rn(lospmm_float(b[at_p]), lospmm_float(residual[static_cast<long long>(index_c[at_p]) * 5 + at_n]), sum);
  }
  if (own < 15) c[element] = lospmm_element(sum);
}
