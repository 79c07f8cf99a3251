// Kernels of quantized_linear: products with a frozen weight of 4 or 8 bits.
//
// The packed weight consists of blocks of 16 outputs. A block is a sequence of 64-byte lines along
// the sum over k:
//
//   int4, nf4   a line has 8 k. A 32-bit lane per output has the codes of k + {0, 2, 4, 6, 1, 3, 5,
//               7} in its nibbles, the lowest first: its two halves are then pairs of neighbours
//               along k for vdpbf16ps
//   int8        a line has 4 k, each as 16 bytes, one per output
//
// Outputs past the last and k past the last have the code of zero. The scales are [blocks][groups]
// [16], one per output for each `group` of k. The weight is value(code) * scale.
#pragma once

#include <cstdint>

#include "../gemm/gemm.h"

namespace fusedops {

enum class WeightFormat { int8, int4, nf4 };

inline constexpr int64_t kBlockOutputs = 16;
inline constexpr int64_t kLineBytes = 64;
// Up to here the weight is decoded in registers, above it is dequantised for the matrix engine.
inline constexpr int64_t kMostDecodedRows = 32;

constexpr int64_t line_depth(WeightFormat format) {
  return format == WeightFormat::int8 ? 4 : 8;
}

struct QuantizedWeight {
  const uint8_t* codes;  // [blocks][lines][64]
  const void* scales;    // [blocks][groups][16]
  DType scale_dtype;     // float32, bfloat16, or float64 with activations of float64
  WeightFormat format;
  int64_t in_features;
  int64_t out_features;
  int64_t lines;
  int64_t groups;
  int64_t group;  // k of a group, a multiple of 8
};

// output = input * weight^T + bias.
struct QuantizedForward {
  QuantizedWeight weight;
  Matrix input;      // [rows, in_features]
  const void* bias;  // [out_features] or null
  void* output;      // [rows, out_features], dense
  int64_t rows;
  DType dtype;
};

// grad_input = grad_output * weight.
struct QuantizedGradient {
  QuantizedWeight weight;
  const void* grad_output;  // [rows, out_features], dense
  void* grad_input;         // [rows, in_features], dense
  int64_t rows;
  DType dtype;
};

}  // namespace fusedops

FUSEDOPS_DECLARE_ISA(quantized_linear_forward, const QuantizedForward&)
FUSEDOPS_DECLARE_ISA(quantized_linear_gradient, const QuantizedGradient&)
