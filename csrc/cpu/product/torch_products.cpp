// mm, addmm, bmm, baddbmm and mv of torch in half precision by our kernels of products. Calls of
// tensors that do not fit together are torch's, which raises.
#include <ATen/MemoryOverlap.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_addmm_activation_cpu_dispatch.h>
#include <ATen/ops/addmm_cpu_dispatch.h>
#include <ATen/ops/addmv_cpu_dispatch.h>
#include <ATen/ops/baddbmm_cpu_dispatch.h>
#include <ATen/ops/bmm_cpu_dispatch.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/mm_cpu_dispatch.h>
#include <ATen/ops/relu.h>
#include <torch/library.h>

#include "../common/torch_kernels.h"
#include "linear_binding.h"

namespace fusedops {
namespace {

using at::Scalar;
using at::Tensor;

c10::SmallVector<int64_t, 3> shape_of(const Tensor& a, const Tensor& b) {
  c10::SmallVector<int64_t, 3> shape(a.sizes().begin(), a.sizes().end());
  shape.back() = b.size(-1);
  return shape;
}

// Whether this is one row times a weight [out, in], for which torch has the faster kernel. Not if
// the weight is small, and not in bfloat16 where the processor multiplies it.
bool is_row_of_torch(const Tensor& a, const Tensor& b) {
  constexpr int64_t kLeast = int64_t{1} << 18;  // elements of the weight
  return a.size(-2) == 1 && b.stride(-2) == 1 && b.size(-1) * b.size(-2) >= kLeast &&
         !(a.scalar_type() == at::kBFloat16 && kHasAvx512Bf16);
}

// Whether our product of two tensors is right, and faster than torch's.
bool is_ours(const Tensor& a, const Tensor& b, int64_t rank) {
  return is_replaced(a) && is_replaced(b) && a.scalar_type() == b.scalar_type() &&
         a.dim() == rank && b.dim() == rank && a.size(-1) == b.size(-2) &&
         (rank == 2 || a.size(0) == b.size(0)) && a.numel() * b.size(-1) >= least_product() &&
         !is_row_of_torch(a, b);
}

// The same with an addend, which broadcasts to the product.
bool is_ours(const Tensor& addend, const Tensor& a, const Tensor& b, const Scalar& beta,
             const Scalar& alpha, int64_t rank) {
  if (!is_ours(a, b, rank) || !is_replaced(addend) || addend.dim() > rank ||
      addend.scalar_type() != a.scalar_type() || beta.isComplex() || alpha.isComplex()) {
    return false;
  }
  const auto shape = shape_of(a, b);
  for (int64_t dim = -addend.dim(); dim < 0; ++dim) {
    if (addend.size(dim) != 1 && addend.size(dim) != shape[rank + dim]) return false;
  }
  return true;
}

bool can_write(const Tensor& out, const Tensor& a) {
  return is_replaced(out) && out.scalar_type() == a.scalar_type() &&
         at::has_internal_overlap(out) != at::MemOverlap::Yes;
}

// The addend with as many dimensions as the product.
Tensor with_rank(Tensor addend, int64_t rank) {
  while (addend.dim() < rank) addend = addend.unsqueeze(0);
  return addend;
}

// The product that packs operands for all threads is faster for long sums, for one row, and for few
// rows unless there is little to multiply (measured on Zen 4, AVX2 and AVX-512).
constexpr int64_t kLongSum = 512, kFewRows = 8, kLittle = int64_t{1} << 17;

bool packs_for_all(int64_t m, int64_t n, int64_t k) {
  return k > kLongSum || m == 1 || (m <= kFewRows && m * n * k >= kLittle);
}

// out = alpha * a * b + beta * addend, where `out` is dense.
void multiply_into(const Tensor& addend, const Tensor& a, const Tensor& b, double beta,
                   double alpha, const Tensor& out) {
  const bool adds = addend.defined() && beta != 0.0;
  const bool is_bias = adds && beta == 1.0 && addend.size(-2) == 1 && addend.stride(-1) == 1 &&
                       addend.size(-1) == b.size(-1);
  const int64_t m = a.size(-2), n = b.size(-1), k = a.size(-1);
  if (a.dim() == 3 || !packs_for_all(m, n, k) || alpha != 1.0 || (adds && !is_bias)) {
    batched_product_into(addend, a, b, beta, alpha, out);
    return;
  }
  const auto call = product_of(m, n, k, matrix(a), matrix(b), a);
  LinearForward arguments{call, is_bias ? data(addend) : nullptr, nullptr, mutable_data(out),
                          Activation::identity};
  if (!is_bias) arguments.product.plain_output = mutable_data(out);
  FUSEDOPS_CALL_ISA(linear_forward, arguments);
}

Tensor product(TorchOperator called, const Tensor& addend, const Tensor& a, const Tensor& b,
               const Scalar& beta, const Scalar& alpha) {
  count_call(called, a);
  auto out = at::empty(shape_of(a, b), a.options());
  multiply_into(addend, a, b, beta.toDouble(), alpha.toDouble(), out);
  return out;
}

Tensor& product_into(TorchOperator called, const Tensor& addend, const Tensor& a, const Tensor& b,
                     const Scalar& beta, const Scalar& alpha, Tensor& out) {
  at::native::resize_output(out, shape_of(a, b));
  const bool adds = addend.defined() && beta.toDouble() != 0.0;
  const bool reads_out =
      out.is_alias_of(a) || out.is_alias_of(b) || (adds && out.is_alias_of(addend));
  if (reads_out || !out.is_contiguous()) {
    return out.copy_(product(called, addend, a, b, beta, alpha));
  }
  count_call(called, a);
  multiply_into(addend, a, b, beta.toDouble(), alpha.toDouble(), out);
  return out;
}

// mm and bmm.
template <TorchOperator kOperator, int64_t kRank, auto kStock>
Tensor multiply(const Tensor& a, const Tensor& b) {
  if (!is_ours(a, b, kRank)) return kStock(a, b);
  return product(kOperator, {}, a, b, 0, 1);
}

template <TorchOperator kOperator, int64_t kRank, auto kStock>
Tensor& multiply_out(const Tensor& a, const Tensor& b, Tensor& out) {
  if (!is_ours(a, b, kRank) || !can_write(out, a)) return kStock(a, b, out);
  return product_into(kOperator, {}, a, b, 0, 1, out);
}

// addmm and baddbmm: the addend is `self`.
template <TorchOperator kOperator, int64_t kRank, auto kStock>
Tensor added(const Tensor& self, const Tensor& a, const Tensor& b, const Scalar& beta,
             const Scalar& alpha) {
  if (!is_ours(self, a, b, beta, alpha, kRank)) return kStock(self, a, b, beta, alpha);
  return product(kOperator, with_rank(self, kRank), a, b, beta, alpha);
}

template <TorchOperator kOperator, int64_t kRank, auto kStock>
Tensor& added_out(const Tensor& self, const Tensor& a, const Tensor& b, const Scalar& beta,
                  const Scalar& alpha, Tensor& out) {
  if (!is_ours(self, a, b, beta, alpha, kRank) || !can_write(out, a)) {
    return kStock(self, a, b, beta, alpha, out);
  }
  return product_into(kOperator, with_rank(self, kRank), a, b, beta, alpha, out);
}

template <TorchOperator kOperator, int64_t kRank, auto kStock>
Tensor& added_in_place(Tensor& self, const Tensor& a, const Tensor& b, const Scalar& beta,
                       const Scalar& alpha) {
  // In place an addend does not broadcast.
  if (!is_ours(self, a, b, beta, alpha, kRank) || !can_write(self, a) ||
      self.sizes() != at::IntArrayRef(shape_of(a, b))) {
    return kStock(self, a, b, beta, alpha);
  }
  return product_into(kOperator, self, a, b, beta, alpha, self);
}

// torch's inference path of transformer layers calls it.
Tensor addmm_activation(const Tensor& self, const Tensor& a, const Tensor& b, const Scalar& beta,
                        const Scalar& alpha, bool use_gelu) {
  if (!is_ours(self, a, b, beta, alpha, 2)) {
    return at::cpu::_addmm_activation(self, a, b, beta, alpha, use_gelu);
  }
  auto out = product(TorchOperator::addmm, with_rank(self, 2), a, b, beta, alpha);
  return use_gelu ? at::gelu_(out) : out.relu_();
}

// torch.mv calls it: a matrix times a vector, as the vector times the transposed matrix.
Tensor& addmv_in_place(Tensor& self, const Tensor& matrix, const Tensor& vector, const Scalar& beta,
                       const Scalar& alpha) {
  if (self.dim() == 1 && matrix.dim() == 2 && vector.dim() == 1 && self.size(0) == matrix.size(0) &&
      can_write(self, vector)) {
    const auto row = vector.unsqueeze(0), transposed = matrix.t();
    auto out = self.unsqueeze(0);
    if (is_ours(out, row, transposed, beta, alpha, 2)) {
      product_into(TorchOperator::addmv, out, row, transposed, beta, alpha, out);
      return self;
    }
  }
  return at::cpu::addmv_(self, matrix, vector, beta, alpha);
}

}  // namespace

void replace_products(torch::Library& library) {
  using Op = TorchOperator;
  library.impl("mm", TORCH_FN((multiply<Op::mm, 2, at::cpu::mm>)));
  library.impl("mm.out", TORCH_FN((multiply_out<Op::mm, 2, at::cpu::mm_outf>)));
  library.impl("bmm", TORCH_FN((multiply<Op::bmm, 3, at::cpu::bmm>)));
  library.impl("bmm.out", TORCH_FN((multiply_out<Op::bmm, 3, at::cpu::bmm_outf>)));
  library.impl("addmm", TORCH_FN((added<Op::addmm, 2, at::cpu::addmm>)));
  library.impl("addmm.out", TORCH_FN((added_out<Op::addmm, 2, at::cpu::addmm_outf>)));
  library.impl("addmm_", TORCH_FN((added_in_place<Op::addmm, 2, at::cpu::addmm_>)));
  library.impl("baddbmm", TORCH_FN((added<Op::baddbmm, 3, at::cpu::baddbmm>)));
  library.impl("baddbmm.out", TORCH_FN((added_out<Op::baddbmm, 3, at::cpu::baddbmm_outf>)));
  library.impl("baddbmm_", TORCH_FN((added_in_place<Op::baddbmm, 3, at::cpu::baddbmm_>)));
  library.impl("addmv_", TORCH_FN(addmv_in_place));
  library.impl("_addmm_activation", TORCH_FN(addmm_activation));
}

}  // namespace fusedops
