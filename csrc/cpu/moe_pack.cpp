// Bindings of moe_pack and moe_unpack on the CPU. Arguments were checked by
// fusedops/ops/moe_pack.py and fusedops/ops/moe_unpack.py, except the values of the index: those
// are checked as they are read.
#include "moe_pack.h"

#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "../common/binding.h"
#include "../common/parallel.h"

namespace fusedops {
namespace {

using Optional = std::optional<at::Tensor>;

// The parts of a row of `data_bytes` and `pairs` probabilities and ids, which lie one behind the
// other in what is read or written.
PayloadOffsets offsets_of(const char* op, at::IntArrayRef layout, int64_t data_bytes, int64_t pairs,
                          int64_t prob_bytes, bool quantized) {
  TORCH_CHECK_VALUE(layout.size() == 4, op, ": layout must be four offsets, got ", layout);
  const PayloadOffsets o{layout[0], layout[1], layout[2], layout[3]};
  // Differences of what is known to be in order: sums could pass the largest number.
  TORCH_CHECK_VALUE(0 <= o.probs && o.probs <= o.ids && o.ids <= o.scale && o.scale <= o.stride &&
                        data_bytes <= o.probs && pairs * prob_bytes <= o.ids - o.probs &&
                        pairs * 4 <= o.scale - o.ids && (!quantized || 4 <= o.stride - o.scale),
                    op, ": layout must have room for ", data_bytes, " bytes and ", pairs,
                    " pairs, got ", layout);
  return o;
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
  TORCH_CHECK_VALUE(span == 0 || (span > 0 && ids.defined() && slots.defined()),
                    "moe_pack: span must be 0, or positive beside index and expert_ids, got ",
                    span);
  const int64_t pairs = slots.defined() && span == 0 ? 1 : p.size(1);
  const int64_t element_bytes = quantized ? 1 : static_cast<int64_t>(x.element_size());
  const auto offsets = offsets_of("moe_pack", layout, x.size(1) * element_bytes, pairs,
                                  static_cast<int64_t>(p.element_size()), quantized);
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
  const auto offsets = offsets_of("moe_unpack", layout, columns, 0, 0, true);
  TORCH_CHECK_VALUE(packed.size(1) == offsets.stride, "moe_unpack: payload must have rows of ",
                    offsets.stride, " bytes, got ", packed.size(1));
  auto rows = at::empty({packed.size(0), columns}, like.options());
  const MoeUnpack arguments{static_cast<const char*>(packed.const_data_ptr()),
                            rows.mutable_data_ptr(),
                            packed.size(0),
                            columns,
                            offsets,
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
