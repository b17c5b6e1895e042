
// Rows of A as lists of entries, GROUP of them at a time, and what they take of B read from where it lies.
//
// An entry is WORDS words: a column and a float32 weight, or, of one word, a column of 16 bits below a weight of 16. A
// weight of 0 pads a list: nothing of B is read for it.

struct alignas(sizeof(Element) * VECTOR) Elements {
  Element of[VECTOR];
};

struct Entries {
  unsigned words[GROUP * WORDS];
};

LOSPMM_INLINE Entries lospmm_entries(const unsigned *from) {
  Entries found;
  if constexpr (GROUP * WORDS % 4 == 0) {
#pragma unroll
    for (int at = 0; at < GROUP * WORDS; at += 4) {
      const uint4 four = __ldg(reinterpret_cast<const uint4 *>(from + at));
      found.words[at] = four.x, found.words[at + 1] = four.y;
      found.words[at + 2] = four.z, found.words[at + 3] = four.w;
    }
  } else {
#pragma unroll
    for (int at = 0; at < GROUP * WORDS; at += 2) {
      const uint2 two = __ldg(reinterpret_cast<const uint2 *>(from + at));
      found.words[at] = two.x, found.words[at + 1] = two.y;
    }
  }
  return found;
}

// The groups first, first + stride, ... below ``groups`` of a list, times B, of which ``b`` is this thread's columns.
LOSPMM_INLINE void lospmm_gather(float (&sums)[VECTOR], const unsigned *list, int first, int groups, int stride,
                                 const Element *b, unsigned n) {
  if (first >= groups) return;
  Entries next = lospmm_entries(list + static_cast<long long>(first) * (GROUP * WORDS));
  for (int at = first; at < groups; at += stride) {
    const Entries now = next;
    if (at + stride < groups) next = lospmm_entries(list + static_cast<long long>(at + stride) * (GROUP * WORDS));
    float weights[GROUP];
    Elements elements[GROUP];
#pragma unroll
    for (int i = 0; i < GROUP; ++i) {
      const unsigned word = now.words[i * WORDS];
      const unsigned column = WORDS == 1 ? word & 0xFFFFu : word;
#if WORDS == 1
      weights[i] = lospmm_float(static_cast<Element>(word >> 16));
#else
      weights[i] = __uint_as_float(now.words[i * WORDS + 1]);
#endif
      elements[i] = Elements{};
      if (weights[i] != 0.0f)
        elements[i] = *reinterpret_cast<const Elements *>(b + static_cast<unsigned long long>(column) * n);
    }
#pragma unroll
    for (int i = 0; i < GROUP; ++i)
#pragma unroll
      for (int of = 0; of < VECTOR; ++of)
        sums[of] = __fmaf_rn(weights[i], lospmm_float(elements[i].of[of]), sums[of]);
  }
}

LOSPMM_INLINE void lospmm_finish_row(const float (&sums)[VECTOR], int row, long long place, Element *c,
                                     const Element *residual) {
  Elements results;
#pragma unroll
  for (int of = 0; of < VECTOR; ++of) results.of[of] = lospmm_finished(sums[of], row, place + of, residual);
  *reinterpret_cast<Elements *>(c + place) = results;
}
