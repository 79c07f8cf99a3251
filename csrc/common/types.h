// The dtypes of the kernels. No torch header: nvcc reads this too.
#pragma once

namespace fusedops {

enum class DType { f32, bf16, f16, f64 };

}  // namespace fusedops
