// What a CUDA kernel and its binding share: the dtypes. No torch header: nvcc reads this too.
#pragma once

#include <cstdint>

namespace fusedops::cuda {

enum class Type { f32, f16, bf16, f64 };

}  // namespace fusedops::cuda
