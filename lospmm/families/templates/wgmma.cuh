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
// columns come behind, and the next 8 rows 256 bytes later. This is the lower half of the PTX ISA's matrix descriptor (K-major, without
// swizzling): the address and the 128 bytes, in units of 16; the upper half is the 256.
using LospmmWeights = unsigned;
LOSPMM_INLINE LospmmWeights lospmm_weights(const void *shared) { return lospmm_address(shared) >> 4 | 128u >> 4 << 16; }
LOSPMM_INLINE LospmmWeights lospmm_behind(LospmmWeights weights, int floats) { return weights + floats / 4; }

// d += a x weights: 64 x 8 numbers in the registers of a warpgroup by those of 8 columns and as many rows of A as two threads
// have sums; the fragments are those of the PTX ISA, wgmma.m64nNk8 (TF32).
#define LOSPMM_SUMS(d, at)                                                                                           \
  "+f"(d[at]), "+f"(d[at + 1]), "+f"(d[at + 2]), "+f"(d[at + 3]), "+f"(d[at + 4]), "+f"(d[at + 5]), "+f"(d[at + 6]), \
      "+f"(d[at + 7])
LOSPMM_INLINE void lospmm_wgmma(float (&d)[32], const unsigned (&a)[4], LospmmWeights weights) {
  asm volatile(
      "{\n.reg .b64 weights;\n"
      "mov.b64 weights, {%36, 16};\n"
      "wgmma.mma_async.sync.aligned.m64n64k8.f32.tf32.tf32 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
      "}, {%32, %33, %34, %35}, weights, 1, 1, 1;\n}"
      : LOSPMM_SUMS(d, 0), LOSPMM_SUMS(d, 8), LOSPMM_SUMS(d, 16), LOSPMM_SUMS(d, 24)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(weights));
}
LOSPMM_INLINE void lospmm_wgmma(float (&d)[48], const unsigned (&a)[4], LospmmWeights weights) {
  asm volatile(
      "{\n.reg .b64 weights;\n"
      "mov.b64 weights, {%52, 16};\n"
      "wgmma.mma_async.sync.aligned.m64n96k8.f32.tf32.tf32 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
      "}, {%48, %49, %50, %51}, weights, 1, 1, 1;\n}"
      : LOSPMM_SUMS(d, 0), LOSPMM_SUMS(d, 8), LOSPMM_SUMS(d, 16), LOSPMM_SUMS(d, 24), LOSPMM_SUMS(d, 32), LOSPMM_SUMS(d, 40)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(weights));
}
LOSPMM_INLINE void lospmm_wgmma(float (&d)[64], const unsigned (&a)[4], LospmmWeights weights) {
  asm volatile(
      "{\n.reg .b64 weights;\n"
      "mov.b64 weights, {%68, 16};\n"
      "wgmma.mma_async.sync.aligned.m64n128k8.f32.tf32.tf32 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
      "}, {%64, %65, %66, %67}, weights, 1, 1, 1;\n}"
      : LOSPMM_SUMS(d, 0), LOSPMM_SUMS(d, 8), LOSPMM_SUMS(d, 16), LOSPMM_SUMS(d, 24), LOSPMM_SUMS(d, 32), LOSPMM_SUMS(d, 40),
        LOSPMM_SUMS(d, 48), LOSPMM_SUMS(d, 56)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(weights));
}

// d += a x weights, or d = a x weights where it does not add, of float16: 16 columns, and the fragments of
// wgmma.m64nNk16.
LOSPMM_INLINE void lospmm_wgmma_half(float (&d)[16], const unsigned (&a)[4], LospmmWeights weights, bool adds) {
  asm volatile(
      "{\n.reg .b64 weights;\n.reg .pred adds;\n"
      "mov.b64 weights, {%20, 16};\nsetp.ne.u32 adds, %21, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n32k16.f32.f16.f16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
      "}, {%16, %17, %18, %19}, weights, adds, 1, 1, 0;\n}"
      : LOSPMM_SUMS(d, 0), LOSPMM_SUMS(d, 8)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(weights), "r"(static_cast<unsigned>(adds)));
}
LOSPMM_INLINE void lospmm_wgmma_half(float (&d)[24], const unsigned (&a)[4], LospmmWeights weights, bool adds) {
  asm volatile(
      "{\n.reg .b64 weights;\n.reg .pred adds;\n"
      "mov.b64 weights, {%28, 16};\nsetp.ne.u32 adds, %29, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n48k16.f32.f16.f16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23"
      "}, {%24, %25, %26, %27}, weights, adds, 1, 1, 0;\n}"
      : LOSPMM_SUMS(d, 0), LOSPMM_SUMS(d, 8), LOSPMM_SUMS(d, 16)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(weights), "r"(static_cast<unsigned>(adds)));
}
LOSPMM_INLINE void lospmm_wgmma_half(float (&d)[32], const unsigned (&a)[4], LospmmWeights weights, bool adds) {
  asm volatile(
      "{\n.reg .b64 weights;\n.reg .pred adds;\n"
      "mov.b64 weights, {%36, 16};\nsetp.ne.u32 adds, %37, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
      "}, {%32, %33, %34, %35}, weights, adds, 1, 1, 0;\n}"
      : LOSPMM_SUMS(d, 0), LOSPMM_SUMS(d, 8), LOSPMM_SUMS(d, 16), LOSPMM_SUMS(d, 24)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(weights), "r"(static_cast<unsigned>(adds)));
}
LOSPMM_INLINE void lospmm_wgmma_half(float (&d)[48], const unsigned (&a)[4], LospmmWeights weights, bool adds) {
  asm volatile(
      "{\n.reg .b64 weights;\n.reg .pred adds;\n"
      "mov.b64 weights, {%52, 16};\nsetp.ne.u32 adds, %53, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n96k16.f32.f16.f16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
      "}, {%48, %49, %50, %51}, weights, adds, 1, 1, 0;\n}"
      : LOSPMM_SUMS(d, 0), LOSPMM_SUMS(d, 8), LOSPMM_SUMS(d, 16), LOSPMM_SUMS(d, 24), LOSPMM_SUMS(d, 32), LOSPMM_SUMS(d, 40)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(weights), "r"(static_cast<unsigned>(adds)));
}
LOSPMM_INLINE void lospmm_wgmma_half(float (&d)[64], const unsigned (&a)[4], LospmmWeights weights, bool adds) {
  asm volatile(
      "{\n.reg .b64 weights;\n.reg .pred adds;\n"
      "mov.b64 weights, {%68, 16};\nsetp.ne.u32 adds, %69, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
      "}, {%64, %65, %66, %67}, weights, adds, 1, 1, 0;\n}"
      : LOSPMM_SUMS(d, 0), LOSPMM_SUMS(d, 8), LOSPMM_SUMS(d, 16), LOSPMM_SUMS(d, 24), LOSPMM_SUMS(d, 32), LOSPMM_SUMS(d, 40),
        LOSPMM_SUMS(d, 48), LOSPMM_SUMS(d, 56)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(weights), "r"(static_cast<unsigned>(adds)));
}

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
