// What bindings of ops that keep a state share: the sequences of a call, and tensors as rows of
// tokens.
#pragma once

#include <optional>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

namespace fusedops {

// Sequence n has the rows [starts[n], starts[n + 1]) of a tensor of all tokens: an entry of the
// batch, or a packed sequence. The operator may be called past the checks of its public function.
inline std::vector<int64_t> sequence_starts(const std::optional<at::Tensor>& cu_seqlens,
                                            int64_t batch, int64_t tokens) {
  std::vector<int64_t> starts;
  if (cu_seqlens.has_value() && cu_seqlens->defined()) {
    const auto ends = cu_seqlens->contiguous();
    starts.assign(ends.const_data_ptr<int64_t>(), ends.const_data_ptr<int64_t>() + ends.numel());
    bool rises = !starts.empty() && starts.front() == 0 && starts.back() == tokens;
    for (size_t n = 1; n < starts.size(); ++n) rises = rises && starts[n - 1] <= starts[n];
    TORCH_CHECK_VALUE(rises, "cu_seqlens must rise from 0 to the number of tokens, ", tokens);
  } else {
    for (int64_t n = 0; n <= batch; ++n) starts.push_back(n * tokens);
  }
  return starts;
}

// A tensor [batch, tokens, ...] as [batch * tokens, columns] with contiguous columns: a view where
// its strides allow that, as those of some columns of a projection do.
inline at::Tensor token_rows(const at::Tensor& tensor) {
  int64_t columns = 1;
  for (int64_t dim = 2; dim < tensor.dim(); ++dim) columns *= tensor.size(dim);
  const auto rows = tensor.reshape({tensor.size(0) * tensor.size(1), columns});
  return columns <= 1 || rows.stride(1) == 1 ? rows : rows.contiguous();
}

}  // namespace fusedops
