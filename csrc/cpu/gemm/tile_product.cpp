// fusedops_native::tile_product: what the tile registers, or their emulation, make of one product
// (tests/core/test_tile_registers.py).
#include "tile_product.h"

#include <ATen/core/Tensor.h>
#include <torch/library.h>

namespace fusedops {
namespace {

// rows [32, k] and columns [k, 32] of bfloat16, sums [32, 32] of float32, k a multiple of 32: sums
// + rows * columns, in chains of 32.
at::Tensor product_of_tiles(const at::Tensor& rows, const at::Tensor& columns,
                            const at::Tensor& sums, bool emulated) {
  const int64_t k = rows.dim() == 2 ? rows.size(1) : -1;
  TORCH_CHECK_VALUE(k >= 0 && k % 32 == 0 && rows.size(0) == 32 && columns.dim() == 2 &&
                        columns.size(0) == k && columns.size(1) == 32 && sums.dim() == 2 &&
                        sums.size(0) == 32 && sums.size(1) == 32,
                    "tile_product: rows must be [32, k], columns [k, 32] and sums [32, 32], k a "
                    "multiple of 32");
  TORCH_CHECK_TYPE(rows.scalar_type() == at::kBFloat16 && columns.scalar_type() == at::kBFloat16 &&
                       sums.scalar_type() == at::kFloat,
                   "tile_product: rows and columns must be bfloat16, sums float32");
  TORCH_CHECK(tile_form() == TileForm::hardware || (emulated && tile_form() != TileForm::none),
              "tile_product: no tiles here; FUSEDOPS_MAX_ISA=amx_emulated emulates them");
  const auto left = rows.reshape({32, k / 32, 32}).transpose(0, 1).contiguous();
  const auto right = columns.reshape({k / 2, 2, 32}).transpose(1, 2).contiguous();
  auto result = sums.clone();
  const TileProduct call{k / 2, static_cast<const uint32_t*>(left.const_data_ptr()),
                         static_cast<const uint32_t*>(right.const_data_ptr()),
                         result.mutable_data_ptr<float>(), emulated};
  FUSEDOPS_CALL_ISA(tile_product, call);
  return result;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(fusedops_native, m) {
  m.def("tile_product(Tensor rows, Tensor columns, Tensor sums, bool emulated) -> Tensor",
        &product_of_tiles);
}

}  // namespace fusedops
