// Bindings of linear_cross_entropy and linear_token_logprobs on the CPU:
// fusedops_cpp::linear_cross_entropy, fusedops_cpp::linear_token_logprobs and their backwards.
#include "linear_cross_entropy.h"

#include <algorithm>
#include <array>

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include "../product/linear_binding.h"
#include "cross_entropy_binding.h"

namespace fusedops {
namespace {

using Optional = std::optional<at::Tensor>;

// The rows that are not ignored: nothing is computed for the others.
struct Rows {
  Rows(const char* op, const at::Tensor& hidden, const at::Tensor& target_of_rows, int64_t classes,
       int64_t ignore_index, bool partial)
      : target(target_of_rows.contiguous().view(-1)), all(target.numel()) {
    const auto* data = target.const_data_ptr<int64_t>();
    // Of a part of the classes: -1 is a class of another.
    count = count_targets(op, data, all, classes, ignore_index, partial ? -1 : 0);
    x = as_rows(hidden.dim() == 1 ? hidden.unsqueeze(0) : hidden);
    if (count == all) return;
    index = at::empty({count}, target.options());
    auto* next = index.mutable_data_ptr<int64_t>();
    for (int64_t row = 0; row < all; ++row) {
      if (data[row] != ignore_index) *next++ = row;
    }
    x = x.index_select(0, index);
    target = target.index_select(0, index);
  }

  // Of a tensor with one row per row of hidden.
  at::Tensor pick(const at::Tensor& tensor) const {
    return index.defined() ? tensor.index_select(0, index) : tensor.contiguous();
  }

  // The other way round: 0 where ignored.
  at::Tensor spread(const at::Tensor& tensor, at::IntArrayRef shape) const {
    if (!index.defined()) return tensor.view(shape);
    auto sizes = tensor.sizes().vec();
    sizes[0] = all;
    return at::zeros(sizes, tensor.options()).index_copy_(0, index, tensor).view(shape);
  }

  const int64_t* index_data() const {
    return index.defined() ? index.const_data_ptr<int64_t>() : nullptr;
  }

  at::Tensor target;
  int64_t all;
  int64_t count;
  at::Tensor x;
  at::Tensor index;  // undefined when no row is ignored
};

// Calls body(first, weight of the chunk, bias of the chunk) chunk by chunk.
template <typename Body>
void for_each_chunk(const at::Tensor& weight, const at::Tensor& bias, int64_t chunk_size,
                    const Body& body) {
  const int64_t classes = weight.size(0);
  for (int64_t first = 0; first < classes; first += chunk_size) {
    const int64_t width = std::min(chunk_size, classes - first);
    body(first, weight.narrow(0, first, width),
         bias.defined() ? bias.narrow(0, first, width) : bias);
  }
}

GemmCall logits_product(const at::Tensor& x, const at::Tensor& weight) {
  return product_of(x.size(0), weight.size(0), x.size(1), matrix(x), transposed(weight), x);
}

// Where the logits are kept, or nothing. Rows that are ignored are 0 there.
at::Tensor room_for_logits(const Rows& rows, const at::Tensor& target, int64_t classes,
                           bool keep_logits) {
  auto shape = target.sizes().vec();
  shape.push_back(keep_logits ? classes : 0);
  const auto wide = rows.x.options().dtype(statistics_type(rows.x));
  return rows.index.defined() ? at::zeros(shape, wide) : at::empty(shape, wide);
}

// The sums of the rows; their logits are written to `kept` if it has room for them.
std::vector<RowSums> row_sums(const Rows& rows, const at::Tensor& weight, const Optional& bias,
                              int64_t chunk_size, const LossOptions& options,
                              const at::Tensor& kept) {
  const int64_t classes = weight.size(0), widest = std::min(chunk_size, classes);
  const bool keep_logits = kept.size(-1) > 0;
  const auto logits = keep_logits ? kept : at::empty({rows.count, widest}, kept.options());
  const int64_t* index = keep_logits ? rows.index_data() : nullptr;
  std::vector<RowSums> sums(rows.count);
  for_each_chunk(weight, dense(bias), chunk_size,
                 [&](int64_t first, const at::Tensor& w, const at::Tensor& b) {
                   const int64_t width = w.size(0), stride = keep_logits ? classes : width;
                   const auto chunk = keep_logits ? logits.narrow(-1, first, width) : logits;
                   const ChunkLogits product{logits_product(rows.x, w), data(b),
                                             mutable_data(chunk), stride, index};
                   FUSEDOPS_CALL_ISA(chunk_logits, product);
                   const CrossEntropySums arguments{
                       data(chunk), stride,          index, rows.target.const_data_ptr<int64_t>(),
                       sums.data(), rows.count,      width, first,
                       options,     dtype_of(logits)};
                   FUSEDOPS_CALL_ISA(cross_entropy_sums, arguments);
                 });
  return sums;
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> forward(
    const at::Tensor& hidden, const at::Tensor& weight, const at::Tensor& target,
    const Optional& bias, int64_t ignore_index, double label_smoothing, double z_loss,
    double softcap, std::string_view reduction, int64_t chunk_size, bool keep_logits,
    int64_t all_classes) {
  const LossOptions options{ignore_index, label_smoothing, z_loss, softcap};
  const int64_t classes = weight.size(0);
  const Rows rows("linear_cross_entropy", hidden, target, classes, ignore_index, all_classes > 0);
  const auto kind = reduction_of(reduction);
  const auto kept = room_for_logits(rows, target, classes, keep_logits);
  const auto sums = row_sums(rows, weight, bias, chunk_size, options, kept);
  auto statistics = at::empty({rows.count, 2}, kept.options());
  const auto type = statistics.scalar_type();
  const auto loss = finish_loss(sums.data(), rows.target, all_classes > 0 ? all_classes : classes,
                                rows.count, options, kind, type, statistics);
  auto statistics_shape = target.sizes().vec();
  statistics_shape.push_back(2);
  return {kind == Reduction::none ? rows.spread(loss, target.sizes()) : loss,
          number(rows.count, type), rows.spread(statistics, statistics_shape), kept};
}

// The gradients of the factors and the bias, from the numbers of each row's gradient.
std::tuple<at::Tensor, at::Tensor, at::Tensor> factor_gradients(
    const Rows& rows, const at::Tensor& hidden, const at::Tensor& weight, const Optional& bias,
    const at::Tensor& kept_logits, int64_t chunk_size, const LossOptions& options,
    const std::vector<RowGradient>& gradient, std::array<bool, 3> output_mask) {
  const int64_t classes = weight.size(0), features = weight.size(1);
  const int64_t widest = std::min(chunk_size, classes);
  const auto kept = kept_logits.contiguous();
  const auto wide = kept.options();
  const auto grad_logits = at::empty({rows.count, widest}, rows.x.options());
  at::Tensor grad_hidden, sums, grad_weight, grad_bias, partials;
  if (output_mask[0]) {
    grad_hidden = at::empty({rows.count, features}, rows.x.options());
    const bool same = wide.dtype() == grad_hidden.dtype();
    sums = same || classes <= chunk_size ? grad_hidden : at::empty(grad_hidden.sizes(), wide);
  }
  if (output_mask[1]) grad_weight = at::empty(weight.sizes(), weight.options());
  if (output_mask[2]) {
    grad_bias = at::empty({classes}, weight.options());
    partials = at::empty({Chunks(rows.count).count, widest}, wide);
    if (rows.count == 0) grad_bias.zero_();
  }
  for_each_chunk(
      weight, dense(bias), chunk_size,
      [&](int64_t first, const at::Tensor& w, const at::Tensor& b) {
        const int64_t width = w.size(0);
        const auto* targets = rows.target.const_data_ptr<int64_t>();
        if (kept.size(-1) > 0) {
          const KeptGradient logits{data(kept.narrow(-1, first, width)),
                                    classes,
                                    rows.index_data(),
                                    targets,
                                    gradient.data(),
                                    first,
                                    options,
                                    mutable_data(grad_logits),
                                    rows.count,
                                    width,
                                    dtype_of(rows.x)};
          FUSEDOPS_CALL_ISA(kept_gradient, logits);
        } else {
          const ChunkGradient logits{logits_product(rows.x, w), data(b), targets,
                                     gradient.data(),           first,   options,
                                     mutable_data(grad_logits)};
          FUSEDOPS_CALL_ISA(chunk_gradient, logits);
        }
        const Matrix grad{data(grad_logits), width, 1}, grad_t{data(grad_logits), 1, width};
        if (output_mask[0]) {
          const bool last = first + width == classes;
          const ChunkSum sum{product_of(rows.count, features, width, grad, matrix(w), rows.x),
                             mutable_data(sums), last ? mutable_data(grad_hidden) : nullptr,
                             first == 0};
          FUSEDOPS_CALL_ISA(chunk_sum, sum);
        }
        if (output_mask[1]) {
          const LinearForward product{
              product_of(width, features, rows.count, grad_t, matrix(rows.x), rows.x), nullptr,
              nullptr, mutable_data(grad_weight.narrow(0, first, width)), Activation::identity};
          FUSEDOPS_CALL_ISA(linear_forward, product);
        }
        if (output_mask[2] && rows.count > 0) {
          const ActivationGradient column_sums{data(grad_logits),
                                               nullptr,
                                               nullptr,
                                               mutable_data(grad_bias.narrow(0, first, width)),
                                               mutable_data(partials),
                                               rows.count,
                                               width,
                                               Activation::identity,
                                               dtype_of(rows.x)};
          FUSEDOPS_CALL_ISA(activation_gradient, column_sums);
        }
      });
  if (grad_hidden.defined()) grad_hidden = rows.spread(grad_hidden, hidden.sizes());
  return {grad_hidden, grad_weight, grad_bias};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> backward(
    const Optional& grad_loss, const at::Tensor& hidden, const at::Tensor& weight,
    const at::Tensor& target, const Optional& bias, const at::Tensor& statistics,
    const at::Tensor& kept_logits, int64_t ignore_index, double label_smoothing, double z_loss,
    double softcap, std::string_view reduction, int64_t chunk_size, bool /*keep_logits*/,
    int64_t all_classes, std::array<bool, 3> output_mask) {
  const LossOptions options{ignore_index, label_smoothing, z_loss, softcap};
  const int64_t classes = weight.size(0);
  const Rows rows("linear_cross_entropy", hidden, target, classes, ignore_index, all_classes > 0);
  const auto grads = reduction_of(reduction) == Reduction::none
                         ? rows.pick(grad_loss->contiguous().view(-1))
                         : *grad_loss;
  const auto gradient = row_gradients(grads, rows.pick(statistics.contiguous().view({-1, 2})),
                                      options, all_classes > 0 ? all_classes : classes);
  return factor_gradients(rows, hidden, weight, bias, kept_logits, chunk_size, options, gradient,
                          output_mask);
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> token_logprobs(
    const at::Tensor& input, const at::Tensor& weight, const at::Tensor& target,
    const Optional& bias, int64_t ignore_index, double temperature, double softcap,
    int64_t chunk_size, bool keep_logits, bool partial) {
  const auto options = token_options(ignore_index, temperature, softcap);
  const int64_t classes = weight.size(0);
  const Rows rows("linear_token_logprobs", input, target, classes, ignore_index, partial);
  const auto kept = room_for_logits(rows, target, classes, keep_logits);
  const auto sums = row_sums(rows, weight, bias, chunk_size, options, kept);
  auto tokens = at::empty({3, rows.count}, kept.options());
  auto statistics = at::empty({rows.count, 4}, kept.options());
  finish_tokens(sums.data(), rows.target, options, tokens, statistics);
  auto shape = target.sizes().vec(), shape_of_tokens = shape;
  shape.push_back(4);
  shape_of_tokens.insert(shape_of_tokens.begin(), 3);
  if (rows.index.defined()) {
    tokens = at::zeros({3, rows.all}, kept.options()).index_copy_(1, rows.index, tokens);
  }
  return {tokens.view(shape_of_tokens), rows.spread(statistics, shape), kept};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> token_logprobs_backward(
    const Optional& grad_tokens, const at::Tensor& input, const at::Tensor& weight,
    const at::Tensor& target, const Optional& bias, const at::Tensor& statistics,
    const at::Tensor& kept_logits, int64_t ignore_index, double temperature, double softcap,
    int64_t chunk_size, bool /*keep_logits*/, bool partial, std::array<bool, 3> output_mask) {
  const auto options = token_options(ignore_index, temperature, softcap);
  const Rows rows("linear_token_logprobs", input, target, weight.size(0), ignore_index, partial);
  auto grads = grad_tokens->contiguous().view({3, rows.all});
  if (rows.index.defined()) grads = grads.index_select(1, rows.index);
  const auto kept = rows.pick(statistics.contiguous().view({-1, 4}));
  return factor_gradients(rows, input, weight, bias, kept_logits, chunk_size, options,
                          token_gradients(grads, kept, options), output_mask);
}

}  // namespace

TORCH_LIBRARY_IMPL(fusedops_cpp, CPU, m) {
  m.impl("linear_cross_entropy", forward);
  m.impl("linear_cross_entropy_backward", backward);
  m.impl("linear_token_logprobs", token_logprobs);
  m.impl("linear_token_logprobs_backward", token_logprobs_backward);
}

}  // namespace fusedops
