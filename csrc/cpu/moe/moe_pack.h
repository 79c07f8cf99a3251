// Interface between the bindings of moe_pack and moe_unpack and their kernels. The offsets within a
// packed row come from fusedops/ops/_moe_payload.py, the only place that knows them.
#pragma once

#include <atomic>
#include <cstdint>

#include "../../common/dtype.h"
#include "../../common/isa.h"

namespace fusedops {

struct PayloadOffsets {
  int64_t probs;
  int64_t ids;
  int64_t scale;  // end of the ids; a quantized row has a float32 scale there
  int64_t stride;
};

struct MoePack {
  const void* input;     // [tokens, columns], rows dense
  int64_t row_stride;    // of input, in elements
  const char* probs;     // [tokens, top_k], dense
  int64_t prob_bytes;    // of one: 4 or 8
  const int32_t* ids;    // [tokens, top_k] or null
  const int32_t* index;  // [rows] or null
  char* payload;         // [rows, offsets.stride]
  int64_t rows;
  int64_t real_rows;  // from there on zeros
  int64_t tokens;
  int64_t columns;
  int64_t top_k;
  int64_t span;
  PayloadOffsets offsets;
  bool quantized;
  DType dtype;
  std::atomic<int64_t>* bad_row;  // set to a row whose index is out of range
};

struct MoeUnpack {
  const char* payload;  // [rows, offsets.stride]
  void* output;         // [rows, columns]
  int64_t rows;
  int64_t columns;
  PayloadOffsets offsets;
  DType dtype;
};

}  // namespace fusedops

FUSEDOPS_DECLARE_ISA(moe_pack, const MoePack&)
FUSEDOPS_DECLARE_ISA(moe_unpack, const MoeUnpack&)
