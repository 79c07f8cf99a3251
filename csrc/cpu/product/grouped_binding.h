// What the bindings of grouped_mm and moe_mlp share: the groups of rows, and their products.
#pragma once

#include <vector>

#include "grouped_mm.h"
#include "linear_binding.h"

namespace fusedops {

// Where the groups of rows end, read from `offsets` of [num_groups] int32.
class Groups {
 public:
  Groups(const char* op, const at::Tensor& offsets, int64_t rows) : ends_(offsets.numel()) {
    const auto dense = offsets.contiguous();
    const auto* values = dense.const_data_ptr<int32_t>();
    int64_t before = 0;
    for (int64_t g = 0; g < count(); before = ends_[g++]) {
      ends_[g] = values[g];
      TORCH_CHECK_VALUE(values[g] >= before, op, ": offsets must not decrease, got ", values[g],
                        " after ", before, " at index ", g);
    }
    TORCH_CHECK_VALUE(before <= rows, op, ": offsets must end within the ", rows,
                      " rows of input, got ", before);
  }

  int64_t count() const { return static_cast<int64_t>(ends_.size()); }
  int64_t begin(int64_t group) const { return group == 0 ? 0 : ends_[group - 1]; }
  int64_t size(int64_t group) const { return ends_[group] - begin(group); }
  int64_t rows() const { return ends_.empty() ? 0 : ends_.back(); }
  const int64_t* ends() const { return ends_.data(); }

 private:
  std::vector<int64_t> ends_;
};

// Element [index] of the first dimension of a tensor, as a matrix.
inline Matrix matrix_of(const at::Tensor& stack, int64_t index) {
  const auto offset = index * stack.stride(0) * stack.element_size();
  return {static_cast<const char*>(stack.const_data_ptr()) + offset, stack.stride(1),
          stack.stride(2)};
}

// Rows from `first` on of a dense matrix (undefined: null).
inline const void* rows_from(const at::Tensor& tensor, int64_t first) {
  if (!tensor.defined()) return nullptr;
  return static_cast<const char*>(tensor.const_data_ptr()) +
         first * tensor.size(-1) * tensor.element_size();
}

inline void* mutable_rows_from(const at::Tensor& tensor, int64_t first) {
  return const_cast<void*>(rows_from(tensor, first));
}

// Rows `first` and after of a matrix: where they are gathered, of the list.
inline Matrix from_row(Matrix matrix, int64_t first, int64_t element_size) {
  if (matrix.rows != nullptr) {
    matrix.rows += first;
  } else {
    matrix.data = static_cast<const char*>(matrix.data) + first * matrix.row_stride * element_size;
  }
  return matrix;
}

inline void zero_rows_from(const at::Tensor& tensor, int64_t first) {
  if (first < tensor.size(0)) tensor.narrow(0, first, tensor.size(0) - first).zero_();
}

// output[r] = act(x[r] * weight[g] + bias[g]) for the rows r of group g. Rows after the last group
// are zeros. `preactivation` and `bias` may be undefined; `output` and `preactivation` are dense.
inline void grouped_product(const Groups& groups, Matrix x, const at::Tensor& weight,
                            const at::Tensor& bias, Activation activation,
                            const at::Tensor& preactivation, const at::Tensor& output) {
  std::vector<LinearForward> products;
  for (int64_t g = 0; g < groups.count(); ++g) {
    const int64_t first = groups.begin(g);
    const auto call =
        product_of(groups.size(g), weight.size(2), weight.size(1),
                   from_row(x, first, weight.element_size()), matrix_of(weight, g), weight);
    products.push_back({call, rows_from(bias, g), mutable_rows_from(preactivation, first),
                        mutable_rows_from(output, first), activation});
  }
  FUSEDOPS_CALL_ISA(linear_forward_batch, products.data(), static_cast<int64_t>(products.size()));
  zero_rows_from(output, groups.rows());
  if (preactivation.defined()) zero_rows_from(preactivation, groups.rows());
}

// Whether each matrix of a stack is the transposed view of a dense one: so is its gradient then.
inline bool is_stack_transposed(const at::Tensor& stack) {
  return !stack.is_contiguous() && stack.transpose(1, 2).is_contiguous();
}

// x[rows of g]^T * grad[rows of g], of the dtype of `like`: the gradient [in, out] of a weight.
inline GemmCall weight_product(const Groups& groups, int64_t g, const Matrix& x, const Matrix& grad,
                               int64_t in, int64_t out, const at::Tensor& like) {
  const int64_t first = groups.begin(g), size = like.element_size();
  return product_of(in, out, groups.size(g), transposed(from_row(x, first, size)),
                    from_row(grad, first, size), like);
}

// gradient[g] = x[rows of g]^T * grad[rows of g], dense. Zeros for an empty group.
inline void weight_gradient_into(const Groups& groups, const Matrix& x, const Matrix& grad,
                                 const at::Tensor& gradient) {
  std::vector<WeightGradient> products;
  const int64_t in = gradient.size(1), out = gradient.size(2);
  for (int64_t g = 0; g < groups.count(); ++g) {
    products.push_back({weight_product(groups, g, x, grad, in, out, gradient),
                        mutable_rows_from(gradient, g * in)});
  }
  FUSEDOPS_CALL_ISA(weight_gradients, products.data(), static_cast<int64_t>(products.size()));
}

// into[g] += x[rows of g]^T * grad[rows of g], rows of the dtype of `like`, for a buffer of its
// accumulation dtype that is dense or the transposed view of a dense one.
inline void add_weight_gradient(const char* op, const Groups& groups, const Matrix& x,
                                const Matrix& grad, const at::Tensor& like,
                                const at::Tensor& into) {
  const bool swapped = !into.is_contiguous();
  const auto gradient = swapped ? into.transpose(1, 2) : into;
  TORCH_CHECK_VALUE(gradient.is_contiguous(), op, ": the buffer of a weight's gradient must be ",
                    "dense, or a transposed view of dense memory");
  const int64_t in = gradient.size(1), out = gradient.size(2);
  std::vector<AddedProduct> products;
  for (int64_t g = 0; g < groups.count(); ++g) {
    const auto call =
        weight_product(groups, g, swapped ? grad : x, swapped ? x : grad, in, out, like);
    if (call.k > 0) products.push_back({call, mutable_rows_from(gradient, g * in), out});
  }
  FUSEDOPS_CALL_ISA(add_products, products.data(), static_cast<int64_t>(products.size()));
}

// The same as a new tensor that is laid out in memory as `weight` is.
inline at::Tensor grouped_weight_gradient(const Groups& groups, const Matrix& x, const Matrix& grad,
                                          const at::Tensor& weight) {
  const bool swapped = is_stack_transposed(weight);
  auto sizes = weight.sizes().vec();
  if (swapped) std::swap(sizes[1], sizes[2]);
  const auto gradient = at::empty(sizes, weight.options());
  weight_gradient_into(groups, swapped ? grad : x, swapped ? x : grad, gradient);
  return swapped ? gradient.transpose(1, 2) : gradient;
}

// The sums over the rows of each group: [groups, columns].
inline at::Tensor grouped_row_sums(const Groups& groups, const at::Tensor& values,
                                   const int32_t* places = nullptr, const void* scale = nullptr) {
  const auto sums = at::empty({groups.count(), values.size(1)}, values.options());
  const GroupSums arguments{data(values),       places,         scale,          groups.ends(),
                            mutable_data(sums), groups.count(), values.size(1), dtype_of(values)};
  FUSEDOPS_CALL_ISA(group_sums, arguments);
  return sums;
}

// into += the sums over the rows of each group, unrounded.
inline void add_row_sums(const char* op, const Groups& groups, const at::Tensor& values,
                         const at::Tensor& into, const int32_t* places = nullptr,
                         const void* scale = nullptr) {
  TORCH_CHECK_VALUE(into.is_contiguous(), op, ": the buffer of a bias's gradient must be dense");
  const GroupSums arguments{
      data(values),   places,           scale, groups.ends(), mutable_data(into), groups.count(),
      values.size(1), dtype_of(values), true};
  FUSEDOPS_CALL_ISA(group_sums, arguments);
}

}  // namespace fusedops
