// moe_pack and moe_unpack on the CPU. Traffic: each row read once and written once; a quantized row
// is read twice, the second time from the cache.
//
// float8 is e4m3 without infinities. Numbers are converted by integer arithmetic, to nearest even,
// as torch converts them: in blocks of float32 that stay in L1, loops that the compiler vectorises.
#include "moe_pack.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "../../common/parallel.h"
#include "../common/vec.h"

namespace fusedops::CPU_CAPABILITY {
namespace {

constexpr int64_t kBlock = 256;

// Calls body(block, first, count) for a row in blocks of kBlock float32, the last filled with
// zeros.
template <typename T, typename F>
inline void for_each_block(const T* x, int64_t columns, const F& body) {
  alignas(64) Acc<T> wide[kBlock];
  alignas(64) float narrow[kBlock];
  for (int64_t first = 0; first < columns; first += kBlock) {
    const int64_t count = std::min(kBlock, columns - first);
    if (count < kBlock) std::fill(wide, wide + kBlock, Acc<T>(0));
    for_each_vector<Vec<T>::size()>(count, [&](int64_t c, int64_t n, auto full) {
      store_vec(wide + c, load_vec(x + first + c, n, full), n, full);
    });
    if constexpr (std::is_same_v<Acc<T>, float>) {
      body(wide, first, count);
    } else {
      for (int64_t c = 0; c < kBlock; ++c) narrow[c] = static_cast<float>(wide[c]);
      body(narrow, first, count);
    }
  }
}

// The power of two that brings a row's largest finite value to 448 = 1.75 * 2^8 or below.
template <typename T>
int32_t scale_exponent(const T* x, int64_t columns) {
  uint32_t largest = 0;
  for_each_block(x, columns, [&](const float* block, int64_t, int64_t) {
    for (int64_t c = 0; c < kBlock; ++c) {
      const uint32_t bits = std::bit_cast<uint32_t>(block[c]) & 0x7fffffffu;
      const uint32_t finite = bits < 0x7f800000u ? bits : 0u;
      largest = largest > finite ? largest : finite;
    }
  });
  const int32_t exponent = static_cast<int32_t>(largest >> 23) - 127 - 8;
  return std::max(exponent + ((largest & 0x7fffffu) > 0x600000u ? 1 : 0), -126);
}

inline float power_of_two(int32_t exponent) {
  return std::bit_cast<float>(static_cast<uint32_t>(exponent + 127) << 23);
}

// x is at most 448 in magnitude, or not finite. Below 2^-6, the smallest normal number, the sum
// with 2^14 rounds to a multiple of 2^-9, the spacing there.
inline uint8_t to_float8(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  const uint32_t magnitude = bits & 0x7fffffffu;
  const uint32_t normal = ((magnitude + 0x7ffffu + ((magnitude >> 20) & 1u)) >> 20) - (120u << 3);
  const float shifted = std::bit_cast<float>(magnitude) + 16384.0f;
  const uint32_t tiny = std::bit_cast<uint32_t>(shifted) - 0x46800000u;
  uint32_t code = magnitude < (121u << 23) ? tiny : normal;
  code = magnitude > 0x43e00000u ? 0x7fu : code;
  return static_cast<uint8_t>(code | ((bits >> 24) & 0x80u));
}

inline float from_float8(uint8_t code) {
  const uint32_t magnitude = code & 0x7fu;
  const float tiny = static_cast<float>(static_cast<int32_t>(magnitude)) * 0x1p-9f;
  uint32_t bits = (magnitude << 20) + (120u << 23);
  bits = magnitude < 8u ? std::bit_cast<uint32_t>(tiny) : bits;
  bits = magnitude == 0x7fu ? 0x7fc00000u : bits;
  return std::bit_cast<float>(bits | (code & 0x80u) << 24);
}

template <typename T>
void pack_data(const MoePack& a, const T* x, char* to) {
  if (!a.quantized) {
    std::memcpy(to, x, a.columns * sizeof(T));
    return;
  }
  const int32_t exponent = scale_exponent(x, a.columns);
  const float inverse = power_of_two(-exponent);
  for_each_block(x, a.columns, [&](const float* block, int64_t first, int64_t count) {
    uint8_t codes[kBlock];
    for (int64_t c = 0; c < kBlock; ++c) codes[c] = to_float8(block[c] * inverse);
    std::memcpy(to + first, codes, count);
  });
  const float scale = power_of_two(exponent);
  std::memcpy(to + a.offsets.scale, &scale, sizeof(scale));
}

// Which block of `span` experts an id belongs to; -1 is in none.
inline int64_t block_of(int64_t id, int64_t span) {
  return id < 0 ? -1 : id / span;
}

// Probabilities and ids of one slot, or of all slots of a token.
void pack_pairs(const MoePack& a, int64_t slot, int64_t token, char* to) {
  char* probs = to + a.offsets.probs;
  char* ids = to + a.offsets.ids;
  if (a.top_k == 0) return;  // a tensor without elements has no memory
  if (a.index != nullptr && a.span == 0) {
    const int32_t id = a.ids != nullptr ? a.ids[slot] : -1;
    std::memcpy(probs, a.probs + slot * a.prob_bytes, a.prob_bytes);
    std::memcpy(ids, &id, sizeof(id));
    return;
  }
  const int64_t first = token * a.top_k;
  std::memcpy(probs, a.probs + first * a.prob_bytes, a.top_k * a.prob_bytes);
  for (int64_t k = 0; k < a.top_k; ++k) {
    int32_t id = a.ids != nullptr ? a.ids[first + k] : -1;
    if (a.span > 0 && block_of(id, a.span) != block_of(a.ids[slot], a.span)) {
      id = -1;
      std::memset(probs + k * a.prob_bytes, 0, a.prob_bytes);
    }
    std::memcpy(ids + k * sizeof(id), &id, sizeof(id));
  }
}

template <typename T>
void pack(const MoePack& a) {
  const int64_t data_bytes = a.columns * (a.quantized ? 1 : static_cast<int64_t>(sizeof(T)));
  const int64_t end = a.offsets.scale + (a.quantized ? 4 : 0);
  parallel_rows(a.rows, 2 * a.offsets.stride, [&](int64_t begin, int64_t last) {
    for (int64_t row = begin; row < last; ++row) {
      char* to = a.payload + row * a.offsets.stride;
      const int64_t slot = a.index == nullptr  ? row * a.top_k
                           : row < a.real_rows ? a.index[row]
                                               : 0;
      const bool legal = a.index == nullptr || (slot >= 0 && slot < a.tokens * a.top_k);
      if (row >= a.real_rows || !legal) {
        if (row < a.real_rows) a.bad_row->store(row, std::memory_order_relaxed);
        std::memset(to, 0, a.offsets.stride);
        continue;
      }
      const int64_t token = a.index == nullptr ? row : slot / a.top_k;
      pack_data(a, static_cast<const T*>(a.input) + token * a.row_stride, to);
      std::memset(to + data_bytes, 0, a.offsets.probs - data_bytes);
      pack_pairs(a, slot, token, to);
      std::memset(to + end, 0, a.offsets.stride - end);
    }
  });
}

template <typename T>
void unpack(const MoeUnpack& a) {
  parallel_rows(a.rows, a.columns * (1 + sizeof(T)), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const char* from = a.payload + row * a.offsets.stride;
      float scale;
      std::memcpy(&scale, from + a.offsets.scale, sizeof(scale));
      T* to = static_cast<T*>(a.output) + row * a.columns;
      for (int64_t first = 0; first < a.columns; first += kBlock) {
        const int64_t count = std::min(kBlock, a.columns - first);
        uint8_t codes[kBlock] = {};
        alignas(64) Acc<T> values[kBlock];
        std::memcpy(codes, from + first, count);
        for (int64_t c = 0; c < kBlock; ++c) values[c] = from_float8(codes[c]) * scale;
        for_each_vector<Vec<T>::size()>(count, [&](int64_t c, int64_t n, auto full) {
          store_vec(to + first + c, load_vec(values + c, n, full), n, full);
        });
      }
    }
  });
}

}  // namespace

void moe_pack(const MoePack& arguments) {
  switch_dtype(arguments.dtype, [&](auto t) { pack<decltype(t)>(arguments); });
}

void moe_unpack(const MoeUnpack& arguments) {
  switch_dtype(arguments.dtype, [&](auto t) { unpack<decltype(t)>(arguments); });
}

}  // namespace fusedops::CPU_CAPABILITY
