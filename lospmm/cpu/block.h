// Makes the text of a packed kernel, as it is, a library that a CPU runs one thread block, or one cluster of them, at a
// time (native_process.py). What runs the threads is compiled once for all kernels: block.cpp.

// No <cmath> or <vector>: they take as long to compile as a kernel.
#include <cstdint>
#include <cstring>

#define LOSPMM_ON_CPU
#define LOSPMM_INLINE static inline

using lospmm_u16 = unsigned short;

struct uint3 {
  unsigned x, y, z;
};
struct alignas(8) float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
struct alignas(8) int2 {
  int x, y;
};
struct alignas(16) int4 {
  int x, y, z, w;
};
struct alignas(8) uint2 {
  unsigned x, y;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
static inline float2 make_float2(float x, float y) { return {x, y}; }
static inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
static inline int2 make_int2(int x, int y) { return {x, y}; }
static inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
static inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
static inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

extern unsigned char *lospmm_data, *lospmm_shared;
extern uint3 blockIdx, threadIdx, blockDim, gridDim;

// What a kernel asks of block.cpp.
namespace lospmm {

constexpr unsigned WARP = 32, SLOTS = 8;

extern float halves[1 << 16];  // float16 as float32, by its bits
using Lanes = const std::uint64_t (*)[SLOTS];

[[noreturn]] void fault(const char *what);
// Hands ``count`` values to the warp and waits for the others'; lane l's are then [l][0], [l][1], ...
Lanes exchange_values(const std::uint64_t *values, unsigned count);
void wait_for_block();
void wait_for_cluster();
bool run_together(unsigned blocks);
// What block ``rank`` of the cluster has where ``mine`` is in this thread's.
const void *of_block(const void *mine, unsigned rank);

// From null: zeros.
void copy(void *shared, const void *global, std::size_t bytes);

// What boxes are copied from: rows of elements of 16 bits.
struct Map {
  const void *matrix;
  long long rows, columns;
  int box_rows;
};
void box_copy(void *shared, const Map &map, int row, int column, unsigned long long *barrier);
void wait_for_copies(unsigned pending);

template <typename... Values>
static Lanes exchange(Values... values) {
  static_assert(sizeof...(values) <= SLOTS);
  const std::uint64_t all[] = {static_cast<std::uint64_t>(values)...};
  return exchange_values(all, sizeof...(values));
}

static float as_float(std::uint64_t bits) {
  const std::uint32_t word = static_cast<std::uint32_t>(bits);
  float value;
  std::memcpy(&value, &word, sizeof value);
  return value;
}
static std::uint32_t as_bits(float value) {
  std::uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

}  // namespace lospmm

void lospmm_commit();
void lospmm_bulk_make(unsigned long long *barrier, unsigned copiers = 0);
void lospmm_bulk_expect(unsigned long long *barrier, unsigned bytes);
void lospmm_bulk_copy(void *shared, const void *global, unsigned bytes, unsigned long long *barrier);
void lospmm_arrive_with_copies(unsigned long long *barrier);
void lospmm_bulk_wait(unsigned long long *barrier, unsigned parity);
void lospmm_cluster_send(float4 *shared, float4 values, unsigned rank, unsigned long long *barrier);
void lospmm_gate_make(unsigned long long *gate, unsigned count);
void lospmm_gate_arrive(unsigned long long *gate);
void lospmm_gate_wait(unsigned long long *gate, unsigned parity);

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __restrict__
#define __align__(bytes) alignas(bytes)
#define __launch_bounds__(...)
#define __cluster_dims__(...)

static inline void __syncthreads() { lospmm::wait_for_block(); }
static inline void __syncwarp(unsigned = ~0u) { lospmm::exchange(0); }

template <typename T>
static inline T __ldg(const T *pointer) { return *pointer; }
template <typename T>
static inline T __ldcs(const T *pointer) { return *pointer; }
template <typename T>
static inline T __ldcg(const T *pointer) { return *pointer; }
template <typename T>
static inline void __stcs(T *pointer, T value) { *pointer = value; }
template <typename T>
static inline T atomicAdd(T *pointer, T value) {
  const T before = *pointer;
  *pointer = before + value;
  return before;
}
static inline float __fmaf_rn(float x, float y, float z) { return __builtin_fmaf(x, y, z); }
static inline float fmaf(float x, float y, float z) { return __builtin_fmaf(x, y, z); }
static inline float fabsf(float x) { return __builtin_fabsf(x); }
static inline float fmaxf(float x, float y) { return __builtin_fmaxf(x, y); }
static inline float __fadd_rn(float x, float y) { return x + y; }
static inline float __uint_as_float(unsigned bits) { return lospmm::as_float(bits); }
static inline unsigned __float_as_uint(float value) { return lospmm::as_bits(value); }
// Four of the eight bytes of ``high`` and ``low``, each chosen by four bits.
static inline unsigned __byte_perm(unsigned low, unsigned high, unsigned chosen) {
  const std::uint64_t bytes = static_cast<std::uint64_t>(high) << 32 | low;
  unsigned result = 0;
  for (unsigned at = 0; at < 4; ++at) result |= static_cast<unsigned>(bytes >> 8 * (chosen >> 4 * at & 7) & 0xFF) << 8 * at;
  return result;
}
// The sum of products of four bytes, and ``sum``.
static inline unsigned __dp4a(unsigned left, unsigned right, unsigned sum) {
  for (int at = 0; at < 32; at += 8) sum += (left >> at & 255) * (right >> at & 255);
  return sum;
}
static inline int __popc(unsigned bits) { return __builtin_popcount(bits); }
static inline int min(int x, int y) { return x < y ? x : y; }
static inline int max(int x, int y) { return x > y ? x : y; }
static inline long long min(long long x, long long y) { return x < y ? x : y; }
static inline unsigned min(unsigned x, unsigned y) { return x < y ? x : y; }
static inline unsigned max(unsigned x, unsigned y) { return x > y ? x : y; }

template <typename T>
static inline T lospmm_from_lane(T value, unsigned lane) {
  static_assert(sizeof(T) == 4);
  std::uint32_t bits;
  std::memcpy(&bits, &value, 4);
  const std::uint32_t got = static_cast<std::uint32_t>(lospmm::exchange(bits)[lane % lospmm::WARP][0]);
  T result;
  std::memcpy(&result, &got, 4);
  return result;
}
template <typename T>
static inline T __shfl_sync(unsigned, T value, int lane, int width = 32) {
  const unsigned first = threadIdx.x % 32 / width * width;
  return lospmm_from_lane(value, first + lane % width);
}
template <typename T>
static inline T __shfl_xor_sync(unsigned, T value, int mask, int = 32) {
  return lospmm_from_lane(value, (threadIdx.x % 32) ^ mask);
}
template <typename T>
static inline T __shfl_down_sync(unsigned, T value, unsigned delta, int width = 32) {
  const unsigned lane = threadIdx.x % 32;
  return lospmm_from_lane(value, lane % width + delta < static_cast<unsigned>(width) ? lane + delta : lane);
}
template <typename T>
static inline T __shfl_up_sync(unsigned, T value, unsigned delta, int width = 32) {
  const unsigned lane = threadIdx.x % 32;
  return lospmm_from_lane(value, lane % width >= delta ? lane - delta : lane);
}
static inline unsigned __ballot_sync(unsigned, int predicate) {
  const auto lanes = lospmm::exchange(predicate != 0);
  unsigned bits = 0;
  for (unsigned lane = 0; lane < 32; ++lane) bits |= static_cast<unsigned>(lanes[lane][0]) << lane;
  return bits;
}

// The functions of prelude.cuh, in C++.

static inline float lospmm_float_of_half(lospmm_u16 bits) { return lospmm::halves[bits]; }
static inline lospmm_u16 lospmm_half_of_float(float value) {
  const _Float16 half = static_cast<_Float16>(value);
  lospmm_u16 bits;
  std::memcpy(&bits, &half, 2);
  return bits;
}
static inline float lospmm_float_of_bfloat16(lospmm_u16 bits) {
  return lospmm::as_float(static_cast<std::uint32_t>(bits) << 16);
}
static inline lospmm_u16 lospmm_bfloat16_of_float(float value) {
  const std::uint32_t bits = lospmm::as_bits(value);
  if (value != value) return 0x7FFF;
  return static_cast<lospmm_u16>((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}
static inline unsigned lospmm_tf32(float value) { return (lospmm::as_bits(value) + 0x1000u) & 0xFFFFE000u; }

namespace lospmm {

// d += a x b of the fragments of PTX's mma.m16n8k8 and m16n8k16; ``depth`` elements of k to a 32-bit register.
template <int depth, typename Convert>
static void mma(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2], Convert convert) {
  const auto lanes = exchange(a[0], a[1], a[2], a[3], b[0], b[1]);
  const unsigned lane = threadIdx.x % WARP, group = lane / 4, place = lane % 4;
  for (int at = 0; at < 4; ++at) {
    const unsigned column = place * 2 + at % 2, upper = at / 2;
    double sum = 0;
    for (unsigned half = 0; half < 2; ++half)
      for (unsigned four = 0; four < 4; ++four)
        for (int part = 0; part < depth; ++part) {
          const std::uint64_t left = lanes[group * 4 + four][half * 2 + upper], right = lanes[column * 4 + four][4 + half];
          sum += static_cast<double>(convert(left, part)) * static_cast<double>(convert(right, part));
        }
    d[at] = static_cast<float>(d[at] + sum);
  }
}

static lospmm_u16 part_of(std::uint64_t word, int part) { return static_cast<lospmm_u16>(word >> 16 * part); }

}  // namespace lospmm

static inline void lospmm_mma_tf32(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
  lospmm::mma<1>(d, a, b, [](std::uint64_t word, int) { return lospmm::as_float(word & 0xFFFFE000u); });
}
static inline void lospmm_mma_half(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
  lospmm::mma<2>(d, a, b, [](std::uint64_t word, int part) { return lospmm_float_of_half(lospmm::part_of(word, part)); });
}
static inline void lospmm_mma_bfloat16(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
  lospmm::mma<2>(d, a, b,
                 [](std::uint64_t word, int part) { return lospmm_float_of_bfloat16(lospmm::part_of(word, part)); });
}
static inline void lospmm_ldmatrix_transposed(unsigned (&r)[4], const void *row) {
  const auto lanes = lospmm::exchange(reinterpret_cast<std::uint64_t>(row));
  const unsigned lane = threadIdx.x % 32;
  for (unsigned matrix = 0; matrix < 4; ++matrix) {
    lospmm_u16 pair[2];
    for (unsigned part = 0; part < 2; ++part) {
      const auto at_row = lanes[matrix * 8 + lane % 4 * 2 + part][0];
      std::memcpy(&pair[part], reinterpret_cast<const lospmm_u16 *>(at_row) + lane / 4, 2);
    }
    r[matrix] = pair[0] | static_cast<unsigned>(pair[1]) << 16;
  }
}

static inline unsigned lospmm_turned(unsigned pair) {
  const auto lanes = lospmm::exchange(pair);
  const unsigned lane = threadIdx.x % 32, of = lane % 4 * 8 + lane / 8, part = lane / 4 % 2;
  return lospmm::part_of(lanes[of][0], part) | static_cast<unsigned>(lospmm::part_of(lanes[of + 4][0], part)) << 16;
}

// Shared memory by its bytes.
static inline unsigned lospmm_address(const void *shared) {
  return static_cast<unsigned>(static_cast<const unsigned char *>(shared) - lospmm_shared);
}
static inline unsigned lospmm_sum_until(unsigned value) {
  const auto lanes = lospmm::exchange(value);
  unsigned sum = 0;
  for (unsigned lane = 0; lane <= threadIdx.x % lospmm::WARP; ++lane) sum += static_cast<unsigned>(lanes[lane][0]);
  return sum;
}
#define LOSPMM_EXPAND(name, number_type) \
  template <unsigned zero> \
  static inline void name(unsigned (&words)[4], unsigned address, unsigned bits) { \
    for (int at = 0; at < 4; ++at) { \
      number_type number = zero; \
      if (bits >> at & 1) std::memcpy(&number, lospmm_shared + address, sizeof number), address += sizeof number; \
      words[at] = number; \
    } \
  }
LOSPMM_EXPAND(lospmm_expand, unsigned)
LOSPMM_EXPAND(lospmm_expand_codes, lospmm_u16)
static inline unsigned lospmm_bytes(unsigned low, unsigned high, unsigned chosen) { return __byte_perm(low, high, chosen); }
template <int bytes>
static inline unsigned lospmm_number_at(unsigned address) {
  unsigned number = 0;
  std::memcpy(&number, lospmm_shared + address, bytes);
  return number;
}
static inline unsigned lospmm_less_1152(unsigned halves) {
  const auto less = [](unsigned half) { return lospmm_half_of_float(lospmm_float_of_half(static_cast<lospmm_u16>(half)) - 1152); };
  return less(halves & 0xFFFF) | static_cast<unsigned>(less(halves >> 16)) << 16;
}
static inline unsigned lospmm_halves_of_int8(unsigned codes) { return lospmm_less_1152(__byte_perm(codes, 0x64646464, 0x4140)); }
static inline unsigned lospmm_halves_of_fp8(unsigned codes) {
  const auto half = [](unsigned code) {
    const int exponent = code >> 3 & 15, fraction = code & 7;
    const float magnitude = exponent ? __builtin_ldexpf(8.0f + fraction, exponent - 10) : __builtin_ldexpf(fraction, -9);
    return lospmm_half_of_float(code & 128 ? -magnitude : magnitude);
  };
  return half(codes & 0xFF) | static_cast<unsigned>(half(codes >> 8 & 0xFF)) << 16;
}

template <int bytes>
static inline void lospmm_copy(void *shared, const void *global, bool is_there) {
  static_assert(bytes == 4 || bytes == 8 || bytes == 16);
  if (reinterpret_cast<std::uintptr_t>(shared) % bytes || (is_there && reinterpret_cast<std::uintptr_t>(global) % bytes))
    lospmm::fault("an asynchronous copy from or to an address that is not aligned");
  lospmm::copy(shared, is_there ? global : nullptr, bytes);
}
template <int pending>
static inline void lospmm_wait() { lospmm::wait_for_copies(pending); }

static inline void lospmm_cluster_wait() { lospmm::wait_for_cluster(); }
static inline void lospmm_cluster_leave() { lospmm::wait_for_cluster(); }
static inline float lospmm_cluster_float(const float *shared, unsigned rank) {
  return *static_cast<const float *>(lospmm::of_block(shared, rank));
}

namespace lospmm {

// d += a x weights of a warp of a warpgroup, which lie in shared memory as wgmma.cuh says.
template <int sums>
static void wgmma(float (&d)[sums], const unsigned (&a)[4], const float *weights) {
  const auto lanes = exchange(a[0], a[1], a[2], a[3]);
  const unsigned lane = threadIdx.x % WARP, group = lane / 4, place = lane % 4;
  for (int at = 0; at < sums; ++at) {
    const unsigned row = at / 4 * 8 + place * 2 + at % 2, upper = at / 2 % 2;
    const float *of_row = weights + row / 8 * 64 + row % 8 * 4;
    double sum = 0;
    for (unsigned half = 0; half < 2; ++half)
      for (unsigned four = 0; four < 4; ++four)
        sum += static_cast<double>(as_float(lanes[group * 4 + four][half * 2 + upper] & 0xFFFFE000u)) *
               static_cast<double>(of_row[half * 32 + four]);
    d[at] = static_cast<float>(d[at] + sum);
  }
}

// The same of float16, 16 columns of A; without what d was where it does not add.
template <int sums>
static void wgmma_half(float (&d)[sums], const unsigned (&a)[4], const float *weights, bool adds) {
  const auto lanes = exchange(a[0], a[1], a[2], a[3]);
  const unsigned lane = threadIdx.x % WARP, group = lane / 4, place = lane % 4;
  for (int at = 0; at < sums; ++at) {
    const unsigned row = at / 4 * 8 + place * 2 + at % 2, upper = at / 2 % 2;
    const lospmm_u16 *of_row = reinterpret_cast<const lospmm_u16 *>(weights + row / 8 * 64 + row % 8 * 4);
    double sum = adds ? d[at] : 0;
    for (unsigned half = 0; half < 2; ++half)
      for (unsigned of = 0; of < 8; ++of)
        sum += static_cast<double>(lospmm_float_of_half(part_of(lanes[group * 4 + of / 2][half * 2 + upper], of % 2))) *
               static_cast<double>(lospmm_float_of_half(of_row[half * 64 + of]));
    d[at] = static_cast<float>(sum);
  }
}

// The same with two of four columns, of B as wgmma_columns.cuh says where it lies.
template <typename Convert>
static void wgmma_sparse(float (&d)[32], const unsigned (&a)[4], const unsigned char *columns, unsigned places,
                         unsigned selector, Convert convert) {
  const auto lanes = exchange(a[0], a[1], a[2], a[3], places);
  const unsigned lane = threadIdx.x % WARP, group = lane / 4;
  for (unsigned upper = 0; upper < 2; ++upper) {
    double of_a[16];
    unsigned ks[16];
    for (unsigned four = 0; four < 8; ++four) {
      const std::uint64_t pair = lanes[group * 4 + four % 4][four / 4 * 2 + upper];
      const std::uint64_t place = lanes[group * 4 + selector * 2 + four / 4][4] >> (upper * 16 + four % 4 * 4);
      if ((place & 3) >= (place >> 2 & 3)) fault("places of two of four columns that do not rise");
      for (unsigned part = 0; part < 2; ++part) {
        of_a[four * 2 + part] = static_cast<double>(convert(part_of(pair, part)));
        ks[four * 2 + part] = four * 4 + (place >> 2 * part & 3);
      }
    }
    for (unsigned eight = 0; eight < 8; ++eight) {  // columns, of which a lane has two
      float *const sums = d + eight * 4 + upper * 2;
      double first = sums[0], second = sums[1];
      for (unsigned of = 0; of < 16; ++of) {
        lospmm_u16 of_b[2];
        std::memcpy(of_b, columns + ks[of] * 128 + (eight ^ (ks[of] % 8)) * 16 + lane % 4 * 4, 4);
        first += of_a[of] * static_cast<double>(convert(of_b[0]));
        second += of_a[of] * static_cast<double>(convert(of_b[1]));
      }
      sums[0] = static_cast<float>(first), sums[1] = static_cast<float>(second);
    }
  }
}

// The same with all columns of A, 16 of them.
template <bool tokens, int parts, typename Convert>
static void wgmma_columns(float (&d)[parts][32], const unsigned (&a)[4], const unsigned char *columns, Convert convert) {
  const auto lanes = exchange(a[0], a[1], a[2], a[3]);
  const unsigned lane = threadIdx.x % WARP, group = lane / 4;
  double of_a[2][16];
  for (unsigned upper = 0; upper < 2; ++upper)
    for (unsigned k = 0; k < 16; ++k)
      of_a[upper][k] = static_cast<double>(convert(part_of(lanes[group * 4 + k % 8 / 2][k / 8 * 2 + upper], k % 2)));
  for (unsigned eight = 0; eight < 8 * parts; ++eight) {  // columns, of which a lane has two
    double sums[2][2] = {};
    for (unsigned k = 0; k < 16; ++k) {
      lospmm_u16 of_b[2];
      if constexpr (tokens) {
        const auto piece = reinterpret_cast<std::uintptr_t>(columns) % 128 / 16 + k / 8;
        const unsigned char *const rows = columns - reinterpret_cast<std::uintptr_t>(columns) % 128;
        for (unsigned of = 0, row = eight * 8 + lane % 4 * 2; of < 2; ++of, ++row)
          std::memcpy(&of_b[of], rows + row * 128 + (piece ^ row % 8) * 16 + k % 8 * 2, 2);
      } else {
        std::memcpy(of_b, columns + eight / 8 * 8192 + k * 128 + (eight % 8 ^ k % 8) * 16 + lane % 4 * 4, 4);
      }
      for (unsigned upper = 0; upper < 2; ++upper)
        for (unsigned of = 0; of < 2; ++of) sums[upper][of] += of_a[upper][k] * static_cast<double>(convert(of_b[of]));
    }
    for (unsigned upper = 0; upper < 2; ++upper)
      for (unsigned of = 0; of < 2; ++of) {
        float &sum = d[eight / 8][eight % 8 * 4 + upper * 2 + of];
        sum = static_cast<float>(sum + sums[upper][of]);
      }
  }
}

}  // namespace lospmm

using LospmmColumns = const unsigned char *;
static inline LospmmColumns lospmm_columns(const void *shared) {
  if (reinterpret_cast<std::uintptr_t>(shared) % 1024) lospmm::fault("columns at an address that is no multiple of 1024");
  return static_cast<const unsigned char *>(shared);
}
// LOSPMM_DTYPE and TOKENS are known only behind this header.
#define lospmm_behind_rows(columns, rows) ((columns) + (rows) * (TOKENS ? 2 : 128))
#define lospmm_wgmma_sparse lospmm_products_of<LOSPMM_DTYPE == 3, TOKENS>::sparse
#define lospmm_wgmma_columns lospmm_products_of<LOSPMM_DTYPE == 3, TOKENS>::product
template <bool is_bfloat16, bool tokens>
struct lospmm_products_of {
  static float converted(lospmm_u16 bits) { return is_bfloat16 ? lospmm_float_of_bfloat16(bits) : lospmm_float_of_half(bits); }
  template <int selector>
  static void sparse(float (&d)[32], const unsigned (&a)[4], LospmmColumns columns, unsigned places) {
    lospmm::wgmma_sparse(d, a, columns, places, selector, converted);
  }
  template <int parts>
  static void product(float (&d)[parts][32], const unsigned (&a)[4], LospmmColumns columns) {
    lospmm::wgmma_columns<tokens>(d, a, columns, converted);
  }
};
template <int behind_from>
static inline void lospmm_copy_lines(void *even, void *odd, const void *const (&from)[4], bool is_there) {
  for (int of = 0; of < 4; ++of)
    lospmm_copy<16>(static_cast<unsigned char *>(of % 2 ? odd : even) + of / 2 * 1024,
                    static_cast<const unsigned char *>(from[of]) + behind_from, is_there);
}

constexpr int MAP_BYTES = 128;
template <int box_rows>
static inline void lospmm_map_make(unsigned char *map, void *, const void *matrix, long long rows, long long columns) {
  if (reinterpret_cast<std::uintptr_t>(map) % MAP_BYTES || reinterpret_cast<std::uintptr_t>(matrix) % 16 || columns % 8)
    lospmm::fault("a map, or what it is of, that is not aligned");
  const lospmm::Map made = {matrix, rows, columns, box_rows};
  std::memcpy(map, &made, sizeof made);
}
static inline void lospmm_box_copy(void *shared, const unsigned char *map, int row, int column, unsigned long long *barrier) {
  lospmm::Map of;
  std::memcpy(&of, map, sizeof of);
  lospmm::box_copy(shared, of, row, column, barrier);
}
static inline unsigned lospmm_sm() { return 0; }
static inline void lospmm_show_to_products() {}
template <int threads>
static inline void lospmm_block_arrive() { lospmm::wait_for_block(); }
template <int threads>
static inline void lospmm_block_wait() { lospmm::wait_for_block(); }
template <int registers>
static inline void lospmm_give_registers() {}
template <int registers>
static inline void lospmm_take_registers() {}

static inline void lospmm_wgmma_begin() {}
static inline void lospmm_wgmma_commit() {}
// The warp waits as one: what its lanes read was read when one of them goes on.
template <int pending>
static inline void lospmm_wgmma_wait() { lospmm::exchange(0); }
using LospmmWeights = const float *;
static inline LospmmWeights lospmm_weights(const void *shared) {
  if (reinterpret_cast<std::uintptr_t>(shared) % 16) lospmm::fault("weights at an address that is no multiple of 16");
  return static_cast<const float *>(shared);
}
static inline LospmmWeights lospmm_behind(LospmmWeights weights, int floats) {
  if (floats % 4) lospmm::fault("weights at an address that is no multiple of 16");
  return weights + floats;
}
template <int sums>
static inline void lospmm_wgmma(float (&d)[sums], const unsigned (&a)[4], LospmmWeights weights) {
  lospmm::wgmma(d, a, weights);
}
template <int sums>
static inline void lospmm_wgmma_half(float (&d)[sums], const unsigned (&a)[4], LospmmWeights weights, bool adds) {
  lospmm::wgmma_half(d, a, weights, adds);
}
static inline unsigned lospmm_pair(float first, float second) {
  return lospmm_half_of_float(first) | static_cast<unsigned>(lospmm_half_of_float(second)) << 16;
}
