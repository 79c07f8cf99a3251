// Philox4x32-7 (Salmon et al., SC 2011), one counter at a time, and what dropout draws from it.
// The specification is fusedops/_core/philox.py; plain C++, for nvcc too.
#pragma once

#include <cmath>
#include <cstdint>

#if defined(__CUDACC__)
#define FUSEDOPS_HOST_DEVICE __host__ __device__
#else
#define FUSEDOPS_HOST_DEVICE
#endif

namespace fusedops {

inline constexpr int kPhiloxRounds = 7;
inline constexpr uint32_t kPhiloxMultiplier0 = 0xD2511F53;
inline constexpr uint32_t kPhiloxMultiplier1 = 0xCD9E8D57;
inline constexpr uint32_t kPhiloxWeyl0 = 0x9E3779B9;
inline constexpr uint32_t kPhiloxWeyl1 = 0xBB67AE85;

struct PhiloxWords {
  uint32_t word[4];
};

FUSEDOPS_HOST_DEVICE inline PhiloxWords philox4x32(PhiloxWords counter, uint32_t key0,
                                                   uint32_t key1) {
  uint32_t* c = counter.word;
  for (int round = 0; round < kPhiloxRounds; ++round) {
    const uint64_t product0 = uint64_t{kPhiloxMultiplier0} * c[0];
    const uint64_t product1 = uint64_t{kPhiloxMultiplier1} * c[2];
    c[0] = static_cast<uint32_t>(product1 >> 32) ^ c[1] ^ key0;
    c[2] = static_cast<uint32_t>(product0 >> 32) ^ c[3] ^ key1;
    c[1] = static_cast<uint32_t>(product1);
    c[3] = static_cast<uint32_t>(product0);
    key0 += kPhiloxWeyl0;
    key1 += kPhiloxWeyl1;
  }
  return counter;
}

// Where the elements of rows stand in a larger tensor: runs of `run` elements are `stride` apart,
// and consist of pieces of `unit` elements, each of which begins at its number of `at`. A row lies
// within a piece. The numbers are those behind {seed, offset}, as fusedops/_core/philox.py has
// them.
struct RowPlaces {
  const int64_t* numbers = nullptr;  // {run, stride, unit, at...}; null: elements have their index

  FUSEDOPS_HOST_DEVICE int64_t of(int64_t i) const {
    if (numbers == nullptr) return i;
    const int64_t run = numbers[0], unit = numbers[2];
    return i / run * numbers[1] + numbers[3 + i % run / unit] + i % unit;
  }
};

// Dropout with probability p from a seed tensor {seed, offset}: element i is kept if and only if
// its random word reaches round(p * 2^32). The seed may have a place behind.
struct Dropout {
  uint64_t seed = 0;
  uint64_t offset = 0;
  RowPlaces places;        // of rows; scores have theirs elsewhere
  uint64_t threshold = 0;  // 0 keeps every element, 2^32 keeps none
  double scale = 1.0;      // of kept elements

  Dropout() = default;
  // `pair` may be null when every element is kept, or none.
  Dropout(const int64_t* pair, double p)
      : seed(pair != nullptr ? static_cast<uint64_t>(pair[0]) : 0),
        offset(pair != nullptr ? static_cast<uint64_t>(pair[1]) : 0),
        threshold(static_cast<uint64_t>(std::nearbyint(p * 4294967296.0))),
        scale(p < 1.0 ? 1.0 / (1.0 - p) : 1.0) {}

  FUSEDOPS_HOST_DEVICE bool active() const { return threshold != 0; }

  // The words of elements 4 * counter .. 4 * counter + 3.
  FUSEDOPS_HOST_DEVICE PhiloxWords words(uint64_t counter) const {
    return philox4x32({{static_cast<uint32_t>(counter), static_cast<uint32_t>(counter >> 32),
                        static_cast<uint32_t>(offset), static_cast<uint32_t>(offset >> 32)}},
                      static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32));
  }
};

}  // namespace fusedops
