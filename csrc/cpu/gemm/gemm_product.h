// One matrix product, cut into blocks, panels and tiles (gemm.isa.cpp has the whole picture).
//
// Include from *.isa.cpp only.
#pragma once

#include <algorithm>
#include <cstring>
#include <vector>

#include <ATen/Parallel.h>

#include "../../common/parallel.h"
#include "../common/workspace.h"
#include "gemm.h"
#include "gemm_kernel.h"
#include "gemm_pack.h"
#include "gemm_path.h"
#include "gemm_single_thread.h"
#include "gemm_unpacked.h"

namespace fusedops::CPU_CAPABILITY {
namespace {

constexpr int64_t kPrivateBytes = int64_t{512} << 10;  // packed A of one thread
constexpr int64_t kMaxTiles = 8;                       // tiles of C that share a panel of B
constexpr int64_t kWorkOfTask = int64_t{1} << 21;      // multiply-adds that are worth a thread
constexpr int64_t kBlockBytes = int64_t{256} << 10;    // packed A that meets B at a time in a batch

// Units of the next task, at most `most`, where `left` are still to be handed out. The last tasks
// are small, so that the threads end together, whatever delayed one of them.
inline int64_t size_of_task(int64_t left, int64_t most) {
  const int64_t threads = at::get_num_threads();
  return std::min(most, threads == 1 ? left : (left + 2 * threads - 1) / (2 * threads));
}

template <typename Policy>
class Batch;

template <typename Policy>
class Gemm {
  using T = typename Policy::T;
  using Sum = typename Policy::Sum;
  using Packed = typename Policy::Packed;
  using Scope = typename Policy::Scope;
  static constexpr int kRows = Policy::kRows;
  static constexpr int kColumns = kTileColumns<Sum>;
  static constexpr int64_t kPanelA = kPanelSize<Policy, kRows>;
  static constexpr int64_t kPanelB = kPanelSize<Policy, kColumns>;
  static constexpr int64_t kBlock = Blocks<Policy>::kBlock;

 public:
  explicit Gemm(const GemmCall& call)
      : m_(call.m),
        n_(call.n),
        k_(call.k),
        sides_(call.second_b == nullptr ? 1 : 2),
        blocks_of_product_(Blocks<Policy>(call).of_product),
        all_blocks_(Blocks<Policy>(call).all),
        call_(call) {}

  // Takes a path of choose_path; shared_rows is one of Batch.
  void run(Path path) {
    if constexpr (Policy::kPair == 1) {
      if (path == Path::direct) return run_direct();
    }
#if defined(CPU_CAPABILITY_AVX512)
    if constexpr (std::is_base_of_v<Bf16Dot, Policy>) {
      if (path == Path::direct_pairs) return run_direct_pairs();
    }
    if constexpr (kTiled<Policy> || kReadsLines<Policy>) {
      if (path == Path::lines_as_tiles || path == Path::lines_as_rows) return run_transposed();
    }
#endif
    if (path != Path::nothing) run_packed(path);
  }

 private:
  void run_packed(Path path) {
    constexpr int64_t most = Blocks<Policy>::kMostAtOnce;
    if (all_blocks_ > most) {
      carried_ =
          static_cast<Sum*>(workspace(Workspace::partial_sums, sides_ * m_ * n_ * sizeof(Sum)));
    }
    for (first_block_ = 0; first_block_ == 0 || first_block_ < all_blocks_; first_block_ += most) {
      blocks_ = std::min(most, all_blocks_ - first_block_);
      if (path == Path::chunks) {
        run_chunks();
      } else {
        run_few_rows(path == Path::lines);
      }
    }
  }

  // Block `block` of those packed now: of which product, from where along k, how much.
  struct Stretch {
    int64_t product;
    int64_t k;
    int64_t count;
  };

  Stretch stretch(int64_t block) const {
    const int64_t index = first_block_ + block;
    const int64_t k = index % blocks_of_product_ * kBlock;
    return {index / blocks_of_product_, k, std::min(kBlock, k_ - k)};
  }

  // Without the zeros that may follow.
  int64_t steps_in(int64_t block) const { return ceil_div(stretch(block).count, Policy::kPair); }

  // The lines of an operand: rows of A, columns of B.
  Lines<T> rows_of_a(int64_t product) const {
    const Matrix& a = product == 0 ? call_.a : call_.extra_products[product - 1].a;
    return {static_cast<const T*>(a.data), a.row_stride, a.column_stride, a.rows, a.columns};
  }

  Lines<T> columns_of_b(int64_t product, int side) const {
    const Matrix& b = side == 1      ? *call_.second_b
                      : product == 0 ? call_.b
                                     : call_.extra_products[product - 1].b;
    return {static_cast<const T*>(b.data), b.column_stride, b.row_stride, b.columns, b.rows};
  }

  void pack_columns_of_b(int side, int64_t column, int64_t columns, int64_t block, Packed* to,
                         int64_t panel_stride) const {
    const Stretch part = stretch(block);
    pack<Policy, kColumns>(columns_of_b(part.product, side).from(column, part.k), columns,
                           n_ - column, part.count, to, panel_stride);
  }

  bool is_first() const { return first_block_ == 0; }
  bool is_last() const { return first_block_ + blocks_ >= all_blocks_; }

  // Tiles of rows [row, row + rows) and the columns of one panel, of both sides:
  // [sides][rows][kColumns]. multiply(side, tiles) adds the blocks of one side, or is the first to
  // write where is_first().
  template <typename Multiply>
  void compute(int64_t row, int64_t rows, int64_t column, Sum* tiles,
               const Multiply& multiply) const {
    const int64_t panels = ceil_div(rows, kRows);
    const int64_t side_size = panels * kRows * kColumns;
    for (int side = 0; side < sides_; ++side) {
      Sum* sums = tiles + side * side_size;
      if (!is_first()) {
        for_carried(side, row, rows, column, [&](Sum* carried, int64_t r, int64_t count) {
          std::copy_n(carried, count, sums + r * kColumns);
        });
      } else if (blocks_ == 0) {
        std::fill_n(sums, rows * kColumns, Sum(0));
      }
      multiply(side, sums);
      if (!is_last()) {
        for_carried(side, row, rows, column, [&](Sum* carried, int64_t r, int64_t count) {
          std::copy_n(sums + r * kColumns, count, carried);
        });
      }
    }
    if (!is_last()) return;
    const int columns = static_cast<int>(std::min<int64_t>(kColumns, n_ - column));
    for (int64_t p = 0; p < panels; ++p) {
      const int here = static_cast<int>(std::min<int64_t>(kRows, rows - p * kRows));
      const Sum* sums = tiles + p * kRows * kColumns;
      const Tile tile{row + p * kRows, column, here,
                      columns,         sums,   sides_ == 2 ? sums + side_size : nullptr,
                      kColumns};
      call_.store(call_.context, tile);
    }
  }

  // Calls f(carried, r, count) for the carried sums of row r of a tile.
  template <typename F>
  void for_carried(int side, int64_t row, int64_t rows, int64_t column, const F& f) const {
    Sum* carried = carried_ + side * m_ * n_;
    for (int64_t r = 0; r < rows; ++r) {
      f(carried + (row + r) * n_ + column, r, std::min<int64_t>(kColumns, n_ - column));
    }
  }

  // The packed rows that follow, a: [blocks][panels] panels; this call prefetches one share of
  // them.
  struct NextRows {
    const Packed* a;  // null: none
    int64_t share, shares;
  };

  // Adds all blocks of packed rows, a: [blocks][panels] panels, times those of a packed panel of B,
  // which panel_of(block) gives. Only a batch passes `next`.
  template <typename PanelOf>
  void multiply_panels(int side, int64_t row, int64_t rows, int64_t column, const Packed* a,
                       Sum* tiles, const PanelOf& panel_of, const NextRows& next = {}) const {
    const int64_t panels = ceil_div(rows, kRows);
    for (int64_t block = 0; block < blocks_; ++block) {
      const Packed* b = panel_of(block);
      const int64_t steps = steps_in(block);
      for (int64_t p = 0; p < panels; ++p) {
        const int here = static_cast<int>(std::min<int64_t>(kRows, rows - p * kRows));
        const Packed* rows_of_a = a + (block * panels + p) * kPanelA;
        Fetch fetch;
        if (side == 0 && is_last() && block == blocks_ - 1) {
          fetch = touched_by(row + p * kRows, here, column);
        }
        // Prefetched while this tile is multiplied: the panel of B after this one, or in a batch
        // the next rows of A. A tile fetches half a panel; with tile registers, an even share.
        const char* ahead = reinterpret_cast<const char*>(rows_of_a + kPanelA);
        if constexpr (kTiled<Policy>) {
          const auto fetch_share = [&](const Packed* panel, int64_t share, int64_t shares) {
            fetch.lines_ahead = ceil_div(fetch.lines_ahead, shares);
            ahead = reinterpret_cast<const char*>(panel) +
                    share * fetch.lines_ahead * ceil_div(steps, Policy::kWhole) * 64;
          };
          if (!in_batch_) {
            fetch_share(b + kPanelB, p, panels);
          } else if (next.a != nullptr) {
            fetch_share(next.a + (block * panels + p) * kPanelA, next.share, next.shares);
          } else {
            fetch.lines_ahead = 0;
          }
        } else if (!in_batch_) {
          ahead = reinterpret_cast<const char*>(b + kPanelB) + p % 2 * steps * 64;
        }
        run_kernel<Policy>(here, steps, rows_of_a, b, tiles + p * kRows * kColumns,
                           block > 0 || !is_first(), ahead, fetch);
      }
    }
  }

  // What the epilogue of a tile will touch.
  Fetch touched_by(int64_t row, int rows, int64_t column) const {
    Fetch fetch;
    for (int i = 0; i < Fetch::kMatrices; ++i) {
      const Touched& each = call_.touched[i];
      if (each.data == nullptr) continue;
      fetch.rows = rows;
      fetch.stride[i] = each.row_stride * static_cast<int64_t>(sizeof(T));
      fetch.row[i] = reinterpret_cast<const char*>(static_cast<const T*>(each.data) +
                                                   row * each.row_stride + column);
    }
    fetch.bytes = std::min<int64_t>(kColumns, n_ - column) * sizeof(T);
    return fetch;
  }

  // The same of compact rows (gemm_unpacked.h) and columns of B that lie along the sum; `last` is
  // where the columns end that this thread reads one after the other.
  void multiply_in_place(int side, int64_t column, int64_t last, const Packed* a,
                         Sum* tiles) const {
    // One row takes all columns of a tile at once, others a vector of them after the other.
    constexpr int64_t n = kLanes<Sum>;
    const int rows = padded_rows(m_);
    const int64_t per_task = m_ == 1 ? kColumns : n, end = std::min(column + kColumns, n_);
    for (int64_t c = column; c < end; c += per_task) {
      const auto lines = static_cast<int>(std::min(per_task, end - c));
      Ahead ahead(columns_of_b(stretch(0).product, side), c + lines, last, k_);
      for (int64_t block = 0; block < blocks_; ++block) {
        const Stretch part = stretch(block);
        const Lines<T> b = columns_of_b(part.product, side);
        multiply_lines<Policy>(rows, {b.at(c, part.k), b.line_stride, 1}, lines, part.count,
                               a + block * kBlockSteps * rows, tiles + (c - column),
                               block > 0 || !is_first(), ahead);
      }
    }
  }

  // Packs `rows` rows of A into this thread's buffer: [blocks][panels][steps][kRows].
  Packed* pack_rows(int64_t row, int64_t rows) const {
    const int64_t panels = ceil_div(rows, kRows);
    const int64_t block_size = panels * kPanelA;
    auto* a = static_cast<Packed*>(workspace(
        Workspace::packed_a, std::max<int64_t>(1, blocks_ * block_size) * sizeof(Packed)));
    pack_rows(row, rows, a);
    return a;
  }

  void pack_rows(int64_t row, int64_t rows, Packed* a) const {
    const int64_t block_size = ceil_div(rows, kRows) * kPanelA;
    for (int64_t block = 0; block < blocks_; ++block) {
      const Stretch part = stretch(block);
      pack_left<Policy>(rows_of_a(part.product).from(row, part.k), rows, m_ - row, part.count,
                        a + block * block_size, kPanelA);
    }
  }

  Sum* tile_buffer(int64_t panels) const {
    return static_cast<Sum*>(
        workspace(Workspace::tiles, sides_ * panels * kRows * kColumns * sizeof(Sum)));
  }

  // `in_place`: B is read where it lies (gemm_unpacked.h), by all rows at once.
  void run_few_rows(bool in_place) const {
    Packed* a = pack_rows(0, m_);
    if (in_place) compact_rows<kPanelA>(a, blocks_, padded_rows(m_));
    const int64_t panels = ceil_div(n_, kColumns);
    const int64_t per_task = panels_per_task(in_place);
    share_tasks(ceil_div(panels, per_task), [&](const auto& next) {
      const Scope scope;
      Sum* tiles = tile_buffer(ceil_div(m_, kRows));
      auto* panel = static_cast<Packed*>(workspace(Workspace::panel_b, kPanelB * sizeof(Packed)));
      for (int64_t task; (task = next()) >= 0;) {
        const int64_t last = std::min(panels, (task + 1) * per_task);
        if (in_place) {
          compute_in_place(a, task * per_task, last);
          continue;
        }
        for (int64_t p = task * per_task; p < last; ++p) {
          const int64_t column = p * kColumns;
          compute(0, m_, column, tiles, [&](int side, Sum* to) {
            multiply_panels(side, 0, m_, column, a, to, [&](int64_t block) {
              pack_columns_of_b(side, column, std::min<int64_t>(kColumns, n_ - column), block,
                                panel, kPanelB);
              return panel;
            });
          });
        }
      }
    });
  }

  // Panels [first, last) of the columns, of packed rows that are compact.
  void compute_in_place(const Packed* a, int64_t first, int64_t last) const {
    Sum* tiles = tile_buffer(1);
    for (int64_t p = first; p < last; ++p) {
      const int64_t column = p * kColumns;
      compute(0, m_, column, tiles, [&](int side, Sum* to) {
        multiply_in_place(side, column, std::min(last * kColumns, n_), a, to);
      });
    }
  }

  // The multiply-adds that a panel of columns is worth, where few rows read B from memory: reading
  // a weight costs as much as a dozen of its products.
  int64_t work_of_panel() const {
    const int64_t terms = sides_ * std::min(blocks_ * kBlock, k_ * (1 + call_.num_extra_products));
    return std::max<int64_t>(1, (m_ + 12) * kColumns * terms);
  }

#if defined(CPU_CAPABILITY_AVX512)
  // Few rows, and B along the sum: the lines of B are tiles as they lie in memory, or their
  // elements are broadcast from there. So B is the left operand, the packed rows of A the right
  // one, and tiles of C come out transposed: 128 shuffles for 32 x 32 elements, where packing B
  // takes 96 for every 32 x 32 of it.
  void run_transposed() {
    if constexpr (!kTiled<Policy>) {
      if (m_ <= kLanes<Sum>) return run_transposed<kLanes<Sum>>();
    }
    run_transposed<kColumns>();
  }

  // kWide: rows of A in a panel.
  template <int kWide>
  void run_transposed() {
    blocks_ = all_blocks_;
    const int64_t row_panels = ceil_div(m_, kWide), panels = ceil_div(n_, kColumns);
    const int64_t block_size = row_panels * kPanelB;
    auto* a =
        static_cast<Packed*>(workspace(Workspace::packed_a, blocks_ * block_size * sizeof(Packed)));
    for (int64_t block = 0; block < blocks_; ++block) {
      const Stretch part = stretch(block);
      pack<Policy, kWide>(rows_of_a(part.product).from(0, part.k), m_, m_, part.count,
                          a + block * block_size, kPanelB);
    }
    const int64_t per_task = panels_per_task();
    share_tasks(ceil_div(panels, per_task), [&](const auto& next) {
      const Scope scope;
      Sum* tiles = tile_buffer(ceil_div(m_, kRows));
      for (int64_t task; (task = next()) >= 0;) {
        for (int64_t p = task * per_task; p < std::min(panels, (task + 1) * per_task); ++p) {
          // The last panel begins early enough to be whole, and writes its own columns only.
          const int64_t column = p * kColumns, from = std::min(column, n_ - kColumns);
          compute(0, m_, column, tiles, [&](int side, Sum* to) {
            for (int64_t row = 0; row < m_; row += kWide) {
              multiply_transposed<kWide>(side, from, static_cast<int>(column - from),
                                         a + row / kWide * kPanelB, block_size,
                                         static_cast<int>(std::min<int64_t>(kWide, m_ - row)),
                                         to + row * kColumns);
            }
          });
        }
      }
    });
  }

  // sums [rows][kColumns], of the columns of B from `column` on without the first `skipped`.
  template <int kWide>
  void multiply_transposed(int side, int64_t column, int skipped, const Packed* a,
                           int64_t block_size, int rows, Sum* sums) const {
    alignas(64) Sum tiles[kColumns * kWide];
    for (int64_t block = 0; block < blocks_; ++block) {
      const Stretch part = stretch(block);
      const Lines<T> b = columns_of_b(part.product, side);
      // Read next: the block after this one, or the first of the next panel.
      const Stretch after = stretch(block + 1 < blocks_ ? block + 1 : 0);
      const T* ahead = columns_of_b(after.product, side)
                           .at(column + (block + 1 < blocks_ ? 0 : kColumns), after.k);
      if constexpr (kTiled<Policy>) {
        const auto multiply =
            rows > 16 ? multiply_lines_in_place<true> : multiply_lines_in_place<false>;
        multiply(b.at(column, part.k), b.line_stride, part.count, a + block * block_size, tiles,
                 block == 0, block + 1 == blocks_, ahead);
      } else {
        multiply_lines_as_rows<Policy, kWide>(b.from(column, part.k), part.count,
                                              a + block * block_size, tiles, block > 0, ahead);
      }
    }
    for (int i = 0; i < rows; i += 16) {
      for (int j = 0; j < kColumns; j += 16) {
        typename Lanes<Sum>::type v[16];
        for (int c = 0; c < 16; ++c) std::memcpy(&v[c], tiles + (j + c) * kWide + i, 64);
        transpose<16>(v);
        for (int r = 0; r < std::min(16, rows - i); ++r) {
          alignas(64) Sum line[16];
          std::memcpy(line, &v[r], 64);
          const int from = std::max(0, skipped - j);
          if (from < 16) {
            std::copy_n(line + from, 16 - from, sums + (i + r) * kColumns + j + from - skipped);
          }
        }
      }
    }
  }

  // One row of bfloat16: B is read where it lies.
  void run_direct_pairs() const {
    const Lines<T> a = rows_of_a(0), b = columns_of_b(0, 0);
    const int64_t pairs = ceil_div(k_, 2);
    auto* row = static_cast<Packed*>(workspace(Workspace::packed_a, pairs * sizeof(Packed)));
    for (int64_t i = 0; i < pairs; ++i) {
      row[i] = pack_one<Policy>(a.at(0, 2 * i), 2 * i + 1 < k_ ? a.at(0, 2 * i + 1) : nullptr);
    }
    constexpr int64_t kWidth = 256;
    const int64_t per_task = std::max<int64_t>(1, (int64_t{1} << 19) / (kWidth * (k_ + 4)));
    const int64_t pieces = ceil_div(n_, kWidth);
    share_tasks(ceil_div(pieces, per_task), [&](const auto& next) {
      alignas(64) float sums[kWidth];
      for (int64_t task; (task = next()) >= 0;) {
        for (int64_t p = task * per_task; p < std::min(pieces, (task + 1) * per_task); ++p) {
          const int64_t column = p * kWidth, columns = std::min(kWidth, n_ - column);
          multiply_row_of_pairs<Policy>(k_, row, b.at(column, 0), b.k_stride, columns, sums);
          call_.store(call_.context,
                      {0, column, 1, static_cast<int>(columns), sums, nullptr, kWidth});
        }
      }
    });
  }
#endif

  // The columns of a task of multiply_wide_row: even shares for the threads.
  int64_t wide_columns() const {
    constexpr int64_t W = kLanes<Sum>;
    const int64_t threads = at::get_num_threads();
    const int64_t tasks = ceil_div(ceil_div(n_, kWideVectors * W), threads) * threads;
    return ceil_div(ceil_div(n_, tasks), W) * W;
  }

  // Tiles are wide, so that the output is written in long pieces of rows.
  void run_direct() const {
    const Lines<T> a = rows_of_a(0), b = columns_of_b(0, 0);
    const bool wide = m_ == 1 && n_ >= 512 && kReadsLongRows;
    const int64_t width = wide ? wide_columns() : (m_ == 1 ? 1 : 8) * kDirectVectors * kLanes<Sum>;
    const int64_t row_tiles = ceil_div(m_, kRows), column_tiles = ceil_div(n_, width);
    const int64_t work = std::min<int64_t>(m_, kRows) * std::min(n_, width) * (k_ + 4);
    const int64_t per_task = std::max<int64_t>(1, (int64_t{1} << 19) / work);
    const int64_t tiles = row_tiles * column_tiles;
    auto* plain = kWidens<Policy> ? nullptr : static_cast<Sum*>(call_.plain_output);
    share_tasks(ceil_div(tiles, per_task), [&](const auto& next) {
      auto* sums = static_cast<Sum*>(
          workspace(Workspace::tiles, std::min<int64_t>(m_, kRows) * width * sizeof(Sum)));
      for (int64_t task; (task = next()) >= 0;) {
        for (int64_t t = task * per_task; t < std::min(tiles, (task + 1) * per_task); ++t) {
          const int64_t row = t / column_tiles * kRows, column = t % column_tiles * width;
          const int rows = static_cast<int>(std::min<int64_t>(kRows, m_ - row));
          const int columns = static_cast<int>(std::min(width, n_ - column));
          for (int r = 0; r < rows; ++r) {
            multiply_row<Policy>(
                k_, a.at(row + r, 0), a.k_stride, b.at(column, 0), b.k_stride, columns, wide,
                plain == nullptr ? sums + r * width : plain + (row + r) * n_ + column);
          }
          if (plain == nullptr) {
            call_.store(call_.context, {row, column, rows, columns, sums, nullptr, width});
          }
        }
      }
    });
  }

  // Panels of B for one task: about 30 us of work, in even shares. Where B is read in place
  // there are no more tasks than threads: what lies ahead of one is then its own.
  int64_t panels_per_task(bool in_place = false) const {
    const int64_t panels = ceil_div(n_, kColumns);
    int64_t tasks = ceil_div(panels, std::max<int64_t>(1, kWorkOfTask / work_of_panel()));
    if (in_place) tasks = std::min<int64_t>(tasks, at::get_num_threads());
    return ceil_div(panels, tasks);
  }

  void run_chunks() const {
    const int64_t panels = ceil_div(n_, kColumns);
    const int64_t panel_size = sides_ * blocks_ * kPanelB;
    const int64_t fitting =
        std::max<int64_t>(1, kSharedBytes / std::max<int64_t>(1, panel_size * sizeof(Packed)));
    const int64_t chunks = ceil_div(panels, fitting);
    const int64_t chunk = ceil_div(panels, chunks);
    auto* b = static_cast<Packed*>(
        workspace(Workspace::packed_b, std::max<int64_t>(1, chunk * panel_size) * sizeof(Packed)));
    for (int64_t first = 0; first < panels; first += chunk) {
      const int64_t count = std::min(chunk, panels - first);
      pack_columns(b, first, count);
      multiply_chunk(b, first, count);
    }
  }

  // b: [panel][side][block][steps][kColumns].
  void pack_columns(Packed* b, int64_t first, int64_t count) const {
    const int64_t in_panel = sides_ * blocks_;
    // Panels that share cache lines of rows of B.
    const int64_t per_task =
        std::clamp<int64_t>(count * in_panel / (4 * at::get_num_threads()), 1, 4);
    const int64_t groups = ceil_div(count, per_task);
    share_tasks(groups * in_panel, [&](const auto& next_task) {
      for (int64_t task; (task = next_task()) >= 0;) {
        const int64_t panel = task / in_panel * per_task;
        const int64_t part = task % in_panel;
        const int64_t column = (first + panel) * kColumns;
        const int64_t lines = std::min(std::min(per_task, count - panel) * kColumns, n_ - column);
        pack_columns_of_b(static_cast<int>(part / blocks_), column, lines, part % blocks_,
                          b + (panel * in_panel + part) * kPanelB, in_panel * kPanelB);
      }
    });
  }

  void multiply_chunk(const Packed* b, int64_t first, int64_t count) const {
    const int64_t row_panels = ceil_div(m_, kRows);
    const int64_t a_panel_bytes = std::max<int64_t>(1, blocks_) * kPanelA * sizeof(Packed);
    const int64_t per_task = std::clamp<int64_t>(kPrivateBytes / a_panel_bytes, 4, kMaxTiles);
    // A task is a block of rows and a part of the chunk's columns: parts only where there are too
    // few blocks for the threads.
    std::vector<int64_t> begins{0};
    while (begins.back() < row_panels) {
      begins.push_back(begins.back() + size_of_task(row_panels - begins.back(), per_task));
    }
    const auto row_blocks = static_cast<int64_t>(begins.size()) - 1;
    const int64_t parts = std::clamp<int64_t>(ceil_div(4 * at::get_num_threads(), row_blocks), 1,
                                              std::max<int64_t>(1, count / 4));
    const int64_t part = ceil_div(count, parts);
    share_tasks(parts * row_blocks, [&](const auto& next) {
      const Scope scope;
      Sum* tiles = tile_buffer(std::min(per_task, row_panels));
      for (int64_t task; (task = next()) >= 0;) {
        const int64_t block = task / parts, row = begins[block] * kRows;
        const int64_t rows = std::min(begins[block + 1] * kRows, m_) - row;
        const Packed* a = pack_rows(row, rows);
        const int64_t from = task % parts * part;
        for (int64_t p = from; p < std::min(from + part, count); ++p) {
          compute(row, rows, (first + p) * kColumns, tiles, [&](int side, Sum* to) {
            multiply_panels(side, row, rows, (first + p) * kColumns, a, to, [&](int64_t k_block) {
              return b + ((p * sides_ + side) * blocks_ + k_block) * kPanelB;
            });
          });
        }
      }
    });
  }

  template <typename>
  friend class Batch;

  int64_t m_, n_, k_;
  int sides_;
  int64_t blocks_of_product_, all_blocks_;
  bool in_batch_ = false;
  const GemmCall& call_;
  Sum* carried_ = nullptr;                // [sides][m, n] sums over the blocks before first_block_
  int64_t first_block_ = 0, blocks_ = 0;  // those that are packed now
};

}  // namespace
}  // namespace fusedops::CPU_CAPABILITY
