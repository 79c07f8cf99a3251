// Several matrix products, or one with few rows, whose rows of A are packed for all threads
// (gemm.isa.cpp has the whole picture).
//
// Include from *.isa.cpp only.
#pragma once

#include <algorithm>
#include <vector>

#include "gemm_product.h"

namespace fusedops::CPU_CAPABILITY {
namespace {

// Products that the threads share. What is shared is cut by sizes alone.
template <typename Policy>
class Batch {
  using Product = Gemm<Policy>;
  using Packed = typename Policy::Packed;

 public:
  Batch(const GemmCall* calls, int64_t count) {
    const int64_t room = kSharedBytes / sizeof(Packed);
    for (int64_t i = 0; i < count; ++i) {
      Product product(calls[i]);
      const Path path = choose_path<Policy>(calls[i], true);
      const bool in_one_pass = Blocks<Policy>(calls[i]).in_one_pass();
      if (path != Path::shared_rows && !(path == Path::lines && in_one_pass)) {
        product.run(path);
        continue;
      }
      product.blocks_ = product.all_blocks_;
      if (path == Path::lines) {
        few_rows_.push_back(product);
        continue;
      }
      product.in_batch_ = true;
      products_.push_back(product);
      const int64_t row_size = std::max<int64_t>(1, product.blocks_) * Product::kPanelA;
      const int64_t height =
          std::clamp<int64_t>(kBlockBytes / sizeof(Packed) / row_size, 1, kMaxTiles) *
          Product::kRows;
      // Rows whose panels fit the shared cache, in whole blocks.
      const int64_t most =
          std::max<int64_t>(1, room / (height / Product::kRows * row_size)) * height;
      const auto last = static_cast<int64_t>(products_.size()) - 1;
      for (int64_t row = 0; row < product.m_; row += most) {
        const int64_t rows = std::min(most, product.m_ - row);
        pieces_.push_back({last, row, rows, height, row_size});
      }
    }
  }

  void run() {
    if (!few_rows_.empty()) run_few_rows();
    const int64_t room = kSharedBytes / sizeof(Packed);
    const auto count = static_cast<int64_t>(pieces_.size());
    for (int64_t first = 0; first < count;) {
      int64_t last = first, size = 0;
      while (last < count && (last == first || size + pieces_[last].size() <= room)) {
        pieces_[last].place = size;
        size += pieces_[last++].size();
      }
      run_together(first, last, size);
      first = last;
    }
  }

 private:
  // Products of few rows that read B where it lies, such as experts that a token or two chose: each
  // thread takes one contiguous share of all their columns.
  void run_few_rows() {
    const auto count = static_cast<int64_t>(few_rows_.size());
    std::vector<int64_t> places{0}, panels{0};
    int64_t work = 0;
    for (const Product& each : few_rows_) {
      const int64_t here = ceil_div(each.n_, Product::kColumns);
      places.push_back(places.back() + each.blocks_ * Product::kPanelA);
      panels.push_back(panels.back() + here);
      work += here * each.work_of_panel();
    }
    auto* a = static_cast<Packed*>(workspace(Workspace::packed_b, places.back() * sizeof(Packed)));
    share_tasks(count, [&](const auto& next) {
      for (int64_t i; (i = next()) >= 0;) {
        const Product& each = few_rows_[i];
        each.pack_rows(0, each.m_, a + places[i]);
        compact_rows<Product::kPanelA>(a + places[i], each.blocks_, padded_rows(each.m_));
      }
    });
    const int64_t shares =
        std::clamp<int64_t>(ceil_div(work, kWorkOfTask), 1, at::get_num_threads());
    share_tasks(shares, [&](const auto& next) {
      for (int64_t share; (share = next()) >= 0;) {
        const int64_t first = panels.back() * share / shares;
        const int64_t last = panels.back() * (share + 1) / shares;
        for (int64_t i = 0; i < count; ++i) {
          const int64_t from = std::max(first, panels[i]), to = std::min(last, panels[i + 1]);
          if (from < to) {
            few_rows_[i].compute_in_place(a + places[i], from - panels[i], to - panels[i]);
          }
        }
      }
    });
  }

  // Rows of a product that are packed together.
  struct Piece {
    int64_t product;
    int64_t row;
    int64_t rows;
    int64_t height;    // rows of a block
    int64_t row_size;  // packed elements of a tile's rows
    int64_t place = 0;
    int64_t first_task = 0;

    int64_t size() const { return ceil_div(rows, Product::kRows) * row_size; }
    int64_t place_of(int64_t block) const {
      return place + block * (height / Product::kRows) * row_size;
    }
  };

  // The piece of a task; `next` walks on, as a thread's tasks only grow.
  const Piece& piece_of(int64_t task, int64_t& current, int64_t last) const {
    while (current + 1 < last && pieces_[current + 1].first_task <= task) ++current;
    return pieces_[current];
  }

  void run_together(int64_t first, int64_t last, int64_t size) {
    auto* a = static_cast<Packed*>(
        workspace(Workspace::packed_b, std::max<int64_t>(1, size) * sizeof(Packed)));
    int64_t tasks = 0, panels = 0;
    for (int64_t i = first; i < last; ++i) {
      pieces_[i].first_task = tasks;
      tasks += ceil_div(pieces_[i].rows, pieces_[i].height);
      panels += ceil_div(products_[pieces_[i].product].n_, Product::kColumns);
    }
    share_tasks(tasks, [&](const auto& next) {
      int64_t current = first;
      for (int64_t task; (task = next()) >= 0;) {
        const Piece& piece = piece_of(task, current, last);
        const int64_t block = task - piece.first_task, row = block * piece.height;
        products_[piece.product].pack_rows(
            piece.row + row, std::min(piece.height, piece.rows - row), a + piece.place_of(block));
      }
    });
    tasks = 0;
    const int64_t even = std::clamp<int64_t>(panels / (8 * at::get_num_threads()), 1, 4);
    for (int64_t i = first; i < last; ++i) {
      pieces_[i].first_task = tasks;
      const Product& product = products_[pieces_[i].product];
      tasks += ceil_div(ceil_div(product.n_, Product::kColumns), per_task(product, even));
    }
    share_tasks(tasks, [&](const auto& next) {
      const typename Policy::Scope scope;
      int64_t current = first;
      for (int64_t task; (task = next()) >= 0;) {
        const Piece& piece = piece_of(task, current, last);
        multiply(piece, a, task - piece.first_task, even);
      }
    });
  }

  // Panels of B that a thread packs at a time: about half of its L2, so that the rows of A are read
  // from the shared cache as seldom as possible.
  static int64_t per_task(const Product& product, int64_t even) {
    const int64_t bytes = product.sides_ * std::max<int64_t>(1, product.blocks_) *
                          Product::kPanelB * static_cast<int64_t>(sizeof(Packed));
    return std::clamp<int64_t>(kPrivateBytes / bytes, 1, even);
  }

  void multiply(const Piece& piece, const Packed* a, int64_t task, int64_t even) const {
    const Product& product = products_[piece.product];
    const int64_t blocks = product.blocks_, sides = product.sides_;
    const int64_t panel_size = std::max<int64_t>(1, sides * blocks) * Product::kPanelB;
    const int64_t most = per_task(product, even);
    const int64_t column = task * most * Product::kColumns;
    const int64_t columns = std::min(most * Product::kColumns, product.n_ - column);
    const int64_t panels = ceil_div(columns, Product::kColumns);
    auto* b =
        static_cast<Packed*>(workspace(Workspace::panel_b, most * panel_size * sizeof(Packed)));
    for (int side = 0; side < sides; ++side) {
      for (int64_t block = 0; block < blocks; ++block) {
        product.pack_columns_of_b(side, column, columns, block,
                                  b + (side * blocks + block) * Product::kPanelB, panel_size);
      }
    }
    auto* tiles = product.tile_buffer(piece.height / Product::kRows);
    for (int64_t row = 0; row < piece.rows; row += piece.height) {
      const int64_t rows = std::min(piece.height, piece.rows - row);
      for (int64_t p = 0; p < panels; ++p) {
        const Packed* rows_of_a = a + piece.place_of(row / piece.height);
        const bool last = row + rows >= piece.rows;
        const Packed* next = last ? nullptr : a + piece.place_of(row / piece.height + 1);
        product.compute(
            piece.row + row, rows, column + p * Product::kColumns, tiles, [&](int side, auto* to) {
              product.multiply_panels(
                  side, piece.row + row, rows, column + p * Product::kColumns, rows_of_a, to,
                  [&](int64_t block) {
                    return b + p * panel_size + (side * blocks + block) * Product::kPanelB;
                  },
                  {next, p * sides + side, panels * sides});
            });
      }
    }
  }

  std::vector<Product> products_, few_rows_;
  std::vector<Piece> pieces_;
};

}  // namespace
}  // namespace fusedops::CPU_CAPABILITY
