
// What blocks have in common that compute tiles of C: 64 rows of A for each of GROUPS warpgroups, and COLS columns. A ring has
// STAGES chunks of B, CHUNK rows of COLS columns. The LOSPMM_CLUSTER blocks that share a tile have columns of A of their own,
// and add up in the end.
//
// Tiles of gridDim.x neighbours along the columns are a group. Blocks along z take the rows of the first group, then those of
// the next one: what is read at one time, and from the L2 cache, is few columns of B.

constexpr int CHUNK = 64, PARTS = COLS / 64, STAGE = CHUNK * COLS * 2;  // bytes, of B
static_assert(COLS % 64 == 0);

// The rows and columns of C that come ``number``-th for a block; there are none where a group has fewer tiles than others.
struct Tile {
  int row_block;
  long long column;
};
LOSPMM_INLINE int tiles_along(int m, long long n) {
  const int across = static_cast<int>((n + COLS - 1) / COLS), groups = (across + gridDim.x - 1) / gridDim.x;
  return groups * ((m + 64 * GROUPS - 1) / (64 * GROUPS));
}
LOSPMM_INLINE Tile tile_of(int number, int m) {
  const int row_blocks = (m + 64 * GROUPS - 1) / (64 * GROUPS), group = number / row_blocks;
  return {number - group * row_blocks, static_cast<long long>(group * gridDim.x + blockIdx.x) * COLS};
}

// What a block does in its ``turn``-th turn: a tile of its own, all pieces of A's columns, while there are enough for all blocks,
// and then a part of the pieces of a tile that its cluster shares, if there are few.
struct Share {
  Tile tile;
  int first, end;  // pieces
  bool is_part, is_there;
};
LOSPMM_INLINE Share share_of(int turn, int m, long long n, int pieces) {
  const int tiles = tiles_along(m, n), clusters = gridDim.z, blocks = clusters * LOSPMM_CLUSTER, rank = blockIdx.y;
  const int whole = tiles / blocks + (tiles % blocks > clusters);  // turns
  const bool is_part = turn >= whole;
  const int number = turn * blocks + (is_part ? 0 : rank * clusters) + blockIdx.z;
  const Tile tile = tile_of(number, m);
  return {tile, is_part ? pieces * rank / LOSPMM_CLUSTER : 0, is_part ? pieces * (rank + 1) / LOSPMM_CLUSTER : pieces, is_part,
          number < tiles && tile.column < n};
}

// Two neighbours of a row of C, from their place on.
LOSPMM_INLINE unsigned finished_pair(float first, float second, int row, long long place, const Element *residual) {
  return lospmm_finished(first, row, place, residual) |
         static_cast<unsigned>(lospmm_finished(second, row, place + 1, residual)) << 16;
}

// ``second`` of a lane whose number has not this bit, and ``first`` of the one that has it.
template <int bit>
LOSPMM_INLINE void change_places(unsigned &first, unsigned &second) {
  const bool has = threadIdx.x & bit;
  const unsigned other = __shfl_xor_sync(~0u, has ? first : second, bit);
  if (has)
    first = other;
  else
    second = other;
}

template <bool is_so>
struct Whether {
  static constexpr bool value = is_so;
};

#if LOSPMM_CLUSTER > 1
// The sums of a tile to C, of which each block of a cluster has a part: by way of the ring, which is not used any more then;
// ``done`` is a barrier for all warps that multiply.
template <int ring_bytes>
LOSPMM_INLINE void lospmm_add_up_rows(const float (&sums)[PARTS][32], const Tile &tile, unsigned char *ring,
                                     unsigned long long *done, int m, long long n, Element *c, const Element *residual) {
  const int lane = threadIdx.x % 32;
  const long long column = tile.column;
  const int above = tile.row_block * (64 * GROUPS) + threadIdx.x / 32 * 16;
  if (lane == 0) lospmm_gate_arrive(done);
  lospmm_gate_wait(done, 0);
  const int rank = blockIdx.y;
  // Each block of a cluster adds up and stores a part of the columns, from its own sums on: all that others have of it is
  // asked for at once. What is not stored is not asked for: a thread that is done with its part must have nothing under way.
  constexpr int THREADS = 128 * GROUPS, FOURS = COLS / 8, OWN = FOURS / LOSPMM_CLUSTER;
  static_assert(FOURS % LOSPMM_CLUSTER == 0 && FOURS * THREADS * sizeof(float4) <= ring_bytes);
  float4 *const given = reinterpret_cast<float4 *>(ring) + threadIdx.x;
#pragma unroll
  for (int four = 0; four < FOURS; ++four) {
    if (four / OWN == rank) continue;
    const float *own_sums = sums[four / 8] + four % 8 * 4;
    given[four * THREADS] = make_float4(own_sums[0], own_sums[1], own_sums[2], own_sums[3]);
  }
  lospmm_cluster_wait();
  const auto collect = [&](auto whole) {
    constexpr bool is_whole = decltype(whole)::value;
    float all[OWN][4];
#pragma unroll
    for (int four = 0; four < FOURS; ++four)
      if (four / OWN == rank)
#pragma unroll
        for (int i = 0; i < 4; ++i) all[four % OWN][i] = sums[four / 8][four % 8 * 4 + i];
#pragma unroll
    for (int apart = 1; apart < LOSPMM_CLUSTER; ++apart)
#pragma unroll
      for (int four = 0; four < OWN; ++four)
        if (is_whole || (above + lane / 4 < m && column + (rank * OWN + four) * 8 < n)) {
          const float4 more = lospmm_cluster_floats(given + (rank * OWN + four) * THREADS, (rank + apart) % LOSPMM_CLUSTER);
          all[four][0] += more.x, all[four][1] += more.y, all[four][2] += more.z, all[four][3] += more.w;
        }
#pragma unroll
    for (int four = 0; four < OWN; ++four) {
      const long long of_block = column + (rank * OWN + four) * 8 + lane % 4 * 2;
#pragma unroll
      for (int upper = 0; upper < 2; ++upper) {
        const int row = above + lane / 4 + 8 * upper;
        if (is_whole || (row < m && of_block < n))
          *reinterpret_cast<unsigned *>(c + row * n + of_block) =
              finished_pair(all[four][2 * upper], all[four][2 * upper + 1], row, row * n + of_block, residual);
      }
    }
  };
  // What is all there by itself, since loads with a condition wait for each other.
  const long long own_begin = column + rank * OWN * 8;
  if ((tile.row_block + 1) * (64 * GROUPS) <= m && own_begin + OWN * 8 <= n)
    collect(Whether<true>());
  else if (own_begin < n)
    collect(Whether<false>());
  lospmm_cluster_leave();  // nobody goes while others read its sums
}
#endif

// The sums of a tile to C.
LOSPMM_INLINE void lospmm_store_rows(const float (&sums)[PARTS][32], const Tile &tile, int m, long long n, Element *c,
                                     const Element *residual) {
  const int lane = threadIdx.x % 32;
  const long long column = tile.column;
  const int above = tile.row_block * (64 * GROUPS) + threadIdx.x / 32 * 16;
  // Four lanes have two neighbours each of every eight columns of a row: after they changed places, a lane has all of one eight.
#pragma unroll
  for (int upper = 0; upper < 2; ++upper) {
    const int row = above + lane / 4 + 8 * upper;
    const long long of_row = min(row, m - 1) * n;
#pragma unroll
    for (int first = 0; first < COLS / 8; first += 4) {
      unsigned pairs[4];
#pragma unroll
      for (int eight = 0; eight < 4; ++eight) {
        const float *two = sums[first / 8] + (first % 8 + eight) * 4 + upper * 2;
        const long long of_block = column + (first + eight) * 8 + lane % 4 * 2;
        pairs[eight] = finished_pair(two[0], two[1], min(row, m - 1), of_row + min(of_block, n - 2), residual);
      }
      change_places<1>(pairs[0], pairs[1]), change_places<1>(pairs[2], pairs[3]);
      change_places<2>(pairs[0], pairs[2]), change_places<2>(pairs[1], pairs[3]);
      const long long own = column + (first + lane % 4) * 8;
      if (row < m && own < n) *reinterpret_cast<uint4 *>(c + of_row + own) = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
    }
  }
}
