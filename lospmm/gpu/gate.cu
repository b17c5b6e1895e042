// The correctness gate: C against A x B in float64, with what is added to it, and one C against another. gate.py starts these kernels.
//
// They are written so that g++ takes the text too: the tests run it on the CPU.

// A convolution's input and window, as lospmm/gpu/operands.py lists them: along the height before along the width.
struct LospmmWindow {
  int channels, height, width, kernel_height, kernel_width, down, right, top, left, dilation_y, dilation_x, out_height,
      out_width;
};

// For every element of C, its error relative to |A| |B|, as in lospmm/verify.py. What is kept of each row is one key,
// the greatest: the error as a float (whose bits are ordered as it is) above the column, counted down so that the first
// of equals is kept. Memory that nothing was written to since it was filled with 0xFFFFFFFF gives the greatest error.
// ``residual``, ``bias`` and ``window`` may be null: without a window, b is B itself.
extern "C" __global__ void lospmm_check(const long long *indptr, const int *indices, const float *values,
                                        const float *b, const float *c, unsigned long long *worst,
                                        const float *residual, const float *bias, const LospmmWindow *window,
                                        unsigned m, unsigned n, unsigned relu) {
  const double smallest_normal = 1.17549435082228751e-38;  // of float32: below it rounding errors have a fixed size
  const unsigned unwritten = 0xFFFFFFFFu, infinite = 0x7F800000u;
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
    double expected = 0, scale = 0;
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
      const double term = double(values[entry]) * double(b[element]);
      expected += term;
      scale += term < 0 ? -term : term;
    }
    const double added[2] = {residual ? double(residual[place]) : 0, bias ? double(bias[row]) : 0};
    for (int which = 0; which < 2; ++which) {
      expected += added[which];
      scale += added[which] < 0 ? -added[which] : added[which];
    }
    if (relu && expected < 0) expected = 0;
    const float got = c[place];
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
