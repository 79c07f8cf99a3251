// Which path a product takes: this file alone decides it (gemm.isa.cpp has the whole picture).
//
// Include from *.isa.cpp only.
#pragma once

#include <type_traits>

#include "gemm.h"
#include "gemm_kernel.h"
#include "gemm_single_thread.h"
#include "gemm_unpacked.h"

namespace fusedops::CPU_CAPABILITY {
namespace {

constexpr int64_t kOuterDepth = 16 * kBlockSteps;    // steps along k that are packed at a time
constexpr int64_t kSharedBytes = int64_t{12} << 20;  // packed operand that the threads share
constexpr int64_t kMostLanesRows = 64;               // up to here one thread packs them for all
constexpr int64_t kFewTerms = 4;                     // up to here along k nothing is packed

enum class Path {
  nothing,         // the output has no elements
  direct,          // one row or a few terms: neither operand is packed
  direct_pairs,    // the same of one row of bfloat16
  lines_as_tiles,  // few rows; lines of B along the sum are register tiles as they lie in memory
  lines_as_rows,   // few rows; elements of lines of B along the sum are broadcast from memory
  lines,           // few rows; lines of B along the sum are read where they lie
  few_rows,        // few rows; each thread packs a panel of B into L1 and uses it at once
  shared_rows,     // rows of A are packed for all threads, B by each thread for itself
  chunks,          // chunks of B are packed for all threads, rows of A by each thread for itself
};

// How a product is cut along k and into panels.
template <typename Policy>
struct Blocks {
  static constexpr int64_t kBlock = Policy::kSteps * Policy::kPair;
  static constexpr int64_t kMostAtOnce = kOuterDepth / Policy::kSteps;
  static constexpr int64_t kFewRows = 4 * Policy::kRows;  // up to here B is not packed ahead

  explicit Blocks(const GemmCall& call)
      : of_product(ceil_div(call.k, kBlock)), all(of_product * (1 + call.num_extra_products)) {}

  bool in_one_pass() const { return all <= kMostAtOnce; }

  int64_t of_product;
  int64_t all;
};

// Whether all of B lies along the sum.
inline bool lies_along_sum(const GemmCall& call) {
  const auto along = [](const Matrix& b) {
    return b.row_stride == 1 && b.rows == nullptr && b.columns == nullptr;
  };
  bool all = along(call.b) && (call.second_b == nullptr || along(*call.second_b));
  for (int64_t i = 0; i < call.num_extra_products; ++i) all &= along(call.extra_products[i].b);
  return all;
}

// Whether so many rows are worth the path lines_as_rows, where they are the lanes of vectors. One
// thread of Zen 4, 1536 columns, k = 384, float32, against the paths below: 12 rows are 1.05 times
// as fast, 14 rows 1.15, 16 rows 1.30, 24 rows 0.92, 32 rows 1.13, 64 rows 1.06; bfloat16: 16
// rows 1.25, 64 rows 1.02.
template <typename Policy>
constexpr bool fills_vectors(int64_t rows) {
  constexpr int64_t W = kLanes<typename Policy::Sum>;
  const int64_t rest = rows % (2 * W);
  const bool one = rows >= W - W / 4 && rows <= W;
  const bool two = rows <= kMostLanesRows && (rest == 0 || rest >= 2 * W - W / 4);
  return kReadsLines<Policy> && (one || two);
}

// `in_batch`: the product is one of several, which share their packed rows where they can.
template <typename Policy>
Path choose_path(const GemmCall& call, bool in_batch) {
  const Blocks<Policy> blocks(call);
  const int64_t m = call.m, n = call.n, k = call.k;
  if (m == 0 || n == 0) return Path::nothing;
  const bool few_rows = m <= Blocks<Policy>::kFewRows;
#if defined(CPU_CAPABILITY_AVX512)
  if (!in_batch && fills_vectors<Policy>(m) && n >= kTileColumns<typename Policy::Sum> &&
      k % Policy::kPair == 0 && blocks.all > 0 && blocks.in_one_pass() && lies_along_sum(call)) {
    return Path::lines_as_rows;
  }
#endif
  if (!in_batch) {
    // A is smaller than B and fits the shared cache: B, the larger one, is then never written to
    // memory and read again.
    const int64_t panel = kPanelSize<Policy, Policy::kRows> * sizeof(typename Policy::Packed);
    const bool fits = ceil_div(m, Policy::kRows) * blocks.all * panel <= kSharedBytes;
    const int64_t sides = call.second_b == nullptr ? 1 : 2;
    if (!few_rows && m < sides * n && blocks.all > 0 && blocks.in_one_pass() && k > kFewTerms &&
        fits) {
      return Path::shared_rows;
    }
    const bool without_lists =
        call.b.columns == nullptr && call.b.rows == nullptr && call.a.columns == nullptr;
    if (without_lists && sides == 1 && call.b.column_stride == 1 && call.num_extra_products == 0 &&
        k > 0) {
      if (Policy::kPair == 1 && (m == 1 || k <= kFewTerms)) return Path::direct;
#if defined(CPU_CAPABILITY_AVX512)
      if (std::is_base_of_v<Bf16Dot, Policy> && m == 1) return Path::direct_pairs;
#endif
    }
  }
  if (few_rows && blocks.all > 0 && lies_along_sum(call)) {
#if defined(CPU_CAPABILITY_AVX512)
    if (kTiled<Policy> && n >= kTileColumns<typename Policy::Sum> && blocks.in_one_pass()) {
      return Path::lines_as_tiles;
    }
#endif
    if (!kTiled<Policy> && m <= kMaxLinesRows) return Path::lines;
  }
  if (in_batch && blocks.in_one_pass()) return Path::shared_rows;
  return few_rows ? Path::few_rows : Path::chunks;
}

}  // namespace
}  // namespace fusedops::CPU_CAPABILITY
