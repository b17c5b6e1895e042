
// Tiles of C, of kernels whose blocks have 64 rows of A for each of GROUPS warpgroups, and COLS columns of B. A ring in shared
// memory has STAGES chunks of B, of CHUNK rows. Each of the LOSPMM_CLUSTER blocks that share a tile has columns of A of its own;
// in the end they add up.

constexpr int CHUNK = 64, PARTS = COLS / 64, STAGE = CHUNK * COLS * 2;  // bytes, of B
static_assert(COLS % 64 == 0);

// A tile: which block of rows, and the first column.
struct Tile {
  int row_block;
  long long column;
};

// Two finished elements of C, ``step`` apart from ``place`` on, as a word.
LOSPMM_INLINE unsigned finished_pair(float first, float second, int row, long long place, const Element *residual, int step = 1) {
  return lospmm_finished(first, row, place, residual) |
         static_cast<unsigned>(lospmm_finished(second, row, place + step, residual)) << 16;
}

// Swap ``second`` of the lane whose number lacks ``bit`` with ``first`` of the lane that has it.
template <int bit>
LOSPMM_INLINE void change_places(unsigned &first, unsigned &second) {
  const bool has = threadIdx.x & bit;
  const unsigned other = __shfl_xor_sync(~0u, has ? first : second, bit);
  if (has)
    first = other;
  else
    second = other;
}

// Transpose among four lanes: lane i gets the four at place i.
LOSPMM_INLINE void change_places_of_four(unsigned (&pairs)[4]) {
  change_places<1>(pairs[0], pairs[1]), change_places<1>(pairs[2], pairs[3]);
  change_places<2>(pairs[0], pairs[2]), change_places<2>(pairs[1], pairs[3]);
}

// Store sums of ``eights`` times eight columns of a tile, from ``column`` on; ``sum_of`` gives the four that a thread has of 16
// rows. Of eight columns of a row, four lanes have two each; transposed, a lane has all of one eight, and stores 16 bytes.
template <int eights, typename Sums>
LOSPMM_INLINE void store_eights(const Sums &sum_of, const Tile &tile, long long column, int m, long long n, Element *c,
                                const Element *residual) {
  constexpr int AT_ONCE = eights % 4 ? 1 : 4;
  const int lane = threadIdx.x % 32, above = tile.row_block * (64 * GROUPS) + threadIdx.x / 32 * 16;
#pragma unroll
  for (int upper = 0; upper < 2; ++upper) {
    const int row = above + lane / 4 + 8 * upper;
    const long long of_row = min(row, m - 1) * n;
#pragma unroll
    for (int first = 0; first < eights; first += AT_ONCE) {
      unsigned pairs[AT_ONCE];
#pragma unroll
      for (int eight = 0; eight < AT_ONCE; ++eight) {
        const long long of_block = column + (first + eight) * 8 + lane % 4 * 2;
        pairs[eight] = finished_pair(sum_of(first + eight, upper * 2), sum_of(first + eight, upper * 2 + 1), min(row, m - 1),
                                     of_row + min(of_block, n - 2), residual);
        if (AT_ONCE == 1 && row < m && of_block < n) *reinterpret_cast<unsigned *>(c + of_row + of_block) = pairs[0];
      }
      if constexpr (AT_ONCE == 4) {
        change_places_of_four(pairs);
        const long long own = column + (first + lane % 4) * 8;
        const uint4 eight = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
        if (row < m && own < n) *reinterpret_cast<uint4 *>(c + of_row + own) = eight;
      }
    }
  }
}

#if TOKENS
// The same to C tokens first, (n, m): a lane has eight rows of one column after all change places, and two lanes 32 bytes.
template <int eights, typename Sums>
LOSPMM_INLINE void store_tokens(const Sums &sum_of, const Tile &tile, long long column, int m, long long n, Element *c,
                                const Element *residual) {
  constexpr int AT_ONCE = eights % 4 ? 1 : 4;
  const int lane = threadIdx.x % 32, above = tile.row_block * (64 * GROUPS) + threadIdx.x / 32 * 16;
#pragma unroll
  for (int first = 0; first < eights; first += AT_ONCE) {
    unsigned pairs[2][AT_ONCE];
#pragma unroll
    for (int upper = 0; upper < 2; ++upper) {
      const int row = min(above + lane / 4 + 8 * upper, m - 1);
#pragma unroll
      for (int eight = 0; eight < AT_ONCE; ++eight) {
        const long long token = min(column + (first + eight) * 8 + lane % 4 * 2, n - 2);
        pairs[upper][eight] = lospmm_turned(finished_pair(sum_of(first + eight, upper * 2), sum_of(first + eight, upper * 2 + 1),
                                                          row, token * m + row, residual, m));
      }
      const long long own = column + first * 8 + lane / 4;
      const int top = above + 8 * upper + lane % 4 * 2;
      if (AT_ONCE == 1 && top < m && own < n) *reinterpret_cast<unsigned *>(c + own * m + top) = pairs[upper][0];
      if constexpr (AT_ONCE == 4) change_places_of_four(pairs[upper]);
    }
    if constexpr (AT_ONCE == 4) {
#pragma unroll
      for (int of = 0; of < 4; ++of) change_places<1>(pairs[0][of], pairs[1][of]);
#pragma unroll
      for (int odd = 0; odd < 2; ++odd) {
        const long long own = column + (first + (lane % 4 & 2 | odd)) * 8 + lane / 4;
        const int top = above + lane % 2 * 8;
        const uint4 eight = make_uint4(pairs[odd][0], pairs[odd][1], pairs[odd][2], pairs[odd][3]);
        if (top < m && own < n) *reinterpret_cast<uint4 *>(c + own * m + top) = eight;
      }
    }
  }
}
#define LOSPMM_STORE store_tokens
#else
#define LOSPMM_STORE store_eights
#endif

// The sums of a tile to C.
LOSPMM_INLINE void store_rows(const float (&sums)[PARTS][32], const Tile &tile, int m, long long n, Element *c,
                              const Element *residual) {
  const auto sum_of = [&](int eight, int i) { return sums[eight / 8][eight % 8 * 4 + i]; };
  LOSPMM_STORE<COLS / 8>(sum_of, tile, tile.column, m, n, c, residual);
}

#if LOSPMM_CLUSTER > 1
// The same where each block of a cluster has a part of each sum. A block adds up and stores some of the columns; the others
// send it their parts of these, into the ring, which is no longer needed. ``done`` are two barriers: of the multiplying warps
// of all blocks, and of what is sent.
LOSPMM_INLINE void add_up_rows(const float (&sums)[PARTS][32], const Tile &tile, unsigned char *ring, unsigned long long *done,
                               int m, long long n, Element *c, const Element *residual) {
  constexpr int THREADS = 128 * GROUPS, FOURS = COLS / 8, OWN = FOURS / LOSPMM_CLUSTER, SENDERS = LOSPMM_CLUSTER - 1;
  static_assert(FOURS % LOSPMM_CLUSTER == 0 && SENDERS * OWN * THREADS * sizeof(float4) <= STAGES * STAGE);
  const int rank = blockIdx.y;
  if (threadIdx.x == 0) lospmm_bulk_expect(done + 1, SENDERS * OWN * THREADS * sizeof(float4));
  if (threadIdx.x % 32 == 0) lospmm_gate_arrive(done);
  lospmm_gate_wait(done, 0);
  lospmm_cluster_wait();
  float4 *const sent = reinterpret_cast<float4 *>(ring) + threadIdx.x;
#pragma unroll
  for (int four = 0; four < FOURS; ++four) {
    const int to = four / OWN;
    if (to == rank) continue;
    const float *own = sums[four / 8] + four % 8 * 4;
    lospmm_cluster_send(sent + ((rank - to + SENDERS) % LOSPMM_CLUSTER * OWN + four % OWN) * THREADS,
                        make_float4(own[0], own[1], own[2], own[3]), to, done + 1);
  }
  float all[OWN][4];
#pragma unroll
  for (int four = 0; four < FOURS; ++four)
    if (four / OWN == rank)
#pragma unroll
      for (int i = 0; i < 4; ++i) all[four % OWN][i] = sums[four / 8][four % 8 * 4 + i];
  lospmm_bulk_wait(done + 1, 0);
#pragma unroll
  for (int sender = 0; sender < SENDERS; ++sender)
#pragma unroll
    for (int of = 0; of < OWN; ++of) {
      const float4 more = sent[(sender * OWN + of) * THREADS];
      all[of][0] += more.x, all[of][1] += more.y, all[of][2] += more.z, all[of][3] += more.w;
    }
  const auto sum_of = [&](int eight, int i) { return all[eight][i]; };
  LOSPMM_STORE<OWN>(sum_of, tile, tile.column + rank * OWN * 8, m, n, c, residual);
}
#endif
