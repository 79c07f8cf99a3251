// torch's own kernels of operators on the CPU, and ours in their place (torch_kernels.cpp).
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/library.h>

namespace fusedops {

enum class TorchOperator { mm, addmm, addmv, bmm, baddbmm, attention, attention_backward, count };

// Whether a call with a tensor runs our kernels: it is strided, and torch's kernels are slow in its
// dtype on this processor.
bool is_replaced(const at::Tensor& tensor);

// Products of fewer multiplications are torch's.
int64_t least_product();

// Counts a call that runs our kernel.
void count_call(TorchOperator called, const at::Tensor& tensor);

// Registers kernels for aten's operators on the CPU. They run torch's where ours cannot.
void replace_products(torch::Library& library);
void replace_attention(torch::Library& library);

}  // namespace fusedops
