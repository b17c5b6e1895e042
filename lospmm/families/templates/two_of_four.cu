// Row blocks of A on the sparse tensor cores of sm_90a, which take two of every four columns; of 16-bit elements.
//
// A block has 64 rows of A for each of GROUPS warpgroups, and COLS columns of C. The columns of A are ordered so that no row
// of the block has a nonzero in more than two of four neighbours; one that does not fit comes a second time. CHUNK of them are
// a chunk. Each of the FEEDERS, the warps of one warpgroup more, copies every fourth chunk to a ring of STAGES in
// shared memory: the rows of B piece by piece, the weights of A in one. The others take their weights from there, and
// multiply.
//
// Numbers: n, m. Arrays: the first chunk of each block (blocks + 1); where the rows of B of each chunk begin, in units of 16
// bytes; the weights of each chunk and warpgroup: 16 bytes a thread for each 32 columns, then a word a thread that says which
// of four columns they stand in.

constexpr int WEIGHTS = 128 * 4 * 9, SHARE = GROUPS * WEIGHTS;  // bytes, of A: of a warpgroup and of all
static_assert(FEEDERS == 4 && STAGES >= FEEDERS);

// Of sixteen rows of B, all that is left of COLS columns.
template <int part>
LOSPMM_INLINE void copy_parts(unsigned char *even, unsigned char *odd, const void *const (&from)[4], long long columns_left) {
  lospmm_copy_lines<part * 128>(even, odd, from, columns_left > part * 64);
  if constexpr (part + 1 < PARTS) copy_parts<part + 1>(even + CHUNK * 128, odd + CHUNK * 128, from, columns_left);
}

// What a warp of the last warpgroup does: every fourth chunk.
LOSPMM_INLINE void feed(unsigned char *ring, unsigned char *shares, unsigned long long *full, unsigned long long *empty,
                        int first, int end, long long first_column, const Element *b, long long n) {
  // A lane copies 16 bytes of each 64 columns, of every fourth row. They are 128 bytes a row, whose 16-byte pieces change
  // places by the row.
  const int warp = threadIdx.x / 32 % FEEDERS, lane = threadIdx.x % 32, piece = lane % 8, line = lane / 8;
  const long long column = first_column + piece * 8;
  b += column;
  const int places[2] = {line * 128 + (piece ^ line) * 16, (4 + line) * 128 + (piece ^ (4 + line)) * 16};
  // A lane has every 32nd row's place. The last chunk's are read again instead of those that there are not.
  const unsigned *rows = lospmm_array<unsigned>(1) + static_cast<long long>(first) * CHUNK + lane;
  const unsigned char *weights = lospmm_array<unsigned char>(2);
  unsigned next[2];
  const auto read_rows = [&](int chunk) {
    const unsigned *from = rows + (min(chunk, end - 1) - first) * CHUNK;
    next[0] = __ldg(from), next[1] = __ldg(from + 32);
  };
  read_rows(first + warp);
  int stage = warp;
  unsigned parity = 1;  // a ring that is empty
#pragma unroll 1
  for (int chunk = first + warp; chunk < end; chunk += FEEDERS) {
    lospmm_gate_wait(empty + stage, parity);
    if (lane == 0) {
      lospmm_bulk_expect(full + stage, SHARE);
      lospmm_bulk_copy(shares + stage * SHARE, weights + static_cast<long long>(chunk) * SHARE, SHARE, full + stage);
    }
#pragma unroll
    for (int some = 0; some < CHUNK; some += 16) {
      const void *from[4];
#pragma unroll
      for (int of = 0; of < 4; ++of) {
        const unsigned row = __shfl_sync(~0u, next[some / 32], some % 32 + 4 * of + line);
        from[of] = b + static_cast<unsigned long long>(row) * 8;
      }
      unsigned char *const to = ring + stage * STAGE + some * 128;
      copy_parts<0>(to + places[0], to + places[1], from, n - column);
    }
    lospmm_arrive_with_copies(full + stage);
    read_rows(chunk + FEEDERS);
    if ((stage += FEEDERS) >= STAGES) stage -= STAGES, parity ^= 1;
  }
  lospmm_commit();
  lospmm_wait<0>();
}

LOSPMM_KERNEL(lospmm_two_of_four) {
#if !RESIDUAL
  const Element *residual = nullptr;
#endif
  const long long n = lospmm_number(0);
  unsigned char *ring = lospmm_shared;
  unsigned char *shares = ring + STAGES * STAGE;
  unsigned long long *full = reinterpret_cast<unsigned long long *>(shares + STAGES * SHARE);
  unsigned long long *empty = full + STAGES, *done = empty + STAGES;
  const int m = static_cast<int>(lospmm_number(1));
  const Tile tile = tile_of(blockIdx.z, m);
  if (tile.column >= n) return;
  const int *starts = lospmm_array<int>(0) + tile.row_block;
  const int chunks = starts[1] - starts[0], rank = blockIdx.y;
  const int first = starts[0] + chunks * rank / LOSPMM_CLUSTER, end = starts[0] + chunks * (rank + 1) / LOSPMM_CLUSTER;
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < STAGES; ++stage) {
      lospmm_bulk_make(full + stage, 32);
      lospmm_gate_make(empty + stage, 4 * GROUPS);
    }
    lospmm_gate_make(done, 4 * GROUPS);
  }
  __syncthreads();
  const int own = threadIdx.x / 128, lane = threadIdx.x % 32;  // a warpgroup
  if (own == GROUPS) {
    lospmm_give_registers<FEEDING_REGISTERS>();
    if (first < end) feed(ring, shares, full, empty, first, end, tile.column, b, n);
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

  lospmm_store_rows<STAGES * STAGE>(sums, tile, ring, done, m, n, c, residual);
}
