
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

// Where a lane's units lie: AHEAD of them are on their way.
struct Source {
  const unsigned char *values, *behinds;
};
LOSPMM_INLINE Source source_of(const unsigned char *units, unsigned lane) {
  return {units + lane * (PAIR_BYTES * 4), units + BEHINDS_AT + lane * 4};
}
LOSPMM_INLINE void load(Unit &unit, const Source &from, int one) {
  unit.values = __ldcs(reinterpret_cast<const Word<PAIR_BYTES * 4>::type *>(from.values + one * UNIT_BYTES));
  unit.behinds = __ldcs(reinterpret_cast<const unsigned *>(from.behinds + one * UNIT_BYTES));
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

// The next AHEAD units of a warp, as ``ahead`` has them; those after them are loaded in their place.
LOSPMM_INLINE void take(Unit (&batch)[AHEAD], Unit (&ahead)[AHEAD], Source &from, int unit, int units) {
  from.values += AHEAD * UNIT_BYTES, from.behinds += AHEAD * UNIT_BYTES;
#pragma unroll
  for (int one = 0; one < AHEAD; ++one) {
    batch[one] = ahead[one];
    if (unit + AHEAD + one < units) load(ahead[one], from, one);
  }
}

// Where the arrays lie: places first.
constexpr long long aligned(long long bytes) { return (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT; }
constexpr long long TURNS_ARRAY = FIRST_ARRAY + aligned(1ll * BLOCKS * WARPS * sizeof(Place));
constexpr long long UNITS_ARRAY = TURNS_ARRAY + aligned(1ll * BLOCKS * TURNS_BYTES);

// Copy what the block knows of its turns to shared memory.
LOSPMM_INLINE void copy_turns(unsigned char *to) {
  const unsigned char *from = lospmm_data + TURNS_ARRAY + blockIdx.y * (1ll * TURNS_BYTES);
#pragma unroll 1
  for (int one = threadIdx.x * 16; one < TURNS_BYTES; one += THREADS * 16) lospmm_copy<16>(to + one, from + one, true);
}
