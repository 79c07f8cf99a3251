// Products that are limited by reading B: they read it where it lies, without packing it. Every
// element is the chain of multiply-adds of the packed kernel (gemm_kernel.h), so it has the same
// bits.
//
// B along the columns: a row of C is a sum of rows of B (multiply_row). B along the sum, as the
// weights of a linear layer lie: blocks of it are transposed in registers and used there by a few
// rows (multiply_lines). On Zen 4 that takes 48 shuffles for 16 x 16 elements, which is about the
// time that they take from the shared cache; packing, which also writes and reads them, took twice
// as long as the product.
//
// Include from *.isa.cpp only.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "gemm_kernel.h"
#include "gemm_pack.h"

namespace fusedops::CPU_CAPABILITY {
namespace {

constexpr int kDirectVectors = kVectorBytes == 64 ? 16 : 8;  // accumulators of multiply_row
constexpr int kWideVectors = 64;                             // of multiply_wide_row
// Rows of multiply_lines, which also needs kLanes transposed vectors: no more than a tile has.
constexpr int kMaxLinesRows = std::min(8, kTileRows);

// out[j] = sum over k of a[k * a_step] * b[k * b_step + j] for kVectors vectors of j, in the order
// of the packed kernel: chains of kBlockSteps from zero, added in order.
template <typename Policy, int kVectors>
inline void multiply_row(int64_t count, const typename Policy::T* a, int64_t a_step,
                         const typename Policy::T* b, int64_t b_step, typename Policy::Sum* out) {
  using V = PackedLanes<Policy>;
  constexpr int W = kLanes<typename Policy::Sum>;
  const int64_t ahead = count > 16 ? 16 * b_step : 0;
  for (int64_t first = 0; first < count; first += kBlockSteps) {
    V sum[kVectors];
    for (int j = 0; j < kVectors; ++j) sum[j] = V{};
    for (int64_t k = first; k < std::min(count, first + kBlockSteps); ++k) {
      const V factor = Policy::pack(a[k * a_step]) - V{};
      const auto* line = b + k * b_step;
#pragma GCC unroll 16
      for (int j = 0; j < kVectors; ++j) {
        sum[j] += factor * load_steps<Policy>(line + j * W);
        __builtin_prefetch(line + ahead + j * W);
      }
    }
    for (int j = 0; j < kVectors; ++j) {
      V* to = reinterpret_cast<V*>(out + j * W);
      *to = first > 0 ? *to + sum[j] : sum[j];
    }
  }
}

// The same for up to kWideVectors vectors, eight rows of B at a time: each row is a long stream of
// memory. The prefetchers of Intel's processors follow these; on a Xeon a row of 4096 x 4096 takes
// half the time of multiply_row.
template <typename Policy>
__attribute__((noinline)) void multiply_wide_row(int64_t count, const typename Policy::T* a,
                                                 int64_t a_step, const typename Policy::T* b,
                                                 int64_t b_step, int64_t vectors,
                                                 typename Policy::Sum* out) {
  using V = PackedLanes<Policy>;
  constexpr int W = kLanes<typename Policy::Sum>;
  constexpr int kTogether = 8;
  V chain[kWideVectors];
  for (int64_t first = 0; first < count; first += kBlockSteps) {
    const int64_t end = std::min(count, first + kBlockSteps);
    const auto add_rows = [&](int64_t k, auto rows) {
      V factor[rows];
      for (int r = 0; r < rows; ++r) factor[r] = Policy::pack(a[(k + r) * a_step]) - V{};
      for (int64_t j = 0; j < vectors; ++j) {
        V sum = k == first ? V{} : chain[j];
#pragma GCC unroll 8
        for (int r = 0; r < rows; ++r) {
          sum += factor[r] * load_steps<Policy>(b + (k + r) * b_step + j * W);
        }
        chain[j] = sum;
      }
    };
    int64_t k = first;
    for (; k + kTogether <= end; k += kTogether) {
      add_rows(k, std::integral_constant<int, kTogether>());
    }
    for (; k < end; ++k) add_rows(k, std::integral_constant<int, 1>());
    for (int64_t j = 0; j < vectors; ++j) {
      V* to = reinterpret_cast<V*>(out + j * W);
      *to = first > 0 ? *to + chain[j] : chain[j];
    }
  }
}

// The same for any number of columns; if `wide`, for at most kWideVectors vectors.
template <typename Policy>
inline void multiply_row(int64_t count, const typename Policy::T* a, int64_t a_step,
                         const typename Policy::T* b, int64_t b_step, int64_t columns, bool wide,
                         typename Policy::Sum* out) {
  using T = typename Policy::T;
  constexpr int W = kLanes<typename Policy::Sum>;
  int64_t c = 0;
  if (wide) {
    c = columns / W * W;
    multiply_wide_row<Policy>(count, a, a_step, b, b_step, c / W, out);
  }
  for (; c + kDirectVectors * W <= columns; c += kDirectVectors * W) {
    multiply_row<Policy, kDirectVectors>(count, a, a_step, b + c, b_step, out + c);
  }
  for (; c + W <= columns; c += W) {
    multiply_row<Policy, 1>(count, a, a_step, b + c, b_step, out + c);
  }
  if (c == columns) return;
  // A vector here as well: the compiler would not contract a scalar loop to multiply-adds.
  using V = PackedLanes<Policy>;
  const auto left = static_cast<size_t>(columns - c);
  V total{};
  for (int64_t first = 0; first < count; first += kBlockSteps) {
    V sum{};
    for (int64_t k = first; k < std::min(count, first + kBlockSteps); ++k) {
      T line[W] = {};
      std::memcpy(line, b + k * b_step + c, left * sizeof(T));
      const V factor = Policy::pack(a[k * a_step]) - V{};
      sum += factor * load_steps<Policy>(line);
    }
    total = first > 0 ? total + sum : sum;
  }
  std::memcpy(out + c, &total, left * sizeof(typename Policy::Sum));
}

#if defined(CPU_CAPABILITY_AVX512)
// The same of bfloat16 with the multiply-add of pairs: out[j] = sum over k of a[k * a_step] *
// b[k * b_step + j]. Two rows of B are interleaved in registers; a vector of the result then holds
// every other four of 32 columns, which the end puts in order.
template <int kGroups>
inline void multiply_row_pairs(int64_t count, const Bf16Pair* a, const c10::BFloat16* b,
                               int64_t b_step, int64_t columns, float* out) {
  constexpr int64_t kAhead = 16;
  __mmask32 mask[kGroups];
  for (int g = 0; g < kGroups; ++g) {
    const auto here = std::clamp<int64_t>(columns - 32 * g, 0, 32);
    mask[g] = static_cast<__mmask32>((uint64_t{1} << here) - 1);
  }
  for (int64_t first = 0; first < count; first += 2 * kBlockSteps) {
    __m512 sum[kGroups][2];
    for (int g = 0; g < kGroups; ++g) sum[g][0] = sum[g][1] = _mm512_setzero_ps();
    for (int64_t k = first; k < std::min(count, first + 2 * kBlockSteps); k += 2) {
      const c10::BFloat16* line = b + k * b_step;
      const bool two = k + 1 < count;
      const int64_t ahead = k + kAhead + 1 < count ? kAhead * b_step : 0;
#pragma GCC unroll 4
      for (int g = 0; g < kGroups; ++g) {
        const __m512i low = _mm512_maskz_loadu_epi16(mask[g], line + 32 * g);
        const __m512i high = two ? _mm512_maskz_loadu_epi16(mask[g], line + b_step + 32 * g)
                                 : _mm512_setzero_si512();
        __builtin_prefetch(line + ahead + 32 * g);
        __builtin_prefetch(line + ahead + b_step + 32 * g);
        sum[g][0] = Bf16Dot::multiply_add(sum[g][0], a[k / 2], _mm512_unpacklo_epi16(low, high));
        sum[g][1] = Bf16Dot::multiply_add(sum[g][1], a[k / 2], _mm512_unpackhi_epi16(low, high));
      }
    }
    const __m512i left = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
    const __m512i right =
        _mm512_setr_epi32(8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
    for (int g = 0; g < kGroups; ++g) {
      for (int half = 0; half < 2; ++half) {
        const __m512 sums = _mm512_permutex2var_ps(sum[g][0], half == 0 ? left : right, sum[g][1]);
        float* to = out + 32 * g + 16 * half;
        const auto part = static_cast<__mmask16>(mask[g] >> (16 * half));
        _mm512_mask_storeu_ps(
            to, part, first == 0 ? sums : _mm512_add_ps(_mm512_maskz_loadu_ps(part, to), sums));
      }
    }
  }
}

// The same in the order of the tile registers (tile_registers.h): of 32 elements along k, the even
// ones are one chain of multiply-adds from zero and the odd ones another; their sum is added to the
// result. Two rows of B are these two chains, so that nothing is interleaved: a vector of 32
// columns is split into its even and its odd columns, which the end puts in order. Not inlined: the
// arithmetic must stay between the changes of the control word.
template <int kGroups>
__attribute__((noinline)) void multiply_row_as_tiles(int64_t count, const Bf16Pair* a,
                                                     const c10::BFloat16* b, int64_t b_step,
                                                     int64_t columns, float* out) {
  constexpr int64_t kAhead = 16, kStretch = 32;
  const __m512i high = _mm512_set1_epi32(static_cast<int>(0xFFFF0000));
  const auto floats = [](__m512i bits) { return _mm512_castsi512_ps(bits); };
  __mmask32 mask[kGroups];
  __m512 total[kGroups][2];
  for (int g = 0; g < kGroups; ++g) {
    const auto here = std::clamp<int64_t>(columns - 32 * g, 0, 32);
    mask[g] = static_cast<__mmask32>((uint64_t{1} << here) - 1);
    total[g][0] = total[g][1] = _mm512_setzero_ps();
  }
  for (int64_t first = 0; first < count; first += kStretch) {
    __m512 chain[kGroups][2][2];  // [even and odd elements of k][even and odd columns]
    for (int i = 0; i < kGroups * 4; ++i) (&chain[0][0][0])[i] = _mm512_setzero_ps();
    for (int64_t k = first; k < std::min(count, first + kStretch); k += 2) {
      const c10::BFloat16* line = b + k * b_step;
      const bool two = k + 1 < count;
      const int64_t ahead = k + kAhead + 1 < count ? kAhead * b_step : 0;
      const auto pair = static_cast<int>(a[k / 2]);
      const __m512 factor[2] = {floats(_mm512_set1_epi32(pair << 16)),
                                floats(_mm512_and_si512(_mm512_set1_epi32(pair), high))};
#pragma GCC unroll 4
      for (int g = 0; g < kGroups; ++g) {
        for (int odd = 0; odd < (two ? 2 : 1); ++odd) {
          const auto* from = line + odd * b_step + 32 * g;
          const __m512i values = _mm512_maskz_loadu_epi16(mask[g], from);
          __builtin_prefetch(from + ahead);
          auto& to = chain[g][odd];
          to[0] = _mm512_fmadd_ps(factor[odd], floats(_mm512_slli_epi32(values, 16)), to[0]);
          to[1] = _mm512_fmadd_ps(factor[odd], floats(_mm512_and_si512(values, high)), to[1]);
        }
      }
    }
    for (int g = 0; g < kGroups; ++g) {
      for (int i = 0; i < 2; ++i) {
        total[g][i] = _mm512_add_ps(total[g][i], _mm512_add_ps(chain[g][0][i], chain[g][1][i]));
      }
    }
  }
  const __m512i left = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
  const __m512i right =
      _mm512_setr_epi32(8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
  for (int g = 0; g < kGroups; ++g) {
    for (int half = 0; half < 2; ++half) {
      const auto part = static_cast<__mmask16>(mask[g] >> (16 * half));
      _mm512_mask_storeu_ps(
          out + 32 * g + 16 * half, part,
          _mm512_permutex2var_ps(total[g][0], half == 0 ? left : right, total[g][1]));
    }
  }
}

// While this lives, vectors take subnormal numbers for zero, as tile registers do.
class SubnormalsAreZero {
 public:
  SubnormalsAreZero() { _mm_setcsr(control_ | 0x8040); }
  ~SubnormalsAreZero() { _mm_setcsr(control_); }
  SubnormalsAreZero(const SubnormalsAreZero&) = delete;
  SubnormalsAreZero& operator=(const SubnormalsAreZero&) = delete;

 private:
  unsigned control_ = _mm_getcsr();
};

// A row times any number of columns of B, in the order of Policy.
template <typename Policy>
inline void multiply_row_of_pairs(int64_t count, const Bf16Pair* a, const c10::BFloat16* b,
                                  int64_t b_step, int64_t columns, float* out) {
  const auto run = [&](auto groups, int64_t from) {
    const int64_t here = std::min<int64_t>(32 * groups, columns - from);
    if constexpr (kTiled<Policy>) {
      const SubnormalsAreZero scope;
      multiply_row_as_tiles<groups>(count, a, b + from, b_step, here, out + from);
    } else {
      multiply_row_pairs<groups>(count, a, b + from, b_step, here, out + from);
    }
  };
  int64_t c = 0;
  for (; c + 128 <= columns; c += 128) run(std::integral_constant<int, 4>(), c);
  for (; c < columns; c += 32) run(std::integral_constant<int, 1>(), c);
}
#endif

// Walks over lines [line, last) of memory in the order of addresses, ahead of those who read them:
// sixteen lines that are read side by side are too many streams for the hardware, one is not.
class Ahead {
 public:
  template <typename T>
  Ahead(const Lines<T>& lines, int64_t line, int64_t last, int64_t length)
      : line_(reinterpret_cast<const char*>(lines.at(line, 0))),
        stride_(lines.line_stride * static_cast<int64_t>(sizeof(T))),
        length_(length * static_cast<int64_t>(sizeof(T))),
        left_(last - line) {
    if (stride_ == length_) {  // nothing between them: one long line
      length_ *= left_;
      left_ = std::min<int64_t>(left_, 1);
    }
  }

  template <int kCount>
  void fetch() {
    if (left_ <= 0) return;
#pragma GCC unroll 16
    for (int i = 0; i < kCount; ++i) __builtin_prefetch(line_ + at_ + i * 64, 0, 2);
    at_ += kCount * 64;
    if (at_ >= length_) {
      at_ = 0;
      line_ += stride_;
      --left_;
    }
  }

 private:
  const char* line_;
  int64_t stride_, length_, left_;
  int64_t at_ = 0;
};

// tile (+)= a * b for a, [steps][kRows] (see compact_rows), and `lines` columns of
// B that are contiguous along k; `count` elements along k, at most one block. tile:
// [rows][kTileColumns]. kGroups vectors of columns take turns, because a single chain of
// multiply-adds would wait for itself: lines <= kGroups * kLanes.
template <typename Policy, int kRows, int kGroups>
__attribute__((noinline)) void multiply_lines(const Lines<typename Policy::T>& source, int lines,
                                              int64_t count, const typename Policy::Packed* a,
                                              typename Policy::Sum* tile, bool accumulate,
                                              Ahead& ahead) {
  using T = typename Policy::T;
  using S = typename Lanes<typename Policy::Sum>::type;
  constexpr int n = kLanes<typename Policy::Sum>;
  constexpr int64_t kBlock = Policy::kPair * n;
  constexpr int kFetched = n * kBlock * sizeof(T) / 64;  // cache lines that a group reads
  const T* begin[kGroups][n];
  for (int i = 0; i < kGroups * n; ++i) begin[i / n][i % n] = source.at(std::min(i, lines - 1), 0);
  S sum[kGroups][kRows];
  for (int i = 0; i < kGroups * kRows; ++i) sum[i / kRows][i % kRows] = S{};
  int64_t k = 0;
#if defined(CPU_CAPABILITY_AVX512) || defined(CPU_CAPABILITY_AVX2)
  if constexpr (kWidens<Policy> && LinePairs<T>::kPays) {
    using Pairs = LinePairs<T>;
    constexpr int kSteps = Pairs::kSteps;
    const int64_t whole_blocks = count / kSteps * kSteps;
    alignas(64) float scaled[kBlockSteps * kRows];
    const bool in_pairs = Pairs::is_exact();
    if (in_pairs) {
      for (int64_t i = 0; i < whole_blocks * kRows; ++i) scaled[i] = a[i] * Pairs::kScale;
    }
    for (; k < whole_blocks; k += kSteps) {
#pragma GCC unroll 2
      for (int group = 0; group < kGroups; ++group) {
        const auto multiply = [&](const auto& steps, const float* factors) {
#pragma GCC unroll 32
          for (int step = 0; step < kSteps; ++step) {
            const auto values = (PackedLanes<Policy>)steps.step(step);
#pragma GCC unroll 8
            for (int r = 0; r < kRows; ++r) {
              auto& to = sum[group][r];
              to = Policy::multiply_add(to, factors[step * kRows + r], values);
            }
          }
        };
        ahead.fetch<n * kSteps * sizeof(T) / 64>();
        Pairs pairs;
        if (in_pairs && pairs.load(begin[group], k)) {
          multiply(pairs, scaled + k * kRows);
          continue;
        }
#if defined(CPU_CAPABILITY_AVX512)
        WholeLines<T> whole;
        whole.load(begin[group], k);
        multiply(whole, a + k * kRows);
#endif
      }
    }
    a += whole_blocks * kRows;
  }
#endif
  PackedLanes<Policy> v[n];
  for (; k + kBlock <= count; k += kBlock) {
#pragma GCC unroll 2
    for (int group = 0; group < kGroups; ++group) {
      ahead.fetch<kFetched>();
      load_transposed<Policy, n>(begin[group], k, v);
#pragma GCC unroll 16
      for (int step = 0; step < n; ++step) {
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) {
          auto& to = sum[group][r];
          to = Policy::multiply_add(to, a[step * kRows + r], v[step]);
        }
      }
    }
    a += n * kRows;
  }
  if (k < count) {
    for (int group = 0; group < kGroups; ++group) {
      T rest[n][kBlock] = {};
      for (int i = 0; i < n; ++i) {
        std::memcpy(rest[i], begin[group][i] + k, (count - k) * sizeof(T));
        begin[group][i] = rest[i];
      }
      load_transposed<Policy, n>(begin[group], 0, v);
      for (int step = 0; step * Policy::kPair < count - k; ++step) {
        for (int r = 0; r < kRows; ++r) {
          auto& to = sum[group][r];
          to = Policy::multiply_add(to, a[step * kRows + r], v[step]);
        }
      }
    }
  }
  for (int group = 0; group < kGroups; ++group) {
    for (int r = 0; r < kRows; ++r) {
      S* out = reinterpret_cast<S*>(tile + (r * kTileVectors + group) * n);
      *out = accumulate ? *out + sum[group][r] : sum[group][r];
    }
  }
}

// The rows that multiply_lines computes for `rows`, 1 <= rows <= kMaxLinesRows.
inline int padded_rows(int64_t rows) {
  return rows <= 2 ? static_cast<int>(rows) : rows <= 4 ? 4 : kMaxLinesRows;
}

// Turns `blocks` panels of A of kPanel elements, where rows beyond those of the matrix are zero,
// into dense [steps][rows] that follow each other: so that a row of A stays in L1.
template <int64_t kPanel, typename Packed>
inline void compact_rows(Packed* a, int64_t blocks, int rows) {
  for (int64_t block = 0; block < blocks; ++block) {
    for (int64_t step = 0; step < kBlockSteps; ++step) {
      const Packed* from = a + block * kPanel + step * kTileRows;
      std::copy_n(from, rows, a + (block * kBlockSteps + step) * rows);
    }
  }
}

// The same for a number of rows that padded_rows gives; lines <= kLanes, with one row twice as
// many.
template <typename Policy>
inline void multiply_lines(int rows, const Lines<typename Policy::T>& source, int lines,
                           int64_t count, const typename Policy::Packed* a,
                           typename Policy::Sum* tile, bool accumulate, Ahead& ahead) {
  const bool two = lines > kLanes<typename Policy::Sum>;
  const auto run = rows == 1 && two ? multiply_lines<Policy, 1, 2>
                   : rows == 1      ? multiply_lines<Policy, 1, 1>
                   : rows == 2      ? multiply_lines<Policy, 2, 1>
                   : rows == 4      ? multiply_lines<Policy, 4, 1>
                                    : multiply_lines<Policy, kMaxLinesRows, 1>;
  run(source, lines, count, a, tile, accumulate, ahead);
}

}  // namespace
}  // namespace fusedops::CPU_CAPABILITY
