// The bindings of attention (attention.cpp), for other bindings.
#pragma once

#include <optional>
#include <tuple>

#include <ATen/core/List.h>
#include <ATen/core/Tensor.h>

namespace fusedops {

// Output, log-sum-exp, and what keep_remainder keeps: fusedops/ops/attention.py.
std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> dense_attention(
    const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
    const std::optional<at::Tensor>& attn_mask, const std::optional<at::Tensor>& alibi_slopes,
    const std::optional<at::Tensor>& sinks, const std::optional<at::Tensor>& seed, double dropout_p,
    double scale, int64_t window_left, int64_t window_right, double softcap, bool keep_remainder);

// Gradients of query, key, value, mask and sinks.
std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor> dense_attention_backward(
    const std::optional<at::Tensor>& grad_output, const std::optional<at::Tensor>& grad_lse,
    const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
    const std::optional<at::Tensor>& attn_mask, const std::optional<at::Tensor>& alibi_slopes,
    const std::optional<at::Tensor>& sinks, const std::optional<at::Tensor>& seed,
    const at::Tensor& output, const at::Tensor& lse, const at::Tensor& remainder,
    const at::Tensor& lse_parts, double dropout_p, double scale, int64_t window_left,
    int64_t window_right, double softcap, bool keep_remainder, c10::List<bool> output_mask);

}  // namespace fusedops
