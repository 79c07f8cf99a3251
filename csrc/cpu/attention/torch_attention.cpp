// torch's attention on the CPU (the kernel behind scaled_dot_product_attention) in half precision
// by our kernels, forward and backward. Results are laid out in memory as torch's.
#include <cmath>

#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu_backward_cpu_dispatch.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu_cpu_dispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/isneginf.h>

#include "../common/torch_kernels.h"
#include "attention_binding.h"

namespace fusedops {
namespace {

using at::Tensor;
using Mask = std::optional<Tensor>;

bool has_mask(const Mask& mask) {
  return mask.has_value() && mask->defined();
}

bool is_mask(const Tensor& mask, const Tensor& query, const Tensor& key) {
  const int64_t rank = mask.dim();
  if (!is_replaced(mask) && mask.scalar_type() != at::kFloat) return false;
  if (mask.scalar_type() != query.scalar_type() && mask.scalar_type() != at::kFloat) return false;
  const int64_t sizes[] = {query.size(0), query.size(1), query.size(2), key.size(2)};
  for (int64_t dim = 0; dim < rank; ++dim) {
    if (mask.size(dim) != 1 && mask.size(dim) != sizes[4 - rank + dim]) return false;
  }
  return rank == 2 || rank == 4;
}

// Whether our kernels run a call: the tensors fit together.
bool is_ours(const Tensor& query, const Tensor& key, const Tensor& value, double dropout_p,
             const Mask& mask, std::optional<double> scale) {
  for (const auto* tensor : {&query, &key, &value}) {
    if (!is_replaced(*tensor) || tensor->scalar_type() != query.scalar_type() ||
        tensor->dim() != 4 || tensor->numel() == 0 || tensor->size(0) != query.size(0) ||
        tensor->size(1) != query.size(1) || tensor->size(3) != query.size(3)) {
      return false;
    }
  }
  return key.size(2) == value.size(2) && dropout_p == 0.0 && scale.value_or(1.0) > 0.0 &&
         (!has_mask(mask) || is_mask(*mask, query, key));
}

// The mask with four dimensions.
Mask as_four(const Mask& mask) {
  if (!has_mask(mask)) return std::nullopt;
  return mask->dim() == 4 ? *mask : mask->unsqueeze(0).unsqueeze(0);
}

double scale_of(const Tensor& query, std::optional<double> scale) {
  return scale.value_or(1.0 / std::sqrt(static_cast<double>(query.size(3))));
}

std::tuple<Tensor, Tensor> forward(const Tensor& query, const Tensor& key, const Tensor& value,
                                   double dropout_p, bool is_causal, const Mask& attn_mask,
                                   std::optional<double> scale) {
  if (!is_ours(query, key, value, dropout_p, attn_mask, scale)) {
    return at::cpu::_scaled_dot_product_flash_attention_for_cpu(query, key, value, dropout_p,
                                                                is_causal, attn_mask, scale);
  }
  count_call(TorchOperator::attention, query);
  const auto [output, lse, remainder, parts] = dense_attention(
      query, key, value, as_four(attn_mask), {}, {}, {}, 0.0, scale_of(query, scale),
      /*window_left=*/-1, /*window_right=*/is_causal ? 0 : -1, /*softcap=*/0.0,
      /*keep_remainder=*/false);
  // torch's lies in memory as [batch, tokens, heads], and is 0 where a mask forbids all keys.
  if (has_mask(attn_mask)) lse.masked_fill_(lse.isneginf(), 0);
  auto logsumexp = at::empty({lse.size(0), lse.size(2), lse.size(1)}, lse.options());
  return {output, logsumexp.transpose_(1, 2).copy_(lse)};
}

std::tuple<Tensor, Tensor, Tensor> backward(const Tensor& grad_out, const Tensor& query,
                                            const Tensor& key, const Tensor& value,
                                            const Tensor& out, const Tensor& logsumexp,
                                            double dropout_p, bool is_causal, const Mask& attn_mask,
                                            std::optional<double> scale) {
  if (!is_ours(query, key, value, dropout_p, attn_mask, scale)) {
    return at::cpu::_scaled_dot_product_flash_attention_for_cpu_backward(
        grad_out, query, key, value, out, logsumexp, dropout_p, is_causal, attn_mask, scale);
  }
  count_call(TorchOperator::attention_backward, query);
  const auto nothing_kept = at::empty({0}, query.options());
  const auto [grad_query, grad_key, grad_value, grad_mask, grad_sinks] = dense_attention_backward(
      grad_out, {}, query, key, value, as_four(attn_mask), {}, {}, {}, out, logsumexp, nothing_kept,
      nothing_kept, 0.0, scale_of(query, scale), /*window_left=*/-1,
      /*window_right=*/is_causal ? 0 : -1, /*softcap=*/0.0, /*keep_remainder=*/false,
      c10::List<bool>({true, true, true, false, false}));
  return {grad_query, grad_key, grad_value};
}

}  // namespace

void replace_attention(torch::Library& library) {
  library.impl("_scaled_dot_product_flash_attention_for_cpu", TORCH_FN(forward));
  library.impl("_scaled_dot_product_flash_attention_for_cpu_backward", TORCH_FN(backward));
}

}  // namespace fusedops
