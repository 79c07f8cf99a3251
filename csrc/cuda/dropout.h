// What dropout needs to know on CUDA; the draw is in philox.cuh. No torch header: nvcc reads this.
#pragma once

#include <cstdint>

namespace fusedops::cuda {

// Elements whose random word is below `threshold` (0: none, 2^32: all) are dropped.
struct DropoutArguments {
  const int64_t* seed;  // {seed, offset}, or null when the threshold is 0 or 2^32
  bool placed;          // whether the seed has RowPlaces behind
  uint64_t threshold;
  double scale;
};

}  // namespace fusedops::cuda
