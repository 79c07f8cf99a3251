// A tensor map as triton/libcuda.cpp writes it for cuTensorMapEncodeTiled, and the machine reads
// it.
#pragma once

#include <cstdint>

namespace ptx {

// The innermost dimension is last.
struct TensorMap {
  uint64_t base;
  uint8_t swizzle, element_bytes, rank, padding;
  uint32_t block[5], shape[5];
  uint64_t strides[5];  // in elements
} __attribute__((packed));

}  // namespace ptx
