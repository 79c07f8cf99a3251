// Bindings of moe_pack and moe_unpack on the CPU. Arguments were checked by
// fusedops/ops/moe_pack.py and fusedops/ops/moe_unpack.py, except the values of the index: those
// are checked as they are read.
#include "moe_pack.h"

#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "../../common/binding.h"
#include "../../common/parallel.h"

namespace fusedops {
namespace {

using Optional = std::optional<at::Tensor>;

PayloadOffsets offsets_of(at::IntArrayRef layout) {
  return {layout[0], layout[1], layout[2], layout[3]};
}

const int32_t* int32_data(const at::Tensor& tensor) {
  return tensor.defined() ? tensor.const_data_ptr<int32_t>() : nullptr;
}

at::Tensor pack(const at::Tensor& input, const at::Tensor& probs, const Optional& expert_ids,
                const Optional& index, const Optional& num_rows, int64_t span, bool quantized,
                at::IntArrayRef layout) {
  const bool dense_rows = input.size(1) == 1 || input.stride(1) == 1;
  const auto x = dense_rows ? input : input.contiguous();
  const auto p = probs.contiguous();
  const auto ids = dense(expert_ids), slots = dense(index), count = dense(num_rows);
  const int64_t rows = slots.defined() ? slots.numel() : x.size(0);
  const auto offsets = offsets_of(layout);
  auto payload = at::empty({rows, offsets.stride}, x.options().dtype(at::kByte));
  std::atomic<int64_t> bad_row{-1};
  const MoePack arguments{x.const_data_ptr(),
                          x.stride(0),
                          static_cast<const char*>(p.const_data_ptr()),
                          static_cast<int64_t>(p.element_size()),
                          int32_data(ids),
                          int32_data(slots),
                          static_cast<char*>(payload.mutable_data_ptr()),
                          rows,
                          count.defined() ? *count.const_data_ptr<int32_t>() : rows,
                          x.size(0),
                          x.size(1),
                          p.size(1),
                          span,
                          offsets,
                          quantized,
                          dtype_of(x),
                          &bad_row};
  FUSEDOPS_CALL_ISA(moe_pack, arguments);
  const int64_t row = bad_row.load();
  TORCH_CHECK_VALUE(row < 0, "moe_pack: index must be in [0, ", p.numel(), "), got ",
                    arguments.index[row], " at row ", row);
  return payload;
}

at::Tensor unpack(const at::Tensor& payload, const at::Tensor& like, at::IntArrayRef layout) {
  const auto packed = payload.contiguous();
  const int64_t columns = like.size(-1);
  auto rows = at::empty({packed.size(0), columns}, like.options());
  const MoeUnpack arguments{static_cast<const char*>(packed.const_data_ptr()),
                            rows.mutable_data_ptr(),
                            packed.size(0),
                            columns,
                            offsets_of(layout),
                            dtype_of(like)};
  FUSEDOPS_CALL_ISA(moe_unpack, arguments);
  return rows;
}

}  // namespace

TORCH_LIBRARY_IMPL(fusedops_cpp, CPU, m) {
  m.impl("moe_pack", pack);
  m.impl("moe_unpack", unpack);
}

}  // namespace fusedops
