// In place of torch's: the error of a launch tells what the kernel did wrong.
#pragma once

#include <c10/util/Exception.h>
#include <driver_types.h>

#include "../../runtime.h"

#define C10_CUDA_CHECK(error) TORCH_CHECK((error) == cudaSuccess, "CUDA kernel: ", ptx::finding())
