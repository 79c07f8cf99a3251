// sums [32][32] += rows * columns, by the tile registers or by their emulation, for tests.
#pragma once

#include <cstdint>

#include "../../common/isa.h"

namespace fusedops {

struct TileProduct {
  int64_t steps;            // pairs along k, a multiple of 16
  const uint32_t* rows;     // [steps / 16][32][16], pairs of bfloat16 along k
  const uint32_t* columns;  // [steps][32]
  float* sums;
  bool emulated;
};

}  // namespace fusedops

FUSEDOPS_DECLARE_ISA(tile_product, const TileProduct&)
