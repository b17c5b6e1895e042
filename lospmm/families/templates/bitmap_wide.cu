
// A as bits and values (pieces.cuh) times many columns of B, on the tensor cores of sm_90a.
//
// A block computes tiles of C (row_block.cuh), one after another, with GROUPS warpgroups. One more warpgroup copies: one thread
// chunks of B, and a thread for each multiplying warp the pieces of its 16 rows. A warp makes fragments of the next chunk while
// the tensor cores multiply by the last one, and copies for the next tile begin while a tile is stored. What a block needs first
// is copied by threads that are idle then: first pieces by the warps themselves, first chunks of B by two other warps.
//
// TMA needs a tensor map of B in global memory. There is one for each SM, as an SM has shared memory for one block only.
//
// ACROSS neighbouring tiles along the columns are a group. Blocks along z take all rows of a group, then those of the next one,
// so that few columns of B are read at a time, from the L2 cache.
//
// With TOKENS, B and C are transposed in memory: N x K and N x M.
//
// Arrays: the first FIRSTS pieces of each 16 rows, PIECE_BYTES of each; where each of the others begins, in 16 bytes, the
// first ones having no bytes there; the others.

constexpr int PER_PIECE = DEPTH / CHUNK, STEPS = CHUNK / 16;  // chunks of a piece, products of a chunk
constexpr int WARPS = 4 * GROUPS, THREADS = 128 * (GROUPS + 1), PIECES = (K + DEPTH - 1) / DEPTH;
constexpr int ROW_BLOCKS = (M + 64 * GROUPS - 1) / (64 * GROUPS);
constexpr int TILES_ALONG = ROW_BLOCKS * (((N + COLS - 1) / COLS + ACROSS - 1) / ACROSS), BLOCKS = CLUSTERS * LOSPMM_CLUSTER;
constexpr int WHOLE_TURNS = TILES_ALONG / BLOCKS + (TILES_ALONG % BLOCKS > CLUSTERS);
constexpr int FIRST_CHUNKS = 2;  // at least a piece is there
static_assert(TILES == 1 && PER_PIECE == FIRST_CHUNKS && !PAIRED && STAGES > FIRST_CHUNKS);

__align__(MAP_BYTES) static __device__ unsigned char maps[MAPS * MAP_BYTES];

// What a block does in its ``turn``-th turn: all pieces of the columns of A for a tile of its own, while there are enough tiles
// for all blocks, and then a part of the pieces for a tile that its cluster shares, if there are few. A group may have fewer
// tiles than others.
struct Share {
  Tile tile;
  int first, end;  // pieces
  bool is_part, is_there;
};
LOSPMM_INLINE Share share_of(int turn) {
  const int rank = blockIdx.y;
  const bool is_part = turn >= WHOLE_TURNS;
  const int number = turn * BLOCKS + (is_part ? 0 : rank * CLUSTERS) + blockIdx.z, group = number / ROW_BLOCKS;
  const Tile tile = {number - group * ROW_BLOCKS, static_cast<long long>(group * ACROSS + blockIdx.x) * COLS};
  return {tile, is_part ? PIECES * rank / LOSPMM_CLUSTER : 0, is_part ? PIECES * (rank + 1) / LOSPMM_CLUSTER : PIECES, is_part,
          number < TILES_ALONG && tile.column < N};
}

// What one thread of the last warpgroup does: all chunks of its tiles but the first ones.
LOSPMM_INLINE void feed(unsigned char *ring, unsigned long long *full, unsigned long long *empty, const unsigned char *map) {
  int stage = FIRST_CHUNKS, skipped = FIRST_CHUNKS;
  unsigned parity = 1;  // a ring that is empty
#pragma unroll 1
  for (int turn = 0;; ++turn) {
    const Share share = share_of(turn);
    if (!share.is_there) break;
    const int column = static_cast<int>(share.tile.column);
#pragma unroll 1
    for (int chunk = share.first * PER_PIECE + skipped; chunk < share.end * PER_PIECE; ++chunk) {
      lospmm_gate_wait(empty + stage, parity);
      lospmm_bulk_expect(full + stage, STAGE);
#pragma unroll
      for (int part = 0; part < PARTS; ++part)
        lospmm_box_copy(ring + stage * STAGE + part * (CHUNK * 128), map, TOKENS ? column + part * 64 : chunk * CHUNK,
                        TOKENS ? chunk * CHUNK : column + part * 64, full + stage);
      if (++stage == STAGES) stage = 0, parity ^= 1;
    }
    skipped = 0;
  }
}

// What a warp of the last warpgroup does: one of the first chunks, which needs no map.
LOSPMM_INLINE void copy_chunk(unsigned char *stage, const Element *b, int number) {
  const Share share = share_of(0);
  const int piece = threadIdx.x % 32, first = share.first * DEPTH + number * CHUNK;  // of 16 bytes, and a row
  const long long column = share.tile.column + piece * 8;
  if (TOKENS && share.is_there) {
    const int eight = piece % 8;
    const bool is_there = first + eight * 8 < K;
    const Element *from = b + share.tile.column * K + first + eight * 8;
#pragma unroll 8
    for (int token = piece / 8; token < COLS; token += 4)
      lospmm_copy<16>(stage + token * 128 + (eight ^ token % 8) * 16, from + static_cast<long long>(token) * K,
                      is_there && share.tile.column + token < N);
    return;
  }
  if (!share.is_there || piece * 8 >= COLS) return;
  b += static_cast<long long>(first) * N + column;
  stage += piece / 8 * (CHUNK * 128);
#pragma unroll 8
  for (int row = 0; row < CHUNK; ++row)
    lospmm_copy<16>(stage + row * 128 + (piece % 8 ^ row % 8) * 16, b + static_cast<long long>(row) * N,
                    column < N && first + row < K);
}

// Which 16 rows of A a warp has of a tile, and where their pieces begin, in 16 bytes.
LOSPMM_INLINE long long rows_of(const Tile &tile, int warp) { return static_cast<long long>(tile.row_block) * WARPS + warp; }
LOSPMM_INLINE const unsigned *starts_of(long long rows) {
  return reinterpret_cast<const unsigned *>(lospmm_data + STARTS_ARRAY) + rows * PIECES;
}
LOSPMM_INLINE void fetch(unsigned char *slot, unsigned long long *barrier, long long rows, int piece, unsigned start, unsigned end) {
  if (piece < FIRSTS) {  // without a wait for ``start``
    lospmm_bulk_expect(barrier, PIECE_BYTES);
    lospmm_bulk_copy(slot, lospmm_data + FIRST_ARRAY + (rows * FIRSTS + piece) * PIECE_BYTES, PIECE_BYTES, barrier);
  } else {
    const int bytes = static_cast<int>(end - start) * 16;
    lospmm_bulk_expect(barrier, bytes);
    lospmm_bulk_copy(slot, lospmm_data + OTHERS_ARRAY + start * 16ll, bytes, barrier);
  }
}

// What a thread does for a warp that multiplies: all pieces of its tiles but the first.
LOSPMM_INLINE void feed_pieces(unsigned char *slots, unsigned long long *full, unsigned long long *empty, int warp) {
  int slot = 1, skipped = 1;
  unsigned parity = 1;
#pragma unroll 1
  for (int turn = 0;; ++turn) {
    const Share share = share_of(turn);
    if (!share.is_there) break;
    const long long rows = rows_of(share.tile, warp);
    const unsigned *const starts = starts_of(rows);
    int piece = share.first + skipped;
    unsigned start = __ldg(starts + piece), end = __ldg(starts + min(piece + 1, share.end));  // a piece ahead of their use
#pragma unroll 1
    for (; piece < share.end; ++piece) {
      lospmm_gate_wait(empty + slot, parity);
      fetch(slots + slot * PIECE_BYTES, full + slot, rows, piece, start, end);
      start = end, end = __ldg(starts + min(piece + 2, share.end));
      if (++slot == SLOTS) slot = 0, parity ^= 1;
    }
    skipped = 0;
  }
}

LOSPMM_KERNEL(ENTRY) {
#if !RESIDUAL
  const Element *residual = nullptr;
#endif
  unsigned char *ring = lospmm_shared, *slots = ring + STAGES * STAGE;
  uint2 *all_places = reinterpret_cast<uint2 *>(slots + WARPS * SLOTS * PIECE_BYTES);
  unsigned char *const scratch = reinterpret_cast<unsigned char *>(all_places + WARPS * WORDS);
  unsigned long long *full = reinterpret_cast<unsigned long long *>(scratch + MAP_BYTES);
  unsigned long long *empty = full + STAGES, *done = empty + STAGES, *pieces_full = done + 2;
  unsigned long long *pieces_empty = pieces_full + WARPS * SLOTS;
  const int warp = lospmm_warp(), lane = threadIdx.x % 32;
  // Who copies makes the barriers of its copies, and begins with them: the others hear of them at the block's barrier.
  if (warp >= WARPS) {
    lospmm_give_registers<FEEDING_REGISTERS>();
    if (warp == WARPS) {
      if (lane < STAGES) {
        lospmm_gate_make(empty + lane, WARPS);
        lospmm_bulk_make(full + lane);
      } else if (lane == STAGES) {
        lospmm_gate_make(done, WARPS);
        lospmm_bulk_make(done + 1);
      }
      __syncwarp();
      lospmm_block_arrive<THREADS>();
      unsigned char *const map = maps + lospmm_sm() * MAP_BYTES;
      lospmm_map_make<CHUNK>(map, scratch, b, TOKENS ? N : K, TOKENS ? K : N);
      if (lane == 0) feed(ring, full, empty, map);
    } else if (warp == WARPS + 1) {
      lospmm_block_wait<THREADS>();
      const int of = lane * SLOTS;
      if (lane < WARPS) feed_pieces(slots + of * PIECE_BYTES, pieces_full + of, pieces_empty + of, lane);
    } else {
      const int chunk = warp - WARPS - 2;
      copy_chunk(ring + chunk * STAGE, b, chunk);
      lospmm_commit();
      lospmm_block_wait<THREADS>();
      lospmm_wait<0>();
      lospmm_show_to_products();
      __syncwarp();
      if (lane == 0) lospmm_bulk_expect(full + chunk, 0);  // all of it is there
    }
    return;
  }
  unsigned weights[PER_PIECE][STEPS][4];
  unsigned char *const own_slots = slots + warp * (SLOTS * PIECE_BYTES);
  uint2 *const places = all_places + warp * WORDS;
  pieces_full += warp * SLOTS, pieces_empty += warp * SLOTS;
  if (lane == 0) {
    for (int of = 0; of < SLOTS; ++of) {
      lospmm_gate_make(pieces_empty + of, 1);
      lospmm_bulk_make(pieces_full + of);
    }
    const Share share = share_of(0);
    const long long rows = rows_of(share.tile, warp);
    const unsigned *const starts = starts_of(rows) + share.first;
    if (share.is_there) fetch(own_slots, pieces_full, rows, share.first, __ldg(starts), __ldg(starts + 1));
  }
  __syncwarp();
  lospmm_block_wait<THREADS>();
  lospmm_take_registers<REGISTERS>();
  int stage = 0, slot = 0;
  unsigned parity = 0, slot_parity = 0;
#pragma unroll 1
  for (int turn = 0;; ++turn) {
    const Share share = share_of(turn);
    if (!share.is_there) break;
    float sums[PARTS][32] = {};
#pragma unroll 1
    for (int piece = share.first; piece < share.end; ++piece) {
      lospmm_bulk_wait(pieces_full + slot, slot_parity);
      count(places, own_slots + slot * PIECE_BYTES);
      __syncwarp();
#pragma unroll
      for (int of = 0; of < PER_PIECE; ++of) {
#pragma unroll
        for (int step = 0; step < STEPS; ++step) fragment_of(weights[of][step], places + (of * 4 + step) * STEP_WORDS);
        lospmm_bulk_wait(full + stage, parity);
        const LospmmColumns columns = lospmm_columns(ring + stage * STAGE);
        lospmm_wgmma_begin();
#pragma unroll
        for (int step = 0; step < STEPS; ++step)
          lospmm_wgmma_columns(sums, weights[of][step], lospmm_behind_rows(columns, step * 16));
        lospmm_wgmma_commit();
        if (of == PER_PIECE - 1) {
          __syncwarp();  // all fragments of the piece were made
          if (lane == 0) lospmm_gate_arrive(pieces_empty + slot);
        }
        lospmm_wgmma_wait<1>();  // the chunk before
        if ((piece > share.first || of) && lane == 0) lospmm_gate_arrive(empty + (stage ? stage : STAGES) - 1);
        if (++stage == STAGES) stage = 0, parity ^= 1;
      }
      if (++slot == SLOTS) slot = 0, slot_parity ^= 1;
    }
    lospmm_wgmma_wait<0>();
    if (lane == 0) lospmm_gate_arrive(empty + (stage ? stage : STAGES) - 1);
#if LOSPMM_CLUSTER > 1
    if (share.is_part) {
      add_up_rows(sums, share.tile, ring, done, M, N, c, residual);
      return;
    }
#endif
    store_rows(sums, share.tile, M, N, c, residual);
  }
}
