
// What both kinds of row blocks have: a ring of STAGES in shared memory, each DEPTH rows of B, of COLS columns, and behind
// them the weights that these rows are multiplied by.
constexpr int SUMS = ROWS / PRODUCTS / 2;  // of a thread, of each of the PRODUCTS that ROWS are cut into
constexpr int COLS = 64 * GROUPS, STRIDE = COLS + 8;
constexpr int WEIGHTS = ROWS * DEPTH, STAGE_FLOATS = DEPTH * STRIDE + WEIGHTS;  // a float of each, or two float16

// The sums of a thread of a warpgroup, of two neighbouring columns of C from ``column`` on, to the rows that stand in array 0
// from ``place`` on (-1: none); where they are ``scaled``, after what undoes the powers of two of these rows, in array 4.
template <bool scaled, int products, int count>
LOSPMM_INLINE void lospmm_store(Element *c, const float (&sums)[products][count], int place, long long column, long long n,
                                const Element *residual) {
  const int *rows_from = lospmm_array<int>(0) + place;  // looked up once: for all that is known, C is stored over it
  const float *scales_from = scaled ? lospmm_array<float>(4) + place : nullptr;
#pragma unroll
  for (int product = 0; product < products; ++product)
#pragma unroll
    for (int eight = 0; eight < count / 4; ++eight) {
      const int at = product * (2 * count) + 8 * eight;
      const int2 rows = __ldg(reinterpret_cast<const int2 *>(rows_from + at));
      const float2 scales = scaled ? __ldg(reinterpret_cast<const float2 *>(scales_from + at)) : make_float2(1, 1);
#pragma unroll
      for (int of = 0; of < 2; ++of) {
        const int row = of ? rows.y : rows.x;
        const float scale = of ? scales.y : scales.x;
        if (row < 0) continue;
        const long long first = row * n + column;
        *reinterpret_cast<float2 *>(c + first) =
            make_float2(lospmm_finished(sums[product][4 * eight + of] * scale, row, first, residual),
                        lospmm_finished(sums[product][4 * eight + 2 + of] * scale, row, first + 1, residual));
      }
    }
}
