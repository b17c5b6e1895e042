
// A in pieces of TILES x 16 rows and DEPTH columns: a bit for two elements beside each other, and the values of those two of
// which one is not 0, in the order of the bits. The fragment of a lane for a product of 16 columns is a run of 4 bits; where
// the values of a run begin is a count of the bits before it. Two values take PAIR_BYTES: 4, or 2 where they are codes.

constexpr int UNITS = TILES * DEPTH / 64;  // of 16 rows x 64 columns, of a piece
constexpr int WORDS = UNITS * 16;          // of bits, of a piece: those of eight lanes each
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
    places[at + lane] = make_uint2(word, begin + PAIR_BYTES * (before & 0xFFFF));
    if (at + 32 < WORDS) {
      const unsigned all = __shfl_sync(~0u, until, 31);
      begin += PAIR_BYTES * (all & 0xFFFF);
      places[at + 32 + lane] = make_uint2(next, begin + PAIR_BYTES * (before >> 16));
      begin += PAIR_BYTES * (all >> 16);
    }
  }
}

// The fragment of 16 rows and 16 columns, of which ``places`` are those of its four words.
LOSPMM_INLINE void fragment_of(unsigned (&fragment)[4], const uint2 *places) {
  const uint2 place = places[threadIdx.x % 32 / 8];
  const int shift = threadIdx.x % 8 * 4;
  const unsigned before = __popc(place.x & ((1u << shift) - 1));
  const unsigned address = place.y + PAIR_BYTES * before, own = place.x >> shift;
  if constexpr (PAIR_BYTES == 4) {
    lospmm_expand<0>(fragment, address, own);
  } else {
    lospmm_expand_codes<INT8 ? 0x8080 : 0>(fragment, address, own);
#pragma unroll
    for (int at = 0; at < 4; ++at) fragment[at] = INT8 ? lospmm_halves_of_int8(fragment[at]) : lospmm_halves_of_fp8(fragment[at]);
  }
}
