// What templates are written in: the few operations of a GPU that C++ has no word for, each a function of its own.
//
// No header is included, so that NVRTC takes the text too. On a CPU (lospmm/cpu/block.h) each of these functions is
// written in C++ instead, and the rest of the text is the same.

#ifndef LOSPMM_ON_CPU

#define LOSPMM_INLINE static __device__ __forceinline__

#ifndef LOSPMM_REGISTERS  // which one of several kernels in a text has: it is declared before them
extern "C" __device__ unsigned char lospmm_data[];           // A, as the family packed it
#endif
extern __shared__ __align__(1024) unsigned char lospmm_shared[];  // as many bytes as the launch says

using lospmm_u16 = unsigned short;

LOSPMM_INLINE unsigned lospmm_address(const void *shared) {
  return static_cast<unsigned>(__cvta_generic_to_shared(shared));
}

// 16-bit elements and float32, by their bits. To the nearest, ties to even.
LOSPMM_INLINE float lospmm_float_of_half(lospmm_u16 bits) {
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
  return value;
}
LOSPMM_INLINE lospmm_u16 lospmm_half_of_float(float value) {
  lospmm_u16 bits;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
  return bits;
}
LOSPMM_INLINE float lospmm_float_of_bfloat16(lospmm_u16 bits) {
  return __uint_as_float(static_cast<unsigned>(bits) << 16);
}
#if __CUDA_ARCH__ >= 800
LOSPMM_INLINE lospmm_u16 lospmm_bfloat16_of_float(float value) {
  lospmm_u16 bits;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
  return bits;
}
#else  // which has no such instruction
LOSPMM_INLINE lospmm_u16 lospmm_bfloat16_of_float(float value) {
  const unsigned bits = __float_as_uint(value);
  return static_cast<lospmm_u16>(value != value ? 0x7FFF : (bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}
#endif

// The bits of ``value`` rounded to TF32, ties away from zero.
LOSPMM_INLINE unsigned lospmm_tf32(float value) {
  unsigned bits;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(bits) : "f"(value));
  return bits;
}

// d += a x b by a warp; the fragments are those of the PTX ISA, mma.m16n8k8 (TF32) and mma.m16n8k16 (16-bit elements).
LOSPMM_INLINE void lospmm_mma_tf32(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
LOSPMM_INLINE void lospmm_mma_half(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
LOSPMM_INLINE void lospmm_mma_bfloat16(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// Four 8 x 8 matrices of 16-bit elements from shared memory, transposed: lane i gives the address of row i % 8 of matrix i / 8.
LOSPMM_INLINE void lospmm_ldmatrix_transposed(unsigned (&r)[4], const void *row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(lospmm_address(row))
               : "memory");
}

// The sum of ``value`` over this lane and those before it.
LOSPMM_INLINE unsigned lospmm_sum_until(unsigned value) {
  asm volatile(
      "{\n"
      ".reg .pred is_there;\n"
      ".reg .b32 before;\n"
      "shfl.sync.up.b32 before|is_there, %0, 1, 0, -1;\n"
      "@is_there add.u32 %0, %0, before;\n"
      "shfl.sync.up.b32 before|is_there, %0, 2, 0, -1;\n"
      "@is_there add.u32 %0, %0, before;\n"
      "shfl.sync.up.b32 before|is_there, %0, 4, 0, -1;\n"
      "@is_there add.u32 %0, %0, before;\n"
      "shfl.sync.up.b32 before|is_there, %0, 8, 0, -1;\n"
      "@is_there add.u32 %0, %0, before;\n"
      "shfl.sync.up.b32 before|is_there, %0, 16, 0, -1;\n"
      "@is_there add.u32 %0, %0, before;\n"
      "}"
      : "+r"(value));
  return value;
}

// Four words from the bits that say which are not ``zero``: bit i of ``bits`` is that of word i, and those whose bit is set lie
// in shared memory from ``address`` on, one after another, in ``bytes`` each.
#define LOSPMM_TEST(i) "and.b32 bit, bits, 1 << " #i ";\nsetp.ne.u32 p" #i ", bit, 0;\n"
#define LOSPMM_TAKE(i, type, bytes) "@p" #i " ld.shared." type " %" #i ", [at];\n@p" #i " add.u32 at, at, " bytes ";\n"
#define LOSPMM_EXPAND(name, type, bytes)                                                            \
  template <unsigned zero>                                                                          \
  LOSPMM_INLINE void name(unsigned (&words)[4], unsigned address, unsigned bits) {                  \
    asm volatile(                                                                                   \
        "{\n.reg .pred p<4>;\n.reg .b32 bit, bits, at;\nmov.b32 at, %4;\nmov.b32 bits, %5;\n"       \
        LOSPMM_TEST(0) LOSPMM_TEST(1) LOSPMM_TEST(2) LOSPMM_TEST(3)                                 \
        "mov.b32 %0, %6;\nmov.b32 %1, %6;\nmov.b32 %2, %6;\nmov.b32 %3, %6;\n"                      \
        LOSPMM_TAKE(0, type, bytes) LOSPMM_TAKE(1, type, bytes)                                     \
        LOSPMM_TAKE(2, type, bytes) LOSPMM_TAKE(3, type, bytes)                                     \
        "}"                                                                                         \
        : "=&r"(words[0]), "=&r"(words[1]), "=&r"(words[2]), "=&r"(words[3])                        \
        : "r"(address), "r"(bits), "n"(zero)                                                        \
        : "memory");                                                                                \
  }
LOSPMM_EXPAND(lospmm_expand, "u32", "4")
LOSPMM_EXPAND(lospmm_expand_codes, "u16", "2")

// Four of eight bytes, each chosen by four bits below 8: __byte_perm takes an instruction to make sure of that.
LOSPMM_INLINE unsigned lospmm_bytes(unsigned low, unsigned high, unsigned chosen) {
  unsigned bytes;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(bytes) : "r"(low), "r"(high), "r"(chosen));
  return bytes;
}

// A number of one byte or two in shared memory.
template <int bytes>
LOSPMM_INLINE unsigned lospmm_number_at(unsigned address) {
  lospmm_u16 number;
  if constexpr (bytes == 2)
    asm volatile("ld.shared.u16 %0, [%1];" : "=h"(number) : "r"(address) : "memory");
  else
    asm volatile("ld.shared.u8 %0, [%1];" : "=h"(number) : "r"(address) : "memory");
  return number;
}

// 1152 less, of two halves: of numbers from -128 to 127, to which 1152 was added as bits of a half's fraction.
LOSPMM_INLINE unsigned lospmm_less_1152(unsigned halves) {
  unsigned less;
  asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(less) : "r"(halves), "r"(0x64806480));
  return less;
}

// Two codes of 8 bits as halves: of numbers 128 above what they stand for, and of E4M3 (from sm_89 on).
LOSPMM_INLINE unsigned lospmm_halves_of_int8(unsigned codes) {
  return lospmm_less_1152(__byte_perm(codes, 0x64646464, 0x4140));
}
LOSPMM_INLINE unsigned lospmm_halves_of_fp8(unsigned codes) {
  unsigned halves = 0;
#if __CUDA_ARCH__ >= 890
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(static_cast<lospmm_u16>(codes)));
#endif
  return halves;
}

// Bytes from global to shared memory while the thread goes on; zeros where ``is_there`` is false. They are there for the
// thread itself once it has waited for their group, and for others after a barrier.
template <int bytes>
LOSPMM_INLINE void lospmm_copy(void *shared, const void *global, bool is_there) {
  const int read = is_there ? bytes : 0;
  if constexpr (bytes == 16)
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(lospmm_address(shared)), "l"(global), "r"(read)
                 : "memory");
  else
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(lospmm_address(shared)), "l"(global), "n"(bytes),
                 "r"(read)
                 : "memory");
}
LOSPMM_INLINE void lospmm_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Until at most ``pending`` of the thread's groups are still under way.
template <int pending>
LOSPMM_INLINE void lospmm_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(pending) : "memory");
}

// A cluster, from sm_90 on: blocks along y that run together (LOSPMM_CLUSTER of them, all that there are along y), wait for
// each other, and read each other's shared memory behind the first wait, until the last, or send values there: a block goes
// when it has what was sent to it. What has to be seen is in shared memory alone: an ordinary release waits for all that was
// stored to memory too (MEMBAR.ALL.GPU). At the last nothing is new there, and who comes has used what it read of the others.
#if LOSPMM_CLUSTER > 1
LOSPMM_INLINE void lospmm_cluster_wait() {
#if __CUDACC_VER_MAJOR__ * 100 + __CUDACC_VER_MINOR__ >= 1208  // PTX ISA 8.6
  asm volatile(
      "fence.release.sync_restrict::shared::cta.cluster;\n"
      "barrier.cluster.arrive.relaxed.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
#else
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}
LOSPMM_INLINE void lospmm_cluster_leave() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}
// What block ``rank`` has where ``shared`` is here.
LOSPMM_INLINE float lospmm_cluster_float(const float *shared, unsigned rank) {
  float value;
  asm volatile(
      "{\n"
      ".reg .u32 there;\n"
      "mapa.shared::cluster.u32 there, %1, %2;\n"
      "ld.shared::cluster.f32 %0, [there];\n"
      "}"
      : "=f"(value)
      : "r"(lospmm_address(shared)), "r"(rank)
      : "memory");
  return value;
}
// To where block ``rank`` has what ``shared`` is here. Its ``barrier`` counts the bytes, as of a bulk copy.
LOSPMM_INLINE void lospmm_cluster_send(float4 *shared, float4 values, unsigned rank, unsigned long long *barrier) {
  asm volatile(
      "{\n"
      ".reg .u32 there, counter;\n"
      "mapa.shared::cluster.u32 there, %0, %2;\n"
      "mapa.shared::cluster.u32 counter, %1, %2;\n"
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [there], {%3, %4, %5, %6}, [counter];\n"
      "}" ::"r"(lospmm_address(shared)),
      "r"(lospmm_address(barrier)), "r"(rank), "f"(values.x), "f"(values.y), "f"(values.z), "f"(values.w)
      : "memory");
}
#endif

// Bulk copies, from sm_90 on: threads start them, and the GPU tells a barrier in shared memory of the bytes that came.
// One thread makes the barrier, before a barrier of the block, and says how many bytes a phase of it expects, be they
// on their way already or not; addresses and sizes are multiples of 16 bytes. ``copiers`` threads arrive too in each phase,
// when what they copied by themselves (lospmm_copy) is there. A wait is for the end of the phase of ``parity``: the first is 0.
#if LOSPMM_BULK
LOSPMM_INLINE void lospmm_bulk_make(unsigned long long *barrier, unsigned copiers = 0) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(lospmm_address(barrier)), "r"(1 + copiers) : "memory");
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
LOSPMM_INLINE void lospmm_bulk_expect(unsigned long long *barrier, unsigned bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(lospmm_address(barrier)), "r"(bytes) : "memory");
}
LOSPMM_INLINE void lospmm_bulk_copy(void *shared, const void *global, unsigned bytes, unsigned long long *barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   lospmm_address(shared)),
               "l"(__cvta_generic_to_global(global)), "r"(bytes), "r"(lospmm_address(barrier))
               : "memory");
}
LOSPMM_INLINE void lospmm_arrive_with_copies(unsigned long long *barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(lospmm_address(barrier)) : "memory");
}
LOSPMM_INLINE void lospmm_bulk_wait(unsigned long long *barrier, unsigned parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared.b64 done, [%0], %1;\n"
      "@!done bra again;\n"
      "}" ::"r"(lospmm_address(barrier)),
      "r"(parity)
      : "memory");
}
#endif

#endif

// A lane's value in a register of its own. What depends on threadIdx alone the compiler would compute again in a loop, with a
// read of it (S2R) each time: it does not see through a shuffle.
LOSPMM_INLINE unsigned lospmm_kept(unsigned value) { return __shfl_sync(~0u, value, threadIdx.x % 32); }
// A number that all lanes of a warp have, in one register for all of them; the number of the thread's warp.
LOSPMM_INLINE int lospmm_of_warp(unsigned value) { return __shfl_sync(~0u, static_cast<int>(value), 0); }
LOSPMM_INLINE int lospmm_warp() { return lospmm_of_warp(threadIdx.x / 32); }

// What B and C are made of (LOSPMM_DTYPE: lospmm/packed.py), and what is done to A x B (SCALED, BIAS, RELU, RESIDUAL).

#if LOSPMM_DTYPE == 2
using Element = lospmm_u16;
LOSPMM_INLINE float lospmm_float(Element element) { return lospmm_float_of_half(element); }
LOSPMM_INLINE Element lospmm_element(float value) { return lospmm_half_of_float(value); }
#elif LOSPMM_DTYPE == 3
using Element = lospmm_u16;
LOSPMM_INLINE float lospmm_float(Element element) { return lospmm_float_of_bfloat16(element); }
LOSPMM_INLINE Element lospmm_element(float value) { return lospmm_bfloat16_of_float(value); }
#else
using Element = float;
LOSPMM_INLINE float lospmm_float(Element element) { return element; }
LOSPMM_INLINE Element lospmm_element(float value) { return value; }
#endif

// d += a x b by a warp, of such elements: float32 as TF32 numbers.
LOSPMM_INLINE void lospmm_mma(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
#if LOSPMM_DTYPE == 2
  lospmm_mma_half(d, a, b);
#elif LOSPMM_DTYPE == 3
  lospmm_mma_bfloat16(d, a, b);
#else
  lospmm_mma_tf32(d, a, b);
#endif
}

// The elements of a pair of 16-bit ones, as a 32-bit register holds them.
#if LOSPMM_DTYPE == 3
LOSPMM_INLINE float lospmm_first(unsigned pair) { return __uint_as_float(pair << 16); }
LOSPMM_INLINE float lospmm_second(unsigned pair) { return __uint_as_float(pair & 0xFFFF0000u); }
#else
LOSPMM_INLINE float lospmm_first(unsigned pair) { return lospmm_float_of_half(static_cast<lospmm_u16>(pair)); }
LOSPMM_INLINE float lospmm_second(unsigned pair) { return lospmm_float_of_half(static_cast<lospmm_u16>(pair >> 16)); }
#endif

// What a thread loads or stores at once: a word of so many bytes.
template <unsigned bytes>
struct Word;
template <>
struct Word<2> {
  using type = lospmm_u16;
};
template <>
struct Word<4> {
  using type = unsigned;
};
template <>
struct Word<8> {
  using type = uint2;
};
template <>
struct Word<16> {
  using type = uint4;
};

// The data: numbers, and arrays, by their places in what lospmm.packed.pack was given.
LOSPMM_INLINE long long lospmm_number(int place) {
  return reinterpret_cast<const long long *>(lospmm_data)[place];
}
template <typename T>
LOSPMM_INLINE const T *lospmm_array(int place) {
  return reinterpret_cast<const T *>(lospmm_data + reinterpret_cast<const long long *>(lospmm_data)[16 + place]);
}

// An element of C from the sum of its products; ``place`` counts elements of C.
LOSPMM_INLINE Element lospmm_finished(float sum, int row, long long place, const Element *residual) {
#if SCALED
  sum *= lospmm_array<float>(14)[row];
#endif
  if (RESIDUAL) sum += lospmm_float(__ldcs(residual + place));
  if (BIAS) sum += lospmm_array<float>(15)[row];
  if (RELU) sum = sum < 0 ? 0 : sum;  // NaN stays
  return lospmm_element(sum);
}

#if LOSPMM_CLUSTER > 1
#define LOSPMM_BLOCKS __cluster_dims__(1, LOSPMM_CLUSTER, 1)
#ifdef LOSPMM_ON_CPU
static const bool lospmm_is_clustered = lospmm::run_together(LOSPMM_CLUSTER);
#endif
#else
#define LOSPMM_BLOCKS
#endif
#ifdef LOSPMM_REGISTERS  // of a thread, at most, where the compiler is not told
#define LOSPMM_LIMIT __maxnreg__(LOSPMM_REGISTERS)
#else
#define LOSPMM_LIMIT
#endif
#if RESIDUAL
#define LOSPMM_KERNEL(entry) \
  extern "C" __global__ void LOSPMM_BLOCKS LOSPMM_LIMIT entry(const Element *b, Element *c, const Element *residual)
#else
#define LOSPMM_KERNEL(entry) extern "C" __global__ void LOSPMM_BLOCKS LOSPMM_LIMIT entry(const Element *b, Element *c)
#endif
