// Products that one thread computes by itself and finishes in registers: those of a batch, or parts
// of one. output = alpha * A * B + beta * addend.
//
// The packed product (gemm_product.h) spends a third of its time on packing and on moving sums
// through L1 where k is 64. Here A is read where it lies, element by element, unless a step of k is
// not whole in memory or its lines share sets of L1; then a tile of rows is packed into L1. B is
// packed into L2, some columns at a time, or, where it stays there as it lies, not at all. What is
// widened to be multiplied is packed always. The sums
// are scaled, added to and rounded in registers. While a tile is multiplied, the lines of its
// addend and its output are fetched, and those that come after it of A and of the next product's B.
//
// Every element is the chain of multiply-adds of the packed kernel (gemm_kernel.h): from zero over
// a block of kBlockSteps steps, blocks added in order. So it has the same bits.
//
// Include from *.isa.cpp only.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "../common/workspace.h"
#include "gemm.h"
#include "gemm_kernel.h"
#include "gemm_pack.h"

namespace fusedops::CPU_CAPABILITY {
namespace {

// Lines of memory to fetch, one at each step: rows of them at a constant distance.
struct Walk {
  const char* at = nullptr;
  int64_t left = 0;  // lines of this row; 0: nothing to fetch
  int64_t lines = 0;
  int64_t jump = 0;  // from the end of a row to the next
  int64_t rows = 0;

  Walk() = default;
  Walk(const void* data, int64_t rows, int64_t stride, int64_t bytes)
      : at(static_cast<const char*>(data)),
        left(ceil_div(bytes, 64)),
        lines(left),
        jump(stride - lines * 64),
        rows(rows) {}

  inline __attribute__((always_inline)) void next() {
    if (left == 0) return;
    __builtin_prefetch(at, 0, 3);
    at += 64;
    if (--left == 0 && --rows > 0) {
      left = lines;
      at += jump;
    }
  }
};

// A tile of C over one block of k. Element (i, step) of A is at a + i * row_stride + step *
// step_stride, in bytes; other strides are in elements.
template <typename Policy>
struct AloneTile {
  using T = typename Policy::T;
  using Sum = typename Policy::Sum;

  const char* a;
  int64_t row_stride;
  int64_t step_stride;
  const typename Policy::Packed* b;
  int64_t b_stride;
  int64_t steps;
  int64_t columns;  // at most those of the vectors
  // Sums of the blocks before this one are added if add_sums; the result goes to `output`, or, if
  // more blocks follow, to `sums`.
  Sum* sums;
  bool add_sums;
  bool last;
  T* output;
  int64_t output_stride;
  const T* addend;
  int64_t addend_stride;
  Sum alpha;
  Sum beta;
};

// The kernel's vector as one of at::vec.
template <typename Sum>
inline at::vec::Vectorized<Sum> as_vec(const typename Lanes<Sum>::type& lanes) {
  using V = at::vec::Vectorized<Sum>;
  if constexpr (sizeof(V) == sizeof(lanes)) {
    return V::loadu(&lanes);
  } else {
    return V::loadu(&lanes, kLanes<Sum>);
  }
}

// kVectors: two, all of whose columns are there, or one.
template <typename Policy, int kRows, int kVectors>
__attribute__((noinline)) void multiply_alone(const AloneTile<Policy>& tile, Walk& walk) {
  using T = typename Policy::T;
  using Sum = typename Policy::Sum;
  using S = typename Lanes<Sum>::type;
  using P = PackedLanes<Policy>;
  using V = Vec<T>;
  constexpr int W = kLanes<Sum>;
  constexpr int kGroup = 5;  // rows that one pointer reaches by small multiples of the stride
  constexpr int kGroups = (kRows + kGroup - 1) / kGroup;
  S sum[kRows][kVectors];
#pragma GCC unroll 32
  for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 2
    for (int j = 0; j < kVectors; ++j) sum[i][j] = S{};
  }
  const int64_t row_stride = tile.row_stride, step_stride = tile.step_stride;
  const char* a[kGroups];
  for (int g = 0; g < kGroups; ++g) a[g] = tile.a + g * kGroup * row_stride;
  const auto* b = tile.b;
  const T *addend = tile.addend, *output = tile.output;
  Walk ahead = walk;
  for (int64_t step = 0; step < tile.steps; ++step) {
    P column[kVectors];
#if defined(CPU_CAPABILITY_AVX512)
    if constexpr (kVectors == 1 && Policy::kPair == 1) {
      const V values = load_vec(b, tile.columns);
      column[0] = *reinterpret_cast<const P*>(&values);
    } else
#endif
    {
#pragma GCC unroll 2
      for (int j = 0; j < kVectors; ++j) column[j] = *reinterpret_cast<const P*>(b + j * W);
    }
#pragma GCC unroll 32
    for (int i = 0; i < kRows; ++i) {
      const P row = Policy::broadcast(a[i / kGroup] + i % kGroup * row_stride);
#pragma GCC unroll 2
      for (int j = 0; j < kVectors; ++j) {
        sum[i][j] = Policy::multiply_add(sum[i][j], row, column[j]);
      }
    }
#pragma GCC unroll 4
    for (int g = 0; g < kGroups; ++g) a[g] += step_stride;
    b += tile.b_stride;
    if (step < kRows) {
#pragma GCC unroll 4
      for (int j = 0; j < kVectors * W; j += 64 / sizeof(T)) {
        __builtin_prefetch(addend + j, 0, 3);
        __builtin_prefetch(output + j, 1, 3);
      }
      addend += tile.addend_stride;
      output += tile.output_stride;
    }
    ahead.next();
  }
  walk = ahead;
  const bool add_sums = tile.add_sums, last = tile.last;
  if (add_sums || !last) {
#pragma GCC unroll 32
    for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 2
      for (int j = 0; j < kVectors; ++j) {
        S* to = reinterpret_cast<S*>(tile.sums + (i * kVectors + j) * W);
        if (add_sums) sum[i][j] = *to + sum[i][j];
        if (!last) *to = sum[i][j];
      }
    }
    if (!last) return;
  }
  const auto finish = [&](auto full) {
    const V alpha(tile.alpha), beta(tile.beta);
    const int64_t columns = std::min<int64_t>(W, tile.columns);
    T* to = tile.output;
    const T* from = tile.addend;
#pragma GCC unroll 32
    for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 2
      for (int j = 0; j < kVectors; ++j) {
        const V product = as_vec<Sum>(sum[i][j]);
        const V added = beta * load_vec(from + j * W, columns, full);
        Policy::store(to + j * W, at::vec::fmadd(alpha, product, added), columns, full);
      }
      to += tile.output_stride;
      from += tile.addend_stride;
    }
  };
  // Vectors of at::vec are wider than those of the kernel where there is no AVX.
  if constexpr (sizeof(V) == sizeof(S)) {
    if (kVectors == 2 || tile.columns == W) return finish(std::true_type());
    if constexpr (kVectors == 1) finish(std::false_type());
  } else {
    finish(std::false_type());
  }
}

template <typename Policy, int kVectors, int kRows = kTileRows>
inline void run_alone(int rows, const AloneTile<Policy>& tile, Walk& walk) {
  if constexpr (kRows > 0) {
    if (rows == kRows) return multiply_alone<Policy, kRows, kVectors>(tile, walk);
    return run_alone<Policy, kVectors, kRows - 1>(rows, tile, walk);
  }
}

#if defined(CPU_CAPABILITY_AVX512)
// Whether multiply_lines_as_rows takes a policy.
template <typename Policy>
constexpr bool kReadsLines =
    std::is_same_v<typename Policy::Sum, float> && !kTiled<Policy> && !kWidens<Policy>;

// tiles (+)= B^T * A^T for kTileColumns lines of B that are contiguous along k, which are read
// where they lie, and packed rows of A, [steps][kWide]: `count` elements along k, at most one
// block. tiles: [kTileColumns][kWide]. `ahead`: what is read next.
template <typename Policy, int kWide>
inline void multiply_lines_as_rows(const Lines<typename Policy::T>& lines, int64_t count,
                                   const typename Policy::Packed* a, typename Policy::Sum* tiles,
                                   bool accumulate, const typename Policy::T* ahead) {
  using Sum = typename Policy::Sum;
  constexpr int64_t kSize = sizeof(typename Policy::T);
  constexpr int kVectors = kWide / kLanes<Sum>;
  constexpr int64_t kLines = kTileColumns<Sum>;
  // Lines of one tile; fewer where all begin in one set of L1, of which 4 KiB are one way.
  const int64_t stride = lines.line_stride * kSize;
  const int64_t past = std::abs(stride) % 4096;
  const bool collide = past < 128 || past > 4096 - 128;
  const int64_t height = collide ? 8 : kVectors == 1 ? 16 : 11;
  AloneTile<Policy> tile{};
  tile.row_stride = stride;
  tile.step_stride = kSize * Policy::kPair;
  tile.b = a;
  tile.b_stride = kWide;
  tile.steps = ceil_div(count, Policy::kPair);
  tile.columns = kWide;
  tile.add_sums = accumulate;
  tile.addend = ahead;  // both are only fetched
  tile.output = reinterpret_cast<typename Policy::T*>(tiles);
  const char* next = reinterpret_cast<const char*>(ahead);
  for (int64_t line = 0; line < kLines; line += height) {
    const auto rows = static_cast<int>(std::min(height, kLines - line));
    tile.a = reinterpret_cast<const char*>(lines.at(line, 0));
    tile.sums = tiles + line * kWide;
    Walk walk(next + line * stride, rows, stride, count * kSize);
    run_alone<Policy, kVectors, 16>(rows, tile, walk);
  }
}
#else
template <typename Policy>
constexpr bool kReadsLines = false;
#endif

// Products of one shape with dense results, and their factors.
struct SingleThreadShape {
  int64_t m;
  int64_t n;
  int64_t k;
  Matrix a;  // of which product, the Operands tell
  Matrix b;
  Matrix addend;  // column_stride 0 or 1
  double alpha;
  double beta;
};

template <typename T>
struct Operands {
  const T* a;
  const T* b;
  const T* addend;  // null: none
  T* output;
};

// Some rows and columns of a product.
struct Part {
  int64_t row;
  int64_t rows;
  int64_t column;
  int64_t columns;
};

template <typename Policy>
class SingleThreadProduct {
  using T = typename Policy::T;
  using Sum = typename Policy::Sum;
  using Packed = typename Policy::Packed;
  static constexpr int kWide = kTileColumns<Sum>;
  static constexpr int kNarrow = kLanes<Sum>;
  static constexpr int64_t kPair = Policy::kPair;
  static constexpr int64_t kBlock = kBlockSteps * kPair;
  static constexpr int64_t kSize = sizeof(T);
  static constexpr int64_t kMaxBlocks = 4;
  static constexpr int64_t kPackedBytes = int64_t{384} << 10;  // of B
  static constexpr int64_t kPlacedBytes = int64_t{512} << 10;  // of B that is read in place
  static constexpr int64_t kFewTiles = 2;  // up to here packing B takes longer than it saves

 public:
  static bool takes(const SingleThreadShape& shape) {
    const bool lists = shape.a.rows != nullptr || shape.a.columns != nullptr ||
                       shape.b.rows != nullptr || shape.b.columns != nullptr;
    return !lists && shape.m > 1 && shape.k > 0 && shape.k <= kMaxBlocks * kBlock;
  }

  explicit SingleThreadProduct(const SingleThreadShape& shape)
      : shape_(shape), steps_(ceil_div(shape.k, kPair)), reads_a_(reads_a()) {
    std::fill_n(nothing_, kWide, static_cast<T>(-0.0F));
  }

  // `next`: what this thread computes after it, or null.
  void run(const Operands<T>& operands, const Part& part, const Operands<T>* next) const {
    const int64_t tiles = ceil_div(part.rows, kTileRows);
    const bool in_place = reads_b(tiles);
    const int64_t most =
        std::max<int64_t>(1,
                          kPackedBytes / (steps_ * kWide * static_cast<int64_t>(sizeof(Packed)))) *
        kWide;
    for (int64_t begin = 0; begin < part.columns; begin += most) {
      const int64_t columns = std::min(most, part.columns - begin);
      const Part chunk{part.row, part.rows, part.column + begin, columns};
      const Packed* packed = in_place ? nullptr : pack_b(operands.b, chunk);
      multiply(operands, chunk, packed, begin + columns < part.columns ? nullptr : next);
    }
  }

 private:
  Lines<T> lines_of_a(const T* a) const { return {a, shape_.a.row_stride, shape_.a.column_stride}; }
  Lines<T> lines_of_b(const T* b) const { return {b, shape_.b.column_stride, shape_.b.row_stride}; }

  // Whether the kernel reads A in place: its steps are whole, and its lines do not push each other
  // out of L1, of which 4 KiB are one way.
  bool reads_a() const {
    if (kWidens<Policy>) return false;
    const int64_t along_m = std::abs(shape_.a.row_stride) * kSize;
    if (kPair == 2 && (shape_.a.column_stride != 1 || shape_.k % 2 != 0)) return false;
    if (shape_.a.column_stride == 1) {
      const int64_t past = along_m % 2048;
      return shape_.m <= 4 || along_m < 128 || (past >= 128 && past <= 2048 - 128);
    }
    // Each step is a line; packing is a copy here, which few columns do not pay.
    return along_m != kSize || shape_.n <= 2 * kWide ||
           std::abs(shape_.a.column_stride) * kSize <= 2048;
  }

  // Whether B is read in place: it stays in L2 as it lies, or only few rows need it.
  bool reads_b(int64_t tiles) const {
    const int64_t span = shape_.k * std::abs(shape_.b.row_stride) * kSize;
    // Other instruction sets have no loads of some lanes.
    const bool whole = kVectorBytes == 64 || shape_.n % kNarrow == 0;
    return kPair == 1 && !kWidens<Policy> && shape_.b.column_stride == 1 && whole &&
           (tiles <= kFewTiles || span <= kPlacedBytes);
  }

  // [panels of kWide columns, then of kNarrow][steps][columns of the panel].
  const Packed* pack_b(const T* b, const Part& part) const {
    const int64_t wide = part.columns / kWide * kWide, narrow = part.columns - wide;
    auto* packed = static_cast<Packed*>(
        workspace(Workspace::panel_b, (part.columns + kWide) * steps_ * sizeof(Packed)));
    const auto lines = lines_of_b(b).from(part.column, 0);
    const int64_t readable = shape_.n - part.column;
    for (int64_t k = 0; k < shape_.k; k += kBlock) {
      const int64_t count = std::min(kBlock, shape_.k - k);
      if (wide > 0) {
        pack<Policy, kWide>(lines.from(0, k), wide, readable, count, packed + k / kPair * kWide,
                            steps_ * kWide);
      }
      if (narrow > 0) {
        pack<Policy, kNarrow>(lines.from(wide, k), narrow, readable - wide, count,
                              packed + wide * steps_ + k / kPair * kNarrow, steps_ * kNarrow);
      }
    }
    return packed;
  }

  void multiply(const Operands<T>& operands, const Part& part, const Packed* packed,
                const Operands<T>* next) const {
    alignas(64) Sum sums[kTileRows * kWide];
    alignas(64) T added[kTileRows * kWide];
    const auto lines = lines_of_a(operands.a);
    AloneTile<Policy> tile;
    tile.sums = sums;
    tile.alpha = static_cast<Sum>(shape_.alpha);
    tile.beta = operands.addend == nullptr ? Sum(1) : static_cast<Sum>(shape_.beta);
    tile.output_stride = shape_.n;
    const bool along = operands.addend != nullptr && shape_.addend.column_stride == 1;
    const bool spread = operands.addend != nullptr && !along;
    tile.addend_stride = along ? shape_.addend.row_stride : spread ? kWide : 0;
    tile.row_stride = reads_a_ ? lines.line_stride * kSize : sizeof(Packed);
    tile.step_stride = reads_a_ ? lines.k_stride * kSize * kPair : kTileRows * sizeof(Packed);
    // Tiles are of even heights.
    const int64_t tiles = ceil_div(part.rows, kTileRows);
    const int64_t height = part.rows / tiles, higher = part.rows % tiles;
    Walk walk;
    for (int64_t t = 0, row = part.row; t < tiles; ++t) {
      const int rows = static_cast<int>(height + (t < higher ? 1 : 0));
      const char* a = reads_a_ ? reinterpret_cast<const char*>(lines.at(row, 0))
                               : pack_a(lines.from(row, 0), rows, shape_.m - row);
      if (t + 1 < tiles) {
        walk = walk_a(operands.a, row + rows, rows);
      } else if (next != nullptr) {
        walk = walk_a(next->a, 0, rows);
      }
      if (spread) {
        for (int i = 0; i < rows; ++i) {
          std::fill_n(added + i * kWide, kWide,
                      operands.addend[(row + i) * shape_.addend.row_stride]);
        }
      }
      const int64_t end = part.column + part.columns;
      for (int64_t column = part.column; column < end;) {
        const int64_t width = end - column >= kWide ? kWide : kNarrow;
        tile.columns = std::min(width, end - column);
        tile.b = packed == nullptr ? reinterpret_cast<const Packed*>(operands.b + column)
                                   : packed + (column - part.column) * steps_;
        tile.b_stride = packed == nullptr ? shape_.b.row_stride : width;
        tile.output = operands.output + row * shape_.n + column;
        tile.addend = along    ? operands.addend + row * shape_.addend.row_stride + column
                      : spread ? added
                               : nothing_;
        tile.a = a;
        for (int64_t k = 0; k < steps_; k += kBlockSteps) {
          tile.steps = std::min(kBlockSteps, steps_ - k);
          tile.add_sums = k > 0;
          tile.last = k + kBlockSteps >= steps_;
          if (width == kWide) {
            run_alone<Policy, 2>(rows, tile, walk);
          } else {
            run_alone<Policy, 1>(rows, tile, walk);
          }
          tile.a += tile.steps * tile.step_stride;
          tile.b += tile.steps * tile.b_stride;
        }
        column += width;
        if (t + 1 == tiles && next != nullptr && walk.left == 0) {
          walk = walk_b(next->b);
          next = nullptr;
        }
      }
      row += rows;
    }
  }

  const char* pack_a(const Lines<T>& lines, int rows, int64_t readable) const {
    auto* packed = static_cast<Packed*>(
        workspace(Workspace::packed_a, (steps_ * kTileRows + 64) * sizeof(Packed)));
    for (int64_t k = 0; k < shape_.k; k += kBlock) {
      pack<Policy, kTileRows>(lines.from(0, k), rows, readable, std::min(kBlock, shape_.k - k),
                              packed + k / kPair * kTileRows, 0);
    }
    return reinterpret_cast<const char*>(packed);
  }

  Walk walk_a(const T* a, int64_t row, int64_t rows) const {
    const int64_t stride = shape_.a.row_stride;
    if (shape_.a.column_stride != 1) return {};
    return {a + row * stride, rows, stride * kSize, shape_.k * kSize};
  }

  Walk walk_b(const T* b) const {
    const int64_t stride = shape_.b.row_stride;
    if (shape_.b.column_stride != 1) return {};
    return {b, shape_.k, stride * kSize, shape_.n * kSize};
  }

  const SingleThreadShape& shape_;
  const int64_t steps_;
  const bool reads_a_;
  alignas(64) T nothing_[kWide];  // an addend that changes no sum, nor the sign of a zero
};

}  // namespace
}  // namespace fusedops::CPU_CAPABILITY
