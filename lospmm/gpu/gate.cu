// The correctness gate: C against A x B in float64, and one C against another. gate.py starts these kernels.
//
// They are written so that g++ takes the text too: the tests run it on the CPU.

// For every element of C, its error relative to |A| |B|, as in lospmm/verify.py. What is kept of each row is one key,
// the greatest: the error as a float (whose bits are ordered as it is) above the column, counted down so that the first
// of equals is kept. Memory that nothing was written to since it was filled with 0xFFFFFFFF gives the greatest error.
extern "C" __global__ void lospmm_check(const long long *indptr, const int *indices, const float *values,
                                        const float *b, const float *c, unsigned long long *worst, unsigned m,
                                        unsigned n) {
  const double smallest_normal = 1.17549435082228751e-38;  // of float32: below it rounding errors have a fixed size
  const unsigned unwritten = 0xFFFFFFFFu, infinite = 0x7F800000u;
  const unsigned column = blockIdx.x * blockDim.x + threadIdx.x;
  if (column >= n) return;
  for (unsigned row = blockIdx.y; row < m; row += gridDim.y) {
    double expected = 0, scale = 0;
    for (long long entry = indptr[row]; entry < indptr[row + 1]; ++entry) {
      const double term = double(values[entry]) * double(b[(unsigned long long)indices[entry] * n + column]);
      expected += term;
      scale += term < 0 ? -term : term;
    }
    const float got = c[(unsigned long long)row * n + column];
    const double off = got < expected ? expected - got : got - expected;
    const double error = off / (scale < smallest_normal ? smallest_normal : scale);
    unsigned bits = __float_as_uint(float(error));
    if (error != error || (scale == 0 && got != 0)) bits = infinite;
    if (__float_as_uint(got) == unwritten) bits = unwritten;
    const unsigned long long key = (unsigned long long)bits << 32 | ~column;
    if (key > worst[row]) atomicMax(worst + row, key);
  }
}

// How many of ``count`` words differ between two arrays, added to ``differing``.
extern "C" __global__ void lospmm_differ(const unsigned *one, const unsigned *other, unsigned long long count,
                                         unsigned long long *differing) {
  unsigned long long mine = 0;
  const unsigned long long stride = (unsigned long long)gridDim.x * blockDim.x;
  for (unsigned long long word = (unsigned long long)blockIdx.x * blockDim.x + threadIdx.x; word < count;
       word += stride)
    mine += one[word] != other[word];
  if (mine) atomicAdd(differing, mine);
}
