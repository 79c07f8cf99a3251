// Kernels of grouped_mm and moe_mlp that are no product with linear_act's epilogue: sums over the
// rows of a group, and weight gradients: new ones, and those added to a float32 buffer.
#pragma once

#include <cstdint>

#include "../gemm/gemm.h"

namespace fusedops {

// sums[g] = sum over the rows r of group g of scale[r] * values[places[r]]; float32 accumulation
// (float64 for float64). Group g is the rows from ends[g - 1] (0 for the first) to ends[g]. With
// `adds` the sums are added, unrounded, to what is there.
struct GroupSums {
  const void* values;     // rows of [columns], dense
  const int32_t* places;  // row r is row places[r] of values; null: r
  const void* scale;      // [rows] of the accumulation dtype, or null
  const int64_t* ends;    // [groups]
  void* sums;             // [groups, columns]; of the accumulation dtype with `adds`
  int64_t groups;
  int64_t columns;
  DType dtype;
  bool adds = false;
};

// gradient = product: [m, n], dense.
struct WeightGradient {
  GemmCall product;  // store and context are filled in
  void* gradient;
};

// into += product: [m, n], rows `row_stride` apart, float32 (float64 for float64).
struct AddedProduct {
  GemmCall product;  // store and context are filled in
  void* into;
  int64_t row_stride;
};

}  // namespace fusedops

FUSEDOPS_DECLARE_ISA(group_sums, const GroupSums&)
// Those of a stack: behind one another in memory, all with the same n.
FUSEDOPS_DECLARE_ISA(weight_gradients, const WeightGradient* gradients, int64_t count)
FUSEDOPS_DECLARE_ISA(add_products, const AddedProduct* products, int64_t count)
