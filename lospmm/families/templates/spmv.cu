
// A times one to four columns, B in shared memory as float32.
//
// Lane l has the columns l, l + 32, l + 64 ... of a row, so each lane reads B from a bank of its own. An element is a value and
// four bits: its distance, in the lane's columns, from the element before. Distance 0 is a filler, which reads the same row of
// B again (at the beginning of a row: zeros). A nonzero more than 15 away comes behind elements of value 0. A unit is eight
// elements of each lane: 16 bytes of values of each, or 8 of codes, then 4 of distances.
//
// A block has whole rows. Each lane walks them in an order of its own, those with most of its elements first, so that all lanes
// need about as many steps at a time. A *turn* is one row of each lane. It is as long as the longest of them, and a unit at
// least. The warps of a block share its turns evenly, one after the other, wherever turns end. Sums of a turn are added by warp,
// sums of a row by lane, in a fixed order, which begins with the lane that has the row's number.
//
// A short kernel loses time where a load waits for another one, so no load says where an array lies. The loop loads nothing but
// units: who waits for a load waits for all on the same scoreboard, of which a warp has six.
//
// Numbers: m. Arrays: where each warp begins, BLOCKS x WARPS; of each block, each lane's row of each turn in it, MAX_ROWS x 32,
// and the turn's elements, MAX_ROWS; the units, WARPS x UNITS of each block.

constexpr int LOG_COLS = COLS == 1 ? 0 : COLS == 2 ? 1 : 2;
constexpr int ROW_BYTES = 128 * COLS;  // 32 rows of B, one of each lane; or a row's sums: of each column, 32 lanes
// Shared memory: a row of zeros and B, then
constexpr int PARTS_AT = ((K + 31) / 32 + 1) * ROW_BYTES;   // the sums of each row of the block
constexpr int SHARED_AT = PARTS_AT + MAX_ROWS * ROW_BYTES;  // each warp's sums of a turn that an earlier warp began
constexpr int TURNS_AT = SHARED_AT + WARPS * ROW_BYTES;     // which turn that is, or -1
constexpr int TABLE_AT = TURNS_AT + WARPS * 4;              // the block's turns: rows and lengths

// The value of a step.
LOSPMM_INLINE float value_of(const Unit &unit, int step) {
  const unsigned pair = pair_of(unit.values, step / 2);
  return step % 2 ? lospmm_second(pair) : lospmm_first(pair);
}

// The distance of a step's element from the one before, in bytes of B.
LOSPMM_INLINE unsigned bytes_behind(const Unit &unit, int step) {
  const int right = 4 * step - 7 - LOG_COLS;
  return (right < 0 ? unit.behinds << -right : unit.behinds >> right) & 15 * ROW_BYTES;
}

// What is ``offset`` bytes into shared memory.
LOSPMM_INLINE float &shared_float(unsigned offset) { return *reinterpret_cast<float *>(lospmm_shared + offset); }

// Sums of a row's columns of C.
struct Sums {
  float of[COLS];
};

// Add the value of a step times its row of B, ``at`` bytes into shared memory.
LOSPMM_INLINE void multiply(Sums &sums, const Unit &unit, int step, unsigned at) {
  const float value = value_of(unit, step);
  const Sums right = *reinterpret_cast<const Sums *>(__builtin_assume_aligned(lospmm_shared + at, 4 * COLS));
#pragma unroll
  for (int col = 0; col < COLS; ++col) sums.of[col] += value * right.of[col];
}

// A lane's sums of a row, or a warp's, lie a column behind the other.
LOSPMM_INLINE void store(unsigned offset, const Sums &sums) {
#pragma unroll
  for (int col = 0; col < COLS; ++col) shared_float(offset + col * 128) = sums.of[col];
}

// An element of B as float32.
LOSPMM_INLINE void put(int at, float value) {
  shared_float(ROW_BYTES + (COLS == N ? at : at / N * COLS + at % N) * 4) = value;
}

LOSPMM_KERNEL(ENTRY) {
#if !RESIDUAL
  const Element *residual = nullptr;
#endif
  const int warp = lospmm_warp();
  const unsigned lane = lospmm_kept(threadIdx.x % 32), zeros = lane * (4 * COLS);
  const Place *place = reinterpret_cast<const Place *>(lospmm_data + FIRST_ARRAY) + blockIdx.y * WARPS + warp;
  Source from = source_of(lospmm_data + UNITS_ARRAY + (blockIdx.y * WARPS + warp) * (1ll * UNITS * UNIT_BYTES), lane);
  Unit ahead[AHEAD];
#pragma unroll
  for (int one = 0; one < AHEAD; ++one) load(ahead[one], from, one);
  const int units = lospmm_of_warp(place->units);
  const int block_row = static_cast<int>(place->block_row), rows = static_cast<int>(place->block_rows);
  int turn = static_cast<int>(place->turn), left = lospmm_of_warp(place->left);
  unsigned at = place->behind[lane] * ROW_BYTES + zeros;
  bool is_shared = place->is_continued;

  copy_turns(lospmm_shared + TABLE_AT);
  for (int one = threadIdx.x; one < 32 * COLS; one += THREADS) shared_float(one * 4) = 0;
  if constexpr (K * N % 8 == 0) {
#pragma unroll 2
    for (int one = threadIdx.x; one < K * N / 8; one += THREADS) {
      const uint4 eight = __ldg(reinterpret_cast<const uint4 *>(b) + one);
      if constexpr (COLS == N) {
        float4 *to = reinterpret_cast<float4 *>(lospmm_shared + ROW_BYTES) + one * 2;
        to[0] = make_float4(lospmm_first(eight.x), lospmm_second(eight.x), lospmm_first(eight.y), lospmm_second(eight.y));
        to[1] = make_float4(lospmm_first(eight.z), lospmm_second(eight.z), lospmm_first(eight.w), lospmm_second(eight.w));
      } else {
#pragma unroll
        for (int two = 0; two < 4; ++two) {
          put(one * 8 + two * 2, lospmm_first(word(eight, two)));
          put(one * 8 + two * 2 + 1, lospmm_second(word(eight, two)));
        }
      }
    }
  } else {
#pragma unroll 1
    for (int one = threadIdx.x; one < K * N; one += THREADS) put(one, lospmm_float(__ldg(b + one)));
  }
  if constexpr (COLS != N)  // what no column of C uses is not read as a number either
    for (int row_of_b = threadIdx.x; row_of_b < K; row_of_b += THREADS)
      shared_float(ROW_BYTES + (row_of_b * COLS + N) * 4) = 0;
  const unsigned char *rows_of_turns = lospmm_shared + TABLE_AT;
  const unsigned short *lengths = reinterpret_cast<const unsigned short *>(rows_of_turns + MAX_ROWS * 32);
  lospmm_commit();
  lospmm_wait<0>();
  int *turns = reinterpret_cast<int *>(lospmm_shared + TURNS_AT);
  if (lane == 0) turns[warp] = is_shared ? turn : -1;
  __syncthreads();

  Sums sums = {};
  const unsigned own = lane * 4, mine = SHARED_AT + warp * ROW_BYTES + own;
  int length = left + 1;  // of the turn; of the first one it has some
#pragma unroll 1
  for (int unit = 0; unit < units; unit += AHEAD) {
    Unit batch[AHEAD];
    take(batch, ahead, from, unit, units);
#pragma unroll
    for (int one = 0; one < AHEAD; ++one) {
      const Unit &now = batch[one];
      if (one > 0 && unit + one >= units) break;
      if (left > STEPS) {
#pragma unroll
        for (int step = 0; step < STEPS; ++step) {
          at += bytes_behind(now, step);
          multiply(sums, now, step, at);
        }
        left -= STEPS;
      } else {  // the turn ends here
        Sums before = sums;
#pragma unroll
        for (int step = 0; step < STEPS; ++step) {
          if (step == left) before = sums, sums = {}, at = zeros;
          at += bytes_behind(now, step);
          multiply(sums, now, step, at);
        }
        if (left == STEPS) before = sums, sums = {}, at = zeros;
        store(is_shared ? mine : PARTS_AT + rows_of_turns[turn * 32 + lane] * ROW_BYTES + own, before);
        is_shared = false;
        ++turn;
        length = turn == rows ? FOREVER : lengths[turn];  // behind the last are fillers
        left += length - STEPS;
      }
    }
  }
  const bool is_open = units > 0 && turn < rows && left < length;
  if (is_open && is_shared) store(mine, sums);
  __syncthreads();
  if (is_open && !is_shared) {  // it begins here, and others have the rest
#pragma unroll 1
    for (int other = warp + 1; other < WARPS && turns[other] == turn; ++other)
#pragma unroll
      for (int col = 0; col < COLS; ++col)
        sums.of[col] += shared_float(SHARED_AT + other * ROW_BYTES + col * 128 + own);
    store(PARTS_AT + rows_of_turns[turn * 32 + lane] * ROW_BYTES + own, sums);
  }
  __syncthreads();
#pragma unroll 1
  for (int part = threadIdx.x; part < rows * COLS; part += THREADS) {
    const int of_row = block_row + part / COLS, col = part % COLS;
    if (col >= N) continue;
    float sum = 0;
#pragma unroll 8
    for (int other = 0; other < 32; ++other) sum += shared_float(PARTS_AT + part * 128 + (part + other) % 32 * 4);
    c[of_row * static_cast<long long>(N) + col] = lospmm_finished(sum, of_row, of_row * static_cast<long long>(N) + col, residual);
  }
}
