
// A as bits and values (pieces.cuh) times a few columns of B, on tensor cores.
//
// A warp has TILES x 16 rows of A and COLS columns of C. PARTS warps of each of the LOSPMM_CLUSTER blocks that share rows take
// the pieces of their rows in turn, and add up in the end, in a fixed order. Each warp copies its pieces, and their rows of B,
// to a ring of its own with STAGES of them, so it waits for no other warp. If PAIRED, odd columns of a piece have changed
// places, so that fewer pairs have a nonzero. A byte for each says which column is there, and rows of B are read in that order.
//
// A short kernel loses time where a load waits for another one, and by its code, which is read from memory. So no load says
// where a warp's first piece lies, and A's shape and the places of its arrays are compiled in.
//
// With C_TOKENS, C is transposed in memory: N x M.
//
// Arrays: the first FIRSTS pieces of a row of tiles, one for each warp at least, PIECE_BYTES of each; where each of the others
// begins, in 16 bytes, the first ones having no bytes there; the others.

constexpr int PIECES = (K + DEPTH - 1) / DEPTH;  // of a row of tiles
constexpr int THREADS = 32 * ROWS * PARTS;
constexpr bool RAGGED = K % DEPTH != 0;          // the last piece has fewer columns
constexpr int CHUNKS = COLS / 8;  // 16 bytes of a row of B
constexpr bool SINGLE = STAGED && N == 1;      // B is a vector
constexpr int ROW = SINGLE ? 1 : COLS;         // elements of a row of B in the ring
constexpr int B_BYTES = STAGED ? DEPTH * ROW * 2 : 0;
constexpr int SLOT_BYTES = PIECE_BYTES + B_BYTES;
constexpr int WARP_BYTES = STAGES * SLOT_BYTES + WORDS * 8;
constexpr int BLOCK_ROWS = ROWS * TILES * 16;
constexpr int SUMS_BYTES = PARTS * BLOCK_ROWS * COLS * 4;
constexpr int BARRIERS_AT = ROWS * PARTS * WARP_BYTES > SUMS_BYTES ? ROWS * PARTS * WARP_BYTES : SUMS_BYTES;
constexpr int APART = PARTS * LOSPMM_CLUSTER;  // pieces from one of a warp to its next
static_assert(APART <= FIRSTS);
constexpr bool PIECEMEAL = STAGED && !WHOLE;   // rows of B are copied by all lanes

// What lies in which 16 bytes of a row of B, so that eight rows below each other lie in different banks.
LOSPMM_INLINE int swizzled(int row, int chunk) {
  return WHOLE ? chunk : chunk ^ (row * CHUNKS / 8 % CHUNKS);
}

// What a lane copies of B: LINES rows at a time, VECTOR elements of one of them.
constexpr int ACROSS = PIECEMEAL ? COLS / VECTOR : 1, LINES = 32 / ACROSS;
static_assert(32 % ACROSS == 0);

struct Walk {
  const unsigned *starts;  // of the next piece that is copied
  const unsigned char *firsts, *pieces;
  unsigned start, end;
  int tile;              // the next
  const Element *b;      // of the next: this lane's, or, WHOLE, all
  int left;              // rows from there to the end of B; none where this lane's columns are beyond it
};

// Bounds are read a piece ahead of their use; ``behind`` are the pieces up to that one.
LOSPMM_INLINE void bounds(Walk &walk, int behind = 0) {
  if (walk.tile + behind < PIECES) walk.start = __ldg(walk.starts + behind), walk.end = __ldg(walk.starts + behind + 1);
}

LOSPMM_INLINE void fetch(Walk &walk, const unsigned char *from, int bytes, unsigned char *slot,
                         unsigned long long *barrier) {
  const int lane = threadIdx.x % 32;
  if (walk.tile < PIECES) {
#if LOSPMM_BULK
    if (lane == 0) {
      const int of_b = WHOLE ? (RAGGED ? min(walk.left, DEPTH) : DEPTH) * ROW * 2 : 0;
      lospmm_bulk_expect(barrier, bytes + of_b);
      lospmm_bulk_copy(slot, from, bytes, barrier);
      if (WHOLE) lospmm_bulk_copy(slot + PIECE_BYTES, walk.b, of_b, barrier);
    }
#else
#pragma unroll
    for (int at = 0; at < PIECE_BYTES; at += 512)
      if (at + lane * 16 < bytes) lospmm_copy<16>(slot + at + lane * 16, from + at + lane * 16, true);
#endif
    if constexpr (PIECEMEAL) {
      const int chunk = lane % ACROSS * VECTOR / 8, within = lane % ACROSS * VECTOR % 8 * 2;
      const Element *row = walk.b;
#pragma unroll
      for (int at = 0; at < DEPTH; at += LINES) {
        const int line = at + lane / ACROSS;
        lospmm_copy<VECTOR * 2>(slot + PIECE_BYTES + line * COLS * 2 + swizzled(line, chunk) * 16 + within, row,
                                at < walk.left);
        row += 1ll * N * LINES;
      }
    }
  }
  if (PIECEMEAL || !LOSPMM_BULK) lospmm_commit();
  walk.tile += APART;
  walk.starts += APART;
  walk.b += 1ll * N * (APART * DEPTH);
  walk.left -= APART * DEPTH;
}
LOSPMM_INLINE void fetch(Walk &walk, unsigned char *slot, unsigned long long *barrier) {
  if (FIRSTS > APART && walk.tile < FIRSTS)
    fetch(walk, walk.firsts + walk.tile * PIECE_BYTES, PIECE_BYTES, slot, barrier);
  else
    fetch(walk, walk.pieces + walk.start * 16ll, static_cast<int>(walk.end - walk.start) * 16, slot, barrier);
  bounds(walk);
}

// Until the piece in ``slot`` is there, all of it; ``rows`` of B are left from it on.
LOSPMM_INLINE void arrive(unsigned char *slot, unsigned long long *barrier, unsigned parity, int rows) {
#if LOSPMM_BULK
  lospmm_bulk_wait(barrier, parity);
#endif
  if (PIECEMEAL || !LOSPMM_BULK) lospmm_wait<STAGES - 2>();
  if (WHOLE && RAGGED && rows < DEPTH)
    for (int at = rows * ROW + threadIdx.x % 32; at < DEPTH * ROW; at += 32)
      reinterpret_cast<Element *>(slot + PIECE_BYTES)[at] = 0;
  __syncwarp();
}

// B for 16 columns of A, as the short side of products.
struct Short {
  unsigned of[CHUNKS][2];
};

// Which row of B belongs to column ``at`` of a piece: another one with the same remainder of 8, thus in the same banks.
LOSPMM_INLINE int row_of(const unsigned char *order, int at) {
  return PAIRED && at % 2 ? order[at / 2] : at;
}

// Straight from where it lies, where two elements beside each other are in no order that copies could keep; ``b`` is the
// piece's first row in this lane's first column, of which ``rows`` are left.
LOSPMM_INLINE void gather(Short (&found)[4], const Element *b, const unsigned char *order, int first, int rows,
                          int columns) {
#pragma unroll
  for (int step = 0; step < 4; ++step)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int at = first + step * 16 + half * 8 + threadIdx.x % 4 * 2, other = row_of(order, at + 1);
#pragma unroll
      for (int chunk = 0; chunk < CHUNKS; ++chunk) {
        unsigned pair = 0;
        if (chunk * 8 < columns && at < rows) pair = __ldg(b + 1ll * at * N + chunk * 8);
        if (chunk * 8 < columns && other < rows) pair |= __ldg(b + 1ll * other * N + chunk * 8) << 16;
        found[step].of[chunk][half] = pair;
      }
    }
}

// From the ring.
LOSPMM_INLINE void gather(Short (&found)[4], const unsigned char *rows, const unsigned char *order, int first) {
  if constexpr (SINGLE) {  // the first of eight columns, which four lanes have
    const Element *vector = reinterpret_cast<const Element *>(rows);
    const bool has_it = threadIdx.x % 32 < 4;
#pragma unroll
    for (int step = 0; step < 4; ++step)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int at = first + step * 16 + half * 8 + threadIdx.x % 4 * 2;
        found[step].of[0][half] = has_it ? vector[at] | vector[row_of(order, at + 1)] << 16 : 0;
      }
  } else if constexpr (CHUNKS == 1) {
#pragma unroll
    for (int two = 0; two < 2; ++two) {
      unsigned r[4];
      lospmm_ldmatrix_transposed(r, rows + row_of(order, first + two * 32 + threadIdx.x % 32) * 16);
      found[2 * two].of[0][0] = r[0], found[2 * two].of[0][1] = r[1];
      found[2 * two + 1].of[0][0] = r[2], found[2 * two + 1].of[0][1] = r[3];
    }
  }
}
LOSPMM_INLINE void gather(Short &found, const unsigned char *rows, const unsigned char *order, int first) {
  if constexpr (CHUNKS > 1) {
    const int lane = threadIdx.x % 32, at = first + lane % 16;
    const unsigned char *row = rows + row_of(order, at) * (COLS * 2);
#pragma unroll
    for (int two = 0; two < CHUNKS / 2; ++two) {
      unsigned r[4];
      lospmm_ldmatrix_transposed(r, row + swizzled(at, two * 2 + lane / 16) * 16);
      found.of[2 * two][0] = r[0], found.of[2 * two][1] = r[1];
      found.of[2 * two + 1][0] = r[2], found.of[2 * two + 1][1] = r[3];
    }
  }
}

LOSPMM_KERNEL(ENTRY) {
#if !RESIDUAL
  const Element *residual = nullptr;
#endif
  const int warp = lospmm_warp(), lane = threadIdx.x % 32;
  const int part = warp % PARTS, line = warp / PARTS;
  const long long block = blockIdx.z, first = static_cast<long long>(blockIdx.x) * COLS;
  const int mine = blockIdx.y * PARTS + part;
  Walk walk;
  walk.tile = mine;
  const int below = PIECEMEAL ? lane / ACROSS : 0;
  const int beside = STAGED ? PIECEMEAL ? lane % ACROSS * VECTOR : 0 : lane / 4;
  const long long row = static_cast<long long>(mine) * DEPTH + below;
  walk.left = PIECEMEAL && first + beside >= N ? 0 : static_cast<int>(K - row);
  walk.b = b + row * N + first + beside;

  unsigned char *ring = lospmm_shared + warp * WARP_BYTES;
  uint2 *places = reinterpret_cast<uint2 *>(ring + STAGES * SLOT_BYTES);
  unsigned long long *barriers = reinterpret_cast<unsigned long long *>(lospmm_shared + BARRIERS_AT) + warp * STAGES;
#if LOSPMM_BULK
  if (lane == 0)
    for (int stage = 0; stage < STAGES; ++stage) lospmm_bulk_make(barriers + stage);
  __syncwarp();
#endif
  float sums[TILES][CHUNKS][4] = {};
  const Element *direct = walk.b;
  int left = walk.left;  // of the piece that is multiplied
  const int columns = static_cast<int>(min(N - first - lane / 4, 1ll * COLS));  // of B, from this lane's first
  const long long tall = block * ROWS + line;
  walk.firsts = lospmm_data + FIRST_ARRAY + tall * (FIRSTS * PIECE_BYTES);
  walk.pieces = lospmm_data + OTHERS_ARRAY;
  walk.starts = reinterpret_cast<const unsigned *>(lospmm_data + STARTS_ARRAY) + tall * PIECES + mine;
  bounds(walk, APART);
  fetch(walk, walk.firsts + mine * PIECE_BYTES, PIECE_BYTES, ring, barriers);
#pragma unroll 1
  for (int stage = 1; stage < STAGES - 1; ++stage) fetch(walk, ring + stage * SLOT_BYTES, barriers + stage);
  int at = 0, next = STAGES - 1;
  unsigned parity = 0;
#pragma unroll 1
  for (int tile = mine; tile < PIECES; tile += APART) {
    arrive(ring + at * SLOT_BYTES, barriers + at, parity, left);
    fetch(walk, ring + next * SLOT_BYTES, barriers + next);
    const unsigned char *slot = ring + at * SLOT_BYTES, *order = slot + WORDS * 4;
    next = at;
    at = at == STAGES - 1 ? 0 : at + 1;
    parity ^= at == 0;
    count(places, slot);
    __syncwarp();
#pragma unroll 1
    for (int unit = 0; unit < UNITS; unit += TILES) {
      const int first = unit / TILES * 64;  // column of the piece
      Short right[4];
      if constexpr (STAGED)
        gather(right, slot + PIECE_BYTES, order, first);
      else
        gather(right, direct, order, first, left, columns);
#pragma unroll
      for (int step = 0; step < 4; ++step) {
        if constexpr (STAGED) gather(right[step], slot + PIECE_BYTES, order, first + step * 16);
#pragma unroll
        for (int of = 0; of < TILES; ++of) {
          unsigned fragment[4];
          fragment_of(fragment, places + ((unit + of) * 4 + step) * STEP_WORDS);
#pragma unroll
          for (int chunk = 0; chunk < CHUNKS; ++chunk) lospmm_mma(sums[of][chunk], fragment, right[step].of[chunk]);
        }
      }
    }
    direct += 1ll * N * (APART * DEPTH);
    left -= APART * DEPTH;
  }
  if (PIECEMEAL || !LOSPMM_BULK) lospmm_wait<0>();
  __syncthreads();

  float *all = reinterpret_cast<float *>(lospmm_shared);  // (PARTS, BLOCK_ROWS, COLS)
#pragma unroll
  for (int of = 0; of < TILES; ++of)
#pragma unroll
    for (int chunk = 0; chunk < CHUNKS; ++chunk)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = (line * TILES + of) * 16 + half * 8 + lane / 4;
        float *to = all + (part * BLOCK_ROWS + row) * COLS + chunk * 8 + lane % 4 * 2;
        *reinterpret_cast<float2 *>(to) = make_float2(sums[of][chunk][2 * half], sums[of][chunk][2 * half + 1]);
      }
  __syncthreads();
#if LOSPMM_CLUSTER > 1
  for (int place = threadIdx.x; place < BLOCK_ROWS * COLS; place += THREADS) {
    float sum = all[place];
    for (int other = 1; other < PARTS; ++other) sum += all[other * BLOCK_ROWS * COLS + place];
    all[place] = sum;
  }
  lospmm_cluster_wait();
#endif
#pragma unroll 1
  for (int number = blockIdx.y * THREADS + threadIdx.x; number < BLOCK_ROWS * COLS; number += LOSPMM_CLUSTER * THREADS) {
    const int place = C_TOKENS ? number % BLOCK_ROWS * COLS + number / BLOCK_ROWS : number;
    const int of_row = static_cast<int>(block) * BLOCK_ROWS + place / COLS, column = static_cast<int>(first) + place % COLS;
    // Nothing that is not used is under way when the others may go.
    if ((M % BLOCK_ROWS != 0 && of_row >= M) || (N % COLS != 0 && column >= N)) continue;
    const long long at = C_TOKENS ? static_cast<long long>(column) * M + of_row : static_cast<long long>(of_row) * N + column;
    float sum = 0;
#if LOSPMM_CLUSTER > 1
    for (int other = 0; other < LOSPMM_CLUSTER; ++other) sum += lospmm_cluster_float(all + place, other);
#else
    for (int other = 0; other < PARTS; ++other) sum += all[other * BLOCK_ROWS * COLS + place];
#endif
    c[at] = lospmm_finished(sum, of_row, at, residual);
  }
#if LOSPMM_CLUSTER > 1
  lospmm_cluster_leave();  // nobody goes while others read its sums
#endif
}
