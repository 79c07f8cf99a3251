// The dropout mask of a run of elements as bits, and vectors masked by them. Include from
// *.isa.cpp.
//
// 64 elements are 16 counters of Philox. Counters stand in 64-bit lanes, a word each in the low
// half: the widening multiply reads nothing else, so that a round is two multiplies, two shifts and
// two three-way xors a vector, and no shuffles. Measured on one (shared) Zen 5 core with AVX-512:
// 0.21 ns an element with four vectors side by side, 0.30 ns with one.
#pragma once

#include <algorithm>
#include <cstring>
#include <limits>

#include "../../common/philox.h"
#include "../common/vec.h"

namespace fusedops::CPU_CAPABILITY {
namespace {

#if defined(CPU_CAPABILITY_AVX512)
#define FUSEDOPS_PHILOX_LANES

// Counters in 64-bit lanes, in an order that lets unpacklo and unpackhi put words into the order of
// the elements.
struct PhiloxLanes {
  using V = __m512i;
  static constexpr int kCounters = 8;
  static constexpr int kGroup = 4;  // vectors at a time: what fits the registers hides the latency

  static V all(uint64_t value) { return _mm512_set1_epi64(static_cast<int64_t>(value)); }
  static V from(uint64_t counter) {
    return _mm512_add_epi64(all(counter), _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7));
  }
  static V multiply(V a, V b) { return _mm512_mul_epu32(a, b); }
  static V high(V a) { return _mm512_srli_epi64(a, 32); }
  static V exclusive_or(V a, V b, V c) { return _mm512_ternarylogic_epi64(a, b, c, 0x96); }

  // Bit 4 * i + k: whether word k of counter i exceeds the limit.
  static uint32_t exceeds(V c0, V c1, V c2, V c3, uint32_t limit) {
    const V first = _mm512_mask_shuffle_epi32(c0, 0xAAAA, c1, _MM_PERM_CCAA);
    const V second = _mm512_mask_shuffle_epi32(c2, 0xAAAA, c3, _MM_PERM_CCAA);
    const V limits = _mm512_set1_epi32(static_cast<int>(limit));
    const uint32_t lower = _mm512_cmpgt_epu32_mask(_mm512_unpacklo_epi64(first, second), limits);
    const uint32_t upper = _mm512_cmpgt_epu32_mask(_mm512_unpackhi_epi64(first, second), limits);
    return lower | upper << 16;
  }
};

#elif defined(CPU_CAPABILITY_AVX2)
#define FUSEDOPS_PHILOX_LANES

struct PhiloxLanes {
  using V = __m256i;
  static constexpr int kCounters = 4;
  static constexpr int kGroup = 2;

  static V all(uint64_t value) { return _mm256_set1_epi64x(static_cast<int64_t>(value)); }
  static V from(uint64_t counter) {
    return _mm256_add_epi64(all(counter), _mm256_setr_epi64x(0, 2, 1, 3));
  }
  static V multiply(V a, V b) { return _mm256_mul_epu32(a, b); }
  static V high(V a) { return _mm256_srli_epi64(a, 32); }
  static V exclusive_or(V a, V b, V c) { return _mm256_xor_si256(_mm256_xor_si256(a, b), c); }

  static uint32_t exceeds(V c0, V c1, V c2, V c3, uint32_t limit) {
    const V first = _mm256_blend_epi32(c0, _mm256_slli_epi64(c1, 32), 0xAA);
    const V second = _mm256_blend_epi32(c2, _mm256_slli_epi64(c3, 32), 0xAA);
    // AVX2 compares signed numbers only.
    const V sign = _mm256_set1_epi32(std::numeric_limits<int32_t>::min());
    const V limits = _mm256_xor_si256(sign, _mm256_set1_epi32(static_cast<int>(limit)));
    const auto bits = [&](V words) -> uint32_t {
      const V greater = _mm256_cmpgt_epi32(_mm256_xor_si256(words, sign), limits);
      return _mm256_movemask_ps(_mm256_castsi256_ps(greater));
    };
    return bits(_mm256_unpacklo_epi64(first, second)) | bits(_mm256_unpackhi_epi64(first, second))
                                                            << 8;
  }
};

#endif

#if defined(FUSEDOPS_PHILOX_LANES)

struct RoundKeys {
  explicit RoundKeys(uint64_t seed) {
    auto key0 = static_cast<uint32_t>(seed), key1 = static_cast<uint32_t>(seed >> 32);
    for (int round = 0; round < kPhiloxRounds; ++round) {
      first[round] = key0;
      second[round] = key1;
      key0 += kPhiloxWeyl0;
      key1 += kPhiloxWeyl1;
    }
  }
  uint64_t first[kPhiloxRounds];
  uint64_t second[kPhiloxRounds];
};

// What the first three rounds take that all counters with one upper half share: three of the four
// words that enter are equal, so that the first two rounds are 7 instructions a vector, not 12.
struct FirstRounds {
  FirstRounds(const Dropout& d, const RoundKeys& keys, uint64_t counter)
      : upper(counter >> 32), key2_of_round0((d.offset >> 32) ^ keys.second[0]) {
    const uint64_t product1 = low(d.offset) * kPhiloxMultiplier1;
    const uint64_t word0 = (product1 >> 32) ^ upper ^ keys.first[0];
    const uint64_t product0 = word0 * kPhiloxMultiplier0;
    key0_of_round1 = low(product1) ^ keys.first[1];
    key2_of_round1 = (product0 >> 32) ^ keys.second[1];
    key2_of_round2 = low(product0) ^ keys.second[2];
  }
  static uint64_t low(uint64_t word) { return word & 0xFFFFFFFF; }

  uint64_t upper;
  uint64_t key2_of_round0;
  uint64_t key0_of_round1, key2_of_round1;
  uint64_t key2_of_round2;
};

// Writes the keep bits of the elements of N * kCounters counters, N vectors side by side, none of
// which carries into the upper half.
template <int N>
inline void keep_bits(const Dropout& d, const RoundKeys& keys, const FirstRounds& first,
                      uint64_t counter, char* bits) {
  using L = PhiloxLanes;
  using V = L::V;
  const V m0 = L::all(kPhiloxMultiplier0), m1 = L::all(kPhiloxMultiplier1);
  V c0[N], c1[N], c2[N], c3[N];
#pragma GCC unroll 4
  for (int i = 0; i < N; ++i) {
    const V p0 = L::multiply(L::from(counter + L::kCounters * i), m0);
    const V p1 = L::multiply(L::high(p0) ^ L::all(first.key2_of_round0), m1);
    c0[i] = L::high(p1) ^ L::all(first.key0_of_round1);
    c1[i] = p1;
    c2[i] = p0 ^ L::all(first.key2_of_round1);
  }
#pragma GCC unroll 8
  for (int round = 2; round < kPhiloxRounds; ++round) {
    const V key0 = L::all(keys.first[round]);
    const V key1 = L::all(round == 2 ? first.key2_of_round2 : keys.second[round]);
#pragma GCC unroll 4
    for (int i = 0; i < N; ++i) {
      const V p0 = L::multiply(c0[i], m0), p1 = L::multiply(c2[i], m1);
      c0[i] = L::exclusive_or(L::high(p1), c1[i], key0);
      c2[i] = round == 2 ? L::high(p0) ^ key1 : L::exclusive_or(L::high(p0), c3[i], key1);
      c1[i] = p1;
      c3[i] = p0;
    }
  }
  const auto limit = static_cast<uint32_t>(d.threshold - 1);
#pragma GCC unroll 4
  for (int i = 0; i < N; ++i) {
    const uint32_t part = L::exceeds(c0[i], c1[i], c2[i], c3[i], limit);
    std::memcpy(bits + L::kCounters / 2 * i, &part, L::kCounters / 2);
  }
}

// Writes the keep bits of `blocks` blocks of 64 elements, 16 counters each.
inline void keep_blocks(const Dropout& d, int64_t first, int64_t blocks, uint64_t* words) {
  constexpr int kVectors = 16 / PhiloxLanes::kCounters;  // of a block
  constexpr uint64_t kStep = PhiloxLanes::kGroup * PhiloxLanes::kCounters;
  const RoundKeys keys(d.seed);
  auto counter = static_cast<uint64_t>(first) * 16;
  const uint64_t end = counter + 16 * blocks;
  auto* bits = reinterpret_cast<char*>(words);
  FirstRounds start(d, keys, counter);
  while (counter < end) {
    if (counter >> 32 != start.upper) start = FirstRounds(d, keys, counter);
    if (counter % kStep == 0 && counter + kStep <= end) {
      keep_bits<PhiloxLanes::kGroup>(d, keys, start, counter, bits);
      counter += kStep;
      bits += kStep / 2;
    } else {
      keep_bits<kVectors>(d, keys, start, counter, bits);
      counter += 16;
      bits += 8;
    }
  }
}

#else

inline void keep_blocks(const Dropout& d, int64_t first, int64_t blocks, uint64_t* words) {
  for (int64_t block = 0; block < blocks; ++block) {
    words[block] = 0;
    for (int i = 0; i < 16; ++i) {
      const auto drawn = d.words(static_cast<uint64_t>(first + block) * 16 + i);
      for (int k = 0; k < 4; ++k) {
        words[block] |= uint64_t{drawn.word[k] >= d.threshold} << (4 * i + k);
      }
    }
  }
}

#endif

// The most elements that one KeepMask holds: 512 bytes of bits.
inline constexpr int64_t kDropoutTile = 4096;

// The keep bits of elements begin .. begin + count - 1 (at most kDropoutTile).
class KeepMask {
 public:
  KeepMask(const Dropout& d, int64_t begin, int64_t count) {
    // What is no index still reads no memory of others.
    shift_ = static_cast<int64_t>(static_cast<uint64_t>(begin) % 64);
    const auto first = static_cast<int64_t>(static_cast<uint64_t>(begin) / 64);
    const int64_t blocks = (shift_ + count + 63) / 64;
    // No word exceeds a limit of 2^32 - 1: p = 1 needs no seed, and no work.
    if (d.threshold > std::numeric_limits<uint32_t>::max()) {
      std::fill(words_, words_ + blocks, 0);
    } else {
      keep_blocks(d, first, blocks, words_);
    }
    words_[blocks] = 0;
  }

  // The bits of elements begin + i, ... of a vector, from the lowest bit on.
  uint32_t bits(int64_t i) const {
    uint32_t word;
    std::memcpy(&word, reinterpret_cast<const char*>(words_) + (shift_ + i) / 8, sizeof(word));
    return word >> ((shift_ + i) % 8);
  }

 private:
  int64_t shift_;
  uint64_t words_[kDropoutTile / 64 + 2];
};

// x * scale where the bit is set, else 0 (also where x is not finite).
inline at::vec::Vectorized<float> drop(const at::vec::Vectorized<float>& x, uint32_t bits,
                                       const at::vec::Vectorized<float>& scale) {
#if defined(CPU_CAPABILITY_AVX512)
  return _mm512_maskz_mul_ps(static_cast<__mmask16>(bits), x, scale);
#elif defined(CPU_CAPABILITY_AVX2)
  const __m256i lane = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
  const __m256i kept = _mm256_cmpeq_epi32(_mm256_and_si256(_mm256_set1_epi32(bits), lane), lane);
  return _mm256_and_ps(_mm256_castsi256_ps(kept), _mm256_mul_ps(x, scale));
#else
  float values[at::vec::Vectorized<float>::size()];
  (x * scale).store(values);
  for (int i = 0; i < at::vec::Vectorized<float>::size(); ++i) {
    if (!(bits >> i & 1)) values[i] = 0.0f;
  }
  return at::vec::Vectorized<float>::loadu(values);
#endif
}

inline at::vec::Vectorized<double> drop(const at::vec::Vectorized<double>& x, uint32_t bits,
                                        const at::vec::Vectorized<double>& scale) {
  double values[at::vec::Vectorized<double>::size()];
  (x * scale).store(values);
  for (int i = 0; i < at::vec::Vectorized<double>::size(); ++i) {
    if (!(bits >> i & 1)) values[i] = 0.0;
  }
  return at::vec::Vectorized<double>::loadu(values);
}

// Calls body(column, count, full, dropped) over the vectors of a row, whose first element has the
// linear index `begin`; dropped(v) is dropout of the vector v at that column.
template <typename T, bool kDropout, typename F>
inline __attribute__((always_inline)) void for_each_dropped(const Dropout& d, int64_t begin,
                                                            int64_t columns, const F& body) {
  using V = Vec<T>;
  if constexpr (!kDropout) {
    for_each_vector<V::size()>(columns, [&](int64_t c, int64_t count, auto full) {
      body(c, count, full, [](const V& v) { return v; });
    });
  } else {
    const V scale(static_cast<Acc<T>>(d.scale));
    for (int64_t tile = 0; tile < columns; tile += kDropoutTile) {
      const int64_t width = std::min(kDropoutTile, columns - tile);
      const KeepMask mask(d, d.places.of(begin + tile), width);
      for_each_vector<V::size()>(width, [&](int64_t c, int64_t count, auto full) {
        const uint32_t bits = mask.bits(c);
        body(tile + c, count, full, [&](const V& v) { return drop(v, bits, scale); });
      });
    }
  }
}

}  // namespace
}  // namespace fusedops::CPU_CAPABILITY
