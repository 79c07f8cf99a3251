// mm, addmm, addmv, bmm and baddbmm of torch in half precision by our kernels of products. Calls of
// tensors that do not fit together are torch's, which raises.
#include <ATen/MemoryOverlap.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/addmm_cpu_dispatch.h>
#include <ATen/ops/addmv_cpu_dispatch.h>
#include <ATen/ops/baddbmm_cpu_dispatch.h>
#include <ATen/ops/bmm_cpu_dispatch.h>
#include <ATen/ops/mm_cpu_dispatch.h>
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

// Whether our product of two tensors is right, and faster than torch's. torch has a fast kernel for
// one row times a weight [out, in].
bool is_ours(const Tensor& a, const Tensor& b, int64_t rank) {
  return is_replaced(a) && is_replaced(b) && a.scalar_type() == b.scalar_type() &&
         a.dim() == rank && b.dim() == rank && a.size(-1) == b.size(-2) &&
         (rank == 2 || a.size(0) == b.size(0)) && a.numel() * b.size(-1) >= least_product() &&
         a.numel() > 0 && b.size(-1) > 0 && !(a.size(-2) == 1 && b.stride(-2) == 1);
}

// The same with an addend, which broadcasts to the product.
bool is_ours(const Tensor& addend, const Tensor& a, const Tensor& b, int64_t rank) {
  if (!is_ours(a, b, rank) || !is_replaced(addend) || addend.dim() > rank ||
      addend.scalar_type() != a.scalar_type()) {
    return false;
  }
  const auto shape = shape_of(a, b);
  for (int64_t dim = -addend.dim(); dim < 0; ++dim) {
    if (addend.size(dim) != 1 && addend.size(dim) != shape[rank + dim]) return false;
  }
  return true;
}

bool are_real(const Scalar& beta, const Scalar& alpha) {
  return !beta.isComplex() && !alpha.isComplex();
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

// Up to so many rows, and of longer sums, the product of packed operands is the faster one.
constexpr int64_t kFewRows = 8, kLongSum = 512;

// out = alpha * a * b + beta * addend, where `out` is dense.
void multiply_into(const Tensor& addend, const Tensor& a, const Tensor& b, double beta,
                   double alpha, const Tensor& out) {
  const bool adds = addend.defined() && beta != 0.0;
  const bool is_bias = adds && beta == 1.0 && addend.size(-2) == 1 && addend.stride(-1) == 1 &&
                       addend.size(-1) == b.size(-1);
  const int64_t m = a.size(-2), k = a.size(-1);
  if (a.dim() == 3 || (m > kFewRows && k <= kLongSum) || alpha != 1.0 || (adds && !is_bias)) {
    batched_product_into(addend, a, b, beta, alpha, out);
    return;
  }
  const auto call = product_of(m, b.size(1), k, matrix(a), matrix(b), a);
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
  const bool reads_out =
      out.is_alias_of(a) || out.is_alias_of(b) || (addend.defined() && out.is_alias_of(addend));
  if (reads_out || !out.is_contiguous()) {
    return out.copy_(product(called, addend, a, b, beta, alpha));
  }
  count_call(called, a);
  multiply_into(addend, a, b, beta.toDouble(), alpha.toDouble(), out);
  return out;
}

Tensor mm(const Tensor& a, const Tensor& b) {
  if (!is_ours(a, b, 2)) return at::cpu::mm(a, b);
  return product(TorchOperator::mm, {}, a, b, 0, 1);
}

Tensor& mm_out(const Tensor& a, const Tensor& b, Tensor& out) {
  if (!is_ours(a, b, 2) || !can_write(out, a)) return at::cpu::mm_outf(a, b, out);
  return product_into(TorchOperator::mm, {}, a, b, 0, 1, out);
}

Tensor bmm(const Tensor& a, const Tensor& b) {
  if (!is_ours(a, b, 3)) return at::cpu::bmm(a, b);
  return product(TorchOperator::bmm, {}, a, b, 0, 1);
}

Tensor& bmm_out(const Tensor& a, const Tensor& b, Tensor& out) {
  if (!is_ours(a, b, 3) || !can_write(out, a)) return at::cpu::bmm_outf(a, b, out);
  return product_into(TorchOperator::bmm, {}, a, b, 0, 1, out);
}

// addmm and baddbmm: the addend is `self`.
template <TorchOperator kOperator, int64_t kRank, auto kStock>
Tensor added(const Tensor& self, const Tensor& a, const Tensor& b, const Scalar& beta,
             const Scalar& alpha) {
  if (!is_ours(self, a, b, kRank) || !are_real(beta, alpha)) return kStock(self, a, b, beta, alpha);
  return product(kOperator, with_rank(self, kRank), a, b, beta, alpha);
}

template <TorchOperator kOperator, int64_t kRank, auto kStock>
Tensor& added_out(const Tensor& self, const Tensor& a, const Tensor& b, const Scalar& beta,
                  const Scalar& alpha, Tensor& out) {
  if (!is_ours(self, a, b, kRank) || !are_real(beta, alpha) || !can_write(out, a)) {
    return kStock(self, a, b, beta, alpha, out);
  }
  return product_into(kOperator, with_rank(self, kRank), a, b, beta, alpha, out);
}

template <TorchOperator kOperator, int64_t kRank, auto kStock>
Tensor& added_in_place(Tensor& self, const Tensor& a, const Tensor& b, const Scalar& beta,
                       const Scalar& alpha) {
  // In place an addend does not broadcast.
  if (!is_ours(self, a, b, kRank) || !are_real(beta, alpha) || !can_write(self, a) ||
      self.sizes() != at::IntArrayRef(shape_of(a, b))) {
    return kStock(self, a, b, beta, alpha);
  }
  return product_into(kOperator, self, a, b, beta, alpha, self);
}

// A matrix times a vector, as the vector times the transposed matrix. torch's kernel is fast where
// rows of the matrix are dense, which `is_ours` finds out.
Tensor& addmv_out(const Tensor& self, const Tensor& matrix, const Tensor& vector,
                  const Scalar& beta, const Scalar& alpha, Tensor& out) {
  if (matrix.dim() == 2 && vector.dim() == 1 && self.dim() <= 1 && out.dim() == 1) {
    const auto row = vector.unsqueeze(0), transposed = matrix.t();
    auto out_row = out.unsqueeze(0);
    if (is_ours(self, row, transposed, 2) && are_real(beta, alpha) && can_write(out, row) &&
        out.size(0) == matrix.size(0)) {
      product_into(TorchOperator::addmv, with_rank(self, 2), row, transposed, beta, alpha, out_row);
      return out;
    }
  }
  return at::cpu::addmv_outf(self, matrix, vector, beta, alpha, out);
}

Tensor& addmv_in_place(Tensor& self, const Tensor& matrix, const Tensor& vector, const Scalar& beta,
                       const Scalar& alpha) {
  // In place the addend does not broadcast.
  if (self.dim() != 1 || matrix.dim() != 2 || self.size(0) != matrix.size(0)) {
    return at::cpu::addmv_(self, matrix, vector, beta, alpha);
  }
  return addmv_out(self, matrix, vector, beta, alpha, self);
}

Tensor addmv(const Tensor& self, const Tensor& matrix, const Tensor& vector, const Scalar& beta,
             const Scalar& alpha) {
  if (matrix.dim() != 2) return at::cpu::addmv(self, matrix, vector, beta, alpha);
  auto out = at::empty({matrix.size(0)}, self.options());
  return addmv_out(self, matrix, vector, beta, alpha, out);
}

}  // namespace

void replace_products(torch::Library& library) {
  constexpr auto kAddmm = TorchOperator::addmm, kBaddbmm = TorchOperator::baddbmm;
  library.impl("mm", TORCH_FN(mm));
  library.impl("mm.out", TORCH_FN(mm_out));
  library.impl("addmv", TORCH_FN(addmv));
  library.impl("addmv.out", TORCH_FN(addmv_out));
  library.impl("addmv_", TORCH_FN(addmv_in_place));
  library.impl("bmm", TORCH_FN(bmm));
  library.impl("bmm.out", TORCH_FN(bmm_out));
  library.impl("addmm", TORCH_FN((added<kAddmm, 2, at::cpu::addmm>)));
  library.impl("addmm.out", TORCH_FN((added_out<kAddmm, 2, at::cpu::addmm_outf>)));
  library.impl("addmm_", TORCH_FN((added_in_place<kAddmm, 2, at::cpu::addmm_>)));
  library.impl("baddbmm", TORCH_FN((added<kBaddbmm, 3, at::cpu::baddbmm>)));
  library.impl("baddbmm.out", TORCH_FN((added_out<kBaddbmm, 3, at::cpu::baddbmm_outf>)));
  library.impl("baddbmm_", TORCH_FN((added_in_place<kBaddbmm, 3, at::cpu::baddbmm_>)));
}

}  // namespace fusedops
