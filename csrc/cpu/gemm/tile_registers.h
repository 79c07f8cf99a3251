// The eight tile registers of AMX.
//
// A tile holds 16 rows of 64 bytes. `dot` adds to a tile of 16 x 16 floats the product of a tile of
// rows (16 rows of 32 bfloat16 along k) and a tile of columns (16 steps of k, each the pairs along
// k of 16 columns). The products of the even elements of k are one chain of multiply-adds from
// zero, those of the odd ones another; both are added, and the sum is added to the tile. Subnormal
// numbers are zero, going in and coming out.
//
// The instructions are written as assembly because what calls them is compiled for processors
// without them too. A thread configures its tiles before it uses them and releases them afterwards:
// other libraries find them as if nobody had been there, and may have left any configuration
// (TileScope). tests/trapped_tiles.py executes the instructions on every machine with AVX-512.
//
// Include from *.isa.cpp only.
#pragma once

#include <cstdint>
#include <cstring>

#include "../common/vec.h"

namespace fusedops::CPU_CAPABILITY {
namespace {

#if defined(CPU_CAPABILITY_AVX512)

constexpr int kTileBytes = 64;  // of a row
constexpr int kTileHeight = 16;

#if defined(FUSEDOPS_WITHOUT_TILES)  // the assembler does not know them (tools/native.py)
#define FUSEDOPS_TILE_INSTRUCTION(...) __builtin_trap()  // has_tiles() is false
#else
#define FUSEDOPS_TILE_INSTRUCTION(...) asm volatile(__VA_ARGS__)
#endif

struct Tiles {
  static void configure() {
    struct alignas(64) {
      uint8_t palette = 1, start = 0, reserved[14] = {};
      uint16_t bytes[16] = {};
      uint8_t rows[16] = {};
    } shape;
    static_assert(sizeof(shape) == 64);
    for (int i = 0; i < 8; ++i) {
      shape.bytes[i] = kTileBytes;
      shape.rows[i] = kTileHeight;
    }
    FUSEDOPS_TILE_INSTRUCTION("ldtilecfg %0" ::"m"(shape));
  }
  static void release() { FUSEDOPS_TILE_INSTRUCTION("tilerelease" :: : "memory"); }
  template <int kTile>
  static void zero() {
    FUSEDOPS_TILE_INSTRUCTION("tilezero %%tmm%c0" ::"i"(kTile));
  }
  // Rows begin `stride` bytes apart.
  template <int kTile>
  static void load(const void* from, int64_t stride) {
    FUSEDOPS_TILE_INSTRUCTION("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride),
                              "i"(kTile) : "memory");
  }
  // The same for rows that are read once: the hint keeps them from displacing panels of B in L1.
  template <int kTile>
  static void load_once(const void* from, int64_t stride) {
    FUSEDOPS_TILE_INSTRUCTION("tileloaddt1 (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride),
                              "i"(kTile) : "memory");
  }
  template <int kTile>
  static void store(void* to, int64_t stride) {
    FUSEDOPS_TILE_INSTRUCTION("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(stride),
                              "i"(kTile) : "memory");
  }
  template <int kSum, int kRows, int kColumns>
  static void dot() {
    FUSEDOPS_TILE_INSTRUCTION("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kSum), "i"(kRows),
                              "i"(kColumns));
  }
};

// The tiles of a thread while this lives.
struct TileScope {
  TileScope() { Tiles::configure(); }
  ~TileScope() { Tiles::release(); }
  TileScope(const TileScope&) = delete;
  TileScope& operator=(const TileScope&) = delete;
};

// sums [32][32] (+)= rows * columns over `steps` pairs of k, a multiple of 16. rows:
// [steps / 16][32][16 pairs], columns: [steps][32]. Without kBoth the lower 16 rows only. `next` is
// called once per 16 steps.
template <bool kBoth, typename Next>
inline __attribute__((always_inline)) void multiply_tiles(int64_t steps, const uint32_t* rows,
                                                          const uint32_t* columns, float* sums,
                                                          bool accumulate, const Next& next) {
  constexpr int64_t kStride = 32 * sizeof(float), kHalf = 16 * 32;
  if (accumulate) {
    Tiles::load<0>(sums, kStride);
    Tiles::load<1>(sums + 16, kStride);
    if constexpr (kBoth) {
      Tiles::load<2>(sums + kHalf, kStride);
      Tiles::load<3>(sums + kHalf + 16, kStride);
    }
  } else {
    Tiles::zero<0>();
    Tiles::zero<1>();
    if constexpr (kBoth) {
      Tiles::zero<2>();
      Tiles::zero<3>();
    }
  }
  for (int64_t step = 0; step < steps; step += 16, rows += kHalf, columns += kHalf) {
    Tiles::load_once<4>(rows, kTileBytes);
    Tiles::load<6>(columns, kStride);
    Tiles::dot<0, 4, 6>();
    if constexpr (kBoth) {
      Tiles::load_once<5>(rows + kHalf / 2, kTileBytes);
      Tiles::dot<2, 5, 6>();
    }
    Tiles::load<7>(columns + 16, kStride);
    Tiles::dot<1, 4, 7>();
    if constexpr (kBoth) Tiles::dot<3, 5, 7>();
    next();
  }
  Tiles::store<0>(sums, kStride);
  Tiles::store<1>(sums + 16, kStride);
  if constexpr (kBoth) {
    Tiles::store<2>(sums + kHalf, kStride);
    Tiles::store<3>(sums + kHalf + 16, kStride);
  }
}

// Prefetches a cache line of each of kCount lines that begin `bytes` apart. As assembly: an address
// holds a multiple of `bytes`, where the compiler computes each before it.
template <int kCount>
inline __attribute__((always_inline)) void fetch_lines(const void* first, int64_t bytes) {
  const auto* line = static_cast<const char*>(first);
#pragma GCC unroll 4
  for (int i = 0; i < kCount; i += 8, line += 8 * bytes) {
    asm volatile(
        "prefetcht1 (%0)\n\tprefetcht1 (%0,%1)\n\tprefetcht1 (%0,%1,2)\n\t"
        "prefetcht1 (%0,%2)\n\tprefetcht1 (%0,%1,4)\n\tprefetcht1 (%0,%3)\n\t"
        "prefetcht1 (%0,%2,2)\n\tprefetcht1 (%0,%4)" ::"r"(line),
        "r"(bytes), "r"(3 * bytes), "r"(5 * bytes), "r"(7 * bytes));
  }
}

// sums [32 lines][32 columns] of 32 lines that are contiguous along k, `stride` elements apart, and
// a panel [steps][32] of columns; `count` elements along k. The tiles are zeroed if `first`, stored
// if `last`, and kept for the next call otherwise. Without kBoth the first 16 columns only. `ahead`
// is where the 32 lines begin that are read next: a step reads a cache line of each line and
// prefetches one of those.
template <bool kBoth>
inline void multiply_lines_in_place(const c10::BFloat16* lines, int64_t stride, int64_t count,
                                    const uint32_t* columns, float* sums, bool first, bool last,
                                    const c10::BFloat16* ahead) {
  constexpr int64_t kStride = 32 * sizeof(float), kDepth = 32;
  if (first) {
    Tiles::zero<0>();
    Tiles::zero<1>();
    Tiles::zero<2>();
    Tiles::zero<3>();
  }
  const auto step = [&](const c10::BFloat16* at, int64_t bytes) {
    Tiles::load<6>(columns, kStride);
    Tiles::load<4>(at, bytes);
    Tiles::dot<0, 4, 6>();
    if constexpr (kBoth) {
      Tiles::load<7>(columns + 16, kStride);
      Tiles::dot<1, 4, 7>();
    }
    Tiles::load<5>(reinterpret_cast<const char*>(at) + 16 * bytes, bytes);
    Tiles::dot<2, 5, 6>();
    if constexpr (kBoth) Tiles::dot<3, 5, 7>();
    columns += 16 * 32;
  };
  const int64_t bytes = stride * static_cast<int64_t>(sizeof(c10::BFloat16));
  int64_t k = 0;
  for (; k + kDepth <= count; k += kDepth) {
    fetch_lines<32>(ahead + k, bytes);
    step(lines + k, bytes);
  }
  if (k < count) {
    alignas(64) c10::BFloat16 rest[32][kDepth] = {};
    for (int i = 0; i < 32; ++i) {
      std::memcpy(rest[i], lines + i * stride + k, (count - k) * sizeof(c10::BFloat16));
    }
    step(rest[0], kTileBytes);
  }
  if (last) {
    Tiles::store<0>(sums, kStride);
    Tiles::store<1>(sums + 16, kStride);
    Tiles::store<2>(sums + 16 * 32, kStride);
    Tiles::store<3>(sums + 16 * 32 + 16, kStride);
  }
}

#endif

}  // namespace
}  // namespace fusedops::CPU_CAPABILITY
