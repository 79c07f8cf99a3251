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

template <typename Policy>
using PackedLanes = typename Lanes<typename Policy::Packed>::type;

// One vector of consecutive steps of one line that is contiguous along k.
template <typename Policy>
inline PackedLanes<Policy> load_steps(const typename Policy::T* from) {
  using V = PackedLanes<Policy>;
  using T = typename Policy::T;
  if constexpr (Policy::kPair == 2 || std::is_same_v<T, typename Policy::Packed>) {
    return *reinterpret_cast<const V*>(from);
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

// One vector of one step of consecutive lines; `next` is the pair's second row (null: zero).
template <typename Policy>
inline PackedLanes<Policy> load_lines(const typename Policy::T* from,
                                      const typename Policy::T* next) {
  if constexpr (Policy::kPair == 1) {
    return load_steps<Policy>(from);
  } else {
#if defined(CPU_CAPABILITY_AVX512)
    const auto widen = [](const void* p) {
      return _mm512_cvtepu16_epi32(_mm256_loadu_si256(static_cast<const __m256i*>(p)));
    };
    const __m512i low = widen(from);
    const __m512i high = next == nullptr ? _mm512_setzero_si512() : widen(next);
    return (PackedLanes<Policy>)_mm512_or_si512(low, _mm512_slli_epi32(high, 16));
#endif
  }
}

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

// Transposes an n x n block held in n vectors, in log2(n) rounds of exchanges.
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

// Elements from one panel to the next: a panel whose width is no multiple of the vector is written
// by whole vectors, each over the end of the one before, and the last runs over the panel's end.
// (Masked stores are slow on Zen.)
template <typename Policy, int kWidth>
constexpr int64_t kPanelSize =
    kBlockSteps * kWidth + (kWidth % kLanes<typename Policy::Packed> == 0
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

// Packs lines [0, lines) of `source`, lines <= kWidth, elements [0, count) along k, into one panel.
template <typename Policy, int kWidth, int kFirst = 0>
inline void pack_transposing(const Lines<typename Policy::T>& source, int lines, int64_t count,
                             typename Policy::Packed* panel) {
  using V = PackedLanes<Policy>;
  constexpr int n = kLanes<typename Policy::Packed>;
  constexpr int kPair = Policy::kPair;
  constexpr int64_t kAhead = 4 * n;
  constexpr int kHere = kWidth - kFirst < n ? kWidth - kFirst : n;
  const int valid = std::clamp(lines - kFirst, 0, kHere);
  const int64_t steps = (count + kPair - 1) / kPair;
  const int64_t blocked = count / (kPair * n) * n;
  const typename Policy::T* begin[n];
  for (int i = 0; i < valid; ++i) begin[i] = source.at(kFirst + i, 0);
  for (int64_t step = 0; step < blocked; step += n) {
    V v[n];
    for (int i = 0; i < n; ++i) {
      // Sixteen streams are more than the hardware follows.
      if (i < valid) __builtin_prefetch(begin[i] + (step + kAhead) * kPair);
      v[i] = i < valid ? load_steps<Policy>(begin[i] + step * kPair) : V{};
    }
    transpose<n>(v);
    for (int i = 0; i < n; ++i) {
      auto* to = panel + (step + i) * kWidth + kFirst;
      if constexpr (kFirst == 0) {
        store_vector(to, v[i]);
      } else {
        store_first<kHere>(to, v[i]);
      }
    }
  }
  for (int64_t step = blocked; step < steps; ++step) {
    const bool whole = (step + 1) * kPair <= count;
    for (int i = 0; i < kHere; ++i) {
      const auto* from = i < valid ? begin[i] + step * kPair : nullptr;
      panel[step * kWidth + kFirst + i] = i < valid
                                              ? pack_one<Policy>(from, whole ? from + 1 : nullptr)
                                              : typename Policy::Packed(0);
    }
  }
  if constexpr (kFirst + n < kWidth) {
    pack_transposing<Policy, kWidth, kFirst + n>(source, lines, count, panel);
  }
}

// One step of one panel whose lines are contiguous in memory; `whole` tells that memory goes on for
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
    for (int i = 0; i < kWidth; ++i) {
      panel[i] = i < lines ? pack_one<Policy>(from + i, after(i)) : typename Policy::Packed(0);
    }
  }
}

// Packs `lines` lines of `source`, elements [0, count) along k, count <= kBlockSteps * kPair, into
// panels that lie `panel_stride` apart. The matrix has `readable` lines from here on.
template <typename Policy, int kWidth>
void pack(const Lines<typename Policy::T>& source, int64_t lines, int64_t readable, int64_t count,
          typename Policy::Packed* panels, int64_t panel_stride) {
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
      for (int64_t line = 0; line < lines; line += kWidth) {
        for (int i = 0; i < kPair; ++i) __builtin_prefetch(later[i] + line);
        pack_step<Policy, kWidth>(row + line, row_after == nullptr ? nullptr : row_after + line,
                                  static_cast<int>(std::min<int64_t>(kWidth, lines - line)),
                                  readable - line >= kReach,
                                  panels + line / kWidth * panel_stride + k / kPair * kWidth);
      }
    }
    return;
  }
  for (int64_t line = 0; line < lines; line += kWidth) {
    const int here = static_cast<int>(std::min<int64_t>(kWidth, lines - line));
    auto* panel = panels + line / kWidth * panel_stride;
    if (along_k) {
      pack_transposing<Policy, kWidth>(source.from(line, 0), here, count, panel);
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

}  // namespace
}  // namespace fusedops::CPU_CAPABILITY
