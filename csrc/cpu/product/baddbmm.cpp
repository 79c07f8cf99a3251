// Binding of baddbmm on the CPU: fusedops_cpp::baddbmm and fusedops_cpp::baddbmm_backward.
// Arguments were checked by fusedops/ops/baddbmm.py, which also gives all three the same number of
// dimensions.
#include "baddbmm.h"

#include <algorithm>
#include <array>

#include <ATen/ops/baddbmm.h>
#include <ATen/ops/bmm.h>
#include <torch/library.h>

#include "../../common/isa.h"
#include "linear_binding.h"

namespace fusedops {
namespace {

using Optional = std::optional<at::Tensor>;

// The stride of a tensor along a dimension where the result has `size` elements.
int64_t stride_along(const at::Tensor& tensor, int64_t dim) {
  return tensor.size(dim) == 1 ? 0 : tensor.stride(dim);
}

int64_t batch_size(const at::Tensor& a, const at::Tensor& b, int64_t dim) {
  return a.size(dim) == 1 ? b.size(dim) : a.size(dim);
}

// Whether the matrices are transposed views of dense ones.
bool is_batch_transposed(const at::Tensor& tensor) {
  return !tensor.is_contiguous() && tensor.transpose(-2, -1).is_contiguous();
}

Matrix last_two(const at::Tensor& tensor) {
  return {tensor.const_data_ptr(), tensor.stride(-2), tensor.stride(-1)};
}

GemmCall product_of_last(const at::Tensor& a, const at::Tensor& b) {
  return product_of(a.size(-2), b.size(-1), a.size(-1), last_two(a), last_two(b), a);
}

// Makes the last batch dimension more rows of one product where B is the same for all of them and
// the rows of A and of the addend go on evenly: B is then packed once. No bit changes; a summed
// dimension made into terms of the sum would move the blocks of k, by strides.
void fold(BatchedProduct& a) {
  while (!a.batch.sizes.empty()) {
    const auto& [along_a, along_b, along_addend] = a.batch.strides.back();
    GemmCall& call = a.product;
    const int64_t size = a.batch.sizes.back();
    const bool even = along_b == 0 && along_a == call.m * call.a.row_stride &&
                      along_addend == call.m * a.addend.row_stride;
    if (size != 1 && !even) break;
    call.m *= size;
    a.batch.sizes.pop_back();
    a.batch.strides.pop_back();
  }
}

// Whether torch multiplies a batch faster: bfloat16 on AMX without broadcast operands, where
// packing both operands of each product costs more than it saves (docs/dev/performance_notes.md,
// "Tiles of AMX"). Other factors than 1 would round twice there.
bool torch_is_faster(const at::Tensor& a, const at::Tensor& b, double alpha) {
  const auto is_dense = [](const at::Tensor& tensor) {
    return tensor.is_contiguous() || is_batch_transposed(tensor);
  };
  const int64_t batch_dims = a.dim() - 2;
  return a.scalar_type() == at::kBFloat16 && batch_dims > 0 && alpha == 1.0 &&
         a.sizes().slice(0, batch_dims) == b.sizes().slice(0, batch_dims) && is_dense(a) &&
         is_dense(b) && has_tiles();
}

// The batch dimensions of a dense tensor as one.
at::Tensor as_batch(const at::Tensor& tensor) {
  return tensor.flatten(0, -3);
}

at::Tensor forward(const at::Tensor& input, const at::Tensor& batch1, const at::Tensor& batch2,
                   double beta, double alpha, at::IntArrayRef /*broadcast*/) {
  auto shape = batch1.sizes().vec();
  for (int64_t dim = 0; dim + 2 < batch1.dim(); ++dim) shape[dim] = batch_size(batch1, batch2, dim);
  shape.back() = batch2.size(-1);
  if (torch_is_faster(batch1, batch2, alpha)) {
    const auto a = as_batch(batch1), b = as_batch(batch2);
    if (beta == 0.0) return at::bmm(a, b).view(shape);
    if (beta == 1.0 && input.sizes() == at::IntArrayRef(shape) && input.is_contiguous()) {
      return at::baddbmm(as_batch(input), a, b).view(shape);
    }
  }
  auto output = at::empty(shape, batch1.options());
  batched_product_into(input, batch1, batch2, beta, alpha, output);
  return output;
}

// alpha * a * b, summed over the batch dimensions that `like` lacks; laid out as `like` is.
at::Tensor operand_gradient(const at::Tensor& a, const at::Tensor& b, const at::Tensor& like,
                            double alpha) {
  if (is_batch_transposed(like)) {
    return operand_gradient(b.transpose(-2, -1), a.transpose(-2, -1), like.transpose(-2, -1), alpha)
        .transpose(-2, -1);
  }
  const bool keeps_batch = like.sizes().slice(0, like.dim() - 2) == a.sizes().slice(0, a.dim() - 2);
  if (keeps_batch && torch_is_faster(a, b, alpha)) {
    return at::bmm(as_batch(a), as_batch(b)).view(like.sizes());
  }
  auto gradient = at::empty(like.sizes(), like.options());
  BatchedProduct arguments{product_of_last(a, b), {}, {}, {}, mutable_data(gradient), alpha, 0.0};
  for (int64_t dim = 0; dim + 2 < like.dim(); ++dim) {
    const int64_t size = batch_size(a, b, dim);
    const int64_t along_a = stride_along(a, dim), along_b = stride_along(b, dim);
    if (like.size(dim) == size) {
      arguments.batch.sizes.push_back(size);
      arguments.batch.strides.push_back({along_a, along_b, 0});
    } else {
      arguments.summed.sizes.push_back(size);
      arguments.summed.strides.push_back({along_a, along_b});
    }
  }
  fold(arguments);
  FUSEDOPS_CALL_ISA(batched_product, arguments);
  return gradient;
}

// beta * the sum of `grad` over the dimensions where `broadcast` is not 0, which keep size 1.
at::Tensor addend_gradient(const at::Tensor& grad, double beta, at::IntArrayRef broadcast) {
  // Neighbouring dimensions that are treated alike are one.
  std::vector<int64_t> sizes;
  std::vector<bool> summed;
  auto shape = grad.sizes().vec();
  for (int64_t dim = 0; dim < grad.dim(); ++dim) {
    const bool sum = broadcast[dim] != 0;
    if (sum) shape[dim] = 1;
    if (!sizes.empty() && summed.back() == sum) {
      sizes.back() *= grad.size(dim);
    } else {
      sizes.push_back(grad.size(dim));
      summed.push_back(sum);
    }
  }
  auto gradient = at::empty(shape, grad.options());
  BroadcastSum arguments{data(grad),   mutable_data(gradient), {},   {},
                         sizes.back(), !summed.back(),         beta, dtype_of(grad)};
  int64_t stride = sizes.back();
  for (size_t dim = sizes.size() - 1; dim-- > 0;) {
    auto& dims = summed[dim] ? arguments.summed : arguments.kept;
    dims.sizes.insert(dims.sizes.begin(), sizes[dim]);
    dims.strides.insert(dims.strides.begin(), {stride});
    stride *= sizes[dim];
  }
  FUSEDOPS_CALL_ISA(broadcast_sum, arguments);
  return gradient;
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> backward(const Optional& grad_output,
                                                        const at::Tensor& batch1,
                                                        const at::Tensor& batch2, double beta,
                                                        double alpha, at::IntArrayRef broadcast,
                                                        std::array<bool, 3> output_mask) {
  const auto grad = grad_output->contiguous();
  const auto is_zero = [](int64_t flag) { return flag == 0; };
  const bool same = beta == 1.0 && std::all_of(broadcast.begin(), broadcast.end(), is_zero);
  at::Tensor dinput, dbatch1, dbatch2;
  if (output_mask[0] && !same) dinput = addend_gradient(grad, beta, broadcast);
  if (output_mask[1]) dbatch1 = operand_gradient(grad, batch2.transpose(-2, -1), batch1, alpha);
  if (output_mask[2]) dbatch2 = operand_gradient(batch1.transpose(-2, -1), grad, batch2, alpha);
  return {dinput, dbatch1, dbatch2};
}

}  // namespace

void batched_product_into(const at::Tensor& input, const at::Tensor& batch1,
                          const at::Tensor& batch2, double beta, double alpha,
                          const at::Tensor& output) {
  const int64_t rank = batch1.dim();
  BatchedProduct arguments{
      product_of_last(batch1, batch2), {}, {}, {}, mutable_data(output), alpha, beta};
  at::Tensor addend;
  if (beta != 0.0 && input.defined()) {
    addend = input.size(-1) == 1 || input.stride(-1) == 1 ? input : input.contiguous();
    arguments.addend = {addend.const_data_ptr(), stride_along(addend, rank - 2),
                        input.size(-1) == 1 ? 0 : 1};
  }
  for (int64_t dim = 0; dim + 2 < rank; ++dim) {
    arguments.batch.sizes.push_back(output.size(dim));
    arguments.batch.strides.push_back({stride_along(batch1, dim), stride_along(batch2, dim),
                                       addend.defined() ? stride_along(addend, dim) : 0});
  }
  fold(arguments);
  FUSEDOPS_CALL_ISA(batched_product, arguments);
}

TORCH_LIBRARY_IMPL(fusedops_cpp, CPU, m) {
  m.impl("baddbmm", forward);
  m.impl("baddbmm_backward", backward);
}

}  // namespace fusedops
