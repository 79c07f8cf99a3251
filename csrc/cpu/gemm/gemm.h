// The matrix product C[m,n] = A[m,k] * B[k,n] on the CPU for float32, half precision and float64:
// any strides, rows gathered by a list, and the caller's epilogue on each finished tile of C while
// it is in L1. Extensions: a second B, for an epilogue that needs the same tile of
// both products; a sum of several products, without a pass over memory between them; and a batch of
// independent products of any sizes (the experts of a layer) that the threads share.
//
// Accumulation is float32 (float64 for float64) and rounded never: the epilogue sees the sums. An
// element's bits depend on its row of A, its column of B and the machine's instruction set, not on
// m, n, strides or the number of threads.
#pragma once

#include <cstdint>

#include "../../common/dtype.h"
#include "../../common/isa.h"

namespace fusedops {

// Element (i, j) is data[rows[i] * row_stride + columns[j] * column_stride]; without a list, i or j
// itself stands there.
struct Matrix {
  const void* data;
  int64_t row_stride;
  int64_t column_stride;
  const int32_t* rows = nullptr;
  const int32_t* columns = nullptr;
};

inline Matrix transposed(const Matrix& matrix) {
  return {matrix.data, matrix.column_stride, matrix.row_stride, matrix.columns, matrix.rows};
}

// An extra product that is added to the first: A[m,k] * B[k,n] of the same sizes.
struct Factors {
  Matrix a;
  Matrix b;
};

// Finished sums of C: sums[i * stride + j] is element (row + i, column + j), i < rows, j < columns.
// `row` is a multiple of the tile height, which is at least kLeastTileRows.
struct Tile {
  int64_t row;
  int64_t column;
  int rows;
  int columns;
  const void* sums;    // float, or double for float64
  const void* second;  // the same of A * GemmCall::second_b, or null
  int64_t stride;
};

inline constexpr int64_t kLeastTileRows = 6;

// A row-major matrix of the shape of C and the dtype of the operands.
struct Touched {
  const void* data = nullptr;
  int64_t row_stride = 0;  // elements
};

struct GemmCall {
  int64_t m;
  int64_t n;
  int64_t k;
  Matrix a;
  Matrix b;
  DType dtype;
  // Called exactly once for each element of C, from several threads; zeros when k is 0.
  void (*store)(const void* context, const Tile& tile) = nullptr;
  const void* context = nullptr;
  const Matrix* second_b = nullptr;         // a second B[k,n]
  const Factors* extra_products = nullptr;  // products to add to A * B; none with `second_b`
  int64_t num_extra_products = 0;
  // Where `store` does no more than write the sums to dense rows [m, n]: these. A product that
  // needs no tiles then writes there itself.
  void* plain_output = nullptr;
  // What `store` reads or writes there: fetched while the tile is multiplied. Only a hint.
  Touched touched[3] = {};
};

}  // namespace fusedops

FUSEDOPS_DECLARE_ISA(gemm, const GemmCall&)
// Independent products of one dtype; each with the bits that gemm gives it.
FUSEDOPS_DECLARE_ISA(gemm_batch, const GemmCall* calls, int64_t count)
