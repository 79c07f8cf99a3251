// Stochastic rounding of float32 to bfloat16: up with a probability of the fraction that is cut
// off, so that the mean of many roundings is the value. Include from *.isa.cpp.
//
// Sixteen random bits are added below the last place that stays, and the sum is cut. They come from
// Philox4x32-7 (common/philox.h) by the element's number in the whole parameter: element i draws
// word i % 4 of counter i / 4, whatever thread or process holds it. The specification is
// fusedops/ops/adamw.py.
#pragma once

#include <cstring>

#include "../common/vec.h"
#include "../elementwise/dropout.h"
#include "adamw.h"

namespace fusedops::CPU_CAPABILITY {
namespace {

inline PhiloxWords drawn_words(uint64_t key, uint64_t offset, uint64_t counter) {
  return philox4x32({{static_cast<uint32_t>(counter), static_cast<uint32_t>(counter >> 32),
                      static_cast<uint32_t>(offset), static_cast<uint32_t>(offset >> 32)}},
                    static_cast<uint32_t>(key), static_cast<uint32_t>(key >> 32));
}

#if defined(FUSEDOPS_PHILOX_LANES)
// The words of PhiloxLanes::kCounters counters, none of which carries into the upper half, in the
// order of the elements.
inline void draw_lanes(const RoundKeys& keys, uint64_t offset, uint64_t counter, uint32_t* words) {
  using L = PhiloxLanes;
  using V = L::V;
  const V m0 = L::all(kPhiloxMultiplier0), m1 = L::all(kPhiloxMultiplier1);
  V c0 = L::from(counter), c1 = L::all(counter >> 32);
  V c2 = L::all(offset & 0xFFFFFFFF), c3 = L::all(offset >> 32);
#pragma GCC unroll 8
  for (int round = 0; round < kPhiloxRounds; ++round) {
    const V p0 = L::multiply(c0, m0), p1 = L::multiply(c2, m1);
    c0 = L::exclusive_or(L::high(p1), c1, L::all(keys.first[round]));
    c2 = L::exclusive_or(L::high(p0), c3, L::all(keys.second[round]));
    c1 = p1;
    c3 = p0;
  }
#if defined(CPU_CAPABILITY_AVX512)
  const V first = _mm512_mask_shuffle_epi32(c0, 0xAAAA, c1, _MM_PERM_CCAA);
  const V second = _mm512_mask_shuffle_epi32(c2, 0xAAAA, c3, _MM_PERM_CCAA);
  _mm512_storeu_si512(words, _mm512_unpacklo_epi64(first, second));
  _mm512_storeu_si512(words + 16, _mm512_unpackhi_epi64(first, second));
#else
  const V first = _mm256_blend_epi32(c0, _mm256_slli_epi64(c1, 32), 0xAA);
  const V second = _mm256_blend_epi32(c2, _mm256_slli_epi64(c3, 32), 0xAA);
  auto* to = reinterpret_cast<__m256i*>(words);
  _mm256_storeu_si256(to, _mm256_unpacklo_epi64(first, second));
  _mm256_storeu_si256(to + 1, _mm256_unpackhi_epi64(first, second));
#endif
}
#endif

// The words of the elements begin .. begin + count - 1 of a whole parameter. Their numbers are
// unsigned: one past 2^63 wraps around, and never makes a negative place among four words.
inline void draw_run(uint64_t key, uint64_t offset, uint64_t begin, int64_t count,
                     uint32_t* words) {
  int64_t done = 0;
#if defined(FUSEDOPS_PHILOX_LANES)
  constexpr int64_t kStep = 4 * PhiloxLanes::kCounters;
  const RoundKeys keys(key);
#endif
  while (done < count) {
    const uint64_t element = begin + static_cast<uint64_t>(done);
    const uint64_t counter = element / 4;
#if defined(FUSEDOPS_PHILOX_LANES)
    const bool carries = (counter >> 32) != ((counter + PhiloxLanes::kCounters - 1) >> 32);
    if (element % 4 == 0 && count - done >= kStep && !carries) {
      draw_lanes(keys, offset, counter, words + done);
      done += kStep;
      continue;
    }
#endif
    const auto drawn = drawn_words(key, offset, counter);
    const auto skip = static_cast<int64_t>(element % 4);
    const int64_t taken = std::min<int64_t>(4 - skip, count - done);
    std::memcpy(words + done, drawn.word + skip, taken * sizeof(uint32_t));
    done += taken;
  }
}

// The same for elements of a local tensor that may be a part of the parameter.
inline void draw_elements(const AdamWTensor& t, uint64_t offset, int64_t begin, int64_t count,
                          uint32_t* words) {
  const Place& place = t.place;
  for (int64_t done = 0; done < count;) {
    const int64_t row = (begin + done) / place.run, column = (begin + done) % place.run;
    const int64_t taken = std::min(count - done, place.run - column);
    const auto first = static_cast<uint64_t>(place.base) +
                       static_cast<uint64_t>(row) * static_cast<uint64_t>(place.pitch) +
                       static_cast<uint64_t>(column);
    draw_run(t.key, offset, first, taken, words + done);
    done += taken;
  }
}

inline uint16_t round_stochastically(float value, uint32_t random) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  const bool is_nan = (bits & 0x7FFFFFFF) > 0x7F800000;
  return is_nan ? 0x7FC0 : static_cast<uint16_t>((bits + random) >> 16);
}

// The lower or the upper halves of `words` decide.
template <int kShift>
inline void store_stochastically(c10::BFloat16* to, const Vec<float>& vector, const uint32_t* words,
                                 int64_t count) {
  constexpr int kWidth = Vec<float>::size();
  float values[kWidth];
  vector.store(values);
  if (count == kWidth) {
    for (int i = 0; i < kWidth; ++i)
      to[i].x = round_stochastically(values[i], words[i] >> kShift & 0xFFFF);
  } else {
    for (int64_t i = 0; i < count; ++i)
      to[i].x = round_stochastically(values[i], words[i] >> kShift & 0xFFFF);
  }
}

}  // namespace
}  // namespace fusedops::CPU_CAPABILITY
