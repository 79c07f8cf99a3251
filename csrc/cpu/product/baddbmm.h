// Kernels of baddbmm: batches of matrix products with a scaled addend, and the gradient of an
// addend that was broadcast.
//
// Batch dimensions are lists of sizes with a stride per operand, in elements; a broadcast operand
// has stride 0.
#pragma once

#include <array>
#include <cstdint>

#include <c10/util/SmallVector.h>

#include "../gemm/gemm.h"

namespace fusedops {

// Sizes of some dimensions and the strides of kOperands operands along them.
template <int kOperands>
struct Dims {
  c10::SmallVector<int64_t, 4> sizes;
  c10::SmallVector<std::array<int64_t, kOperands>, 4> strides;

  int64_t count() const {
    int64_t product = 1;
    for (const int64_t size : sizes) product *= size;
    return product;
  }

  // Offsets of element `index` of the row-major order.
  std::array<int64_t, kOperands> offsets(int64_t index) const {
    std::array<int64_t, kOperands> sum{};
    for (size_t dim = sizes.size(); dim-- > 0;) {
      const int64_t here = index % sizes[dim];
      index /= sizes[dim];
      for (int i = 0; i < kOperands; ++i) sum[i] += here * strides[dim][i];
    }
    return sum;
  }
};

// output[i] = alpha * sum over j of A[i,j] * B[i,j] + beta * addend[i]: i runs over `batch`, j over
// `summed` (an operand that was broadcast gets the sum as its gradient).
struct BatchedProduct {
  GemmCall product;  // of the first of all; store and context are filled in
  Dims<3> batch;     // strides of A, B and the addend
  Dims<2> summed;    // strides of A and B
  Matrix addend;     // of the first; data null for none; column_stride 0 or 1
  void* output;      // dense [batch, m, n]
  double alpha;
  double beta;
};

// out = scale * sum of grad over some dimensions. Innermost come `inner` contiguous elements, which
// are summed too or not.
struct BroadcastSum {
  const void* grad;
  void* out;       // dense [kept, inner if inner_kept]
  Dims<1> kept;    // without the innermost
  Dims<1> summed;  // without the innermost
  int64_t inner;
  bool inner_kept;
  double scale;
  DType dtype;
};

}  // namespace fusedops

FUSEDOPS_DECLARE_ISA(batched_product, const BatchedProduct&)
FUSEDOPS_DECLARE_ISA(broadcast_sum, const BroadcastSum&)
