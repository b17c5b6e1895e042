
// A in pieces of TILES x 16 rows and DEPTH columns: a bit for PER_BIT elements beside each other, one or two, and the values of
// those of which one is not 0, in the order of the bits. The fragment of a lane for a product of 16 columns is a run of 8 or 4
// bits; where the values of a run begin is a count of the bits before it. Two values take PAIR_BYTES: 4, or 2 where they are
// codes.

constexpr int UNITS = TILES * DEPTH / 64;  // of 16 rows x 64 columns, of a piece
constexpr int RUN = 8 / PER_BIT, RUNS = 32 / RUN;                // bits, and runs of a word
constexpr int STEP_WORDS = RUN, WORDS = UNITS * 4 * STEP_WORDS;  // of bits: of 16 rows x 16 columns, and of a piece
constexpr int VALUES_BYTES = PAIR_BYTES * PER_BIT / 2;           // of a bit
constexpr int ORDER_BYTES = PAIRED ? DEPTH / 2 : 0;  // of a piece, behind its bits: the columns at odd places

// Each word of bits, and where its values begin: (word, address), for every word of a piece.
LOSPMM_INLINE void count(uint2 *places, const unsigned char *slot) {
  static_assert(WORDS % 32 == 0);
  const int lane = threadIdx.x % 32;
  const unsigned *bits = reinterpret_cast<const unsigned *>(slot) + lane;
  unsigned begin = lospmm_address(slot) + WORDS * 4 + ORDER_BYTES;
#pragma unroll
  for (int at = 0; at < WORDS; at += 64) {
    const unsigned word = bits[at], next = at + 32 < WORDS ? bits[at + 32] : 0;
    const unsigned held = __popc(word) | __popc(next) << 16;  // both counts at once
    const unsigned until = lospmm_sum_until(held), before = until - held;
    places[at + lane] = make_uint2(word, begin + VALUES_BYTES * (before & 0xFFFF));
    if (at + 32 < WORDS) {
      const unsigned all = __shfl_sync(~0u, until, 31);
      begin += VALUES_BYTES * (all & 0xFFFF);
      places[at + 32 + lane] = make_uint2(next, begin + VALUES_BYTES * (before >> 16));
      begin += VALUES_BYTES * (all >> 16);
    }
  }
}

// The fragment of 16 rows and 16 columns, of which ``places`` are those of its words.
LOSPMM_INLINE void fragment_of(unsigned (&fragment)[4], const uint2 *places) {
  constexpr unsigned zero = PAIR_BYTES == 4 || !INT8 ? 0 : PER_BIT == 2 ? 0x8080 : 0x80;
  const uint2 place = places[threadIdx.x % 32 / RUNS];
  const int shift = threadIdx.x % RUNS * RUN;
  const unsigned before = __popc(place.x & ((1u << shift) - 1));
  const unsigned address = place.y + VALUES_BYTES * before, own = place.x >> shift;
  if constexpr (PER_BIT == 1) {
    unsigned eight[8];
    if constexpr (PAIR_BYTES == 4)
      lospmm_expand_eight<zero>(eight, address, own);
    else
      lospmm_expand_eight_codes<zero>(eight, address, own);
#pragma unroll
    for (int at = 0; at < 4; ++at)
      fragment[at] = __byte_perm(eight[2 * at], eight[2 * at + 1], PAIR_BYTES == 4 ? 0x5410 : 0x7740);
  } else if constexpr (PAIR_BYTES == 4) {
    lospmm_expand<zero>(fragment, address, own);
  } else {
    lospmm_expand_codes<zero>(fragment, address, own);
  }
  if constexpr (PAIR_BYTES == 2)
#pragma unroll
    for (int at = 0; at < 4; ++at) fragment[at] = INT8 ? lospmm_halves_of_int8(fragment[at]) : lospmm_halves_of_fp8(fragment[at]);
}
