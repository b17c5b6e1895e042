
// A as bits and values on tensor cores: a bit for each element, and the 16-bit values of those that are not 0.
//
// A warp has TILES x 16 rows of A and COLS columns of C, and walks every so-many-th piece of its rows, 64 columns of A
// wide: their bits, one word of 32 for each lane and each 16 rows, and their values in the order of the bits. It copies
// pieces, and the rows of B that belong to them, to a ring of its own, STAGES of them, so that it waits for nobody. The
// fragment of a lane is two runs of 4 bits; where the values of a run begin is a count of the bits before it.
// PARTS warps of each of the LOSPMM_CLUSTER blocks that share rows add up what they have, in a fixed order.
//
// Numbers: m, n, k, pieces of a row of tiles. Arrays: where each piece begins, in 16 bytes; the pieces.

constexpr int THREADS = 32 * ROWS * PARTS;
constexpr int DEPTH = 64;
constexpr int CHUNKS = COLS / 8;  // 16 bytes of a row of B
constexpr bool STAGED = VECTOR > 1;
constexpr int B_BYTES = STAGED ? DEPTH * COLS * 2 : 0;
constexpr int SLOT_BYTES = PIECE_BYTES + B_BYTES;
constexpr int PLACE_BYTES = TILES * 32 * 8;
constexpr int WARP_BYTES = STAGES * SLOT_BYTES + PLACE_BYTES;
constexpr int BLOCK_ROWS = ROWS * TILES * 16;

// What lies in which piece of 16 bytes, so that eight rows of B below each other lie in different banks.
LOSPMM_INLINE int swizzled(int row, int chunk) {
  return chunk ^ (row * CHUNKS / 8 % CHUNKS);
}

// What a lane copies of B: LINES rows at a time, VECTOR elements of one of them.
constexpr int ACROSS = COLS / VECTOR, LINES = 32 / ACROSS;
static_assert(!STAGED || 32 % ACROSS == 0);

struct Walk {
  const unsigned *starts;  // of the next piece that is copied
  const unsigned char *pieces;
  unsigned start, end;
  int tile, tiles;  // of the next
  const Element *b;  // of the next, this lane's
  long long step, line;  // elements to what this lane copies in the piece after that, and LINES rows below
  int left;  // rows from this lane's of the next piece to the end of B; none where its columns are beyond it
};

// The pieces of this warp are PARTS x LOSPMM_CLUSTER apart; bounds are read a piece ahead of their use.
LOSPMM_INLINE void bounds(Walk &walk) {
  if (walk.tile < walk.tiles) walk.start = __ldg(walk.starts), walk.end = __ldg(walk.starts + 1);
}

LOSPMM_INLINE void fetch(Walk &walk, unsigned char *slot) {
  const int lane = threadIdx.x % 32;
  if (walk.tile < walk.tiles) {
    const int bytes = static_cast<int>(walk.end - walk.start) * 16 - lane * 16;
    const unsigned char *from = walk.pieces + static_cast<long long>(walk.start) * 16 + lane * 16;
#pragma unroll
    for (int at = 0; at < PIECE_BYTES; at += 512)
      if (at < bytes) lospmm_copy<16>(slot + lane * 16 + at, from + at, true);
    if constexpr (STAGED) {
      const int chunk = lane % ACROSS * VECTOR / 8, within = lane % ACROSS * VECTOR % 8 * 2;
      const Element *row = walk.b;
#pragma unroll
      for (int at = 0; at < DEPTH; at += LINES) {
        const int line = at + lane / ACROSS;
        lospmm_copy<VECTOR * 2>(slot + PIECE_BYTES + line * COLS * 2 + swizzled(line, chunk) * 16 + within, row,
                                at < walk.left);
        if (at + LINES < DEPTH) row += walk.line;
      }
    }
  }
  lospmm_commit();
  walk.tile += PARTS * LOSPMM_CLUSTER;
  walk.starts += PARTS * LOSPMM_CLUSTER;
  walk.b += walk.step;
  walk.left -= PARTS * LOSPMM_CLUSTER * DEPTH;
  bounds(walk);
}

// B for 16 columns of A, as the short side of products.
struct Short {
  unsigned of[CHUNKS][2];
};

// Straight from where it lies: two elements below each other are no register's worth of any row.
LOSPMM_INLINE void gather(Short &found, const Element *b, long long row, long long k, long long first, long long n) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int chunk = 0; chunk < CHUNKS; ++chunk) {
    const long long column = first + chunk * 8 + lane / 4;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const long long at = row + half * 8 + lane % 4 * 2;
      unsigned low = 0, high = 0;
      if (column < n && at < k) low = __ldg(b + at * n + column);
      if (column < n && at + 1 < k) high = __ldg(b + (at + 1) * n + column);
      found.of[chunk][half] = low | high << 16;
    }
  }
}

// From the ring.
LOSPMM_INLINE void gather(Short (&found)[DEPTH / 16], const unsigned char *rows) {
  const int lane = threadIdx.x % 32;
  if constexpr (CHUNKS == 1) {
#pragma unroll
    for (int two = 0; two < DEPTH / 32; ++two) {
      unsigned r[4];
      lospmm_ldmatrix_transposed(r, rows + (two * 32 + lane) * 16);
      found[2 * two].of[0][0] = r[0], found[2 * two].of[0][1] = r[1];
      found[2 * two + 1].of[0][0] = r[2], found[2 * two + 1].of[0][1] = r[3];
    }
  }
}
LOSPMM_INLINE void gather(Short &found, const unsigned char *rows, int step) {
  const int lane = threadIdx.x % 32;
  if constexpr (CHUNKS > 1) {
#pragma unroll
    for (int two = 0; two < CHUNKS / 2; ++two) {
      unsigned r[4];
      const int row = step * 16 + lane % 16;
      lospmm_ldmatrix_transposed(r, rows + row * COLS * 2 + swizzled(row, two * 2 + lane / 16) * 16);
      found.of[2 * two][0] = r[0], found.of[2 * two][1] = r[1];
      found.of[2 * two + 1][0] = r[2], found.of[2 * two + 1][1] = r[3];
    }
  }
}

// Each word of bits, and where its values begin: (word, address), for every word of a piece.
LOSPMM_INLINE void count(uint2 *places, const unsigned char *slot) {
  const int lane = threadIdx.x % 32;
  const unsigned *bits = reinterpret_cast<const unsigned *>(slot);
  unsigned begin = lospmm_address(slot) + TILES * 128;
#pragma unroll
  for (int tile = 0; tile < TILES; tile += 2) {
    const unsigned word = bits[tile * 32 + lane], next = tile + 1 < TILES ? bits[tile * 32 + 32 + lane] : 0;
    const unsigned held = __popc(word) | __popc(next) << 16;  // both counts at once
    const unsigned until = lospmm_sum_until(held), all = __shfl_sync(~0u, until, 31), before = until - held;
    places[tile * 32 + lane] = make_uint2(word, begin + 2 * (before & 0xFFFF));
    begin += 2 * (all & 0xFFFF);
    if (tile + 1 < TILES) places[tile * 32 + 32 + lane] = make_uint2(next, begin + 2 * (before >> 16));
    begin += 2 * (all >> 16);
  }
}

// Four elements of a lane: two of the upper row, two of the lower.
LOSPMM_INLINE void expand(unsigned &upper, unsigned &lower, uint2 place) {
  const int shift = threadIdx.x % 8 * 4;
  const unsigned before = __popc(place.x & ((1u << shift) - 1));
  lospmm_expand(upper, lower, place.y + 2 * before, place.x >> shift);
}

LOSPMM_KERNEL(lospmm_bitmap) {
#if !RESIDUAL
  const Element *residual = nullptr;
#endif
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int part = warp % PARTS, line = warp / PARTS;
  const long long m = lospmm_number(0), block = blockIdx.z, tiles = lospmm_number(3);
  const long long n = lospmm_number(1), k = lospmm_number(2), first = static_cast<long long>(blockIdx.x) * COLS;
  const int mine = blockIdx.y * PARTS + part;
  Walk walk;
  walk.tile = mine;
  walk.tiles = static_cast<int>(tiles);
  walk.starts = lospmm_array<unsigned>(0) + (block * ROWS + line) * tiles + mine;
  walk.pieces = lospmm_array<unsigned char>(1);
  const long long row = static_cast<long long>(mine) * DEPTH + lane / ACROSS, column = first + lane % ACROSS * VECTOR;
  walk.left = column < n ? static_cast<int>(k - row) : 0;
  walk.b = b + row * n + column;
  walk.step = n * (PARTS * LOSPMM_CLUSTER * DEPTH);
  walk.line = n * LINES;

  unsigned char *ring = lospmm_shared + warp * WARP_BYTES;
  uint2 *places = reinterpret_cast<uint2 *>(ring + STAGES * SLOT_BYTES);
  float sums[TILES][CHUNKS][4] = {};
  bounds(walk);
#pragma unroll 1
  for (int stage = 0; stage < STAGES - 1; ++stage) fetch(walk, ring + stage * SLOT_BYTES);
  int slot_at = 0, fetch_at = (STAGES - 1) * SLOT_BYTES;
#pragma unroll 1
  for (int tile = mine; tile < walk.tiles; tile += PARTS * LOSPMM_CLUSTER) {
    Short right[DEPTH / 16];
    if constexpr (!STAGED)
#pragma unroll
      for (int step = 0; step < DEPTH / 16; ++step)
        gather(right[step], b, static_cast<long long>(tile) * DEPTH + step * 16, k, first, n);
    lospmm_wait<STAGES - 2>();
    __syncwarp();
    fetch(walk, ring + fetch_at);
    const unsigned char *slot = ring + slot_at;
    fetch_at = slot_at;
    slot_at = slot_at == (STAGES - 1) * SLOT_BYTES ? 0 : slot_at + SLOT_BYTES;
    count(places, slot);
    __syncwarp();
    if constexpr (STAGED) gather(right, slot + PIECE_BYTES);
#pragma unroll
    for (int step = 0; step < DEPTH / 16; ++step) {
      if constexpr (STAGED) gather(right[step], slot + PIECE_BYTES, step);
#pragma unroll
      for (int of = 0; of < TILES; ++of) {
        unsigned left[4];
        const uint2 *place = places + of * 32 + step * 8 + lane / 8;
        expand(left[0], left[1], place[0]);
        expand(left[2], left[3], place[4]);
#pragma unroll
        for (int chunk = 0; chunk < CHUNKS; ++chunk) lospmm_mma(sums[of][chunk], left, right[step].of[chunk]);
      }
    }
  }
  lospmm_wait<0>();
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
  for (int at = threadIdx.x; at < BLOCK_ROWS * COLS; at += THREADS) {
    float sum = all[at];
    for (int other = 1; other < PARTS; ++other) sum += all[other * BLOCK_ROWS * COLS + at];
    all[at] = sum;
  }
  lospmm_cluster_wait();
#endif
  for (int at = blockIdx.y * THREADS + threadIdx.x; at < BLOCK_ROWS * COLS; at += LOSPMM_CLUSTER * THREADS) {
    float sum = 0;
#if LOSPMM_CLUSTER > 1
    for (int other = 0; other < LOSPMM_CLUSTER; ++other) sum += lospmm_cluster_float(all + at, other);
#else
    for (int other = 0; other < PARTS; ++other) sum += all[other * BLOCK_ROWS * COLS + at];
#endif
    const long long row = block * BLOCK_ROWS + at / COLS, column = first + at % COLS;
    if (row < m && column < n) {
      const long long place = row * n + column;
      c[place] = lospmm_finished(sum, static_cast<int>(row), place, residual);
    }
  }
#if LOSPMM_CLUSTER > 1
  lospmm_cluster_wait();  // nobody goes while others read its sums
#endif
}
