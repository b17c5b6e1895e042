
// Column partitions of A, DEPTH columns each: a block walks them in order, and holds the rows of B that the next ones
// take in shared memory, with the entries of its rows, while it multiplies by one. A warp has ROWS rows, a thread VECTOR
// columns of them, whose sums stay in its registers.
// Numbers: n, k, partitions, where a stage's lists begin, bytes of a stage, of all of them. Arrays: the rows of each block (-1: none);
// where the lists of each block and partition begin, in units of 16 bytes (blocks x partitions + 1); the lists: for each
// row the place where its entries end, of 16 bits, in units of UNIT words, and the entries, padded to whole units: the
// place of a row of B in the stage and a weight (16 bits each, the place in units of 16 bytes, or 32 each and bytes).

struct alignas(sizeof(Element) * VECTOR) Elements {
  Element of[VECTOR];
};
struct alignas(COPY) Piece {
  Element of[COPY / sizeof(Element)];
};

struct alignas(UNIT * 4) Unit {
  unsigned words[UNIT];
};

constexpr int COLS = 32 * VECTOR, ROW_BYTES = COLS * sizeof(Element), THREADS = WARPS * 32, PIECES = ROW_BYTES / COPY;
#if LOSPMM_BULK
// One for each stage, behind the stages.
LOSPMM_INLINE unsigned long long *lospmm_barriers() {
  return reinterpret_cast<unsigned long long *>(lospmm_shared + lospmm_number(5));
}
#endif

constexpr int HEADER = (WARPS * ROWS * 2 + 15) / 16;  // units of 16 bytes

// The rows of B and the lists of a partition on their way to its stage: in bulk, or by all threads.
LOSPMM_INLINE void lospmm_stage(int partition, const Element *b, unsigned n, int k) {
  const long long partitions = lospmm_number(2), entries_at = lospmm_number(3), stage_bytes = lospmm_number(4);
  unsigned char *stage = lospmm_shared + partition % STAGES * stage_bytes;
  const long long *starts = lospmm_array<long long>(1) + blockIdx.y * partitions + partition;
  const long long start = __ldg(starts);
  const int units = static_cast<int>(__ldg(starts + 1) - start);
  const uint4 *from = lospmm_array<uint4>(2) + start;
  const int rows = min(DEPTH, k - partition * DEPTH);
  const long long first = static_cast<long long>(blockIdx.x) * COLS;
  const Element *source = b + static_cast<long long>(partition) * DEPTH * n + first;
#if LOSPMM_BULK
  unsigned long long *barrier = lospmm_barriers() + partition % STAGES;
  const unsigned row_bytes = static_cast<unsigned>((n - first < COLS ? n - first : COLS) * sizeof(Element));
  if (threadIdx.x == 0) {
    lospmm_bulk_expect(barrier, rows * row_bytes + units * 16);
    lospmm_bulk_copy(stage + entries_at, from, units * 16, barrier);
  }
  if (threadIdx.x % 32 == 0)  // a thread needs some 40 cycles to start one: every warp starts some
    for (int row = threadIdx.x / 32; row < rows; row += WARPS)
      lospmm_bulk_copy(stage + row * ROW_BYTES, source + static_cast<long long>(row) * n, row_bytes, barrier);
  __syncwarp();
#else
  for (int at = threadIdx.x; at < units; at += THREADS)
    lospmm_copy<16>(stage + entries_at + at * 16, from + at, true);
  for (int at = threadIdx.x; at < rows * PIECES; at += THREADS) {
    const int row = at / PIECES, piece = at % PIECES, column = piece * (COPY / static_cast<int>(sizeof(Element)));
    const bool is_there = first + column < n;
    const Element *element = source + static_cast<long long>(row) * n + (is_there ? column : 0);
    unsigned char *target = stage + row * ROW_BYTES + piece * COPY;
#if COPY >= 4
    lospmm_copy<COPY>(target, element, is_there);
#else
    *reinterpret_cast<Element *>(target) = is_there ? *element : lospmm_element(0);
#endif
  }
#endif
}

LOSPMM_INLINE void lospmm_multiply(float (&sums)[VECTOR], const Unit &unit, const unsigned char *columns) {
  float weights[UNIT / WORDS];
  Elements elements[UNIT / WORDS];
#pragma unroll
  for (int at = 0; at < UNIT / WORDS; ++at) {
#if WORDS == 1
    weights[at] = lospmm_float(static_cast<Element>(unit.words[at] >> 16));
    const unsigned place = (unit.words[at] & 0xFFFFu) * 16;
#else
    weights[at] = __uint_as_float(unit.words[2 * at + 1]);
    const unsigned place = unit.words[2 * at];
#endif
    elements[at] = *reinterpret_cast<const Elements *>(columns + place);
  }
#pragma unroll
  for (int at = 0; at < UNIT / WORDS; ++at)
#pragma unroll
    for (int of = 0; of < VECTOR; ++of)
      sums[of] = __fmaf_rn(weights[at], lospmm_float(elements[at].of[of]), sums[of]);
}

LOSPMM_KERNEL(lospmm_hyb_partitions) {
#if !RESIDUAL
  const Element *residual = nullptr;
#endif
  const unsigned n = static_cast<unsigned>(lospmm_number(0));
  const int k = static_cast<int>(lospmm_number(1)), partitions = static_cast<int>(lospmm_number(2));
  const long long entries_at = lospmm_number(3), stage_bytes = lospmm_number(4);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  float sums[ROWS][VECTOR] = {};
#if LOSPMM_BULK
  if (threadIdx.x == 0)
    for (int stage = 0; stage < STAGES; ++stage) lospmm_bulk_make(lospmm_barriers() + stage);
  __syncthreads();
#endif
  for (int ahead = 0; ahead < STAGES - 1; ++ahead) {
    if (ahead < partitions) lospmm_stage(ahead, b, n, k);
#if !LOSPMM_BULK
    lospmm_commit();
#endif
  }
  for (int partition = 0; partition < partitions; ++partition) {
#if !LOSPMM_BULK
    lospmm_wait<STAGES - 2>();
#endif
    __syncthreads();  // all have multiplied by what the next stage is written over
    if (partition + STAGES - 1 < partitions) lospmm_stage(partition + STAGES - 1, b, n, k);
#if LOSPMM_BULK
    lospmm_bulk_wait(lospmm_barriers() + partition % STAGES, partition / STAGES % 2);
#else
    lospmm_commit();
#endif
    const unsigned char *stage = lospmm_shared + partition % STAGES * stage_bytes;
    const lospmm_u16 *ends = reinterpret_cast<const lospmm_u16 *>(stage + entries_at) + warp * ROWS;
    const Unit *entries = reinterpret_cast<const Unit *>(stage + entries_at + HEADER * 16);
    const unsigned char *columns = stage + lane * (VECTOR * static_cast<int>(sizeof(Element)));
    unsigned both[ROWS / 2];  // two ends each
#pragma unroll
    for (int row = 0; row < ROWS / 2; row += 2) {
      const uint2 four = *reinterpret_cast<const uint2 *>(ends + row * 2);
      both[row] = four.x, both[row + 1] = four.y;
    }
    int at = warp ? ends[-1] : 0;
    Unit next = entries[at];  // one ahead, from one row into the next and beyond the last
#pragma unroll
    for (int row = 0; row < ROWS; ++row) {
      const int end = row % 2 ? both[row / 2] >> 16 : both[row / 2] & 0xFFFFu;
#pragma unroll 1
      while (at < end) {
        const Unit now = next;
        next = entries[++at];
        lospmm_multiply(sums[row], now, columns);
      }
    }
  }
  const int *rows = lospmm_array<int>(0) + (blockIdx.y * WARPS + warp) * ROWS;
  constexpr int in_copy = COPY / static_cast<int>(sizeof(Element)), in_piece = in_copy < VECTOR ? in_copy : VECTOR;
  struct alignas(in_piece * sizeof(Element)) Part {
    Element of[in_piece];
  };
#pragma unroll
  for (int row = 0; row < ROWS; ++row) {
    const int of_c = __ldg(rows + row);
    if (of_c < 0) continue;
#pragma unroll
    for (int part = 0; part < VECTOR; part += in_piece) {
      const long long column = (static_cast<long long>(blockIdx.x) * 32 + lane) * VECTOR + part;
      if (column >= n) continue;
      const long long place = static_cast<long long>(of_c) * n + column;
      Part results;
#pragma unroll
      for (int of = 0; of < in_piece; ++of)
        results.of[of] = lospmm_finished(sums[row][part + of], of_c, place + of, residual);
      *reinterpret_cast<Part *>(c + place) = results;
    }
  }
}
