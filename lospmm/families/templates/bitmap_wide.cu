
// A as bits and values (pieces.cuh) times many columns of B, on the tensor cores of sm_90a.
//
// A block has 64 rows of A for each of GROUPS warpgroups, and COLS columns of C (row_block.cuh), then those of another tile.
// One warpgroup more copies chunks of B, by one thread. Each warp of the others copies pieces of its own 16 rows, and makes
// fragments of the next chunk while the tensor cores multiply by the last one. Copies for the next tile begin while one is
// stored.
//
// Copies of boxes need a map of B, in global memory. There is a place for each SM: a block has it for itself, as two of
// them have no room in its shared memory.
//
// Tiles of ACROSS neighbours along the columns are a group. Blocks along z take the rows of the first group, then those of the
// next one: what is read at one time, and from the L2 cache, is few columns of B.
//
// Arrays: the first FIRSTS pieces of each 16 rows, PIECE_BYTES of each; where each of the others begins, in 16 bytes, the
// first ones having no bytes there; the others.

constexpr int PER_PIECE = DEPTH / CHUNK, STEPS = CHUNK / 16;  // chunks of a piece, products of a chunk
constexpr int WARPS = 4 * GROUPS, THREADS = 128 * (GROUPS + 1), SLOTS = 2, PIECES = (K + DEPTH - 1) / DEPTH;
constexpr int ROW_BLOCKS = (M + 64 * GROUPS - 1) / (64 * GROUPS);
constexpr int TILES_ALONG = ROW_BLOCKS * (((N + COLS - 1) / COLS + ACROSS - 1) / ACROSS), BLOCKS = CLUSTERS * LOSPMM_CLUSTER;
constexpr int WHOLE_TURNS = TILES_ALONG / BLOCKS + (TILES_ALONG % BLOCKS > CLUSTERS);
static_assert(TILES == 1 && PER_PIECE == 2 && !PAIRED);

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

// What one thread of the last warpgroup does: all chunks of each of its tiles.
LOSPMM_INLINE void feed(unsigned char *ring, unsigned long long *full, unsigned long long *empty, const unsigned char *map) {
  int stage = 0;
  unsigned parity = 1;  // a ring that is empty
#pragma unroll 1
  for (int turn = 0;; ++turn) {
    const Share share = share_of(turn);
    if (!share.is_there) break;
    const int column = static_cast<int>(share.tile.column);
#pragma unroll 1
    for (int chunk = share.first * PER_PIECE; chunk < share.end * PER_PIECE; ++chunk) {
      lospmm_gate_wait(empty + stage, parity);
      lospmm_bulk_expect(full + stage, STAGE);
#pragma unroll
      for (int part = 0; part < PARTS; ++part)
        lospmm_box_copy(ring + stage * STAGE + part * (CHUNK * 128), map, chunk * CHUNK, column + part * 64, full + stage);
      if (++stage == STAGES) stage = 0, parity ^= 1;
    }
  }
}

// The pieces of a warp, those of each of its tiles in turn.
struct Pieces {
  int turn, next, end_piece;  // of the tile, and of pieces: none is left where these are the same
  unsigned start, end;        // of the next, read a piece ahead of their use
  const unsigned *starts;     // of all pieces of the tile's rows
  const unsigned char *firsts;
};
LOSPMM_INLINE void bounds(Pieces &own) { own.start = __ldg(own.starts + own.next), own.end = __ldg(own.starts + own.next + 1); }
LOSPMM_INLINE void turn_to_tile(Pieces &own) {
  const Share share = share_of(own.turn);
  own.next = own.end_piece = 0;
  if (!share.is_there) return;
  const long long rows = static_cast<long long>(share.tile.row_block) * WARPS + threadIdx.x / 32;
  own.firsts = lospmm_data + FIRST_ARRAY + rows * (FIRSTS * PIECE_BYTES);
  own.starts = lospmm_array<unsigned>(1) + rows * PIECES;
  own.next = share.first, own.end_piece = share.end;
  bounds(own);
}
LOSPMM_INLINE void fetch(Pieces &own, unsigned char *slot, unsigned long long *barrier) {
  if (own.next == own.end_piece) return;
  if (threadIdx.x % 32 == 0) {
    const bool is_first = own.next < FIRSTS;
    const int bytes = is_first ? PIECE_BYTES : static_cast<int>(own.end - own.start) * 16;
    lospmm_bulk_expect(barrier, bytes);
    lospmm_bulk_copy(slot, is_first ? own.firsts + own.next * PIECE_BYTES : lospmm_array<unsigned char>(2) + own.start * 16ll,
                     bytes, barrier);
  }
  if (++own.next < own.end_piece) {
    bounds(own);
  } else {
    ++own.turn;
    turn_to_tile(own);
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
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  // Who copies makes the barriers of its copies, and begins with them: the others hear of them at the block's barrier.
  if (warp >= WARPS) {
    unsigned char *const map = maps + lospmm_sm() * MAP_BYTES;
    if (warp == WARPS) {
      if (lane == 0) {
        for (int stage = 0; stage < STAGES; ++stage) {
          lospmm_bulk_make(full + stage);
          lospmm_gate_make(empty + stage, WARPS);
        }
        lospmm_gate_make(done, WARPS);
        lospmm_bulk_make(done + 1);
      }
      lospmm_map_make<CHUNK>(map, scratch, b, K, N);
    }
    lospmm_block_arrive<THREADS>();
    lospmm_give_registers<FEEDING_REGISTERS>();
    if (warp == WARPS && lane == 0) feed(ring, full, empty, map);
    return;
  }
  unsigned weights[PER_PIECE][STEPS][4];
  unsigned char *const own_slots = slots + warp * (SLOTS * PIECE_BYTES);
  uint2 *const places = all_places + warp * WORDS;
  pieces_full += warp * SLOTS;
  if (lane == 0)
    for (int slot = 0; slot < SLOTS; ++slot) lospmm_bulk_make(pieces_full + slot);
  Pieces own = {0, 0, 0, 0, 0, nullptr, nullptr};
  turn_to_tile(own);
  fetch(own, own_slots, pieces_full);
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
      __syncwarp();  // all fragments of the piece before were made
      fetch(own, own_slots + (slot ^ 1) * PIECE_BYTES, pieces_full + (slot ^ 1));
      lospmm_bulk_wait(pieces_full + slot, slot_parity);
      count(places, own_slots + slot * PIECE_BYTES);
      __syncwarp();
#pragma unroll
      for (int of = 0; of < PER_PIECE; ++of) {
#pragma unroll
        for (int step = 0; step < STEPS; ++step) fragment_of(weights[of][step], places + of * 16 + step * 4);
        lospmm_bulk_wait(full + stage, parity);
        const LospmmColumns columns = lospmm_columns(ring + stage * STAGE);
        lospmm_wgmma_begin();
#pragma unroll
        for (int step = 0; step < STEPS; ++step)
          lospmm_wgmma_columns(sums, weights[of][step], lospmm_behind_rows(columns, step * 16));
        lospmm_wgmma_commit();
        lospmm_wgmma_wait<1>();  // the chunk before
        if ((piece > share.first || of) && lane == 0) lospmm_gate_arrive(empty + (stage ? stage : STAGES) - 1);
        if (++stage == STAGES) stage = 0, parity ^= 1;
      }
      slot ^= 1;
      slot_parity ^= slot == 0;
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
