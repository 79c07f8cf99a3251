// Interface between the bindings of the norms and their kernels. Pointers are device memory; a call
// enqueues on `stream` and returns the error of the launch.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "../common/norm.h"
#include "dropout.h"

namespace fusedops::cuda {

using NormForward = NormForwardOf<DropoutArguments>;
using NormBackward = NormBackwardOf<DropoutArguments>;  // partials: [2, partial_rows(...), columns]

// Without residual; with one.
cudaError_t norm_forward(const NormForward& arguments, cudaStream_t stream);
cudaError_t add_norm_forward(const NormForward& arguments, cudaStream_t stream);

// Without grad_summed and grad_residual; with them.
cudaError_t norm_backward(const NormBackward& arguments, cudaStream_t stream);
cudaError_t add_norm_backward(const NormBackward& arguments, cudaStream_t stream);

// How many partial rows the sums over rows are cut into; depends on the sizes and on the GPU alone.
int64_t partial_rows(int64_t rows, int64_t columns, DType dtype);

}  // namespace fusedops::cuda
