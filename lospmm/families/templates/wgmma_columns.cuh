// Products of warpgroups by columns of B as a ring has them (row_block.cuh), of 16-bit elements; of sm_90a. The first factor
// may have two of every four columns alone: sparse tensor cores.

#ifndef LOSPMM_ON_CPU

#if TOKENS
#define LOSPMM_MAJOR "0"
#else
#define LOSPMM_MAJOR "1"
#endif

// Where 64 columns of B lie in shared memory, 128 bytes a row, row behind row, with the 16-byte pieces of row k at their place
// xor k % 8: a PTX ISA matrix descriptor (MN-major, swizzled by 128 bytes, 8 rows in 1024); at a multiple of 1024 bytes. Each
// further 64 columns come 64 rows later. With TOKENS, a row has 64 elements of one column (K-major).
using LospmmColumns = unsigned;
LOSPMM_INLINE LospmmColumns lospmm_columns(const void *shared) {
  return (lospmm_address(shared) >> 4 & 0x3FFF) | 64u * 128 >> 4 << 16;  // above 18 bits a block of a cluster has its rank
}
LOSPMM_INLINE LospmmColumns lospmm_behind_rows(LospmmColumns columns, int rows) { return columns + rows * (TOKENS ? 2 : 128) / 16; }

// d += a x columns: 64 rows of A, 32 columns of which 16 are there, by as many rows of 64 columns of B. Fragments, and
// ``places`` (the metadata), are those of the PTX ISA, wgmma.m64nNk32.sp; lanes 0 and 1 of four have the places that selector
// 0 takes, lanes 2 and 3 those of selector 1.
#if LOSPMM_DTYPE == 3
#define LOSPMM_FACTORS "bf16.bf16"
#else
#define LOSPMM_FACTORS "f16.f16"
#endif
template <int selector>
LOSPMM_INLINE void lospmm_wgmma_sparse(float (&d)[32], const unsigned (&a)[4], LospmmColumns columns, unsigned places) {
  asm volatile(
      "{\n.reg .b64 columns;\nmov.b64 columns, {%36, 0x40000040};\n"
      "wgmma.mma_async.sp.sync.aligned.m64n64k32.f32." LOSPMM_FACTORS " {" LOSPMM_32
      "}, {%32, %33, %34, %35}, columns, %37, %38, 1, 1, 1, 1;\n}"
      : LOSPMM_SUMS(d, 0), LOSPMM_SUMS(d, 8), LOSPMM_SUMS(d, 16), LOSPMM_SUMS(d, 24)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(columns), "r"(places), "n"(selector));
}

// d += a x columns: 64 rows and 16 columns of A, by as many rows of B and 64 columns for each line of d.
#define LOSPMM_LINE(d, part) LOSPMM_SUMS(d[part], 0), LOSPMM_SUMS(d[part], 8), LOSPMM_SUMS(d[part], 16), LOSPMM_SUMS(d[part], 24)
#define LOSPMM_WGMMA_COLUMNS(parts, cols, sums, a0, a1, a2, a3, at, ...)                                                    \
  LOSPMM_INLINE void lospmm_wgmma_columns(float (&d)[parts][32], const unsigned (&a)[4], LospmmColumns columns) {           \
    asm volatile("{\n.reg .b64 columns;\nmov.b64 columns, {%" #at ", 0x40000040};\n"                                       \
                 "wgmma.mma_async.sync.aligned.m64n" #cols "k16.f32." LOSPMM_FACTORS " {" LOSPMM_##sums                     \
                 "}, {%" #a0 ", %" #a1 ", %" #a2 ", %" #a3 "}, columns, 1, 1, 1, " LOSPMM_MAJOR ";\n}"                      \
                 : __VA_ARGS__                                                                                              \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(columns));                                               \
  }
LOSPMM_WGMMA_COLUMNS(1, 64, 32, 32, 33, 34, 35, 36, LOSPMM_LINE(d, 0))
LOSPMM_WGMMA_COLUMNS(2, 128, 64, 64, 65, 66, 67, 68, LOSPMM_LINE(d, 0), LOSPMM_LINE(d, 1))
LOSPMM_WGMMA_COLUMNS(3, 192, 96, 96, 97, 98, 99, 100, LOSPMM_LINE(d, 0), LOSPMM_LINE(d, 1), LOSPMM_LINE(d, 2))
LOSPMM_WGMMA_COLUMNS(4, 256, 128, 128, 129, 130, 131, 132, LOSPMM_LINE(d, 0), LOSPMM_LINE(d, 1), LOSPMM_LINE(d, 2), LOSPMM_LINE(d, 3))

// Four copies of 16 bytes (lospmm_copy), in turn from ``even`` and from ``odd`` on, each time 1024 bytes further, of what is
// so many bytes behind ``from``. In one piece, so that all addresses are known before the first one starts.
template <int behind_from>
LOSPMM_INLINE void lospmm_copy_lines(void *even, void *odd, const void *const (&from)[4], bool is_there) {
  asm volatile(
      "cp.async.cg.shared.global [%0], [%2 + %7], 16, %6;\n"
      "cp.async.cg.shared.global [%1], [%3 + %7], 16, %6;\n"
      "cp.async.cg.shared.global [%0 + 1024], [%4 + %7], 16, %6;\n"
      "cp.async.cg.shared.global [%1 + 1024], [%5 + %7], 16, %6;" ::"r"(lospmm_address(even)),
      "r"(lospmm_address(odd)), "l"(from[0]), "l"(from[1]), "l"(from[2]), "l"(from[3]), "r"(is_there ? 16 : 0), "n"(behind_from)
      : "memory");
}

// An 8 x 8 matrix of 16-bit elements, of which each lane has two beside each other of row lane / 4, transposed.
LOSPMM_INLINE unsigned lospmm_turned(unsigned pair) {
  unsigned turned;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(turned) : "r"(pair));
  return turned;
}

// What was written to shared memory, as far as this thread knows, can be read by its products.
LOSPMM_INLINE void lospmm_show_to_products() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// A second barrier of a block of so many threads: those that arrive go on, the others wait for all.
template <int threads>
LOSPMM_INLINE void lospmm_block_arrive() {
  asm volatile("barrier.cta.arrive 1, %0;" ::"n"(threads) : "memory");
}
template <int threads>
LOSPMM_INLINE void lospmm_block_wait() {
  asm volatile("barrier.cta.sync 1, %0;" ::"n"(threads) : "memory");
}

// The threads of a warpgroup need so many registers from here on, fewer or more than before.
template <int registers>
LOSPMM_INLINE void lospmm_give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(registers));
}
template <int registers>
LOSPMM_INLINE void lospmm_take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(registers));
}

#endif
