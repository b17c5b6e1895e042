
// Copies of boxes of B by one thread, swizzled as products of warpgroups read them (wgmma_columns.cuh); of sm_90a.

#ifndef LOSPMM_ON_CPU

constexpr int MAP_BYTES = 128;  // at a multiple of so many bytes

// A map of ``rows`` of ``columns`` elements of 16 bits, in boxes of box_rows x 64 (the PTX ISA's tensor map). A warp makes it in
// ``shared``, and leaves it in ``map``, where copies can read it.
template <int box_rows>
LOSPMM_INLINE void lospmm_map_make(unsigned char *map, void *shared, const Element *matrix, long long rows, long long columns) {
  const int lane = threadIdx.x % 32;
  static_cast<unsigned *>(shared)[lane] = 0;
  __syncwarp();
#if __CUDACC_VER_MAJOR__ * 100 + __CUDACC_VER_MINOR__ >= 1205
  const long long row_bytes = columns * 2;
#else
  const long long row_bytes = columns * 2 >> 4;  // without the bits that are 0
#endif
  if (lane == 0)
    asm volatile(
        "tensormap.replace.tile.global_address.shared::cta.b1024.b64 [%0], %1;\n"
        "tensormap.replace.tile.rank.shared::cta.b1024.b32 [%0], 1;\n"
        "tensormap.replace.tile.box_dim.shared::cta.b1024.b32 [%0], 0, 64;\n"
        "tensormap.replace.tile.box_dim.shared::cta.b1024.b32 [%0], 1, %5;\n"
        "tensormap.replace.tile.global_dim.shared::cta.b1024.b32 [%0], 0, %2;\n"
        "tensormap.replace.tile.global_dim.shared::cta.b1024.b32 [%0], 1, %3;\n"
        "tensormap.replace.tile.global_stride.shared::cta.b1024.b64 [%0], 0, %4;\n"
        "tensormap.replace.tile.element_stride.shared::cta.b1024.b32 [%0], 0, 1;\n"
        "tensormap.replace.tile.element_stride.shared::cta.b1024.b32 [%0], 1, 1;\n"
        "tensormap.replace.tile.elemtype.shared::cta.b1024.b32 [%0], 1;\n"
        "tensormap.replace.tile.interleave_layout.shared::cta.b1024.b32 [%0], 0;\n"
        "tensormap.replace.tile.swizzle_mode.shared::cta.b1024.b32 [%0], 3;\n"
        "tensormap.replace.tile.fill_mode.shared::cta.b1024.b32 [%0], 0;" ::"r"(lospmm_address(shared)),
        "l"(__cvta_generic_to_global(matrix)), "r"(static_cast<unsigned>(columns)), "r"(static_cast<unsigned>(rows)),
        "l"(row_bytes), "r"(box_rows)
        : "memory");
  __syncwarp();
  asm volatile(
      "tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.gpu.sync.aligned [%0], [%1], 128;\n"
      "fence.proxy.tensormap::generic.acquire.gpu [%0], 128;" ::"l"(__cvta_generic_to_global(map)),
      "r"(lospmm_address(shared))
      : "memory");
}

// The box from a row and a column on, zeros beyond the matrix; ``barrier`` counts the bytes.
LOSPMM_INLINE void lospmm_box_copy(void *shared, const unsigned char *map, int row, int column, unsigned long long *barrier) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(
                   lospmm_address(shared)),
               "l"(__cvta_generic_to_global(map)), "r"(column), "r"(row), "r"(lospmm_address(barrier))
               : "memory");
}

// Which SM the thread is on.
LOSPMM_INLINE unsigned lospmm_sm() {
  unsigned sm;
  asm volatile("mov.u32 %0, %%smid;" : "=r"(sm));
  return sm;
}

#endif
