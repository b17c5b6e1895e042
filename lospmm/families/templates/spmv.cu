
// A times one column, B in shared memory as float32: the lanes of a warp take consecutive nonzeros of a row.
//
// A step is 32 nonzeros of one row, or fewer whose columns lie within reach of a byte: the other lanes multiply the first
// one's row of B by 0. A nonzero has a byte, the distance from a multiple of 4 that is 15 bits of the step; the 16th says
// that the row ends. A unit is eight steps: 16 bytes of values for each lane, or 8 of codes, 8 of distances, then the
// steps' columns.
//
// A block multiplies whole rows; its warps have UNITS units each, the last ones fewer. What several warps have of a row is
// added in the order of the warps.
//
// A load that has to wait for another costs a short kernel a part of its time, so both arrays lie where no load says.
//
// Numbers: m. Arrays: where each warp begins, blocks x WARPS; the units, WARPS x UNITS of each block.

constexpr int THREADS = 32 * WARPS, STEPS = 8;
constexpr int DISTANCES_AT = PAIR_BYTES * 128, FIRSTS_AT = DISTANCES_AT + 256, UNIT_BYTES = FIRSTS_AT + 16;
constexpr int ZERO = (K + 7) / 8 * 8;             // a row of B of zeros, for rows of A without nonzeros
constexpr int SUMS_AT = ZERO * 4 + 32;            // a sum for each row of the block
constexpr int PARTS_AT = SUMS_AT + MAX_ROWS * 4;  // of rows that several warps share: two for each warp

struct Place {
  unsigned units;                   // of the warp
  unsigned row;                     // of which the first unit is
  unsigned block_row, block_rows;   // the first row of the block, and how many it has
  unsigned is_continued;            // whether an earlier warp has the beginning of that row
  unsigned unused[3];
};

struct Unit {
  Word<PAIR_BYTES * 4>::type values;
  uint4 firsts;
  uint2 distances;
};

LOSPMM_INLINE void load(Unit &unit, const unsigned char *from) {
  const int lane = threadIdx.x % 32;
  unit.values = __ldcs(reinterpret_cast<const Word<PAIR_BYTES * 4>::type *>(from) + lane);
  unit.distances = __ldcs(reinterpret_cast<const uint2 *>(from + DISTANCES_AT) + lane);
  unit.firsts = __ldcs(reinterpret_cast<const uint4 *>(from + FIRSTS_AT));
}

LOSPMM_INLINE unsigned word(const uint4 &words, int at) {
  return at == 0 ? words.x : at == 1 ? words.y : at == 2 ? words.z : words.w;
}

// The values of two steps, as halves where they are codes.
LOSPMM_INLINE unsigned pair_of(const uint4 &values, int at) { return word(values, at); }
LOSPMM_INLINE unsigned pair_of(const uint2 &codes, int at) {
  const unsigned two = (at < 2 ? codes.x : codes.y) >> at % 2 * 16;
  return INT8 ? lospmm_halves_of_int8(two) : lospmm_halves_of_fp8(two);
}

// A bit for each step, whether its row ends.
LOSPMM_INLINE unsigned row_ends(const uint4 &firsts) {
  unsigned ends = 0;
#pragma unroll
  for (int at = 0; at < STEPS / 2; ++at)
    ends |= (word(firsts, at) >> 15 & 1) << 2 * at | word(firsts, at) >> 31 << (2 * at + 1);
  return ends;
}

LOSPMM_INLINE float of_warp(float sum) {
#pragma unroll
  for (int apart = 16; apart; apart /= 2) sum += __shfl_xor_sync(~0u, sum, apart);
  return sum;
}

LOSPMM_KERNEL(lospmm_spmv) {
#if !RESIDUAL
  const Element *residual = nullptr;
#endif
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const unsigned char *arrays = lospmm_data + FIRST_ARRAY;
  const Place *places = reinterpret_cast<const Place *>(arrays) + blockIdx.y * WARPS;
  const Place *mine = places + warp;
  const int bytes_of_places = static_cast<int>(gridDim.y) * WARPS * static_cast<int>(sizeof(Place));
  const unsigned char *from = arrays + (bytes_of_places + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT +
                              (blockIdx.y * WARPS + warp) * (1ll * UNITS * UNIT_BYTES);
  Unit next;
  load(next, from);
  const int units = static_cast<int>(mine->units);
  const int block_row = static_cast<int>(mine->block_row), rows = static_cast<int>(mine->block_rows);
  int row = static_cast<int>(mine->row) - block_row;

  float *right = reinterpret_cast<float *>(lospmm_shared);
  float *sums = reinterpret_cast<float *>(lospmm_shared + SUMS_AT);
  float *parts = reinterpret_cast<float *>(lospmm_shared + PARTS_AT);
  if constexpr (K % 8 == 0) {
#pragma unroll 2
    for (int at = threadIdx.x; at < K / 8; at += THREADS) {
      const uint4 eight = __ldg(reinterpret_cast<const uint4 *>(b) + at);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const unsigned low = half ? eight.z : eight.x, high = half ? eight.w : eight.y;
        reinterpret_cast<float4 *>(right)[at * 2 + half] =
            make_float4(lospmm_first(low), lospmm_second(low), lospmm_first(high), lospmm_second(high));
      }
    }
  } else {
#pragma unroll 1
    for (int at = threadIdx.x; at < K; at += THREADS) right[at] = lospmm_float(__ldg(b + at));
  }
  if (threadIdx.x == 0) right[ZERO] = 0;
  __syncthreads();

  bool is_shared = mine->is_continued, is_open = false;
  float sum = 0;
#pragma unroll 1
  for (int unit = 0; unit < units; ++unit) {
    float products[STEPS];
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
      const unsigned pair = pair_of(next.values, step / 2), both = word(next.firsts, step / 2);
      const unsigned first = (step % 2 ? both >> 16 : both) & 0x7FFF;
      const unsigned distance = (step < 4 ? next.distances.x : next.distances.y) >> step % 4 * 8 & 0xFF;
      products[step] = (step % 2 ? lospmm_second(pair) : lospmm_first(pair)) * right[first * 4 + distance];
    }
    const unsigned ends = row_ends(next.firsts);
    is_open = !(ends >> (STEPS - 1));
    from += UNIT_BYTES;
    if (unit + 1 < units) load(next, from);
    if (ends == 0) {
#pragma unroll
      for (int step = 0; step < STEPS; ++step) sum += products[step];
    } else {
#pragma unroll 1  // the code of a kernel is read from memory too
      for (int step = 0; step < STEPS; ++step) {
        sum += products[0];
#pragma unroll
        for (int later = 1; later < STEPS; ++later) products[later - 1] = products[later];
        if (ends >> step & 1) {
          sum = of_warp(sum);
          if (lane == 0) *(is_shared ? parts + 2 * warp : sums + row) = sum;
          sum = 0;
          is_shared = false;
          ++row;
        }
      }
    }
  }
  if (is_open) {
    sum = of_warp(sum);
    if (lane == 0) parts[2 * warp + !is_shared] = sum;
  }
  __syncthreads();

  if (lane == 0 && is_open && !is_shared && row < rows) {  // the row begins here, and others have the rest
    sum = parts[2 * warp + 1];
#pragma unroll 1
    for (int other = warp + 1; other < WARPS; ++other) {
      if (!places[other].is_continued || static_cast<int>(places[other].row) != row + block_row) break;
      sum += parts[2 * other];
    }
    sums[row] = sum;
  }
  __syncthreads();
#pragma unroll 1
  for (int at = threadIdx.x; at < rows; at += THREADS)
    c[block_row + at] = lospmm_finished(sums[at], block_row + at, block_row + at, residual);
}
