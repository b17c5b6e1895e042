// A matrix of floats turned over: what lies between a layer's activations, tokens x features, and B, features x tokens.
//
// Squares of 32 x 32 go through shared memory, so that both the reads and the writes of a warp are whole lines. A row of
// the square is one word longer: a warp that reads a column then finds every bank once.

// ``from`` is (rows, columns) and ``to`` (columns, rows), both row-major; ``shape`` is rows + 2^32 columns. Any number of
// blocks of 256 threads.
extern "C" __global__ void lospmm_transpose(const float *from, float *to, unsigned long long shape) {
  __shared__ float square[32][33];
  const unsigned rows = unsigned(shape), columns = unsigned(shape >> 32);
  const unsigned across = (columns + 31) / 32, squares = across * ((rows + 31) / 32);
  const unsigned x = threadIdx.x % 32, first = threadIdx.x / 32;
  for (unsigned number = blockIdx.x; number < squares; number += gridDim.x) {
    const unsigned row = number / across * 32, column = number % across * 32;
#pragma unroll
    for (unsigned y = first; y < 32; y += 8)
      if (row + y < rows && column + x < columns)
        square[y][x] = from[(unsigned long long)(row + y) * columns + column + x];
    __syncthreads();
#pragma unroll
    for (unsigned y = first; y < 32; y += 8)
      if (column + y < columns && row + x < rows) to[(unsigned long long)(column + y) * rows + row + x] = square[x][y];
    __syncthreads();
  }
}
