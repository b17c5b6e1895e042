
// Groups of GROUP entries of one row of A, rows of groups next to each other (lospmm/families/group_coo.py).
// A team of LANES threads computes LANES x VECTOR columns of C for groups that follow one another; a block has TEAMS
// teams and whole rows. Numbers: n, blocks with groups, empty rows. Arrays: where each team's groups begin (blocks x TEAMS
// + 1), the row of each group, the columns of its entries, their weights, the empty rows.

constexpr unsigned STEPS = GROUP / DEPTH;  // of DEPTH entries, whose elements of B are under way together

union Elements {
  Word<sizeof(Element) * VECTOR>::type word;
  Element of[VECTOR];
  unsigned pairs[(sizeof(Element) * VECTOR + 3) / 4];
};

LOSPMM_INLINE float element(const Elements &elements, int at) {
  if (sizeof(Element) == 2 && VECTOR > 1)
    return at % 2 ? lospmm_second(elements.pairs[at / 2]) : lospmm_first(elements.pairs[at / 2]);
  return lospmm_float(elements.of[at]);
}

struct Sums {
  float of[VECTOR];
};

LOSPMM_INLINE void store(Element *c, const Sums &sums, int row, unsigned n, unsigned column, const Element *residual) {
  const long long place = static_cast<long long>(row) * n + column;
  Elements results;
#pragma unroll
  for (int i = 0; i < VECTOR; ++i) results.of[i] = lospmm_finished(sums.of[i], row, place + i, residual);
  *reinterpret_cast<decltype(results.word) *>(c + place) = results.word;
}

LOSPMM_KERNEL(lospmm_group_coo) {
#if !RESIDUAL
  const Element *residual = nullptr;
#endif
  const unsigned n = lospmm_number(0), blocks = lospmm_number(1);
  const unsigned team = threadIdx.x / LANES, lane = threadIdx.x % LANES;
  const unsigned column = (blockIdx.x * LANES + lane) * VECTOR;
  const unsigned block = blockIdx.z * gridDim.y + blockIdx.y;
  if (block >= blocks) {
    const unsigned empty = lospmm_number(2);
    const unsigned first = ((block - blocks) * TEAMS + team) * EMPTY_ROWS;
    const Sums nothing = {};
    for (unsigned at = first; at < first + EMPTY_ROWS && at < empty; ++at)
      if (column < n) store(c, nothing, lospmm_array<int>(4)[at], n, column, residual);
    return;
  }
  const unsigned *starts = lospmm_array<unsigned>(0) + block * TEAMS;
  const unsigned begin = __ldg(starts), end = __ldg(starts + TEAMS);
  const unsigned first = __ldg(starts + team), last = __ldg(starts + team + 1);
  const int *rows = lospmm_array<int>(1);
  // What ends in this team of a row that began in another one; the team of its beginning adds it.
  Sums *const parts = reinterpret_cast<Sums *>(lospmm_shared);
  // And which row that is: NO_PART where the team's first row is its own, NO_GROUPS where it has none.
  int *const part_rows = reinterpret_cast<int *>(parts + TEAMS * LANES);
  constexpr int NO_PART = -1, NO_GROUPS = -2;
  if (lane == 0) part_rows[team] = NO_GROUPS;
  Sums sums = {};
  int row = -1;
  bool is_own = false, goes_on = false;
  if (first < last) {
    const unsigned stride = n * sizeof(Element);
    const unsigned char *from = reinterpret_cast<const unsigned char *>(b + (column < n ? column : 0));
    const int4 *at_columns = reinterpret_cast<const int4 *>(lospmm_array<int>(2)) + first * (GROUP / 4);
    const float4 *at_weights = reinterpret_cast<const float4 *>(lospmm_array<float>(3)) + first * (GROUP / 4);
    row = __ldg(rows + first);
    is_own = first == begin || __ldg(rows + first - 1) != row;
    if (lane == 0) part_rows[team] = is_own ? NO_PART : row;
    int4 columns[DEPTH / 4];
#pragma unroll
    for (int i = 0; i < DEPTH / 4; ++i) columns[i] = __ldg(at_columns + i);
    for (unsigned group = first; group < last; ++group) {
      const int next_row = group + 1 < end ? __ldg(rows + group + 1) : -1;
#pragma unroll
      for (unsigned step = 0; step < STEPS; ++step) {
        Elements elements[DEPTH];
        float4 weights[DEPTH / 4];
#pragma unroll
        for (int i = 0; i < DEPTH; ++i) {
          const int4 four = columns[i / 4];
          const unsigned k = i % 4 == 0 ? four.x : i % 4 == 1 ? four.y : i % 4 == 2 ? four.z : four.w;
          elements[i].word = __ldg(reinterpret_cast<const decltype(elements[i].word) *>(
              from + static_cast<unsigned long long>(k) * stride));
        }
#pragma unroll
        for (int i = 0; i < DEPTH / 4; ++i) weights[i] = __ldg(at_weights + i);
        at_weights += DEPTH / 4;
        // The columns of the next step: the last one of all reads its own again.
        at_columns += group + 1 < last || step + 1 < STEPS ? DEPTH / 4 : 0;
#pragma unroll
        for (int i = 0; i < DEPTH / 4; ++i) columns[i] = __ldg(at_columns + i);
#pragma unroll
        for (int i = 0; i < DEPTH; ++i) {
          const float4 four = weights[i / 4];
          const float weight = i % 4 == 0 ? four.x : i % 4 == 1 ? four.y : i % 4 == 2 ? four.z : four.w;
#pragma unroll
          for (int j = 0; j < VECTOR; ++j)
            sums.of[j] = __fmaf_rn(weight, element(elements[i], j), sums.of[j]);
        }
      }
      goes_on = next_row == row;
      if (goes_on) continue;
      if (!is_own)
        parts[threadIdx.x] = sums;
      else if (column < n)
        store(c, sums, row, n, column, residual);
      if (group + 1 < last) {
        sums = {};
        is_own = true;
        row = next_row;
      }
    }
    if (goes_on && !is_own) parts[threadIdx.x] = sums;
  }
  __syncthreads();
  if (!goes_on || !is_own) return;
  for (unsigned other = team + 1; other < TEAMS; ++other) {
    const int part_row = part_rows[other];
    if (part_row == NO_GROUPS) continue;
    if (part_row != row) break;
    const Sums part = parts[other * LANES + lane];
#pragma unroll
    for (int j = 0; j < VECTOR; ++j) sums.of[j] = __fadd_rn(sums.of[j], part.of[j]);
  }
  if (column < n) store(c, sums, row, n, column, residual);
}
