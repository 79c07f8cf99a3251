// Binding of scaled_masked_softmax on the CPU: fusedops_cpp::scaled_masked_softmax and its
// backward. Arguments were checked by fusedops/ops/scaled_masked_softmax.py.
#include "scaled_masked_softmax.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/sum.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include "../../common/binding.h"
#include "../../common/parallel.h"

namespace fusedops {
namespace {

using Optional = std::optional<at::Tensor>;

// The rows of `sizes` with a mask of shape `mask_sizes`, which is broadcast to them and has these
// strides; neighbouring dimensions that memory joins are one. No value when too many are left.
std::optional<SoftmaxRows> rows_of(at::IntArrayRef sizes, at::IntArrayRef mask_sizes,
                                   at::IntArrayRef mask_strides) {
  struct Dim {
    int64_t size, row_stride, mask_stride;
  };
  std::vector<Dim> dims;  // from the last to the first
  int64_t count = 1;
  for (int64_t d = static_cast<int64_t>(sizes.size()) - 2; d >= 0; --d) {
    const int64_t of_mask = d - static_cast<int64_t>(sizes.size() - mask_sizes.size());
    const bool varies = of_mask >= 0 && mask_sizes[of_mask] > 1;
    const int64_t stride = varies ? mask_strides[of_mask] : 0;
    if (sizes[d] > 1) {
      if (!dims.empty() && stride == dims.back().size * dims.back().mask_stride) {
        dims.back().size *= sizes[d];
      } else {
        dims.push_back({sizes[d], count, stride});
      }
    }
    count *= sizes[d];
  }
  if (dims.size() > SoftmaxRows::kMostDims) return std::nullopt;
  SoftmaxRows rows{};
  rows.count = count;
  rows.sharing = 1;
  for (const bool broadcast : {false, true}) {
    for (auto dim = dims.rbegin(); dim != dims.rend(); ++dim) {
      if ((dim->mask_stride == 0) != broadcast) continue;
      rows.sizes[rows.dims] = dim->size;
      rows.row_strides[rows.dims] = dim->row_stride;
      rows.mask_strides[rows.dims] = dim->mask_stride;
      ++rows.dims;
      if (broadcast) rows.sharing *= dim->size;
    }
  }
  return rows;
}

at::Tensor forward(const at::Tensor& input, const Optional& mask_in, double scale, bool is_causal) {
  const auto x = input.contiguous();
  auto output = at::empty(x.sizes(), x.options());
  if (x.numel() == 0) return output;
  const int64_t columns = x.size(-1);
  auto mask = mask_in.has_value() ? *mask_in : at::Tensor();
  std::optional<SoftmaxRows> rows = rows_of(x.sizes(), {}, {});
  bool per_row = false;
  if (mask.defined()) {
    for (int64_t d = 0; d < mask.dim(); ++d) {
      if (mask.stride(d) == 0 && mask.size(d) > 1) mask = mask.narrow(d, 0, 1);
    }
    per_row = mask.dim() == 0 || (mask.size(-1) == 1 && columns > 1);
    if (!per_row && columns > 1 && mask.stride(-1) != 1) mask = mask.contiguous();
    rows = rows_of(x.sizes(), mask.sizes(), mask.strides());
    if (!rows) {
      mask = mask.contiguous();
      rows = rows_of(x.sizes(), mask.sizes(), mask.strides());
      TORCH_CHECK_NOT_IMPLEMENTED(rows,
                                  "scaled_masked_softmax: the mask is broadcast over more "
                                  "than 8 groups of dimensions");
    }
  }
  const bool keeps = mask.defined() && mask.scalar_type() == at::kBool;
  const ScaledMaskedSoftmaxForward arguments{data(x),
                                             data(mask),
                                             mutable_data(output),
                                             *rows,
                                             columns,
                                             x.size(-2),
                                             per_row,
                                             is_causal,
                                             scale,
                                             !mask.defined() ? MaskKind::none
                                             : keeps         ? MaskKind::keep
                                                             : MaskKind::additive,
                                             dtype_of(x),
                                             dtype_of(!mask.defined() || keeps ? x : mask)};
  FUSEDOPS_CALL_ISA(scaled_masked_softmax_forward, arguments);
  return output;
}

std::tuple<at::Tensor, at::Tensor> backward(const Optional& grad_output, const Optional& mask,
                                            const at::Tensor& output, double scale, bool is_causal,
                                            c10::List<bool> output_mask) {
  at::Tensor dx, dmask, partials;
  const auto y = output.contiguous();
  if (output_mask[0]) dx = at::empty(y.sizes(), y.options());
  if (y.numel() == 0) {
    if (output_mask[1]) dmask = at::zeros(mask->sizes(), mask->options());
    return {dx, dmask};
  }
  if (!output_mask[0] && !output_mask[1]) return {};
  const auto dy = grad_output->to(y.scalar_type()).contiguous();
  const int64_t columns = y.size(-1);
  auto rows = rows_of(y.sizes(), {}, {});
  bool per_row = false;
  if (output_mask[1]) {
    per_row = mask->dim() == 0 || (mask->size(-1) == 1 && columns > 1);
    // The gradient is dense, and has a row of its own for each row of a mask that is expanded.
    std::vector<int64_t> sizes = mask->sizes().vec();
    if (sizes.empty()) sizes.push_back(1);
    sizes.back() = columns;
    std::vector<int64_t> strides(sizes.size());
    int64_t stride = 1;
    for (size_t d = sizes.size(); d-- > 0; stride *= sizes[d]) strides[d] = stride;
    rows = rows_of(y.sizes(), sizes, strides);
    TORCH_CHECK_NOT_IMPLEMENTED(rows,
                                "scaled_masked_softmax: the mask is broadcast over more than "
                                "8 groups of dimensions");
    // One element for a row is the sum of a whole row of gradients, in accumulation dtype.
    const auto type = per_row ? statistics_type(y) : mask->scalar_type();
    dmask = at::empty(sizes, y.options().dtype(type));
    const int64_t chunks = Chunks(rows->sharing).count;
    if (chunks > 1) {
      partials = at::empty({rows->count / rows->sharing, chunks, columns},
                           y.options().dtype(statistics_type(y)));
    }
  }
  const ScaledMaskedSoftmaxBackward arguments{data(dy),
                                              data(y),
                                              mutable_data(dx),
                                              mutable_data(dmask),
                                              mutable_data(partials),
                                              *rows,
                                              columns,
                                              y.size(-2),
                                              is_causal,
                                              scale,
                                              dtype_of(y),
                                              dtype_of(dmask.defined() ? dmask : y)};
  FUSEDOPS_CALL_ISA(scaled_masked_softmax_backward, arguments);
  if (per_row) dmask = dmask.sum(-1).to(mask->scalar_type()).reshape(mask->sizes());
  return {dx, dmask};
}

}  // namespace

TORCH_LIBRARY_IMPL(fusedops_cpp, CPU, m) {
  m.impl("scaled_masked_softmax", forward);
  m.impl("scaled_masked_softmax_backward", backward);
}

}  // namespace fusedops
