// Interface between the binding of bias_gelu and its kernels. Pointers are device memory; a call
// enqueues on `stream` and returns the error of the launch.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "../common/bias_gelu.h"

namespace fusedops::cuda {

cudaError_t bias_gelu_forward(const BiasGeluForward& arguments, cudaStream_t stream);
cudaError_t bias_gelu_backward(const BiasGeluBackward& arguments, cudaStream_t stream);

// How many partial rows the bias gradient is cut into; depends on the sizes and on the GPU alone.
int64_t bias_gelu_partials(int64_t rows, int64_t columns, DType dtype);

}  // namespace fusedops::cuda
