
// Units of spmv's A, and where warps begin: what its templates share.

constexpr int THREADS = 32 * WARPS, STEPS = 8;
constexpr int BEHINDS_AT = PAIR_BYTES * 128, UNIT_BYTES = BEHINDS_AT + 128;
constexpr int FOREVER = 1 << 30;

struct Place {
  unsigned short behind[32];       // the row of B that each lane read last
  unsigned units;                  // of the warp
  unsigned turn, left;             // the first, and how many elements of it there are
  unsigned is_continued;           // whether an earlier warp has its beginning
  unsigned block_row, block_rows;  // the first row of the block, and how many it has
  unsigned unused[2];
};

struct Unit {
  Word<PAIR_BYTES * 4>::type values;
  unsigned behinds;
};

LOSPMM_INLINE void load(Unit &unit, const unsigned char *from) {
  const int lane = threadIdx.x % 32;
  unit.values = __ldcs(reinterpret_cast<const Word<PAIR_BYTES * 4>::type *>(from) + lane);
  unit.behinds = __ldcs(reinterpret_cast<const unsigned *>(from + BEHINDS_AT) + lane);
}

LOSPMM_INLINE unsigned word(const uint4 &words, int at) {
  return at == 0 ? words.x : at == 1 ? words.y : at == 2 ? words.z : words.w;
}

// The values of two steps, as halves where they are codes.
LOSPMM_INLINE unsigned pair_of(const uint4 &values, int at) { return word(values, at); }
LOSPMM_INLINE unsigned pair_of(const uint2 &codes, int at) {
  const unsigned two = (at < 2 ? codes.x : codes.y) >> at % 2 * 16;
  return INT8 ? lospmm_halves_of_int8(two) : lospmm_halves_of_fp8(two);
}

// The next AHEAD units of a warp, as ``ahead`` has them; those after them are loaded in their place, ``from`` there on.
LOSPMM_INLINE void take(Unit (&batch)[AHEAD], Unit (&ahead)[AHEAD], const unsigned char *&from, int unit, int units) {
#pragma unroll
  for (int one = 0; one < AHEAD; ++one) {
    batch[one] = ahead[one];
    if (unit + AHEAD + one < units) load(ahead[one], from + one * UNIT_BYTES);
  }
  from += AHEAD * UNIT_BYTES;
}
