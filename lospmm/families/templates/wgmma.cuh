// Products of warpgroups (four warps, the first of which has a number that four divides) on the tensor cores of sm_90a, whose
// large factor lies in shared memory. They are done while the threads go on: what they read and write is left alone until
// they were waited for.

#ifndef LOSPMM_ON_CPU

// What the products of this warpgroup read in registers was written before.
LOSPMM_INLINE void lospmm_wgmma_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
LOSPMM_INLINE void lospmm_wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Until at most ``pending`` of the committed groups are still under way.
template <int pending>
LOSPMM_INLINE void lospmm_wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(pending) : "memory");
}

// Where weights lie in shared memory: 8 x 4 of them, or 8 x 8 float16, are 128 bytes next to each other, the next 4 or 8
// columns come behind, and the next 8 rows 256 bytes later. This is the lower half of the PTX ISA's matrix descriptor
// (K-major, without swizzling): the address and the 128 bytes, in units of 16; the upper half is the 256.
using LospmmWeights = unsigned;
LOSPMM_INLINE LospmmWeights lospmm_weights(const void *shared) { return lospmm_address(shared) >> 4 | 128u >> 4 << 16; }
LOSPMM_INLINE LospmmWeights lospmm_behind(LospmmWeights weights, int floats) { return weights + floats / 4; }

// d += a x weights: 64 x 8 numbers in the registers of a warpgroup by those of 8 columns and as many rows of A as two threads
// have sums; the fragments are those of the PTX ISA, wgmma.m64nNk8 (TF32). And of float16, wgmma.m64nNk16, by 16 columns:
// d = a x weights where it does not add.
#define LOSPMM_SUMS(d, at)                                                                                           \
  "+f"(d[at]), "+f"(d[at + 1]), "+f"(d[at + 2]), "+f"(d[at + 3]), "+f"(d[at + 4]), "+f"(d[at + 5]), "+f"(d[at + 6]), \
      "+f"(d[at + 7])
#define LOSPMM_16 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define LOSPMM_24 LOSPMM_16 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define LOSPMM_32 LOSPMM_24 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define LOSPMM_48 \
  LOSPMM_32 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define LOSPMM_64 \
  LOSPMM_48 ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define LOSPMM_96 \
  LOSPMM_64 ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, " \
  "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define LOSPMM_128 \
  LOSPMM_96 ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, " \
  "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"

// Of so many sums of a thread, and rows of A; then the numbers of the operands behind the sums, and the sums.
#define LOSPMM_WGMMA(count, rows, a0, a1, a2, a3, at, ...)                                               \
  LOSPMM_INLINE void lospmm_wgmma(float (&d)[count], const unsigned (&a)[4], LospmmWeights weights) {    \
    asm volatile("{\n.reg .b64 weights;\nmov.b64 weights, {%" #at ", 16};\n"                            \
                 "wgmma.mma_async.sync.aligned.m64n" #rows "k8.f32.tf32.tf32 {" LOSPMM_##count           \
                 "}, {%" #a0 ", %" #a1 ", %" #a2 ", %" #a3 "}, weights, 1, 1, 1;\n}"                     \
                 : __VA_ARGS__                                                                           \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(weights));                            \
  }
#define LOSPMM_WGMMA_HALF(count, rows, a0, a1, a2, a3, at, adding, ...)                                                 \
  LOSPMM_INLINE void lospmm_wgmma_half(float (&d)[count], const unsigned (&a)[4], LospmmWeights weights, bool adds) {   \
    asm volatile("{\n.reg .b64 weights;\n.reg .pred adds;\nmov.b64 weights, {%" #at ", 16};\n"                         \
                 "setp.ne.u32 adds, %" #adding ", 0;\n"                                                                 \
                 "wgmma.mma_async.sync.aligned.m64n" #rows "k16.f32.f16.f16 {" LOSPMM_##count                           \
                 "}, {%" #a0 ", %" #a1 ", %" #a2 ", %" #a3 "}, weights, adds, 1, 1, 0;\n}"                              \
                 : __VA_ARGS__                                                                                          \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(weights), "r"(static_cast<unsigned>(adds)));         \
  }
LOSPMM_WGMMA(32, 64, 32, 33, 34, 35, 36, LOSPMM_SUMS(d, 0), LOSPMM_SUMS(d, 8), LOSPMM_SUMS(d, 16), LOSPMM_SUMS(d, 24))
LOSPMM_WGMMA(48, 96, 48, 49, 50, 51, 52, LOSPMM_SUMS(d, 0), LOSPMM_SUMS(d, 8), LOSPMM_SUMS(d, 16), LOSPMM_SUMS(d, 24), LOSPMM_SUMS(d, 32), LOSPMM_SUMS(d, 40))
LOSPMM_WGMMA(64, 128, 64, 65, 66, 67, 68, LOSPMM_SUMS(d, 0), LOSPMM_SUMS(d, 8), LOSPMM_SUMS(d, 16), LOSPMM_SUMS(d, 24), LOSPMM_SUMS(d, 32), LOSPMM_SUMS(d, 40), LOSPMM_SUMS(d, 48), LOSPMM_SUMS(d, 56))
LOSPMM_WGMMA_HALF(16, 32, 16, 17, 18, 19, 20, 21, LOSPMM_SUMS(d, 0), LOSPMM_SUMS(d, 8))
LOSPMM_WGMMA_HALF(24, 48, 24, 25, 26, 27, 28, 29, LOSPMM_SUMS(d, 0), LOSPMM_SUMS(d, 8), LOSPMM_SUMS(d, 16))
LOSPMM_WGMMA_HALF(32, 64, 32, 33, 34, 35, 36, 37, LOSPMM_SUMS(d, 0), LOSPMM_SUMS(d, 8), LOSPMM_SUMS(d, 16), LOSPMM_SUMS(d, 24))
LOSPMM_WGMMA_HALF(48, 96, 48, 49, 50, 51, 52, 53, LOSPMM_SUMS(d, 0), LOSPMM_SUMS(d, 8), LOSPMM_SUMS(d, 16), LOSPMM_SUMS(d, 24), LOSPMM_SUMS(d, 32), LOSPMM_SUMS(d, 40))
LOSPMM_WGMMA_HALF(64, 128, 64, 65, 66, 67, 68, 69, LOSPMM_SUMS(d, 0), LOSPMM_SUMS(d, 8), LOSPMM_SUMS(d, 16), LOSPMM_SUMS(d, 24), LOSPMM_SUMS(d, 32), LOSPMM_SUMS(d, 40), LOSPMM_SUMS(d, 48), LOSPMM_SUMS(d, 56))

// Two float16 in a register, to the nearest.
LOSPMM_INLINE unsigned lospmm_pair(float first, float second) {
  unsigned pair;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
  return pair;
}

// A barrier in shared memory that ``count`` arrivals open, again and again; a wait is for the end of the phase of ``parity``.
LOSPMM_INLINE void lospmm_gate_make(unsigned long long *gate, unsigned count) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(lospmm_address(gate)), "r"(count) : "memory");
}
LOSPMM_INLINE void lospmm_gate_arrive(unsigned long long *gate) {
  asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(lospmm_address(gate)) : "memory");
}
LOSPMM_INLINE void lospmm_gate_wait(unsigned long long *gate, unsigned parity) { lospmm_bulk_wait(gate, parity); }

#endif
