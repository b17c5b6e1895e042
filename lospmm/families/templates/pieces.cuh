
// A in pieces of TILES x 16 rows and DEPTH columns: a bit for PER_BIT elements beside each other, one or two, and the values of
// those of which one is not 0. The values of two elements take PAIR_BYTES: 4, or 2 where they are codes.
//
// A lane has eight elements of a fragment of 16 x 16. With bits of two, it has four bits beside each other in a word, and
// values are in the order of bits. With bits of one, it has four in each of two words, one in each byte: the first word is of
// the left half of the columns, and values are in the order of words and then lanes.

constexpr int UNITS = TILES * DEPTH / 64;  // of 16 rows x 64 columns, of a piece
constexpr int STEP_WORDS = 8 / PER_BIT, WORDS = UNITS * 4 * STEP_WORDS;  // of bits: of 16 rows x 16 columns, and of a piece
constexpr int VALUES_BYTES = PAIR_BYTES * PER_BIT / 2;                   // of a bit
constexpr int ORDER_BYTES = PAIRED ? DEPTH / 2 : 0;  // of a piece, behind its bits: the columns at odd places

// Which place is that of a word: those of a lane's two words are neighbours, so that it reads both at once.
LOSPMM_INLINE int place_of(int word) { return PER_BIT == 1 ? word / 8 * 8 + word % 4 * 2 + word / 4 % 2 : word; }

// Each word of bits, and where its values begin: (word, address), for every word of a piece.
LOSPMM_INLINE void count(uint2 *places, const unsigned char *slot) {
  static_assert(WORDS % 32 == 0);
  const int lane = threadIdx.x % 32;
  const unsigned *bits = reinterpret_cast<const unsigned *>(slot) + lane;
  unsigned begin = lospmm_address(slot) + WORDS * 4 + ORDER_BYTES;
  places += place_of(lane);
#pragma unroll
  for (int at = 0; at < WORDS; at += 64) {
    const unsigned word = bits[at], next = at + 32 < WORDS ? bits[at + 32] : 0;
    const unsigned held = __popc(word) | __popc(next) << 16;  // both counts at once
    const unsigned until = lospmm_sum_until(held), before = until - held;
    places[at] = make_uint2(word, begin + VALUES_BYTES * (before & 0xFFFF));
    if (at + 32 < WORDS) {
      const unsigned all = __shfl_sync(~0u, until, 31);
      begin += VALUES_BYTES * (all & 0xFFFF);
      places[at + 32] = make_uint2(next, begin + VALUES_BYTES * (before >> 16));
      begin += VALUES_BYTES * (all >> 16);
    }
  }
}

// A lane's part of a fragment, of which ``places`` are those of its words. For an element that is 0, bits of one load what would
// be the next value, and take zero bytes instead: no predicates, and no load waits for the sum of another one's address. Half
// of a fragment's values mostly lie in different banks.
LOSPMM_INLINE void fragment_of_ones(unsigned (&fragment)[4], const uint2 *places) {
  const int lane = threadIdx.x % 32;
  const uint4 two = reinterpret_cast<const uint4 *>(places)[lane / 8];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const unsigned word = half ? two.z : two.x, begin = half ? two.w : two.y;
    const unsigned own = word >> lane % 8 & 0x01010101u;
    const unsigned first = begin + VALUES_BYTES * __popc(word & ((1u << lane % 8) - 1) * 0x01010101u);
    unsigned values[4] = {lospmm_number_at<VALUES_BYTES>(first)};
#pragma unroll
    for (int at = 1; at < 4; ++at)
      values[at] = lospmm_number_at<VALUES_BYTES>(__dp4a(own, 0x010101u * VALUES_BYTES >> 8 * (3 - at), first));
    // Of two values bytes 10 and 54, for 0 bytes 32 and 76; of two codes bytes 0 and 4, for 0 bytes 1 and 5.
    const unsigned chosen = VALUES_BYTES == 2 ? 0x76327632u - 0x22u * own : 0x15111511u - own;
    fragment[2 * half] = lospmm_bytes(values[0], values[1], chosen);
    fragment[2 * half + 1] = lospmm_bytes(values[2], values[3], chosen >> 16);
  }
  if constexpr (PAIR_BYTES == 2)
#pragma unroll
    for (int at = 0; at < 4; ++at)  // codes are in bytes 0 and 2
      fragment[at] = INT8 ? lospmm_less_1152(fragment[at] ^ 0x64806480u)
                          : lospmm_halves_of_fp8(lospmm_bytes(fragment[at], 0, 0x20));
}

LOSPMM_INLINE void fragment_of_pairs(unsigned (&fragment)[4], const uint2 *places) {
  constexpr unsigned zero = PAIR_BYTES == 2 && INT8 ? 0x8080 : 0;
  const uint2 place = places[threadIdx.x % 32 / 8];
  const int shift = threadIdx.x % 8 * 4;
  const unsigned address = place.y + VALUES_BYTES * __popc(place.x & ((1u << shift) - 1)), own = place.x >> shift;
  if constexpr (PAIR_BYTES == 4) {
    lospmm_expand<zero>(fragment, address, own);
  } else {
    lospmm_expand_codes<zero>(fragment, address, own);
#pragma unroll
    for (int at = 0; at < 4; ++at) fragment[at] = INT8 ? lospmm_halves_of_int8(fragment[at]) : lospmm_halves_of_fp8(fragment[at]);
  }
}

LOSPMM_INLINE void fragment_of(unsigned (&fragment)[4], const uint2 *places) {
  if constexpr (PER_BIT == 1)
    fragment_of_ones(fragment, places);
  else
    fragment_of_pairs(fragment, places);
}
