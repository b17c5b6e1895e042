// The correctness gate: C against A x B in float64, with what is added to it, and one C against another. gate.py starts
// these kernels, and network.py the last, which writes B as the layer before would.
//
// They are written so that g++ takes the text too: the tests run it on the CPU.

// A convolution's input and window, as lospmm/gpu/operands.py lists them: along the height before along the width.
struct LospmmWindow {
  int channels, height, width, kernel_height, kernel_width, down, right, top, left, dilation_y, dilation_x, out_height,
      out_width;
};

// How far an element may be off: lospmm/accuracy.py, Tolerance.
struct LospmmTolerance {
  double sum_rounding, factor_rounding, c_rounding, smallest_normal, deviations;
};

// What B, C and the residual are made of: the numbers of their types in lospmm/gpu/operands.py, STORAGES.
struct LospmmFloat32 {
  float bits;
  __device__ float value() const { return bits; }
  __device__ bool is_unwritten() const { return __float_as_uint(bits) == 0xFFFFFFFFu; }
};
struct LospmmFloat16 {
  unsigned short bits;
  __device__ float value() const {  // 2^112 between the exponents of the two; what is infinite or NaN stays so
    const float size = __uint_as_float((bits & 0x7FFFu) << 13) * 5.192296858534828e33f;
    const unsigned special = (bits & 0x7C00u) == 0x7C00u ? 0x7F800000u : 0;
    return __uint_as_float(__float_as_uint(size) | special | (bits & 0x8000u) << 16);
  }
  __device__ bool is_unwritten() const { return bits == 0xFFFFu; }
};
struct LospmmBfloat16 {
  unsigned short bits;
  __device__ float value() const { return __uint_as_float((unsigned)bits << 16); }
  __device__ bool is_unwritten() const { return bits == 0xFFFFu; }
};

// For every element of C, how far it is off as in lospmm/verify.py: relative to what is allowed there, and relative to
// |A| |B|. What is kept of each row is one key of either, the greatest, those of the latter behind the m of the former:
// the ratio as a float (whose bits are ordered as it is) above the column, counted down so that the first of equals is
// kept. Memory that nothing was written to since it was filled with 0xFFFFFFFF gives the greatest key.
// ``residual``, ``bias`` and ``window`` may be null: without a window, b is B itself.
template <typename Element>
static __device__ void lospmm_check_type(const long long *indptr, const int *indices, const float *values,
                                         const Element *b, const Element *c, unsigned long long *worst,
                                         const Element *residual, const float *bias, const LospmmWindow *window,
                                         const LospmmTolerance *tolerance, unsigned m, unsigned n, unsigned relu) {
  const double smallest_normal = 1.17549435082228751e-38;  // of float32: below it rounding errors have a fixed size
  const unsigned unwritten = 0xFFFFFFFFu, infinite = 0x7F800000u;
  const LospmmTolerance limits = *tolerance;
  const unsigned column = blockIdx.x * blockDim.x + threadIdx.x;
  if (column >= n) return;
  unsigned long long first = column, row_elements = n, image = 0;
  int y = 0, x = 0;
  if (window) {
    row_elements = (unsigned long long)window->out_height * window->out_width;
    image = column / row_elements;
    const unsigned pixel = unsigned(column - image * row_elements);
    first = image * m * row_elements + pixel;
    y = int(pixel / window->out_width) * window->down - window->top;
    x = int(pixel % window->out_width) * window->right - window->left;
  }
  for (unsigned row = blockIdx.y; row < m; row += gridDim.y) {
    const unsigned long long place = row * row_elements + first;
    double expected = 0, scale = 0, squares = 0;
    for (long long entry = indptr[row]; entry < indptr[row + 1]; ++entry) {
      unsigned long long element = (unsigned long long)indices[entry] * n + column;
      if (window) {
        const int k = indices[entry], rest = k / window->kernel_width;
        const int at_y = y + rest % window->kernel_height * window->dilation_y;
        const int at_x = x + k % window->kernel_width * window->dilation_x;
        if (at_y < 0 || at_y >= window->height || at_x < 0 || at_x >= window->width) continue;
        const unsigned long long channel = image * window->channels + rest / window->kernel_height;
        element = (channel * window->height + at_y) * window->width + at_x;
      }
      const double term = double(values[entry]) * double(b[element].value());
      expected += term;
      scale += term < 0 ? -term : term;
      squares += term * term;
    }
    const double added[2] = {residual ? double(residual[place].value()) : 0, bias ? double(bias[row]) : 0};
    for (int which = 0; which < 2; ++which) {
      expected += added[which];
      scale += added[which] < 0 ? -added[which] : added[which];
    }
    if (relu && expected < 0) expected = 0;
    const float got = c[place].value();
    const double off = got < expected ? expected - got : got - expected;
    const double least = scale < smallest_normal ? smallest_normal : scale;
    const double size = expected < 0 ? -expected : expected, root = sqrt(squares), small = limits.smallest_normal;
    const double spread = limits.deviations * (root < small ? small : root), whole = scale < small ? small : scale;
    const double allowed = limits.sum_rounding * least + limits.factor_rounding * (spread < whole ? spread : whole) +
                           limits.c_rounding * (size < small ? small : size);
    const double ratios[2] = {off / allowed, off / least};
    for (int which = 0; which < 2; ++which) {
      unsigned bits = __float_as_uint(float(ratios[which]));
      if (off != off || (scale == 0 && got != 0)) bits = infinite;
      if (c[place].is_unwritten()) bits = unwritten;
      const unsigned long long key = (unsigned long long)bits << 32 | ~column;
      unsigned long long *best = worst + (which ? m : 0) + row;
      if (key > *best) atomicMax(best, key);
    }
  }
}
extern "C" __global__ void lospmm_check(const long long *indptr, const int *indices, const float *values,
                                        const void *b, const void *c, unsigned long long *worst, const void *residual,
                                        const float *bias, const LospmmWindow *window, const LospmmTolerance *tolerance,
                                        unsigned m, unsigned n, unsigned relu, unsigned storage) {
  if (storage == 0)
    lospmm_check_type(indptr, indices, values, (const LospmmFloat32 *)b, (const LospmmFloat32 *)c, worst,
                      (const LospmmFloat32 *)residual, bias, window, tolerance, m, n, relu);
  else if (storage == 1)
    lospmm_check_type(indptr, indices, values, (const LospmmFloat16 *)b, (const LospmmFloat16 *)c, worst,
                      (const LospmmFloat16 *)residual, bias, window, tolerance, m, n, relu);
  else
    lospmm_check_type(indptr, indices, values, (const LospmmBfloat16 *)b, (const LospmmBfloat16 *)c, worst,
                      (const LospmmBfloat16 *)residual, bias, window, tolerance, m, n, relu);
}

// How many of ``count`` elements differ between two arrays, bit by bit, added to ``differing``.
template <typename Word>
static __device__ void lospmm_differ_type(const Word *one, const Word *other, unsigned long long count,
                                          unsigned long long *differing) {
  unsigned long long mine = 0;
  const unsigned long long stride = (unsigned long long)gridDim.x * blockDim.x;
  for (unsigned long long word = (unsigned long long)blockIdx.x * blockDim.x + threadIdx.x; word < count;
       word += stride)
    mine += one[word] != other[word];
  if (mine) atomicAdd(differing, mine);
}
extern "C" __global__ void lospmm_differ(const void *one, const void *other, unsigned long long count,
                                         unsigned long long *differing, unsigned element_bytes) {
  if (element_bytes == 4)
    lospmm_differ_type((const unsigned *)one, (const unsigned *)other, count, differing);
  else
    lospmm_differ_type((const unsigned short *)one, (const unsigned short *)other, count, differing);
}

// Words as one load and one store take them, and ``count`` of them from one place to another, one to a thread.
struct alignas(16) LospmmWords {
  unsigned words[4];
};
extern "C" __global__ void lospmm_copy(const LospmmWords *from, LospmmWords *to, unsigned long long count) {
  const unsigned long long at = (unsigned long long)blockIdx.x * blockDim.x + threadIdx.x;
  if (at < count) to[at] = from[at];
}
