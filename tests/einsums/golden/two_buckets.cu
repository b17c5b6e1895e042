
// C[r[p],c[q]] += A[p] * B[q]
template <int count> struct alignas(sizeof(Element) * count) Elements { Element of[count]; };
LOSPMM_KERNEL(lospmm_einsum) {
  const long long *starts_0 = lospmm_array<long long>(0);
  const int *sorted_p = lospmm_array<int>(1);
  const long long *starts_1 = lospmm_array<long long>(2);
  const int *sorted_q = lospmm_array<int>(3);
  const long long thread = static_cast<long long>(blockIdx.x) * 256 + threadIdx.x;
  const long long own = thread;
  const long long element = own < 12 ? own : 0;  // teams behind the last go along, and store nothing
  const long long axis_0 = element / 4 % 3;
  const long long axis_1 = element % 4;
  float sum = 0;
  for (long long place_0 = starts_0[axis_0]; place_0 < starts_0[axis_0 + 1]; ++place_0) {
    const long long at_p = sorted_p[place_0];
    for (long long place_1 = starts_1[axis_1]; place_1 < starts_1[axis_1 + 1]; ++place_1) {
      const long long at_q = sorted_q[place_1];
      sum = __fmaf_rn(lospmm_float(b[at_p]), lospmm_float(residual[at_q]), sum);
    }
  }
  if (own < 12) c[element] = lospmm_element(sum);
}
