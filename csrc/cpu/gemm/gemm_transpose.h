// Vectors of lines that are contiguous along k, loaded, widened and transposed in registers: what
// packing (gemm_pack.h) and products that read B where it lies (gemm_unpacked.h) begin with.
//
// Include from *.isa.cpp only.
#pragma once

#include <cstdint>
#include <cstring>
#include <utility>

#include "gemm_kernel.h"

namespace fusedops::CPU_CAPABILITY {
namespace {

template <typename Policy>
using PackedLanes = typename Lanes<typename Policy::Packed>::type;

// Whether packing converts: a panel's element is another type than memory's.
template <typename Policy>
constexpr bool kWidens =
    Policy::kPair == 1 && !std::is_same_v<typename Policy::T, typename Policy::Packed>;

// One vector of consecutive steps of one line that is contiguous along k. Memory is aligned to its
// own elements only: the pairs of bfloat16 that become an element of a panel may lie anywhere.
template <typename Policy>
inline PackedLanes<Policy> load_steps(const typename Policy::T* from) {
  using V = PackedLanes<Policy>;
  using T = typename Policy::T;
  if constexpr (Policy::kPair == 2 || std::is_same_v<T, typename Policy::Packed>) {
    V values;
    std::memcpy(&values, from, sizeof(V));
    return values;
  } else {
#if defined(CPU_CAPABILITY_AVX512) || defined(CPU_CAPABILITY_AVX2)
    const Vec<T> wide = load_vec(from);
    V values;
    std::memcpy(&values, &wide, sizeof(V));
    return values;
#else
    V values;
    for (int i = 0; i < kLanes<float>; ++i) values[i] = Policy::pack(from[i]);
    return values;
#endif
  }
}

template <int kDistance, bool kHigh, typename V, int... kLane>
inline V exchange(const V& a, const V& b, std::integer_sequence<int, kLane...>) {
  constexpr int n = sizeof...(kLane);
  using Index = std::conditional_t<sizeof(a[0]) == 8, int64_t, int32_t>;
  typedef Index Mask __attribute__((vector_size(sizeof(V))));
  if constexpr (kHigh) {
    return __builtin_shuffle(a, b, Mask{((kLane & kDistance) ? kLane + n : kLane + kDistance)...});
  } else {
    return __builtin_shuffle(a, b, Mask{((kLane & kDistance) ? kLane - kDistance + n : kLane)...});
  }
}

// Transposes an n x n block in n vectors, in log2(n) rounds of exchanges.
template <int n, int kDistance = 1, typename V>
inline __attribute__((always_inline)) void transpose(V (&v)[n]) {
  if constexpr (kDistance < n) {
    using Sequence = std::make_integer_sequence<int, n>;
#pragma GCC unroll 16
    for (int i = 0; i < n; ++i) {
      if (i & kDistance) continue;
      const V low = exchange<kDistance, false>(v[i], v[i + kDistance], Sequence());
      const V high = exchange<kDistance, true>(v[i], v[i + kDistance], Sequence());
      v[i] = low;
      v[i + kDistance] = high;
    }
    transpose<n, 2 * kDistance>(v);
  }
}

#if defined(CPU_CAPABILITY_AVX512) || defined(CPU_CAPABILITY_AVX2)
// Half precision is transposed before it is widened: half of the vectors. Of eight rows, each eight
// half-words in every 128 bits of the register, out[s] holds step s of the eight rows there.
template <typename Register, typename Words, typename Pairs, typename Quads>
inline __attribute__((always_inline)) void transpose_halves(const Register (&rows)[8],
                                                            Register (&out)[8], const Words& words,
                                                            const Pairs& pairs,
                                                            const Quads& quads) {
  Register two[8], four[8];
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    two[2 * i] = words(rows[2 * i], rows[2 * i + 1], false);
    two[2 * i + 1] = words(rows[2 * i], rows[2 * i + 1], true);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {  // half of the rows, half of the steps
    const int from = 4 * (i / 2) + i % 2;
    four[4 * (i / 2) + 2 * (i % 2)] = pairs(two[from], two[from + 2], false);
    four[4 * (i / 2) + 2 * (i % 2) + 1] = pairs(two[from], two[from + 2], true);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    out[2 * i] = quads(four[i], four[i + 4], false);
    out[2 * i + 1] = quads(four[i], four[i + 4], true);
  }
}

#if defined(CPU_CAPABILITY_AVX512)
inline __attribute__((always_inline)) void transpose_halves(const __m512i (&rows)[8],
                                                            __m512i (&out)[8]) {
  transpose_halves(
      rows, out,
      [](__m512i a, __m512i b, bool high) {
        return high ? _mm512_unpackhi_epi16(a, b) : _mm512_unpacklo_epi16(a, b);
      },
      [](__m512i a, __m512i b, bool high) {
        return high ? _mm512_unpackhi_epi32(a, b) : _mm512_unpacklo_epi32(a, b);
      },
      [](__m512i a, __m512i b, bool high) {
        return high ? _mm512_unpackhi_epi64(a, b) : _mm512_unpacklo_epi64(a, b);
      });
}

// v[i] = the 32-bit word i of 16 lines, from element k on; the lines from kCount on are zero. The
// loads bring halves of two lines together, which leaves 48 shuffles of the 64 of an exchange in
// four rounds; and these are the cheap ones (68 for 77 cycles on Zen 4).
template <int kCount, typename T, typename V>
inline __attribute__((always_inline)) void transpose_words(const T* const (&lines)[16], int64_t k,
                                                           V (&v)[16]) {
  constexpr int64_t kHalf = 32 / sizeof(T);
  const auto half = [&](int line, int part) {
    __m256i values = _mm256_setzero_si256();
    if (line < kCount) {
      std::memcpy(&values, lines[line] + k + part * kHalf, sizeof(values));
    }
    return values;
  };
  const auto halves = [&](int line, int part) {
    const __m512i low = _mm512_zextsi256_si512(half(line, part));
    return line + 4 < kCount ? _mm512_inserti64x4(low, half(line + 4, part), 1) : low;
  };
  __m512 quarter[4][4];  // [steps][line, line + 4, line + 8, line + 12] of four steps each
#pragma GCC unroll 4
  for (int line = 0; line < 4; ++line) {
#pragma GCC unroll 2
    for (int part = 0; part < 2; ++part) {
      const __m512 a = _mm512_castsi512_ps(halves(line, part));
      const __m512 b = _mm512_castsi512_ps(halves(line + 8, part));
      quarter[2 * part][line] = _mm512_shuffle_f32x4(a, b, 0x88);
      quarter[2 * part + 1][line] = _mm512_shuffle_f32x4(a, b, 0xDD);
    }
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const auto pairs = [&](int line, bool high) {
      const __m512 a = quarter[i][line], b = quarter[i][line + 1];
      return _mm512_castps_pd(high ? _mm512_unpackhi_ps(a, b) : _mm512_unpacklo_ps(a, b));
    };
#pragma GCC unroll 2
    for (int j = 0; j < 2; ++j) {
      const __m512d a = pairs(0, j == 1), b = pairs(2, j == 1);
      v[4 * i + 2 * j] = (V)_mm512_unpacklo_pd(a, b);
      v[4 * i + 2 * j + 1] = (V)_mm512_unpackhi_pd(a, b);
    }
  }
}

#else
// The same of eight lines: 16 shuffles, where an exchange is a shuffle and a blend and three rounds
// take 48.
template <int kCount, typename T, typename V>
inline __attribute__((always_inline)) void transpose_words(const T* const (&lines)[8], int64_t k,
                                                           V (&v)[8]) {
  constexpr int64_t kHalf = 16 / sizeof(T);
  const auto quarter = [&](int line, int part) {
    __m128 values = _mm_setzero_ps();
    if (line < kCount) {
      std::memcpy(&values, lines[line] + k + part * kHalf, sizeof(values));
    }
    return values;
  };
#pragma GCC unroll 2
  for (int part = 0; part < 2; ++part) {
    __m256 both[4];  // [line, line + 4]
#pragma GCC unroll 4
    for (int line = 0; line < 4; ++line) {
      const __m256 low = _mm256_zextps128_ps256(quarter(line, part));
      both[line] = line + 4 < kCount ? _mm256_insertf128_ps(low, quarter(line + 4, part), 1) : low;
    }
#pragma GCC unroll 2
    for (int j = 0; j < 2; ++j) {
      const auto pairs = [&](int line) {
        const __m256 a = both[line], b = both[line + 1];
        return _mm256_castps_pd(j == 1 ? _mm256_unpackhi_ps(a, b) : _mm256_unpacklo_ps(a, b));
      };
      const __m256d a = pairs(0), b = pairs(2);
      v[4 * part + 2 * j] = (V)_mm256_unpacklo_pd(a, b);
      v[4 * part + 2 * j + 1] = (V)_mm256_unpackhi_pd(a, b);
    }
  }
}
#endif

// Steps of half precision by fewer shuffles: words of two steps are transposed, and each step is
// taken from its word by shifts, in the ports that shuffles leave free. Shifted into the place of a
// float, a float16 is 2^112 times too small, so the other factor is to be kScale times as large: no
// bit of their product differs. Infinity and NaN have no such place, and subnormal numbers are
// subnormal there: only where is_exact() and load() agree.
template <typename T>
struct LinePairs {
  static constexpr int kLines = kLanes<float>, kSteps = 2 * kLines;
  static constexpr bool kIsHalf = std::is_same_v<T, c10::Half>;
  static constexpr float kScale = kIsHalf ? 0x1p112f : 1.0f;
  // Vectors of 256 bits convert float16 as quickly by the instruction.
  static constexpr bool kPays = !kIsHalf || kVectorBytes == 64;
  typedef int32_t Words __attribute__((vector_size(kVectorBytes)));

  // Whether this thread computes with subnormal factors, and as fast as with others: not at
  // torch.set_flush_denormal(True), and not where the processor leaves them to microcode (Intel).
  static bool is_exact() {
    return !kIsHalf || (__builtin_cpu_is("amd") && (_mm_getcsr() & _MM_DENORMALS_ZERO_MASK) == 0);
  }

  // False: the block has an infinity or NaN.
  inline __attribute__((always_inline)) bool load(const T* const (&lines)[kLines], int64_t k) {
    transpose_words<kLines>(lines, k, words_);
#if defined(CPU_CAPABILITY_AVX512)
    if constexpr (kIsHalf) {
      auto most = (__m512i)words_[0], least = most;
#pragma GCC unroll 16
      for (int i = 1; i < kLines; ++i) {
        most = _mm512_max_epi16(most, (__m512i)words_[i]);    // of those without a sign
        least = _mm512_max_epu16(least, (__m512i)words_[i]);  // of those with one
      }
      const auto plus = _mm512_cmpge_epi16_mask(most, _mm512_set1_epi16(0x7c00));
      const auto minus = _mm512_cmpge_epu16_mask(least, _mm512_set1_epi16(-0x0400));
      return _kortestz_mask32_u8(plus, minus);
    }
#endif
    return true;
  }

  inline __attribute__((always_inline)) auto step(int index) const {
    typedef float Floats __attribute__((vector_size(kVectorBytes)));
    const Words word = words_[index / 2];
    if constexpr (kIsHalf) {
      // Sign, three copies of it, exponent and fraction; the copies and what is below are cleared.
      return (Floats)(((index % 2 == 1 ? word : word << 16) >> 3) & static_cast<int>(0x8fffe000));
    } else {
      return (Floats)(index % 2 == 1 ? word & static_cast<int>(0xffff0000) : word << 16);
    }
  }

 private:
  Words words_[kLines];
};

template <typename Policy, int kCount, int n>
inline __attribute__((always_inline)) void load_transposed_halves(
    const typename Policy::T* const (&lines)[n], int64_t k, PackedLanes<Policy> (&v)[n]) {
  using T = typename Policy::T;
#if defined(CPU_CAPABILITY_AVX512)
  const auto load = [&](int line) {
    return line < kCount ? _mm256_loadu_si256(reinterpret_cast<const __m256i*>(lines[line] + k))
                         : _mm256_setzero_si256();
  };
  __m512i rows[8], steps[8];
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) {
    rows[i] = _mm512_inserti64x4(_mm512_castsi256_si512(load(i)), load(i + 8), 1);
  }
  transpose_halves(rows, steps);
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) {  // quarters: steps i and i + 8 of rows 0 to 7, then of 8 to 15
    const __m512i both = _mm512_shuffle_i64x2(steps[i], steps[i], 0xD8);
    v[i] = (PackedLanes<Policy>)widen<T>(_mm512_castsi512_si256(both));
    v[i + 8] = (PackedLanes<Policy>)widen<T>(_mm512_extracti64x4_epi64(both, 1));
  }
#else
  __m128i rows[8], steps[8];
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) {
    rows[i] = i < kCount ? _mm_loadu_si128(reinterpret_cast<const __m128i*>(lines[i] + k))
                         : _mm_setzero_si128();
  }
  transpose_halves(
      rows, steps,
      [](__m128i a, __m128i b, bool high) {
        return high ? _mm_unpackhi_epi16(a, b) : _mm_unpacklo_epi16(a, b);
      },
      [](__m128i a, __m128i b, bool high) {
        return high ? _mm_unpackhi_epi32(a, b) : _mm_unpacklo_epi32(a, b);
      },
      [](__m128i a, __m128i b, bool high) {
        return high ? _mm_unpackhi_epi64(a, b) : _mm_unpacklo_epi64(a, b);
      });
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) v[i] = (PackedLanes<Policy>)widen<T>(steps[i]);
#endif
}

#if defined(CPU_CAPABILITY_AVX512)
// 32 steps of 16 lines from element k on, transposed but not widened. Each cache line is read once:
// lines whose stride is a power of two share a set of the first cache, which has room for eight of
// them, and a second visit would find none (4096 x 4096 in float16 took 1.3 times as long).
template <typename T>
struct WholeLines {
  inline __attribute__((always_inline)) void load(const T* const (&lines)[16], int64_t k) {
    const __m512i low = _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11);
    const __m512i high = _mm512_setr_epi64(4, 5, 12, 13, 6, 7, 14, 15);
    __m512i rows[8], first[8], second[8];
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) rows[i] = _mm512_loadu_si512(lines[i] + k);
    transpose_halves(rows, first);
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) rows[i] = _mm512_loadu_si512(lines[i + 8] + k);
    transpose_halves(rows, second);
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) {
      steps_[i] = _mm512_permutex2var_epi64(first[i], low, second[i]);
      steps_[i + 8] = _mm512_permutex2var_epi64(first[i], high, second[i]);
    }
  }

  inline __attribute__((always_inline)) __m512 step(int index) const {
    const __m512i both = steps_[index / 16 * 8 + index % 8];
    const bool high = index / 8 % 2 == 1;
    return widen<T>(high ? _mm512_extracti64x4_epi64(both, 1) : _mm512_castsi512_si256(both));
  }

 private:
  __m512i steps_[16];  // [s]: steps s and s + 8, [s + 8]: s + 16 and s + 24
};
#endif
#endif

// v[s] = step s of n lines that are contiguous along k and begin at `lines`, from element k on; the
// lines from kCount on are zero.
template <typename Policy, int kCount, int n = kLanes<typename Policy::Packed>>
inline __attribute__((always_inline)) void load_transposed(
    const typename Policy::T* const (&lines)[n], int64_t k, PackedLanes<Policy> (&v)[n]) {
#if defined(CPU_CAPABILITY_AVX512) || defined(CPU_CAPABILITY_AVX2)
  if constexpr (kWidens<Policy>) return load_transposed_halves<Policy, kCount>(lines, k, v);
  if constexpr (sizeof(typename Policy::Packed) == 4) {
    return transpose_words<kCount>(lines, k, v);
  }
#endif
#pragma GCC unroll 16
  for (int i = 0; i < n; ++i) {
    v[i] = i < kCount ? load_steps<Policy>(lines[i] + k) : PackedLanes<Policy>{};
  }
  transpose<n>(v);
}

}  // namespace
}  // namespace fusedops::CPU_CAPABILITY
