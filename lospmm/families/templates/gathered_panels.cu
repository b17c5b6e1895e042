
// Row panels of A on tensor cores: C^T = B^T A^T, so that the 8 rows of a subgroup are the short side of a product.
//
// A block stages slabs of B's rows in shared memory. A panel of SUBGROUPS x 8 rows and COLS columns of C is that of
// PARTS warps, each with a stream of its steps. A step multiplies 4 x EACH rows of B, gathered from the slab, by the weights of those subgroups that its mask
// names. A thread t of a quad reads only rows whose slot is t modulo 4, which keeps the quad on different banks.
//
// Numbers: n, slabs, k. Arrays: the rows of a panel (-1: none); the row of B in each slot of each slab of a block (-1:
// zeros), where they are LISTED; the first step of each slab of a stream; the mask of each step; the bytes from the start of the slab to each of
// its rows; a fragment of A for each subgroup, of which only those in the mask are read.

constexpr int SIZE = sizeof(Element);
constexpr int EACH = 8 / SIZE;                            // rows of B that a thread reads in a step
constexpr int ROW_BYTES = COLS * SIZE;                    // of B in shared memory
constexpr int WIDTH = 16 / SIZE < COLS / 8 ? 16 / SIZE : COLS / 8;  // elements of a row that a thread reads at once
constexpr int PIECES = COLS / (8 * WIDTH);
constexpr int TILES = COLS / 16;
constexpr int SPLIT = LOSPMM_DTYPE == 0 ? 2 : 1;          // float32 is the sum of two TF32 numbers
constexpr int WORDS = WIDTH * SIZE / 4;
constexpr int SLAB_BYTES = DEPTH * ROW_BYTES;
constexpr int HELD = DEPTH - 4;                           // slots of a slab that hold rows of B
constexpr int SWIZZLE = ROW_BYTES >= 128 ? 0 : ROW_BYTES == 64 ? 1 : 2;
constexpr int THREADS = 32 * WARPS;
constexpr int STORED = VECTOR < WIDTH ? VECTOR : WIDTH;   // elements of C that are next to each other

struct alignas(4 * WORDS) Words {
  unsigned of[WORDS];
};
struct alignas(8 * SPLIT) Weights {
  unsigned of[SPLIT][2];
};
struct alignas(4 * EACH) Slots {
  int of[EACH];
};
struct alignas(SIZE * STORED) Stored {
  Element of[STORED];
};

// What a step needs beside B, loaded AHEAD steps early; ``next`` is the mask of the step AHEAD after it.
struct Step {
  unsigned mask, next;
  Slots slots;
  Weights weights[SUBGROUPS];
};

LOSPMM_INLINE void load(Step &step, const unsigned *next, const Slots *slots, const Weights *weights) {
  step.mask = step.next;
  step.next = __ldg(next);
  step.slots = *slots;
#pragma unroll
  for (int p = 0; p < SUBGROUPS; ++p)
    if (step.mask >> p & 1) step.weights[p] = weights[32 * p];
}

// The rows of a slab to ``to``, while the thread goes on: ``rows`` of them from ``b`` on, or those that ``listed`` names.
// Where an element is shorter than what can be copied so, it is copied at once. Slots without a row get zeros.
LOSPMM_INLINE void fetch(unsigned char *to, const int *listed, int rows, const Element *b, long long n,
                         long long first) {
  constexpr int CHUNKS = COLS / VECTOR, LINES = THREADS / CHUNKS;
  static_assert(THREADS % CHUNKS == 0);
  const int line = threadIdx.x / CHUNKS, place = threadIdx.x % CHUNKS * VECTOR;
  const bool inside = first + place < n;
  const Element *from = b + (LISTED ? 0 : line * n) + first + place;
#pragma unroll 8
  for (int slot = line; slot < DEPTH; slot += LINES) {
    const long long row = LISTED ? __ldg(listed + slot) : 0;
    const bool is_there = inside && (LISTED ? row >= 0 : slot < rows);
    const Element *element = from + row * n;
    unsigned char *into = to + slot * ROW_BYTES + ((place * SIZE) ^ ((slot % 4 >> SWIZZLE) * 32));
    if constexpr (VECTOR * SIZE < 4)
      *reinterpret_cast<Element *>(into) = is_there ? *element : Element(0);
    else
      lospmm_copy<VECTOR * SIZE>(into, element, is_there);
    if (!LISTED) from += LINES * n;
  }
}

// A thread's part of 4 x EACH rows of B.
struct Rows {
  Words of[PIECES][EACH];
};

LOSPMM_INLINE void gather(Rows &rows, const unsigned char *slab, const Slots &slots) {
#pragma unroll
  for (int piece = 0; piece < PIECES; ++piece)
#pragma unroll
    for (int i = 0; i < EACH; ++i)
      rows.of[piece][i] = *reinterpret_cast<const Words *>(slab + slots.of[i] + piece * 8 * WIDTH * SIZE);
}

// The same as fragments, the long side of the products; of float32 the large part, and the rest.
struct Fragments {
  unsigned large[TILES][4], rest[SPLIT == 2 ? TILES : 1][4];
};

LOSPMM_INLINE void arrange(Fragments &fragments, const Rows &rows) {
#pragma unroll
  for (int piece = 0; piece < PIECES; ++piece)
#pragma unroll
    for (int part = 0; part < WIDTH / 2; ++part) {
      const int tile = piece * (WIDTH / 2) + part;
      const Words *words = rows.of[piece];
      if constexpr (SIZE == 2) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const unsigned one = words[2 * half].of[part], other = words[2 * half + 1].of[part];
          fragments.large[tile][2 * half] = __byte_perm(one, other, 0x5410);
          fragments.large[tile][2 * half + 1] = __byte_perm(one, other, 0x7632);
        }
      } else {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float value = __uint_as_float(words[i / 2].of[2 * part + i % 2]);
          fragments.large[tile][i] = lospmm_tf32(value);
          if constexpr (SPLIT == 2)
            fragments.rest[tile][i] = lospmm_tf32(value - __uint_as_float(fragments.large[tile][i]));
        }
      }
    }
}

LOSPMM_INLINE void multiply(float (&sums)[TILES][4], const Fragments &fragments, const Weights &weights) {
  if constexpr (SPLIT == 2) {
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile) {
      lospmm_mma_tf32(sums[tile], fragments.rest[tile], weights.of[0]);
      lospmm_mma_tf32(sums[tile], fragments.large[tile], weights.of[SPLIT - 1]);
    }
  }
#pragma unroll
  for (int tile = 0; tile < TILES; ++tile) {
    lospmm_mma(sums[tile], fragments.large[tile], weights.of[0]);
  }
}

LOSPMM_KERNEL(lospmm_gathered_panels) {
#if !RESIDUAL
  const Element *residual = nullptr;
#endif
  const long long n = lospmm_number(0), k = lospmm_number(2), first = static_cast<long long>(blockIdx.x) * COLS;
  const int slabs = static_cast<int>(lospmm_number(1));
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = lane / 4, quad = lane % 4;
  const long long stream = static_cast<long long>(blockIdx.y) * WARPS + warp;
  const unsigned *starts = lospmm_array<unsigned>(2) + stream * slabs;
  const long long start = starts[0];
  unsigned following = starts[1];  // the first step of the next slab

  const int *slots_of_b = lospmm_array<int>(1) + static_cast<long long>(blockIdx.y) * slabs * DEPTH;
  const auto fetch_slab = [&](int slab) {
    const long long done = static_cast<long long>(slab) * HELD;
    fetch(lospmm_shared + slab % STAGES * SLAB_BYTES, slots_of_b + slab * DEPTH, static_cast<int>(k - done < HELD ? k - done : HELD),
          b + (LISTED ? 0 : done * n), n, first);
  };
#pragma unroll 1
  for (int slab = 0; slab < STAGES; ++slab) {
    if (slab < slabs) fetch_slab(slab);
    lospmm_commit();
  }

  const unsigned *masks = lospmm_array<unsigned>(3) + start;
  const Slots *slots = lospmm_array<Slots>(4) + start * 4 + quad;
  const Weights *weights = lospmm_array<Weights>(5) + start * SUBGROUPS * 32 + lane;
  Step steps[AHEAD];
#pragma unroll
  for (int i = 0; i < AHEAD; ++i) {
    steps[i].next = __ldg(masks + i);
    load(steps[i], masks + i + AHEAD, slots + 4 * i, weights + 32 * SUBGROUPS * i);
  }

  float sums[SUBGROUPS][TILES][4] = {};
  const int own = (group * WIDTH * SIZE) ^ ((quad >> SWIZZLE) * 32);
  const unsigned char *staged = lospmm_shared + own;
  int slab = -1;
  unsigned left = 0, reached = static_cast<unsigned>(start);  // steps of the slab, and where it ends

  // The next step, the ``i``-th of AHEAD; false when there is none. Every warp comes past every slab.
  const auto turn = [&](int i) {
    while (left == 0) {
      if (++slab == slabs) return false;
      if (slab == 0)
        lospmm_wait<STAGES - 1>();
      else
        lospmm_wait<(STAGES > 1 ? STAGES - 2 : 0)>();
      __syncthreads();
      if (STAGES > 1 && slab > 0) {
        if (slab - 1 + STAGES < slabs) fetch_slab(slab - 1 + STAGES);
        lospmm_commit();
      }
      staged = lospmm_shared + slab % STAGES * SLAB_BYTES + own;
      left = following - reached;
      reached = following;
      if (slab + 1 < slabs) following = starts[slab + 2];
    }
    --left;
    Rows gathered;
    Fragments fragments;
    gather(gathered, staged, steps[i].slots);
    arrange(fragments, gathered);
#pragma unroll
    for (int p = 0; p < SUBGROUPS; ++p)
      if (SUBGROUPS == 1 || steps[i].mask >> p & 1) multiply(sums[p], fragments, steps[i].weights[p]);
    load(steps[i], masks + i + 2 * AHEAD, slots + 4 * (i + AHEAD), weights + 32 * SUBGROUPS * (i + AHEAD));
    return true;
  };
  while (turn(0) && (AHEAD < 2 || turn(1 % AHEAD)) && (AHEAD < 3 || turn(2 % AHEAD)) && (AHEAD < 4 || turn(3 % AHEAD))) {
    masks += AHEAD;
    slots += 4 * AHEAD;
    weights += 32 * SUBGROUPS * AHEAD;
  }

  // The warps of a panel add up what they have, in their order.
  if constexpr (PARTS > 1) {
    constexpr int SUMS = SUBGROUPS * TILES * 4;
    float *others = reinterpret_cast<float *>(lospmm_shared) + lane;
    float(&own_sums)[SUMS] = reinterpret_cast<float(&)[SUMS]>(sums);
    __syncthreads();
    if (warp % PARTS > 0) {
#pragma unroll
      for (int i = 0; i < SUMS; ++i) others[(warp * SUMS + i) * 32] = own_sums[i];
    }
    __syncthreads();
    if (warp % PARTS > 0) return;
#pragma unroll
    for (int part = 1; part < PARTS; ++part)
#pragma unroll
      for (int i = 0; i < SUMS; ++i) own_sums[i] += others[((warp + part) * SUMS + i) * 32];
  }

  const int2 *rows = reinterpret_cast<const int2 *>(lospmm_array<int>(0) + stream / PARTS * (8 * SUBGROUPS)) + quad;
  int2 pairs[SUBGROUPS];
#pragma unroll
  for (int p = 0; p < SUBGROUPS; ++p) pairs[p] = rows[4 * p];
#pragma unroll
  for (int p = 0; p < SUBGROUPS; ++p)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = half ? pairs[p].y : pairs[p].x;
      if (row < 0) continue;
#pragma unroll
      for (int piece = 0; piece < PIECES; ++piece)
#pragma unroll
        for (int part = 0; part < WIDTH; part += STORED) {
          const long long column = first + (piece * 8 + group) * WIDTH + part;
          if (column >= n) continue;
          Stored results;
#pragma unroll
          for (int i = 0; i < STORED; ++i) {
            const int element = part + i;
            const float sum = sums[p][piece * (WIDTH / 2) + element / 2][element % 2 * 2 + half];
            results.of[i] = lospmm_finished(sum, row, row * n + column + i, residual);
          }
          *reinterpret_cast<Stored *>(c + row * n + column) = results;
        }
    }
}
