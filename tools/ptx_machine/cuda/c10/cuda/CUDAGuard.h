// In place of torch's: there is one device, the host.
#pragma once

#include <c10/core/Device.h>

namespace c10::cuda {

struct CUDAGuard {
  explicit CUDAGuard(Device) {}
};

}  // namespace c10::cuda
