// The innermost loop of the matrix product: a tile of kTileRows x kTileColumns<A> of C in
// registers, fed by packed panels of A and B (gemm_pack.h).
//
// AVX-512: 14 x 2 vectors use 28 of the 32 registers as accumulators; each step of k loads two
// vectors of B and broadcasts 14 elements of A for 28 multiply-adds. On Zen 5 (gcc 12) this runs at
// 98 % of the two multiply-adds a cycle, float32 and bfloat16 alike, with panels in L2 as well.
//
// Packing widens float16 to float32. bfloat16 has three forms. Where the processor has AVX512_BF16,
// panels keep bfloat16 in pairs along k and vdpbf16ps multiplies 64 a cycle, accumulating in
// float32; where it has AMX, tiles of 32 x 32 multiply 1024 a cycle (tile_registers.h); elsewhere
// packing widens it too. The pair kernel carries its own target attribute, so that the AVX512
// object needs no other compiler flag, and is called only after a run-time check.
//
// Include from *.isa.cpp only.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include <c10/util/BFloat16.h>

#include "../../common/dtype.h"
#include "../common/vec.h"
#include "tile_registers.h"

namespace fusedops::CPU_CAPABILITY {
namespace {

constexpr int64_t ceil_div(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}

#if defined(CPU_CAPABILITY_AVX512)
constexpr int kVectorBytes = 64;
constexpr int kTileRows = 14;
#elif defined(CPU_CAPABILITY_AVX2)
constexpr int kVectorBytes = 32;
constexpr int kTileRows = 6;
#else
constexpr int kVectorBytes = 16;
constexpr int kTileRows = 6;
#endif
constexpr int kTileVectors = 2;

template <typename A>
constexpr int kLanes = kVectorBytes / static_cast<int>(sizeof(A));
template <typename A>
constexpr int kTileColumns = kTileVectors * kLanes<A>;

// Steps of k that are one chain of sums; a panel of B is then 48 KiB (AVX-512).
constexpr int64_t kBlockSteps = 384;

// A compiler vector of A, loadable from any address of an A.
template <typename A>
struct Lanes {
  typedef A type __attribute__((vector_size(kVectorBytes), aligned(alignof(A)), may_alias));
};

// Rows of memory that are fetched while a tile is multiplied, because what comes next reads or
// writes them: short pieces of rows, which the hardware does not foresee. Spread over the steps
// they wait for memory while the multiplications run; all at once they wait by themselves.
struct Fetch {
  static constexpr int kMatrices = 3;
  const char* row[kMatrices] = {};  // null: none
  int64_t stride[kMatrices] = {};   // bytes
  int64_t bytes = 0;                // of each row
  int64_t rows = 0;                 // zero: nothing to fetch
  int64_t lines_ahead = 32;         // cache lines of `ahead` per step of tiles: a panel's

  inline __attribute__((always_inline)) void next() {
    if (--rows < 0) return;
    for (int i = 0; i < kMatrices; ++i) {
      if (row[i] == nullptr) continue;
      for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch(row[i] + at, 0, 3);
      row[i] += stride[i];
    }
  }

  // The steps after which the next row is fetched.
  int64_t every(int64_t steps) const {
    return rows == 0 ? steps : std::max<int64_t>(1, steps / rows);
  }
};

// A pair of bfloat16 along k, the first in the low half.
using Bf16Pair = uint32_t;

// tile (+)= a * b over `steps` steps of k. a: [steps][kTileRows], b: [steps][kTileColumns],
// tile: [rows][kTileColumns]. `ahead` is what will be read next from farther than L2: a line of it
// is prefetched at each step. Each element is one chain of multiply-adds in the order of k, so its
// bits do not depend on `rows`.
template <typename A, int kRows>
__attribute__((noinline)) void multiply_tile(int64_t steps, const A* __restrict a,
                                             const A* __restrict b, A* __restrict tile,
                                             bool accumulate, const char* ahead, Fetch fetch) {
  using V = typename Lanes<A>::type;
  constexpr int W = kLanes<A>;
  V sum[kRows][kTileVectors];
#pragma GCC unroll 32
  for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 4
    for (int j = 0; j < kTileVectors; ++j) sum[i][j] = V{};
  }
  const int64_t every = fetch.every(steps);
  for (int64_t step = 0; step < steps;) {
    fetch.next();
    const int64_t to = std::min(steps, step + every);
    for (; step < to; ++step) {
      V column[kTileVectors];
#pragma GCC unroll 4
      for (int j = 0; j < kTileVectors; ++j) column[j] = *reinterpret_cast<const V*>(b + j * W);
#pragma GCC unroll 32
      for (int i = 0; i < kRows; ++i) {
        const V row = a[i] - V{};
#pragma GCC unroll 4
        for (int j = 0; j < kTileVectors; ++j) sum[i][j] += row * column[j];
      }
      __builtin_prefetch(ahead, 0, 2);
      a += kTileRows;
      b += kTileVectors * W;
      ahead += 64;
    }
  }
#pragma GCC unroll 32
  for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 4
    for (int j = 0; j < kTileVectors; ++j) {
      V* out = reinterpret_cast<V*>(tile + (i * kTileVectors + j) * W);
      *out = accumulate ? *out + sum[i][j] : sum[i][j];
    }
  }
}

#if defined(CPU_CAPABILITY_AVX512)
template <int kRows>
__attribute__((noinline, target("avx512bf16"))) void multiply_tile_pairs(
    int64_t steps, const Bf16Pair* __restrict a, const Bf16Pair* __restrict b,
    float* __restrict tile, bool accumulate, const char* ahead, Fetch fetch) {
  constexpr int W = kLanes<float>;
  __m512 sum[kRows][kTileVectors];
#pragma GCC unroll 32
  for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 4
    for (int j = 0; j < kTileVectors; ++j) sum[i][j] = _mm512_setzero_ps();
  }
  const int64_t every = fetch.every(steps);
  for (int64_t step = 0; step < steps;) {
    fetch.next();
    const int64_t to = std::min(steps, step + every);
    for (; step < to; ++step) {
      __m512bh column[kTileVectors];
#pragma GCC unroll 4
      for (int j = 0; j < kTileVectors; ++j) {
        column[j] = (__m512bh)_mm512_loadu_si512(b + j * W);
      }
#pragma GCC unroll 32
      for (int i = 0; i < kRows; ++i) {
        const __m512bh row = (__m512bh)_mm512_set1_epi32(static_cast<int>(a[i]));
#pragma GCC unroll 4
        for (int j = 0; j < kTileVectors; ++j) {
          sum[i][j] = _mm512_dpbf16_ps(sum[i][j], row, column[j]);
        }
      }
      __builtin_prefetch(ahead, 0, 2);
      a += kTileRows;
      b += kTileVectors * W;
      ahead += 64;
    }
  }
#pragma GCC unroll 32
  for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 4
    for (int j = 0; j < kTileVectors; ++j) {
      float* out = tile + (i * kTileVectors + j) * W;
      if (accumulate) sum[i][j] = _mm512_add_ps(_mm512_loadu_ps(out), sum[i][j]);
      _mm512_storeu_ps(out, sum[i][j]);
    }
  }
}

// The same by tiles, for kRows <= 32: as many of the sums are written as whole tiles hold. A step
// of tiles is 16 steps; a panel has two cache lines for each of those.
template <int kRows>
__attribute__((noinline)) void multiply_tile_registers(int64_t steps, const Bf16Pair* __restrict a,
                                                       const Bf16Pair* __restrict b,
                                                       float* __restrict sums, bool accumulate,
                                                       const char* ahead, Fetch fetch) {
  const int64_t whole = ceil_div(steps, 16) * 16;
  const int64_t rows = ceil_div(16 * fetch.rows, std::max<int64_t>(1, whole));
  const char* fetched = ahead;
  multiply_tiles<(kRows > 16)>(whole, a, b, sums, accumulate, [&] {
    ahead += 64 * fetch.lines_ahead;
    for (; fetched < ahead; fetched += 8 * 64) {
#pragma GCC unroll 8
      for (int i = 0; i < 8; ++i) __builtin_prefetch(fetched + 64 * i, 0, 2);
    }
    for (int64_t i = 0; i < rows; ++i) fetch.next();
  });
}
#endif

// Nothing to do before and after a thread multiplies.
struct NoScope {
  NoScope() {}
};

// How one dtype is multiplied: T in memory, Packed in the panels (kPair elements of T along k
// each), Sum in the accumulators. A tile of C has kRows rows, a chain of sums kSteps steps; panels
// hold a multiple of kWhole steps, of which those at the end are zero. A thread that runs the
// kernel is in a Scope.
template <typename T_>
struct Widened {
  using T = T_;
  using Sum = Acc<T>;
  using Packed = Sum;
  using Scope = NoScope;
  static constexpr int kPair = 1;
  static constexpr int kRows = kTileRows;
  static constexpr int64_t kSteps = kBlockSteps;
  static constexpr int64_t kWhole = 1;
  static Packed pack(T value) { return static_cast<Packed>(value); }
  // sum + row * column: the kernel's step.
  template <typename V>
  static V multiply_add(const V& sum, Packed row, const V& column) {
    return sum + (row - V{}) * column;
  }
  // The same step of one element of A, in its packed form, broadcast to every lane.
  static auto broadcast(const char* from) {
    return *reinterpret_cast<const Packed*>(from) - typename Lanes<Packed>::type{};
  }
  template <typename V>
  static V multiply_add(const V& sum, const V& row, const V& column) {
    return sum + row * column;
  }
  template <typename Full>
  static void store(T* to, const Vec<T>& values, int64_t count, Full full) {
    store_vec(to, values, count, full);
  }
  template <int kRows>
  static constexpr auto kernel = multiply_tile<Sum, kRows>;
};

#if defined(CPU_CAPABILITY_AVX512)
struct Bf16Dot {
  using T = c10::BFloat16;
  using Sum = float;
  using Packed = Bf16Pair;
  using Scope = NoScope;
  static constexpr int kPair = 2;
  static constexpr int kRows = kTileRows;
  static constexpr int64_t kSteps = kBlockSteps;
  static constexpr int64_t kWhole = 1;
  // As assembly, because what calls it is compiled for processors without the instruction too.
  template <typename S, typename V>
  static S multiply_add(S sum, const Packed& row, const V& column) {
    asm("vdpbf16ps %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(column), "m"(row));
    return sum;
  }
  static auto broadcast(const char* from) {
    int32_t pair;
    std::memcpy(&pair, from, sizeof(pair));
    return (Lanes<Packed>::type)_mm512_set1_epi32(pair);
  }
  template <typename S, typename V>
  static S multiply_add(S sum, const V& row, const V& column) {
    asm("vdpbf16ps %2, %1, %0" : "+v"(sum) : "v"(column), "v"(row));
    return sum;
  }
  template <typename Full>
  static void store(T* to, const Vec<T>& values, int64_t count, Full) {
    __m256i rounded;
    asm("vcvtneps2bf16 %1, %0" : "=v"(rounded) : "v"(static_cast<__m512>(values)));
    if constexpr (Full::value) {
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), rounded);
    } else {
      _mm256_mask_storeu_epi16(to, static_cast<__mmask16>((uint32_t{1} << count) - 1), rounded);
    }
  }
  template <int kRows>
  static constexpr auto kernel = multiply_tile_pairs<kRows>;
};

// Panels of A stand as tiles of rows (pack_left in gemm_pack.h), so that the tile of C can be
// larger; blocks of k are short, so that a panel of B (16 KiB) stays in L1 while the panels of A
// stream by, and go on with the chain of the block before.
struct Bf16Tiles : Bf16Dot {
  using Scope = TileScope;
  static constexpr int kRows = 2 * kTileHeight;
  static constexpr int64_t kSteps = 128;
  static constexpr int64_t kWhole = kTileHeight;
  template <int kRows>
  static constexpr auto kernel = multiply_tile_registers<(kRows + 15) / 16 * 16>;
};
#endif

template <typename Policy>
constexpr bool kTiled = Policy::kWhole > 1;

// Calls body(Policy()) with how a dtype is multiplied here.
template <typename Body>
void with_policy(DType dtype, const Body& body) {
  switch_dtype(dtype, [&](auto t) {
    using T = decltype(t);
#if defined(CPU_CAPABILITY_AVX512)
    if constexpr (std::is_same_v<T, c10::BFloat16>) {
      if (has_tiles()) return body(Bf16Tiles());
      if (kHasAvx512Bf16) return body(Bf16Dot());
    }
#endif
    body(Widened<T>());
  });
}

// Rows of a tile of C, whatever is multiplied.
inline int rows_of_tiles(DType dtype) {
  int rows = 0;
  with_policy(dtype, [&](auto policy) { rows = decltype(policy)::kRows; });
  return rows;
}

// Runs the kernel for `rows` rows, 1 <= rows <= Policy::kRows.
template <typename Policy, int kRows = Policy::kRows>
inline void run_kernel(int rows, int64_t steps, const typename Policy::Packed* a,
                       const typename Policy::Packed* b, typename Policy::Sum* tile,
                       bool accumulate, const char* ahead, const Fetch& fetch = Fetch()) {
  if constexpr (kRows > 0) {
    if (rows == kRows) {
      return Policy::template kernel<kRows>(steps, a, b, tile, accumulate, ahead, fetch);
    }
    return run_kernel<Policy, kRows - 1>(rows, steps, a, b, tile, accumulate, ahead, fetch);
  }
}

}  // namespace
}  // namespace fusedops::CPU_CAPABILITY
