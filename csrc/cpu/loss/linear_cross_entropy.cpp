// Binding of linear_cross_entropy on the CPU: fusedops_cpp::linear_cross_entropy and
// fusedops_cpp::linear_cross_entropy_backward. Shapes were checked by
// fusedops/ops/linear_cross_entropy.py.
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
  Rows(const at::Tensor& hidden, const at::Tensor& target_of_rows, int64_t classes,
       int64_t ignore_index, int64_t all_classes)
      : target(target_of_rows.contiguous().view(-1)), all(target.numel()) {
    const auto* data = target.const_data_ptr<int64_t>();
    // Of a part of the classes: -1 is a class of another.
    const int64_t least = all_classes > 0 ? -1 : 0;
    count = count_targets("linear_cross_entropy", data, all, classes, ignore_index, least);
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

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> forward(
    const at::Tensor& hidden, const at::Tensor& weight, const at::Tensor& target,
    const Optional& bias, int64_t ignore_index, double label_smoothing, double z_loss,
    double softcap, std::string_view reduction, int64_t chunk_size, bool keep_logits,
    int64_t all_classes) {
  const LossOptions options{ignore_index, label_smoothing, z_loss, softcap};
  const int64_t classes = weight.size(0), widest = std::min(chunk_size, classes);
  const Rows rows(hidden, target, classes, ignore_index, all_classes);
  const auto wide = rows.x.options().dtype(statistics_type(hidden));
  const auto kind = reduction_of(reduction);
  auto shape = target.sizes().vec();
  shape.push_back(keep_logits ? classes : 0);
  // Rows that are ignored are 0 there.
  const auto kept = rows.index.defined() ? at::zeros(shape, wide) : at::empty(shape, wide);
  const auto logits = keep_logits ? kept : at::empty({rows.count, widest}, wide);
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
  auto statistics = at::empty({rows.count, 2}, wide);
  const auto type = statistics.scalar_type();
  const auto loss = finish_loss(sums.data(), rows.target, all_classes > 0 ? all_classes : classes,
                                rows.count, options, kind, type, statistics);
  auto statistics_shape = target.sizes().vec();
  statistics_shape.push_back(2);
  return {kind == Reduction::none ? rows.spread(loss, target.sizes()) : loss,
          number(rows.count, type), rows.spread(statistics, statistics_shape), kept};
}

std::vector<RowGradient> row_gradients(const at::Tensor& grad_loss, const at::Tensor& statistics,
                                       const LossOptions& options, int64_t classes) {
  // In double, which both dtypes fit: three numbers per row.
  const auto grads = grad_loss.to(at::kDouble), wide = statistics.to(at::kDouble);
  const double* grad = grads.const_data_ptr<double>();
  const double* of_rows = wide.const_data_ptr<double>();
  const int64_t stride = grads.numel() == 1 ? 0 : 1;
  std::vector<RowGradient> rows;
  rows.reserve(wide.size(0));
  for (int64_t row = 0; row < wide.size(0); ++row) {
    rows.emplace_back(grad[row * stride], of_rows[2 * row], of_rows[2 * row + 1], options, classes);
  }
  return rows;
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> backward(
    const Optional& grad_loss, const at::Tensor& hidden, const at::Tensor& weight,
    const at::Tensor& target, const Optional& bias, const at::Tensor& statistics,
    const at::Tensor& kept_logits, int64_t ignore_index, double label_smoothing, double z_loss,
    double softcap, std::string_view reduction, int64_t chunk_size, bool keep_logits,
    int64_t all_classes, std::array<bool, 3> output_mask) {
  const LossOptions options{ignore_index, label_smoothing, z_loss, softcap};
  const int64_t classes = weight.size(0), features = weight.size(1);
  const int64_t widest = std::min(chunk_size, classes);
  const Rows rows(hidden, target, classes, ignore_index, all_classes);
  const auto wide = rows.x.options().dtype(statistics_type(hidden));
  const auto grads = reduction_of(reduction) == Reduction::none
                         ? rows.pick(grad_loss->contiguous().view(-1))
                         : *grad_loss;
  const auto gradient = row_gradients(grads, rows.pick(statistics.contiguous().view({-1, 2})),
                                      options, all_classes > 0 ? all_classes : classes);
  const auto kept = kept_logits.contiguous();
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
        if (keep_logits) {
          const KeptGradient logits{data(kept.narrow(-1, first, width)),
                                    classes,
                                    rows.index_data(),
                                    targets,
                                    gradient.data(),
                                    first,
                                    softcap,
                                    mutable_data(grad_logits),
                                    rows.count,
                                    width,
                                    dtype_of(rows.x)};
          FUSEDOPS_CALL_ISA(kept_gradient, logits);
        } else {
          const ChunkGradient logits{logits_product(rows.x, w), data(b), targets,
                                     gradient.data(),           first,   softcap,
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

}  // namespace

TORCH_LIBRARY_IMPL(fusedops_cpp, CPU, m) {
  m.impl("linear_cross_entropy", forward);
  m.impl("linear_cross_entropy_backward", backward);
}

}  // namespace fusedops
