// Packing: a slice of a strided matrix is copied into panels that the kernel reads front to back.
//
// A panel holds kWidth lines (rows of A or columns of B) as [steps][kWidth]; a step is one element
// along k, or a pair of bfloat16. "w" counts lines, "k" runs along the sum. Where memory is
// contiguous along k, blocks of vectors are transposed in registers (0.25 cycles an element on
// Zen 5); where it is contiguous along w, rows are copied; other strides go element by element.
// Lines past the edge are zero in B, and not read by the kernel in A.
//
// Include from *.isa.cpp only.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <utility>

#include "gemm_kernel.h"
#include "gemm_transpose.h"

namespace fusedops::CPU_CAPABILITY {
namespace {

// The lines of an operand: line w, element k is data[w * line_stride + k * k_stride], where w and k
// first go through a list if there is one.
template <typename T>
struct Lines {
  const T* data;
  int64_t line_stride;
  int64_t k_stride;
  const int32_t* lines = nullptr;
  const int32_t* ks = nullptr;

  const T* at(int64_t line, int64_t k) const {
    return data + (lines == nullptr ? line : lines[line]) * line_stride +
           (ks == nullptr ? k : ks[k]) * k_stride;
  }

  // Those from here on.
  Lines from(int64_t line, int64_t k) const {
    return {data + (lines == nullptr ? line * line_stride : 0) + (ks == nullptr ? k * k_stride : 0),
            line_stride, k_stride, lines == nullptr ? nullptr : lines + line,
            ks == nullptr ? nullptr : ks + k};
  }
};

#if defined(CPU_CAPABILITY_AVX512)
// The half-words low[0], high[0], low[1], high[1], ...
inline __m512i interleave(__m256i low, __m256i high) {
  const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24,
                                         8, 23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  return _mm512_permutexvar_epi16(order, _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1));
}
#endif

// One vector of one step of consecutive lines; `next` is the pair's second row (null: zero).
template <typename Policy>
inline PackedLanes<Policy> load_lines(const typename Policy::T* from,
                                      const typename Policy::T* next) {
  if constexpr (Policy::kPair == 1) {
    return load_steps<Policy>(from);
  } else {
#if defined(CPU_CAPABILITY_AVX512)
    const auto half = [](const void* p) {
      __m256i values;
      std::memcpy(&values, p, sizeof(values));
      return values;
    };
    const __m256i high = next == nullptr ? _mm256_setzero_si256() : half(next);
    return (PackedLanes<Policy>)interleave(half(from), high);
#endif
  }
}

// Whether some lanes of a vector can be loaded, and the others be zero.
template <typename Policy>
constexpr bool kLoadsSome = kVectorBytes == 64 && sizeof(typename Policy::Packed) == 4;

#if defined(CPU_CAPABILITY_AVX512)
// load_steps of `count` elements, zero beyond them.
template <typename Policy>
inline PackedLanes<Policy> load_first_steps(const typename Policy::T* from, int count) {
  const uint32_t mask = (uint32_t{1} << count) - 1;
  if constexpr (Policy::kPair == 1) {
    return (PackedLanes<Policy>)static_cast<__m512>(load_vec(from, count));
  } else {
    return (PackedLanes<Policy>)_mm512_maskz_loadu_epi16(mask, from);
  }
}

// load_lines of `count` lines, zero beyond them.
template <typename Policy>
inline PackedLanes<Policy> load_first_lines(const typename Policy::T* from,
                                            const typename Policy::T* next, int count) {
  if constexpr (Policy::kPair == 1) {
    return load_first_steps<Policy>(from, count);
  } else {
    const auto mask = static_cast<__mmask16>((uint32_t{1} << count) - 1);
    const auto half = [mask](const void* p) { return _mm256_maskz_loadu_epi16(mask, p); };
    const __m256i high = next == nullptr ? _mm256_setzero_si256() : half(next);
    return (PackedLanes<Policy>)interleave(half(from), high);
  }
}
#endif

// One element of a panel.
template <typename Policy>
inline typename Policy::Packed pack_one(const typename Policy::T* from,
                                        const typename Policy::T* next) {
  if constexpr (Policy::kPair == 1) {
    return Policy::pack(*from);
  } else {
    const uint32_t high = next == nullptr ? 0u : static_cast<uint32_t>(next->x);
    return static_cast<uint32_t>(from->x) | high << 16;
  }
}

// Elements from one panel to the next: a panel whose width is no multiple of the vector is written
// by whole vectors, each over the end of the one before, and the last runs over the panel's end.
// (Masked stores are slow on Zen.)
template <typename Policy, int kWidth>
constexpr int64_t kPanelSize =
    Policy::kSteps * kWidth + (kWidth % kLanes<typename Policy::Packed> == 0
                                   ? 0
                                   : 64 / static_cast<int64_t>(sizeof(typename Policy::Packed)));

template <typename P, typename V>
inline void store_vector(P* to, const V& v) {
  std::memcpy(to, &v, sizeof(V));
}

// The first kCount lanes: for vectors after the first of a step, where a whole one would run into
// the next step, which is already there.
template <int kCount, typename P, typename V>
inline void store_first(P* to, const V& v) {
  std::memcpy(to, &v, kCount * sizeof(P));
}

// Steps of lines along k that are fetched before they are packed. Sixteen streams are more than the
// hardware follows, and short ones end before it begins.
template <typename Policy>
constexpr int64_t kAhead = 8 * kLanes<typename Policy::Packed>;

// Fetches what the packing of the first panel does not fetch itself.
template <typename Policy>
inline void fetch_first(const Lines<typename Policy::T>& source, int64_t lines, int64_t count) {
  const int64_t end = std::min(kAhead<Policy> * Policy::kPair, count);
  constexpr int64_t kLine = 64 / sizeof(typename Policy::T);
  for (int64_t line = 0; line < lines; ++line) {
    const auto* from = source.at(line, 0);
    for (int64_t k = 0; k < end; k += kLine) __builtin_prefetch(from + k);
  }
}

// Packs lines [0, lines) of `source`, lines <= kWidth, elements [0, count) along k, into one panel.
// `more` lines follow, which are packed next.
template <typename Policy, int kWidth, int kFirst = 0>
inline void pack_transposing(const Lines<typename Policy::T>& source, int lines, int64_t more,
                             int64_t count, typename Policy::Packed* panel) {
  using V = PackedLanes<Policy>;
  constexpr int n = kLanes<typename Policy::Packed>;
  constexpr int kPair = Policy::kPair;
  constexpr int kHere = kWidth - kFirst < n ? kWidth - kFirst : n;
  const int valid = std::clamp(lines - kFirst, 0, kHere);
  const int64_t steps = (count + kPair - 1) / kPair;
  const int64_t blocked = count / (kPair * n) * n;
  const int64_t ahead = std::min(blocked, kAhead<Policy>);
  const typename Policy::T* begin[n];
  for (int i = 0; i < valid; ++i) begin[i] = source.at(kFirst + i, 0);
  const auto store_steps = [panel](const V(&v)[n], int64_t step, int64_t here) {
    for (int i = 0; i < here; ++i) {
      auto* to = panel + (step + i) * kWidth + kFirst;
      if constexpr (kFirst == 0) {
        store_vector(to, v[i]);
      } else {
        store_first<kHere>(to, v[i]);
      }
    }
  };
  for (int64_t step = 0; step < blocked; step += n) {
    V v[n];
    if (step + ahead < blocked) {
      for (int i = 0; i < valid; ++i) __builtin_prefetch(begin[i] + (step + ahead) * kPair);
    } else if (kFirst + n >= kWidth) {
      const int64_t later = (step + ahead - blocked) * kPair;
      for (int i = 0; i < std::min<int64_t>(kWidth, more); ++i) {
        __builtin_prefetch(source.at(lines + i, later));
      }
    }
    if (valid == kHere) {
      load_transposed<Policy, kHere>(begin, step * kPair, v);
    } else {
      for (int i = 0; i < n; ++i) {
        v[i] = i < valid ? load_steps<Policy>(begin[i] + step * kPair) : V{};
      }
      transpose<n>(v);
    }
    store_steps(v, step, n);
  }
  if (blocked < steps) {
    if constexpr (kLoadsSome<Policy>) {
      V v[n];
      const auto rest = static_cast<int>(count - blocked * kPair);
      for (int i = 0; i < n; ++i) {
        v[i] = i < valid ? load_first_steps<Policy>(begin[i] + blocked * kPair, rest) : V{};
      }
      transpose<n>(v);
      store_steps(v, blocked, steps - blocked);
    } else {
      for (int64_t step = blocked; step < steps; ++step) {
        for (int i = 0; i < kHere; ++i) {
          panel[step * kWidth + kFirst + i] =
              i < valid ? pack_one<Policy>(begin[i] + step, nullptr) : typename Policy::Packed(0);
        }
      }
    }
  }
  if constexpr (kFirst + n < kWidth) {
    pack_transposing<Policy, kWidth, kFirst + n>(source, lines, more, count, panel);
  }
}

// One step of one panel whose lines are contiguous in memory; `whole`: there is memory for
// whole vectors.
template <typename Policy, int kWidth>
inline void pack_step(const typename Policy::T* from, const typename Policy::T* next, int lines,
                      bool whole, typename Policy::Packed* panel) {
  constexpr int n = kLanes<typename Policy::Packed>;
  const auto after = [next](int i) { return next == nullptr ? next : next + i; };
  if (whole) {
    for (int i = 0; i < kWidth; i += n) {
      store_vector(panel + i, load_lines<Policy>(from + i, after(i)));
    }
  } else {
#if defined(CPU_CAPABILITY_AVX512)
    if constexpr (kLoadsSome<Policy> && (kWidth % n == 0 || kWidth < n)) {
      for (int i = 0; i < kWidth; i += n) {
        const int here = std::clamp(lines - i, 0, n);
        store_vector(panel + i, load_first_lines<Policy>(from + i, after(i), here));
      }
      return;
    }
#endif
    for (int i = 0; i < kWidth; ++i) {
      panel[i] = i < lines ? pack_one<Policy>(from + i, after(i)) : typename Policy::Packed(0);
    }
  }
}

// Packs `lines` lines of `source`, elements [0, count) along k, count <= kSteps * kPair, into
// panels that lie `panel_stride` apart. The matrix has `readable` lines from here on.
template <typename Policy, int kWidth>
void pack_steps(const Lines<typename Policy::T>& source, int64_t lines, int64_t readable,
                int64_t count, typename Policy::Packed* panels, int64_t panel_stride) {
  constexpr int kPair = Policy::kPair;
  constexpr int n = kLanes<typename Policy::Packed>;
  constexpr int64_t kReach = (kWidth + n - 1) / n * n;
  const bool along_k = source.k_stride == 1 && source.ks == nullptr;
  if (source.line_stride == 1 && source.lines == nullptr && !along_k) {
    // Along k first: the panels of a block share the cache lines of a row. The next row is in
    // another page, where the hardware does not look ahead.
    constexpr int kAhead = 8 * kPair;
    for (int64_t k = 0; k < count; k += kPair) {
      const auto* row = source.at(0, k);
      const auto* row_after = kPair == 2 && k + 1 < count ? source.at(0, k + 1) : nullptr;
      const typename Policy::T* later[kPair];
      for (int i = 0; i < kPair; ++i) later[i] = source.at(0, std::min(k + kAhead + i, count - 1));
      auto* to = panels + k / kPair * kWidth;
      for (int64_t line = 0; line < lines; line += kWidth, to += panel_stride) {
        for (int i = 0; i < kPair; ++i) __builtin_prefetch(later[i] + line);
        pack_step<Policy, kWidth>(row + line, row_after == nullptr ? nullptr : row_after + line,
                                  static_cast<int>(std::min<int64_t>(kWidth, lines - line)),
                                  readable - line >= kReach, to);
      }
    }
    return;
  }
  if (along_k) fetch_first<Policy>(source, std::min<int64_t>(kWidth, lines), count);
  for (int64_t line = 0; line < lines; line += kWidth) {
    const int here = static_cast<int>(std::min<int64_t>(kWidth, lines - line));
    auto* panel = panels + line / kWidth * panel_stride;
    if (along_k) {
      pack_transposing<Policy, kWidth>(source.from(line, 0), here, lines - line - here, count,
                                       panel);
      continue;
    }
    for (int64_t k = 0; k < count; k += kPair) {
      for (int i = 0; i < kWidth; ++i) {
        const int64_t w = line + std::min(i, here - 1);
        const auto* from = source.at(w, k);
        const auto* next = kPair == 2 && k + 1 < count ? source.at(w, k + 1) : nullptr;
        panel[k / kPair * kWidth + i] =
            i < here ? pack_one<Policy>(from, next) : typename Policy::Packed(0);
      }
    }
  }
}

#if defined(CPU_CAPABILITY_AVX512)
// 16 pairs along k, from element k on, of 16 lines that are contiguous in memory: v[line].
template <typename Policy>
inline void load_pairs(const Lines<typename Policy::T>& source, int64_t line, int lines, int64_t k,
                       int64_t count, PackedLanes<Policy> (&v)[16]) {
  for (int pair = 0; pair < 16; ++pair) {
    const int64_t at = k + 2 * pair;
    v[pair] = at < count ? load_first_lines<Policy>(
                               source.at(line, at),
                               at + 1 < count ? source.at(line, at + 1) : nullptr, lines)
                         : PackedLanes<Policy>{};
  }
  transpose<16>(v);
}

// Rows of A as tiles: a panel is [steps / 16][kRows][16 pairs], zeros past the edges.
template <typename Policy>
void pack_tiles(const Lines<typename Policy::T>& source, int64_t lines, int64_t, int64_t count,
                typename Policy::Packed* panels, int64_t panel_stride) {
  using T = typename Policy::T;
  constexpr int64_t kRows = Policy::kRows, kDepth = Policy::kWhole * Policy::kPair;
  const bool along_k = source.k_stride == 1 && source.ks == nullptr;
  const bool along_lines = source.line_stride == 1 && source.lines == nullptr;
  for (int64_t first = 0; first < lines; first += kRows, panels += panel_stride) {
    const int64_t here = std::min(kRows, lines - first);
    const auto tile_row = [&](int64_t k, int64_t i) {
      return reinterpret_cast<T*>(panels + k / kDepth * kRows * Policy::kWhole +
                                  i * Policy::kWhole);
    };
    for (int64_t i = 0; i < kRows && (along_k || i >= here); ++i) {
      const T* from = source.at(first + std::min(i, here - 1), 0);
      for (int64_t k = 0; k < count; k += kDepth) {
        const auto valid = i < here ? std::min(kDepth, count - k) : 0;
        const auto mask = static_cast<__mmask32>((uint64_t{1} << valid) - 1);
        _mm512_storeu_si512(tile_row(k, i), _mm512_maskz_loadu_epi16(mask, from + k));
      }
    }
    if (along_k) continue;
    for (int64_t k = 0; k < count; k += kDepth) {
      for (int64_t i = 0; along_lines && i < here; i += 16) {
        PackedLanes<Policy> v[16];
        const int some = static_cast<int>(std::min<int64_t>(16, here - i));
        load_pairs<Policy>(source, first + i, some, k, count, v);
        for (int j = 0; j < some; ++j) store_vector(tile_row(k, i + j), v[j]);
      }
      for (int64_t i = 0; !along_lines && i < here; ++i) {
        for (int64_t j = 0; j < kDepth; ++j) {
          tile_row(k, i)[j] = k + j < count ? *source.at(first + i, k + j) : T(0);
        }
      }
    }
  }
}
#endif

// The same of whole panels of columns of B: a multiple of kWhole steps, zeros at the end.
template <typename Policy, int kWidth>
void pack(const Lines<typename Policy::T>& source, int64_t lines, int64_t readable, int64_t count,
          typename Policy::Packed* panels, int64_t panel_stride) {
  pack_steps<Policy, kWidth>(source, lines, readable, count, panels, panel_stride);
  if constexpr (kTiled<Policy>) {
    const int64_t steps = ceil_div(count, Policy::kPair);
    const int64_t rest = ceil_div(steps, Policy::kWhole) * Policy::kWhole - steps;
    for (int64_t line = 0; line < lines; line += kWidth, panels += panel_stride) {
      std::fill_n(panels + steps * kWidth, rest * kWidth, typename Policy::Packed(0));
    }
  }
}

// The same of rows of A, panels of Policy::kRows.
template <typename Policy>
void pack_left(const Lines<typename Policy::T>& source, int64_t lines, int64_t readable,
               int64_t count, typename Policy::Packed* panels, int64_t panel_stride) {
#if defined(CPU_CAPABILITY_AVX512)
  if constexpr (kTiled<Policy>) {
    return pack_tiles<Policy>(source, lines, readable, count, panels, panel_stride);
  }
#endif
  pack<Policy, Policy::kRows>(source, lines, readable, count, panels, panel_stride);
}

}  // namespace
}  // namespace fusedops::CPU_CAPABILITY
