
// A times five to eight columns: B in shared memory in its own type, products on tensor cores. Turns are as in spmv.cu.
//
// Lane l has the columns of A whose remainder by 8 is l % 8, so that eight lanes read 16 bytes of B each without bank conflicts.
// Four lanes share a row: each has a quarter of its elements of that remainder, in order. An array says where it begins.
//
// In a step each lane reads a row of B. Those of lanes 0 to 15, and those of lanes 16 to 31, are the B operand of a product
// (m16n8k16). Row i of its A operand has the values of lanes i and i + 8 at their k, and 0 elsewhere, so row i of the result
// is of remainder i. Values of a step thus lie in eight lanes only. So that in four steps all lanes hold some, step s has lane
// i in row i ^ 2 (s % 4) instead, and sums of its own; values are packed for the lanes that hold them. Steps 2 and 3 of four
// use rows 8 to 15 of the operand: sums then need half of the registers, which leaves room for more warps, with more loads in
// flight.
//
// Numbers: m. Arrays: where each warp begins, BLOCKS x WARPS; of each block, where each lane begins each turn, MAX_ROWS x 32,
// each remainder's row of it in the block, MAX_ROWS x 8, and its elements, MAX_ROWS; the units, WARPS x UNITS of each block.

constexpr int ROW_BYTES = 128;   // eight rows of B, one of each remainder
constexpr int SUMS_BYTES = 256;  // a row's sums: of each remainder, eight columns
// Shared memory: a row of zeros and B, then
constexpr int PARTS_AT = ((K + 7) / 8 + 1) * ROW_BYTES;      // the sums of each row of the block
constexpr int SHARED_AT = PARTS_AT + MAX_ROWS * SUMS_BYTES;  // each warp's sums of a turn that an earlier warp began
constexpr int TURNS_AT = SHARED_AT + WARPS * SUMS_BYTES;     // which turn that is, or -1
constexpr int TABLE_AT = TURNS_AT + WARPS * 4;               // the block's turns: starts, rows and lengths

// By step: the selector that keeps the lane's value where the step has it, and gives 0 elsewhere.
struct Diagonals {
  unsigned of[4];
};

// A lane's sums of two columns of C, by step % 4: steps s and s + 2 have the upper and the lower rows of a result.
struct Sums {
  float of[2][4];
};

// Add the values of a step times rows of B.
LOSPMM_INLINE void multiply(Sums &sums, const Unit &unit, int step, const unsigned (&rows)[4], const Diagonals &diagonals) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const unsigned two = pair_of(unit.values, step / 4 * 2 + half);
    const unsigned first = __byte_perm(two, 0, diagonals.of[step % 4]), second = __byte_perm(two >> 16, 0, diagonals.of[step % 4]);
    const bool is_low = step % 4 >= 2;
    const unsigned left[4] = {is_low ? 0 : first, is_low ? first : 0, is_low ? 0 : second, is_low ? second : 0};
    const unsigned right[2] = {rows[half * 2], rows[half * 2 + 1]};
    lospmm_mma(sums.of[step % 2], left, right);
  }
}

// A lane's two sums among those of a row, which begin ``at`` bytes into shared memory.
LOSPMM_INLINE float2 &two_sums(unsigned at, unsigned lane) {
  return *reinterpret_cast<float2 *>(lospmm_shared + at + lane * 8);
}

// The sums by step.
struct Used {
  float2 of[4];
};
LOSPMM_INLINE Used used(const Sums &sums) {
  Used used;
#pragma unroll
  for (int step = 0; step < 4; ++step) {
    const float *two = sums.of[step % 2] + step / 2 * 2;
    used.of[step] = make_float2(two[0], two[1]);
  }
  return used;
}
LOSPMM_INLINE float2 two_of(const Used &used) {
  float2 two = used.of[0];
#pragma unroll
  for (int step = 1; step < 4; ++step) {
    two.x += __shfl_xor_sync(~0u, used.of[step].x, step * 8);
    two.y += __shfl_xor_sync(~0u, used.of[step].y, step * 8);
  }
  return two;
}

// The steps of a unit. A turn that ends before step ``left`` is followed by one from ``start`` on, and its sums are ``whole``.
template <bool ends>
LOSPMM_INLINE void go(Sums &sums, Used &whole, unsigned &at, const Unit &unit, const Diagonals &diagonals, int left,
                      unsigned start) {
  const unsigned steps[2] = {unit.behinds & 0x0F0F0F0F, unit.behinds >> 4 & 0x0F0F0F0F};
#pragma unroll
  for (int step = 0; step < STEPS; ++step) {
    if (ends && step == left) whole = used(sums), sums = {}, at = start;
    at = __dp4a(steps[step % 2], 128u << step / 2 * 8, at);
    unsigned rows[4];  // of B
    lospmm_ldmatrix_transposed(rows, lospmm_shared + at);
    multiply(sums, unit, step, rows, diagonals);
  }
  if (ends && left == STEPS) whole = used(sums), sums = {}, at = start;
}

LOSPMM_KERNEL(ENTRY) {
#if !RESIDUAL
  const Element *residual = nullptr;
#endif
  const int warp = lospmm_warp();
  const unsigned lane = lospmm_kept(threadIdx.x % 32), zeros = lane % 8 * 16, mine = SHARED_AT + warp * SUMS_BYTES;
  Diagonals diagonals;
#pragma unroll
  for (int step = 0; step < 4; ++step) {
    const bool holds = (lane / 8 ^ lane % 4) == step, is_second = lane / 4 % 2 != 0;
    diagonals.of[step] = lospmm_kept(!holds ? 0x4444 : is_second ? 0x1044 : 0x4410);
  }
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
  if (threadIdx.x < ROW_BYTES / 4) reinterpret_cast<float *>(lospmm_shared)[threadIdx.x] = 0;
  if constexpr (N == 8) {
#pragma unroll
    for (int first = 0; first < K; first += THREADS) {
      const int one = first + static_cast<int>(threadIdx.x);
      if (first + THREADS <= K || one < K) lospmm_copy<16>(lospmm_shared + ROW_BYTES + one * 16, b + one * 8, true);
    }
  } else {
    Element *rows_of_b = reinterpret_cast<Element *>(lospmm_shared + ROW_BYTES);
    constexpr int vector = K * N % 8 == 0 ? 8 : 1;
#pragma unroll 4
    for (int one = threadIdx.x; one < K * N / vector; one += THREADS) {
      alignas(16) Element some[vector];
      *reinterpret_cast<Word<vector * 2>::type *>(some) = __ldg(reinterpret_cast<const Word<vector * 2>::type *>(b) + one);
#pragma unroll
      for (int next = 0; next < vector; ++next) {
        const int place = one * vector + next;
        rows_of_b[place / N * 8 + place % N] = some[next];
      }
    }
    for (int one = threadIdx.x; one < K; one += THREADS)  // what no column of C uses is not read as a number either
      for (int col = N; col < 8; ++col) rows_of_b[one * 8 + col] = 0;
  }
  const unsigned short *starts = reinterpret_cast<const unsigned short *>(lospmm_shared + TABLE_AT);
  const unsigned short *lengths = starts + MAX_ROWS * 36;
  const unsigned char *rows_of_turns = reinterpret_cast<const unsigned char *>(starts + MAX_ROWS * 32);
  lospmm_commit();
  lospmm_wait<0>();
  int *turns = reinterpret_cast<int *>(lospmm_shared + TURNS_AT);
  if (lane == 0) turns[warp] = is_shared ? turn : -1;
  __syncthreads();

  Sums sums = {};
  int length = left + 1;  // of the turn; of the first one it has some
#pragma unroll 1
  for (int unit = 0; unit < units; unit += AHEAD) {
    Unit batch[AHEAD];
    take(batch, ahead, from, unit, units);
#pragma unroll
    for (int one = 0; one < AHEAD; ++one) {
      if (one > 0 && unit + one >= units) break;
      Used whole;
      if (left > STEPS) {
        go<false>(sums, whole, at, batch[one], diagonals, left, 0);
        left -= STEPS;
      } else {  // the turn ends here
        const bool is_last = turn + 1 == rows;
        const unsigned start = starts[is_last ? lane : (turn + 1) * 32 + lane];
        go<true>(sums, whole, at, batch[one], diagonals, left, start * ROW_BYTES + zeros);
        two_sums(is_shared ? mine : PARTS_AT + rows_of_turns[turn * 8 + lane / 4] * SUMS_BYTES, lane) = two_of(whole);
        is_shared = false;
        ++turn;
        length = is_last ? FOREVER : lengths[turn];  // behind the last are fillers
        left += length - STEPS;
      }
    }
  }
  const bool is_open = units > 0 && turn < rows && left < length;
  float2 own = two_of(used(sums));
  if (is_open && is_shared) two_sums(mine, lane) = own;
  __syncthreads();
  if (is_open && !is_shared) {  // it begins here, and others have the rest
#pragma unroll 1
    for (int other = warp + 1; other < WARPS && turns[other] == turn; ++other) {
      const float2 more = two_sums(SHARED_AT + other * SUMS_BYTES, lane);
      own.x += more.x, own.y += more.y;
    }
    two_sums(PARTS_AT + rows_of_turns[turn * 8 + lane / 4] * SUMS_BYTES, lane) = own;
  }
  __syncthreads();
#pragma unroll 1
  for (int one = threadIdx.x; one < rows * 8; one += THREADS) {
    const int of_row = block_row + one / 8, col = one % 8;
    if (col >= N) continue;
    const float *parts = reinterpret_cast<const float *>(lospmm_shared + PARTS_AT + one / 8 * SUMS_BYTES) + col;
    float sum = 0;
#pragma unroll
    for (int other = 0; other < 8; ++other) sum += parts[(one / 8 + other) % 8 * 8];
    c[of_row * static_cast<long long>(N) + col] = lospmm_finished(sum, of_row, of_row * static_cast<long long>(N) + col, residual);
  }
}
