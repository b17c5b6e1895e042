
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
// Numbers: m, k. Arrays: the first FIRSTS pieces of each 16 rows, PIECE_BYTES of each; where each of the others begins, in 16
// bytes, the first ones having no bytes there; the others; places of maps.

constexpr int PER_PIECE = DEPTH / CHUNK, STEPS = CHUNK / 16;  // chunks of a piece, products of a chunk
constexpr int WARPS = 4 * GROUPS, SLOTS = 2;
static_assert(TILES == 1 && PER_PIECE == 2 && !PAIRED);

// What one thread of the last warpgroup does: all chunks of each of its tiles.
LOSPMM_INLINE void feed(unsigned char *ring, unsigned long long *full, unsigned long long *empty, int m, int pieces,
                        const unsigned char *map) {
  int stage = 0;
  unsigned parity = 1;  // a ring that is empty
#pragma unroll 1
  for (int turn = 0;; ++turn) {
    const Share share = share_of(turn, m, N, pieces);
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
  const int m, pieces;
  int turn, next, end_piece;  // of the tile, and of pieces: none is left where these are the same
  unsigned start, end;        // of the next, read a piece ahead of their use
  const unsigned *starts;     // of all pieces of the tile's rows
  const unsigned char *firsts;
};
LOSPMM_INLINE void bounds(Pieces &own) { own.start = __ldg(own.starts + own.next), own.end = __ldg(own.starts + own.next + 1); }
LOSPMM_INLINE void turn_to_tile(Pieces &own) {
  const Share share = share_of(own.turn, own.m, N, own.pieces);
  own.next = own.end_piece = 0;
  if (!share.is_there) return;
  const long long rows = static_cast<long long>(share.tile.row_block) * WARPS + threadIdx.x / 32;
  own.firsts = lospmm_data + FIRST_ARRAY + rows * (FIRSTS * PIECE_BYTES);
  own.starts = lospmm_array<unsigned>(1) + rows * own.pieces;
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
  const int m = static_cast<int>(lospmm_number(0)), k = static_cast<int>(lospmm_number(1));
  const int pieces = (k + DEPTH - 1) / DEPTH;
  unsigned char *ring = lospmm_shared, *slots = ring + STAGES * STAGE;
  uint2 *all_places = reinterpret_cast<uint2 *>(slots + WARPS * SLOTS * PIECE_BYTES);
  unsigned char *const scratch = reinterpret_cast<unsigned char *>(all_places + WARPS * WORDS);
  unsigned long long *full = reinterpret_cast<unsigned long long *>(scratch + MAP_BYTES);
  unsigned long long *empty = full + STAGES, *done = empty + STAGES, *pieces_full = done + 2;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < STAGES; ++stage) {
      lospmm_bulk_make(full + stage);
      lospmm_gate_make(empty + stage, WARPS);
    }
    lospmm_gate_make(done, WARPS);
    lospmm_bulk_make(done + 1);
    for (int slot = 0; slot < WARPS * SLOTS; ++slot) lospmm_bulk_make(pieces_full + slot);
  }
  unsigned char *const map = const_cast<unsigned char *>(lospmm_array<unsigned char>(3)) + lospmm_sm() * MAP_BYTES;
  if (warp == WARPS) lospmm_map_make<CHUNK>(map, scratch, b, k, N);
  __syncthreads();
  if (warp >= WARPS) {
    lospmm_give_registers<FEEDING_REGISTERS>();
    if (warp == WARPS && lane == 0) feed(ring, full, empty, m, pieces, map);
    return;
  }
  lospmm_take_registers<REGISTERS>();

  unsigned weights[PER_PIECE][STEPS][4];
  unsigned char *const own_slots = slots + warp * (SLOTS * PIECE_BYTES);
  uint2 *const places = all_places + warp * WORDS;
  pieces_full += warp * SLOTS;
  Pieces own = {m, pieces, 0, 0, 0, 0, 0, nullptr, nullptr};
  turn_to_tile(own);
  fetch(own, own_slots, pieces_full);
  int stage = 0, slot = 0;
  unsigned parity = 0, slot_parity = 0;
#pragma unroll 1
  for (int turn = 0;; ++turn) {
    const Share share = share_of(turn, m, N, pieces);
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
      add_up_rows(sums, share.tile, ring, done, m, N, c, residual);
      return;
    }
#endif
    store_rows(sums, share.tile, m, N, c, residual);
  }
}
