
// What blocks of 64 rows of A for each of GROUPS warpgroups, and of COLS columns of C, have in common. A ring has STAGES chunks
// of B, CHUNK rows of COLS columns. The LOSPMM_CLUSTER blocks that share rows and columns of C have columns of A of their own,
// and add up in the end.

constexpr int CHUNK = 64, PARTS = COLS / 64, STAGE = CHUNK * COLS * 2;  // bytes, of B
static_assert(COLS % 64 == 0);

// Two neighbours of a row of C, from their place on.
LOSPMM_INLINE unsigned finished_pair(float first, float second, int row, long long place, const Element *residual) {
  return lospmm_finished(first, row, place, residual) |
         static_cast<unsigned>(lospmm_finished(second, row, place + 1, residual)) << 16;
}

template <bool is_so>
struct Whether {
  static constexpr bool value = is_so;
};

// The sums of a block to C, by way of shared memory; ``done`` is a barrier for all warps that multiply.
template <int ring_bytes>
LOSPMM_INLINE void lospmm_store_rows(const float (&sums)[PARTS][32], unsigned char *ring, unsigned long long *done, int m,
                                     long long n, Element *c, const Element *residual) {
  // Nobody reads the ring any more.
  if (threadIdx.x % 32 == 0) lospmm_gate_arrive(done);
  lospmm_gate_wait(done, 0);
  const int lane = threadIdx.x % 32, rank = blockIdx.y;
  const long long column = static_cast<long long>(blockIdx.x) * COLS;
  const int above = static_cast<int>(blockIdx.z) * (64 * GROUPS) + threadIdx.x / 32 * 16;
#if LOSPMM_CLUSTER > 1
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
  if (static_cast<int>(blockIdx.z + 1) * (64 * GROUPS) <= m && own_begin + OWN * 8 <= n)
    collect(Whether<true>());
  else if (own_begin < n)
    collect(Whether<false>());
  lospmm_cluster_leave();  // nobody goes while others read its sums
#else
  // A warp's part of C by way of shared memory, where it is read again row by row.
  constexpr int PIECE = 16 / sizeof(Element), STRIDE = COLS + PIECE;  // elements
  static_assert(64 * GROUPS * STRIDE * sizeof(Element) <= ring_bytes);
  Element *own_rows = reinterpret_cast<Element *>(ring) + threadIdx.x / 32 * (16 * STRIDE);
#pragma unroll
  for (int upper = 0; upper < 2; ++upper) {
    const int of_warp = lane / 4 + 8 * upper, row = min(above + of_warp, m - 1);
#pragma unroll
    for (int eight = 0; eight < COLS / 8; ++eight) {
      const int of_block = eight * 8 + lane % 4 * 2;
      const long long place = row * n + min(column + of_block, n - 2);
      const float *two = sums[eight / 8] + eight % 8 * 4 + upper * 2;
      *reinterpret_cast<unsigned *>(own_rows + of_warp * STRIDE + of_block) =
          finished_pair(two[0], two[1], row, place, residual);
    }
  }
  __syncwarp();
#pragma unroll
  for (int part = 0; part < PARTS; ++part)
#pragma unroll
    for (int some = 0; some < 16; some += 4) {
      const int row = some + lane / 8, of_block = part * 64 + lane % 8 * PIECE;
      if (above + row < m && column + of_block < n)
        *reinterpret_cast<uint4 *>(c + (above + row) * n + column + of_block) =
            *reinterpret_cast<const uint4 *>(own_rows + row * STRIDE + of_block);
    }
#endif
}
