// Dropout without a stored mask: Philox4x32-7, the numbers of fusedops/_core/philox.py.
#pragma once

#include <cstdint>

#include "../common/philox.h"
#include "device.cuh"
#include "dropout.h"

namespace fusedops::cuda {

__device__ __forceinline__ uint4 philox4x32(uint4 counter, uint2 key) {
#pragma unroll
  for (int round = 0; round < kPhiloxRounds; ++round) {
    const uint32_t high0 = __umulhi(kPhiloxMultiplier0, counter.x);
    const uint32_t high1 = __umulhi(kPhiloxMultiplier1, counter.z);
    const uint32_t low0 = kPhiloxMultiplier0 * counter.x;
    const uint32_t low1 = kPhiloxMultiplier1 * counter.z;
    counter = make_uint4(high1 ^ counter.y ^ key.x, low1, high0 ^ counter.w ^ key.y, low0);
    key.x += kPhiloxWeyl0;
    key.y += kPhiloxWeyl1;
  }
  return counter;
}

// The counter of element `first` of a tensor, from which on its row is drawn. It divides by numbers
// that only the device knows, a call that costs registers: once a row, before there are values.
__device__ __forceinline__ int64_t place_of(const DropoutArguments& dropout, int64_t first) {
  return dropout.placed ? RowPlaces{dropout.seed + 2}.of(first) : first;
}

// Drops elements that stand at first, first + 1, ... of one row. N elements lie within whole
// groups of four, or inside one: the pack size is 8, 4, 2 or 1 and `first` is a multiple of it, as
// are the places of rows in a larger tensor where it divides the columns.
template <int N, typename A>
__device__ __forceinline__ void drop(const DropoutArguments& dropout, int64_t first,
                                     A (&values)[N]) {
  if (dropout.threshold == 0) return;
  if (dropout.threshold >> 32) {
#pragma unroll
    for (int i = 0; i < N; ++i) values[i] = A(0);
    return;
  }
  const uint32_t threshold = static_cast<uint32_t>(dropout.threshold);
  const uint64_t seed = static_cast<uint64_t>(dropout.seed[0]);
  const uint64_t offset = static_cast<uint64_t>(dropout.seed[1]);
  const uint2 key = make_uint2(static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32));
  const A scale = static_cast<A>(dropout.scale);
#pragma unroll
  for (int group = 0; group < (N + 3) / 4; ++group) {
    const uint64_t count = static_cast<uint64_t>(first) / 4 + group;
    const uint4 drawn =
        philox4x32(make_uint4(static_cast<uint32_t>(count), static_cast<uint32_t>(count >> 32),
                              static_cast<uint32_t>(offset), static_cast<uint32_t>(offset >> 32)),
                   key);
#pragma unroll
    for (int i = 0; i < (N < 4 ? N : 4); ++i) {
      const int word = N < 4 ? static_cast<int>(first % 4) + i : i;
      const uint32_t bits = word == 0   ? drawn.x
                            : word == 1 ? drawn.y
                            : word == 2 ? drawn.z
                                        : drawn.w;
      A& value = values[4 * group + i];
      value = bits >= threshold ? multiply(value, scale) : A(0);
    }
  }
}

}  // namespace fusedops::cuda
