// A matrix turned over: what lies between a layer's activations, tokens x features, and B, features x tokens.
//
// Squares of 64 x 64 go through shared memory, four elements at a time both ways where the sizes are multiples of four, so
// that whole lines are read and written and many are under way: a copy is bound by memory. A row of the square is one
// element longer, so that the threads of a warp, along a row or a column, meet a bank twice at most.

// ``from`` is (rows, columns) and ``to`` (columns, rows), both row-major, at multiples of 16 bytes; ``shape`` is rows +
// 2^32 columns. Any number of blocks of 256 threads. ``Four`` is four elements.
template <typename Element, typename Four>
__device__ void turned(const Element *from, Element *to, unsigned long long shape) {
  __shared__ Element square[64][65];
  const unsigned rows = unsigned(shape), columns = unsigned(shape >> 32);
  const unsigned across = (columns + 63) / 64, squares = across * ((rows + 63) / 64);
  const bool by_four = rows % 4 == 0 && columns % 4 == 0;
  const unsigned x = threadIdx.x % 16 * 4, first = threadIdx.x / 16;
  for (unsigned number = blockIdx.x; number < squares; number += gridDim.x) {
    const unsigned row = number / across * 64, column = number % across * 64;
    Four four[4];
    if (by_four) {
#pragma unroll
      for (unsigned turn = 0; turn < 4; ++turn) {
        const unsigned y = first + 16 * turn;
        if (row + y < rows && column + x < columns)
          four[turn] = *reinterpret_cast<const Four *>(from + (unsigned long long)(row + y) * columns + column + x);
      }
#pragma unroll
      for (unsigned turn = 0; turn < 4; ++turn) {
        const unsigned y = first + 16 * turn;
        square[x][y] = four[turn].x;
        square[x + 1][y] = four[turn].y;
        square[x + 2][y] = four[turn].z;
        square[x + 3][y] = four[turn].w;
      }
    } else {
      for (unsigned y = first; y < 64; y += 16)
        for (unsigned at = x; at < x + 4; ++at)
          if (row + y < rows && column + at < columns)
            square[at][y] = from[(unsigned long long)(row + y) * columns + column + at];
    }
    __syncthreads();
    for (unsigned y = first; y < 64; y += 16) {
      if (column + y >= columns) continue;
      Element *const place = to + (unsigned long long)(column + y) * rows + row + x;
      if (by_four) {
        if (row + x < rows)
          *reinterpret_cast<Four *>(place) = Four{square[y][x], square[y][x + 1], square[y][x + 2], square[y][x + 3]};
      } else {
        for (unsigned at = 0; at < 4; ++at)
          if (row + x + at < rows) place[at] = square[y][x + at];
      }
    }
    __syncthreads();
  }
}

extern "C" __global__ void lospmm_transpose(const float *from, float *to, unsigned long long shape) {
  turned<float, float4>(from, to, shape);
}

// Of elements of 16 bits, whatever they are.
extern "C" __global__ void lospmm_transpose_16(const unsigned short *from, unsigned short *to,
                                               unsigned long long shape) {
  turned<unsigned short, ushort4>(from, to, shape);
}
