
// Rows of A by falling length, in blocks: those of a block are padded to the longest. A team of TEAM threads has VECTOR
// columns for each thread; the teams that share a row, its slices, may be of several warps. A step of a block is a group
// of GROUP entries for each team.
//
// An entry is WORDS words: a column and a float32 weight, or, of one word, a column of 16 bits below a weight of 16. A
// weight of 0 pads a list: nothing of B is read for it.
//
// Numbers: n. Arrays: a head of each block: its steps, where those behind the first lie, log2 of the slices of a row, and the
// row of each team (-1: none); steps, the first ones of all blocks before the others. Both lie where a block finds them by its
// number: head and first entries are on their way at once.

constexpr int TEAMS = WARPS * 32 / TEAM, STEP = TEAMS * GROUP * WORDS;  // in words

struct alignas(sizeof(Element) * VECTOR) Elements {
  Element of[VECTOR];
};

struct Entries {
  unsigned words[GROUP * WORDS];
};

LOSPMM_INLINE Entries lospmm_entries(const unsigned *from) {
  Entries found;
  if constexpr (GROUP * WORDS % 4 == 0) {
#pragma unroll
    for (int at = 0; at < GROUP * WORDS; at += 4) {
      const uint4 four = __ldg(reinterpret_cast<const uint4 *>(from + at));
      found.words[at] = four.x, found.words[at + 1] = four.y;
      found.words[at + 2] = four.z, found.words[at + 3] = four.w;
    }
  } else {
#pragma unroll
    for (int at = 0; at < GROUP * WORDS; at += 2) {
      const uint2 two = __ldg(reinterpret_cast<const uint2 *>(from + at));
      found.words[at] = two.x, found.words[at + 1] = two.y;
    }
  }
  return found;
}

// Entries times B, of which ``b`` is this thread's columns.
LOSPMM_INLINE void lospmm_multiply(float (&sums)[VECTOR], const Entries &entries, const Element *b, unsigned n) {
  float weights[GROUP];
  Elements elements[GROUP];
#pragma unroll
  for (int i = 0; i < GROUP; ++i) {
    const unsigned word = entries.words[i * WORDS];
    const unsigned column = WORDS == 1 ? word & 0xFFFFu : word;
#if WORDS == 1
    weights[i] = lospmm_float(static_cast<Element>(word >> 16));
#else
    weights[i] = __uint_as_float(entries.words[i * WORDS + 1]);
#endif
    elements[i] = Elements{};
    if (weights[i] != 0.0f)
      elements[i] = *reinterpret_cast<const Elements *>(b + static_cast<unsigned long long>(column) * n);
  }
#pragma unroll
  for (int i = 0; i < GROUP; ++i)
#pragma unroll
    for (int of = 0; of < VECTOR; ++of)
      sums[of] = __fmaf_rn(weights[i], lospmm_float(elements[i].of[of]), sums[of]);
}

// What the slices of a row have, added up in a fixed order; the first slice has the sum. For all threads of a block.
LOSPMM_INLINE void lospmm_add_slices(float (&sums)[VECTOR], int slices) {
  constexpr int in_warp = 32 / TEAM;
  const int team = threadIdx.x / TEAM;
#pragma unroll
  for (int apart = 1; apart < in_warp; apart *= 2)
    if (apart < slices)
#pragma unroll
      for (int of = 0; of < VECTOR; ++of) sums[of] += __shfl_xor_sync(~0u, sums[of], apart * TEAM);
  if (slices > in_warp) {
    float *partial = reinterpret_cast<float *>(lospmm_shared) + threadIdx.x % TEAM * VECTOR;
    const int warps = slices / in_warp;
    if (team % in_warp == 0)
#pragma unroll
      for (int of = 0; of < VECTOR; ++of) partial[threadIdx.x / 32 * (TEAM * VECTOR) + of] = sums[of];
    __syncthreads();
    if (team % slices == 0)
      for (int other = 1; other < warps; ++other)
#pragma unroll
        for (int of = 0; of < VECTOR; ++of)
          sums[of] += partial[(threadIdx.x / 32 + other) * (TEAM * VECTOR) + of];
  }
}

LOSPMM_KERNEL(lospmm_rows) {
#if !RESIDUAL
  const Element *residual = nullptr;
#endif
  const long long block = blockIdx.z * static_cast<long long>(gridDim.y) + blockIdx.y;
  const long long blocks = static_cast<long long>(gridDim.y) * gridDim.z;
  const int team = threadIdx.x / TEAM;
  const unsigned char *known = lospmm_data + FIRST_ARRAY;
  const int4 *head = reinterpret_cast<const int4 *>(known + block * (16 + 4 * TEAMS));
  const unsigned *list = reinterpret_cast<const unsigned *>(known + (blocks * (16 + 4 * TEAMS) + 255) / 256 * 256);
  list += team * (GROUP * WORDS);
  Entries next = lospmm_entries(list + block * STEP);
  const int4 own = __ldg(head);
  const int row = __ldg(reinterpret_cast<const int *>(head + 1) + team);
  const unsigned n = static_cast<unsigned>(lospmm_number(0));
  const long long column = (static_cast<long long>(blockIdx.x) * TEAM + threadIdx.x % TEAM) * VECTOR;
  const int steps = own.x, slices = 1 << own.z;
  float sums[VECTOR] = {};
  if (row >= 0 && column < n) {
    list += static_cast<long long>(own.y) * STEP;
    for (int step = 0; step < steps; ++step) {
      const Entries now = next;
      if (step + 1 < steps) next = lospmm_entries(list);
      list += STEP;
      lospmm_multiply(sums, now, b + column, n);
    }
  }
  lospmm_add_slices(sums, slices);
  if (row >= 0 && column < n && team % slices == 0) {
    const long long place = static_cast<long long>(row) * n + column;
    Elements results;
#pragma unroll
    for (int of = 0; of < VECTOR; ++of) results.of[of] = lospmm_finished(sums[of], row, place + of, residual);
    *reinterpret_cast<Elements *>(c + place) = results;
  }
}
