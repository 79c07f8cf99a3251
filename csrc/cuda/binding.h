// What the bindings of CUDA kernels share: the current stream, the check of a launch. Only c10/cuda
// headers: `make check-cuda` compiles the bindings against a CPU-only torch too (with
// tools/compat), where ATen/cuda/CUDAContext.h cannot be included.
#pragma once

#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include "../common/binding.h"
