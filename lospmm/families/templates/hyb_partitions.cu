
// Column partitions of A, DEPTH columns each: a block walks them in order, and holds the rows of B that the next ones
// take in shared memory, with the entries of its rows, while it multiplies by one. A warp has ROWS rows, a thread VECTOR
// columns of them, whose sums stay in its registers.
// Numbers: n, k, partitions, where a stage's entries begin, bytes of a stage. Arrays: the rows of each block (-1: none);
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
constexpr int HEADER = (WARPS * ROWS * 2 + 15) / 16;  // units of 16 bytes

LOSPMM_INLINE void lospmm_stage(int partition, const Element *b, unsigned n, int k) {
  const long long partitions = lospmm_number(2), entries_at = lospmm_number(3), stage_bytes = lospmm_number(4);
  unsigned char *stage = lospmm_shared + partition % STAGES * stage_bytes;
  const long long *starts = lospmm_array<long long>(1) + blockIdx.y * partitions + partition;
  const long long start = __ldg(starts);
  const int units = static_cast<int>(__ldg(starts + 1) - start);
  const uint4 *from = lospmm_array<uint4>(2) + start;
  for (int at = threadIdx.x; at < units; at += THREADS)
    lospmm_copy<16>(stage + entries_at + at * 16, from + at, true);
  const int rows = min(DEPTH, k - partition * DEPTH);
  const long long first = static_cast<long long>(blockIdx.x) * COLS;
  for (int at = threadIdx.x; at < rows * PIECES; at += THREADS) {
    const int row = at / PIECES, piece = at % PIECES;
    const long long column = first + piece * (COPY / static_cast<int>(sizeof(Element)));
    const bool is_there = column < n;
    const Element *source = b + (static_cast<long long>(partition) * DEPTH + row) * n + (is_there ? column : 0);
    unsigned char *target = stage + row * ROW_BYTES + piece * COPY;
#if COPY >= 4
    lospmm_copy<COPY>(target, source, is_there);
#else
    *reinterpret_cast<Element *>(target) = is_there ? *source : lospmm_element(0);
#endif
  }
}

LOSPMM_INLINE void lospmm_multiply(float (&sums)[VECTOR], const unsigned *entry, const unsigned char *columns) {
#if WORDS == 1
  const float weight = lospmm_float(static_cast<Element>(entry[0] >> 16));
  const unsigned place = (entry[0] & 0xFFFFu) * 16;
#else
  const float weight = __uint_as_float(entry[1]);
  const unsigned place = entry[0];
#endif
  const Elements elements = *reinterpret_cast<const Elements *>(columns + place);
#pragma unroll
  for (int of = 0; of < VECTOR; ++of) sums[of] = __fmaf_rn(weight, lospmm_float(elements.of[of]), sums[of]);
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
  for (int ahead = 0; ahead < STAGES - 1; ++ahead) {
    if (ahead < partitions) lospmm_stage(ahead, b, n, k);
    lospmm_commit();
  }
  for (int partition = 0; partition < partitions; ++partition) {
    lospmm_wait<STAGES - 2>();
    __syncthreads();
    if (partition + STAGES - 1 < partitions) lospmm_stage(partition + STAGES - 1, b, n, k);
    lospmm_commit();
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
    Unit next = entries[at];  // one ahead, beyond the last of a warp too
#pragma unroll
    for (int row = 0; row < ROWS; ++row) {
      const int end = row % 2 ? both[row / 2] >> 16 : both[row / 2] & 0xFFFFu;
#pragma unroll 1
      while (at < end) {
        const Unit now = next;
        next = entries[++at];
#pragma unroll
        for (int word = 0; word < UNIT; word += WORDS) lospmm_multiply(sums[row], now.words + word, columns);
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
