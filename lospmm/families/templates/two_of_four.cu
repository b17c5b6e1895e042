// Row blocks of A on the sparse tensor cores of sm_90a, which take two of every four columns; of 16-bit elements.
//
// A block has 64 rows of A for each of GROUPS warpgroups, and COLS columns of C. The columns of A are ordered so that no row
// of the block has a nonzero in more than two of four neighbours; one that does not fit comes a second time. CHUNK of them are
// a chunk. The FEEDERS, the warps of one warpgroup more, copy a quarter of each chunk to a ring of STAGES in
// shared memory: the rows of B piece by piece, the weights of A in one. The others take their weights from there, and
// multiply.
//
// Numbers: n, m. Arrays: what each block starts with; where the rows of B of each chunk begin, in units of 16 bytes; the
// weights of each chunk and warpgroup: 16 bytes a thread for each 32 columns, then a word a thread that says which of four
// columns they stand in.

constexpr int WEIGHTS = 128 * 4 * 9, SHARE = GROUPS * WEIGHTS;  // bytes, of A: of a warpgroup and of all
static_assert(FEEDERS == 4 && STAGES >= FEEDERS);

// Its chunks, its tile, and the rows of B of its first chunks: at a known place, as the first copies wait for all of it.
struct Start {
  int4 chunks;  // from x to y; then the block of rows, and the group of columns
  unsigned rows[FEEDERS * CHUNK];
};

// Of sixteen rows of B, all that is left of COLS columns.
template <int part>
LOSPMM_INLINE void copy_parts(unsigned char *even, unsigned char *odd, const void *const (&from)[4], long long columns_left) {
  lospmm_copy_lines<part * 128>(even, odd, from, columns_left > part * 64);
  if constexpr (part + 1 < PARTS) copy_parts<part + 1>(even + CHUNK * 128, odd + CHUNK * 128, from, columns_left);
}

// What a warp of the last warpgroup does: sixteen rows of each chunk, so that chunks are there one after another. Its lanes have
// the places of these rows of four chunks, ``next`` of the first ones.
LOSPMM_INLINE void feed(unsigned char *ring, unsigned char *shares, unsigned long long *full, unsigned long long *empty,
                        int first, int end, unsigned (&next)[2], const unsigned *rows, const unsigned char *weights,
                        long long first_column, const Element *b, long long n) {
  // A lane copies 16 bytes of each 64 columns, of every fourth row. They are 128 bytes a row, whose 16-byte pieces change
  // places by the row.
  const int warp = threadIdx.x / 32 % FEEDERS, lane = threadIdx.x % 32, piece = lane % 8, line = lane / 8;
  const long long column = first_column + piece * 8;
  b += column;
  const int places[2] = {line * 128 + (piece ^ line) * 16, (4 + line) * 128 + (piece ^ (4 + line)) * 16};
  int stage = 0;
  unsigned parity = 1;  // a ring that is empty
#pragma unroll 1
  for (int begin = first; begin < end; begin += FEEDERS) {
    unsigned after[2];
#pragma unroll
    for (int two = 0; two < 2; ++two) {  // the last chunk's are read again instead of those that there are not
      const int chunk = min(begin + FEEDERS + two * 2 + lane / 16, end - 1);
      after[two] = __ldg(rows + static_cast<long long>(chunk) * CHUNK + warp * 16 + lane % 16);
    }
#pragma unroll
    for (int of = 0; of < FEEDERS; ++of) {
      const int chunk = begin + of;
      if (chunk >= end) break;
      lospmm_gate_wait(empty + stage, parity);
      if (lane == 0 && warp == of) {
        lospmm_bulk_expect(full + stage, SHARE);
        lospmm_bulk_copy(shares + stage * SHARE, weights + static_cast<long long>(chunk) * SHARE, SHARE, full + stage);
      }
      const void *from[4];
#pragma unroll
      for (int four = 0; four < 4; ++four) {
        const unsigned row = __shfl_sync(~0u, next[of / 2], of % 2 * 16 + four * 4 + line);
        from[four] = b + static_cast<unsigned long long>(row) * 8;
      }
      unsigned char *const to = ring + stage * STAGE + warp * (16 * 128);
      copy_parts<0>(to + places[0], to + places[1], from, n - column);
      lospmm_arrive_with_copies(full + stage);
      if (++stage == STAGES) stage = 0, parity ^= 1;
    }
    next[0] = after[0], next[1] = after[1];
  }
  lospmm_commit();
  lospmm_wait<0>();
}

LOSPMM_KERNEL(lospmm_two_of_four) {
#if !RESIDUAL
  const Element *residual = nullptr;
#endif
  const Start *start = reinterpret_cast<const Start *>(lospmm_data + FIRST_ARRAY) + blockIdx.z * LOSPMM_CLUSTER + blockIdx.y;
  const int4 chunks = __ldg(&start->chunks);
  const long long n = lospmm_number(0);
  const int own = threadIdx.x / 128, lane = threadIdx.x % 32;  // a warpgroup
  unsigned next[2];
#pragma unroll
  for (int two = 0; two < 2; ++two)
    next[two] = __ldg(start->rows + (two * 2 + lane / 16) * CHUNK + threadIdx.x / 32 % FEEDERS * 16 + lane % 16);
  const unsigned *const rows = lospmm_array<unsigned>(1);
  const unsigned char *const weights_of_all = lospmm_array<unsigned char>(2);
  unsigned char *ring = lospmm_shared;
  unsigned char *shares = ring + STAGES * STAGE;
  unsigned long long *full = reinterpret_cast<unsigned long long *>(shares + STAGES * SHARE);
  unsigned long long *empty = full + STAGES, *done = empty + STAGES;
  const int m = static_cast<int>(lospmm_number(1)), first = chunks.x, end = chunks.y;
  const Tile tile = {chunks.z, (static_cast<long long>(chunks.w) * gridDim.x + blockIdx.x) * COLS};
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < STAGES; ++stage) {
      lospmm_bulk_make(full + stage, 32 * FEEDERS);
      lospmm_gate_make(empty + stage, 4 * GROUPS);
    }
    lospmm_gate_make(done, 4 * GROUPS);
    lospmm_bulk_make(done + 1);
  }
  __syncthreads();
  if (tile.column >= n) return;
  if (own == GROUPS) {
    lospmm_give_registers<FEEDING_REGISTERS>();
    if (first < end) feed(ring, shares, full, empty, first, end, next, rows, weights_of_all, tile.column, b, n);
    return;
  }
  lospmm_take_registers<REGISTERS>();

  float sums[PARTS][32] = {};
  const unsigned char *share = shares + own * WEIGHTS, *const of_thread = share + threadIdx.x % 128 * 16;
  const unsigned *const place_of_thread = reinterpret_cast<const unsigned *>(share + 4096) + threadIdx.x % 128;
  unsigned weights[2][2][4], places[2];  // of two chunks, two steps
  int stage = 0;
  unsigned parity = 0;
#pragma unroll 1
  for (int pair = first; pair < end; pair += 2) {
#pragma unroll
    for (int of = 0; of < 2; ++of) {
      if (pair + of == end) break;
      lospmm_bulk_wait(full + stage, parity);
#pragma unroll
      for (int step = 0; step < 2; ++step) {
        const uint4 four = *reinterpret_cast<const uint4 *>(of_thread + stage * SHARE + step * 2048);
        unsigned (&to)[4] = weights[of][step];
        to[0] = four.x, to[1] = four.y, to[2] = four.z, to[3] = four.w;
      }
      places[of] = place_of_thread[stage * (SHARE / 4)];
      lospmm_show_to_products();
      const LospmmColumns columns = lospmm_columns(ring + stage * STAGE);
      lospmm_wgmma_begin();
#pragma unroll
      for (int part = 0; part < PARTS; ++part) {
        const LospmmColumns of_part = lospmm_behind_rows(columns, part * CHUNK);
        lospmm_wgmma_sparse<0>(sums[part], weights[of][0], of_part, places[of]);
        lospmm_wgmma_sparse<1>(sums[part], weights[of][1], lospmm_behind_rows(of_part, 32), places[of]);
      }
      lospmm_wgmma_commit();
      lospmm_wgmma_wait<1>();  // the chunk before
      if (pair + of > first && lane == 0) lospmm_gate_arrive(empty + (stage ? stage : STAGES) - 1);
      if (++stage == STAGES) stage = 0, parity ^= 1;
    }
  }
  lospmm_wgmma_wait<0>();

#if LOSPMM_CLUSTER > 1
  add_up_rows(sums, tile, ring, done, m, n, c, residual);
#else
  store_rows(sums, tile, m, n, c, residual);
#endif
}
