// From the codes of a packed weight (quantized_linear.h) to vectors of float: 16 outputs at one k.
//
// A code of 4 bits is an index into a table of 16 floats, for int4 as for nf4: a shift and a
// permutation. Include from *.isa.cpp only.
#pragma once

#include <cstdint>
#include <cstring>

#include "../common/vec.h"
#include "quantized_linear.h"

namespace fusedops::CPU_CAPABILITY {
namespace {

using Floats = at::vec::Vectorized<float>;
constexpr int kParts = static_cast<int>(kBlockOutputs) / Floats::size();

// Place of a nibble in its lane -> k, relative to the line's first.
constexpr int depth_of_nibble(int nibble) {
  return nibble < 4 ? 2 * nibble : 2 * nibble - 7;
}

// The values of the codes of 4 bits. nf4: Dettmers et al., arXiv:2305.14314.
template <WeightFormat F>
inline constexpr float kValues[16] = {-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7};
template <>
inline constexpr float kValues<WeightFormat::nf4>[16] = {-1.0f,
                                                         -0.6961928009986877f,
                                                         -0.5250730514526367f,
                                                         -0.39491748809814453f,
                                                         -0.28444138169288635f,
                                                         -0.18477343022823334f,
                                                         -0.09105003625154495f,
                                                         0.0f,
                                                         0.07958029955625534f,
                                                         0.16093020141124725f,
                                                         0.24611230194568634f,
                                                         0.33791524171829224f,
                                                         0.44070982933044434f,
                                                         0.5626170039176941f,
                                                         0.7229568362236023f,
                                                         1.0f};

// Decodes part `part` of a line, a vector of outputs; `step` is the place of the nibble, or of the
// 16 bytes.
template <WeightFormat F>
class Decoder {
 public:
#if defined(CPU_CAPABILITY_AVX512)
  Decoder() : table_(_mm512_loadu_ps(kValues<F>)) {}

  Floats decode(const uint8_t* line, int /*part*/, int step) const {
    if constexpr (F == WeightFormat::int8) {
      const auto bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(line + 16 * step));
      return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes));
    } else {
      // The permutation reads the lowest 4 bits of a lane alone.
      const __m512i lanes = _mm512_loadu_si512(line);
      return _mm512_permutexvar_ps(_mm512_srli_epi32(lanes, 4 * step), table_);
    }
  }

 private:
  __m512 table_;
#elif defined(CPU_CAPABILITY_AVX2)
  Decoder() : low_(_mm256_loadu_ps(kValues<F>)), high_(_mm256_loadu_ps(kValues<F> + 8)) {}

  Floats decode(const uint8_t* line, int part, int step) const {
    if constexpr (F == WeightFormat::int8) {
      const auto* from = reinterpret_cast<const __m128i*>(line + 16 * step + 8 * part);
      return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(from)));
    } else {
      const auto lanes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(line + 32 * part));
      const __m256i codes = _mm256_srli_epi32(lanes, 4 * step);
      if constexpr (F == WeightFormat::int4) {
        const __m256i numbers = _mm256_and_si256(codes, _mm256_set1_epi32(15));
        return _mm256_cvtepi32_ps(_mm256_sub_epi32(numbers, _mm256_set1_epi32(8)));
      }
      // The fourth bit becomes the sign, by which the two halves of the table are blended.
      const __m256 is_high = _mm256_castsi256_ps(_mm256_slli_epi32(codes, 28));
      return _mm256_blendv_ps(_mm256_permutevar8x32_ps(low_, codes),
                              _mm256_permutevar8x32_ps(high_, codes), is_high);
    }
  }

 private:
  __m256 low_, high_;
#else
  Floats decode(const uint8_t* line, int part, int step) const {
    float values[Floats::size()];
    for (int i = 0; i < Floats::size(); ++i) {
      const int output = part * Floats::size() + i;
      if constexpr (F == WeightFormat::int8) {
        values[i] = static_cast<float>(static_cast<int8_t>(line[16 * step + output]));
      } else {
        const uint8_t byte = line[4 * output + step / 2];
        values[i] = kValues<F>[(step % 2 == 0 ? byte : byte >> 4) & 15];
      }
    }
    return Floats::loadu(values);
  }
#endif
};

// k of a step of a line, relative to the line's first.
template <WeightFormat F>
constexpr int depth_of_step(int step) {
  return F == WeightFormat::int8 ? step : depth_of_nibble(step);
}

// Calls body(tag) with the format as a constant.
template <typename Body>
inline void with_format(WeightFormat format, const Body& body) {
  switch (format) {
    case WeightFormat::int8:
      return body(std::integral_constant<WeightFormat, WeightFormat::int8>());
    case WeightFormat::int4:
      return body(std::integral_constant<WeightFormat, WeightFormat::int4>());
    case WeightFormat::nf4:
      return body(std::integral_constant<WeightFormat, WeightFormat::nf4>());
  }
}

}  // namespace
}  // namespace fusedops::CPU_CAPABILITY
