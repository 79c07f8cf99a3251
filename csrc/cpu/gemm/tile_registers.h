// The eight tile registers of AMX, and the same in plain C++.
//
// A tile holds 16 rows of 64 bytes. `dot` adds to a tile of 16 x 16 floats the product of a tile of
// rows (16 rows of 32 bfloat16 along k) and a tile of columns (16 steps of k, each the pairs along
// k of 16 columns). Both forms do what the manual says: the products of the even elements of k are
// one chain of multiply-adds from zero, those of the odd ones another; both are added, and the sum
// is added to the tile. Subnormal numbers are zero, going in and coming out.
//
// HardwareTiles are instructions, written as assembly because what calls them is compiled for
// processors without them too; EmulatedTiles are memory of the thread, and let every machine with
// AVX-512 test what is made of them (FUSEDOPS_MAX_ISA=amx_emulated). A thread configures its tiles
// before it uses them and releases them afterwards: other libraries find them as if nobody had been
// there, and may have left any configuration (TileScope).
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

#if !defined(FUSEDOPS_WITHOUT_TILES)  // the assembler knows them (tools/native.py)
struct HardwareTiles {
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
    asm volatile("ldtilecfg %0" ::"m"(shape));
  }
  static void release() { asm volatile("tilerelease" ::: "memory"); }
  template <int kTile>
  static void zero() {
    asm volatile("tilezero %%tmm%c0" ::"i"(kTile));
  }
  // Rows begin `stride` bytes apart.
  template <int kTile>
  static void load(const void* from, int64_t stride) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(kTile) : "memory");
  }
  // The same for rows that are read once: the hint keeps them from displacing panels of B in L1.
  template <int kTile>
  static void load_once(const void* from, int64_t stride) {
    asm volatile("tileloaddt1 (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(kTile) : "memory");
  }
  template <int kTile>
  static void store(void* to, int64_t stride) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(stride), "i"(kTile) : "memory");
  }
  template <int kSum, int kRows, int kColumns>
  static void dot() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kSum), "i"(kRows), "i"(kColumns));
  }
};
#endif

// While this lives, vectors take subnormal numbers for zero, as tile registers do.
class SubnormalsAreZero {
 public:
  SubnormalsAreZero() { _mm_setcsr(control_ | 0x8040); }
  ~SubnormalsAreZero() { _mm_setcsr(control_); }
  SubnormalsAreZero(const SubnormalsAreZero&) = delete;
  SubnormalsAreZero& operator=(const SubnormalsAreZero&) = delete;

 private:
  unsigned control_ = _mm_getcsr();
};

struct EmulatedTiles {
  static void configure() {
    state().configured = true;
    for (auto& tile : state().tiles) std::memset(&tile, 0, sizeof(tile));
  }
  static void release() { state().configured = false; }
  template <int kTile>
  static void zero() {
    std::memset(&tile<kTile>(), 0, sizeof(Tile));
  }
  template <int kTile>
  static void load(const void* from, int64_t stride) {
    for (int i = 0; i < kTileHeight; ++i) {
      std::memcpy(tile<kTile>()[i], static_cast<const char*>(from) + i * stride, kTileBytes);
    }
  }
  template <int kTile>
  static void load_once(const void* from, int64_t stride) {
    load<kTile>(from, stride);
  }
  template <int kTile>
  static void store(void* to, int64_t stride) {
    for (int i = 0; i < kTileHeight; ++i) {
      std::memcpy(static_cast<char*>(to) + i * stride, tile<kTile>()[i], kTileBytes);
    }
  }
  template <int kSum, int kRows, int kColumns>
  static void dot() {
    const SubnormalsAreZero scope;
    multiply(tile<kSum>(), tile<kRows>(), tile<kColumns>());
  }

 private:
  using Tile = char[kTileHeight][kTileBytes];
  struct TileState {
    alignas(64) Tile tiles[8];
    bool configured;
  };

  static TileState& state() {
    static thread_local TileState tiles;
    return tiles;
  }
  template <int kTile>
  static Tile& tile() {
    if (!state().configured) __builtin_trap();  // as the processor does
    return state().tiles[kTile];
  }
  // Not inlined: its arithmetic must stay between the changes of the control word.
  __attribute__((noinline)) static void multiply(Tile& sum, const Tile& rows, const Tile& columns) {
    const __m512i high = _mm512_set1_epi32(static_cast<int>(0xFFFF0000));
    for (int i = 0; i < kTileHeight; ++i) {
      __m512 even = _mm512_setzero_ps(), odd = _mm512_setzero_ps();
      for (int k = 0; k < kTileHeight; ++k) {
        uint32_t pair;
        std::memcpy(&pair, rows[i] + 4 * k, sizeof(pair));
        const __m512i column = _mm512_loadu_si512(columns[k]);
        const auto of = [](__m512i bits) { return _mm512_castsi512_ps(bits); };
        even = _mm512_fmadd_ps(of(_mm512_set1_epi32(static_cast<int>(pair << 16))),
                               of(_mm512_slli_epi32(column, 16)), even);
        odd = _mm512_fmadd_ps(of(_mm512_set1_epi32(static_cast<int>(pair & 0xFFFF0000))),
                              of(_mm512_and_si512(column, high)), odd);
      }
      const __m512 before = _mm512_loadu_ps(sum[i]);
      _mm512_storeu_ps(sum[i], _mm512_add_ps(before, _mm512_add_ps(even, odd)));
    }
  }
};

#if defined(FUSEDOPS_WITHOUT_TILES)
using HardwareTiles = EmulatedTiles;  // never chosen (csrc/isa.cpp)
#endif

// Calls body(Tiles()) with the form that runs here.
template <typename Body>
inline void with_tiles(const Body& body) {
  if (kTilesAreEmulated) {
    body(EmulatedTiles());
  } else {
    body(HardwareTiles());
  }
}

// The tiles of a thread while this lives.
struct TileScope {
  TileScope() {
    with_tiles([](auto tiles) { tiles.configure(); });
  }
  ~TileScope() {
    with_tiles([](auto tiles) { tiles.release(); });
  }
  TileScope(const TileScope&) = delete;
  TileScope& operator=(const TileScope&) = delete;
};

// sums [32][32] (+)= rows * columns over `steps` pairs of k, a multiple of 16. rows:
// [steps / 16][32][16 pairs], columns: [steps][32]. Without kBoth the lower 16 rows only. `next` is
// called once per 16 steps.
template <typename Tiles, bool kBoth, typename Next>
inline __attribute__((always_inline)) void multiply_tiles(int64_t steps, const uint32_t* rows,
                                                          const uint32_t* columns, float* sums,
                                                          bool accumulate, const Next& next) {
  constexpr int64_t kStride = 32 * sizeof(float), kHalf = 16 * 32;
  if (accumulate) {
    Tiles::template load<0>(sums, kStride);
    Tiles::template load<1>(sums + 16, kStride);
    if constexpr (kBoth) {
      Tiles::template load<2>(sums + kHalf, kStride);
      Tiles::template load<3>(sums + kHalf + 16, kStride);
    }
  } else {
    Tiles::template zero<0>();
    Tiles::template zero<1>();
    if constexpr (kBoth) {
      Tiles::template zero<2>();
      Tiles::template zero<3>();
    }
  }
  for (int64_t step = 0; step < steps; step += 16, rows += kHalf, columns += kHalf) {
    Tiles::template load_once<4>(rows, kTileBytes);
    Tiles::template load<6>(columns, kStride);
    Tiles::template dot<0, 4, 6>();
    if constexpr (kBoth) {
      Tiles::template load_once<5>(rows + kHalf / 2, kTileBytes);
      Tiles::template dot<2, 5, 6>();
    }
    Tiles::template load<7>(columns + 16, kStride);
    Tiles::template dot<1, 4, 7>();
    if constexpr (kBoth) Tiles::template dot<3, 5, 7>();
    next();
  }
  Tiles::template store<0>(sums, kStride);
  Tiles::template store<1>(sums + 16, kStride);
  if constexpr (kBoth) {
    Tiles::template store<2>(sums + kHalf, kStride);
    Tiles::template store<3>(sums + kHalf + 16, kStride);
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
template <typename Tiles, bool kBoth>
inline void multiply_lines_in_place(const c10::BFloat16* lines, int64_t stride, int64_t count,
                                    const uint32_t* columns, float* sums, bool first, bool last,
                                    const c10::BFloat16* ahead) {
  constexpr int64_t kStride = 32 * sizeof(float), kDepth = 32;
  if (first) {
    Tiles::template zero<0>();
    Tiles::template zero<1>();
    Tiles::template zero<2>();
    Tiles::template zero<3>();
  }
  const auto step = [&](const c10::BFloat16* at, int64_t bytes) {
    Tiles::template load<6>(columns, kStride);
    Tiles::template load<4>(at, bytes);
    Tiles::template dot<0, 4, 6>();
    if constexpr (kBoth) {
      Tiles::template load<7>(columns + 16, kStride);
      Tiles::template dot<1, 4, 7>();
    }
    Tiles::template load<5>(reinterpret_cast<const char*>(at) + 16 * bytes, bytes);
    Tiles::template dot<2, 5, 6>();
    if constexpr (kBoth) Tiles::template dot<3, 5, 7>();
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
    Tiles::template store<0>(sums, kStride);
    Tiles::template store<1>(sums + 16, kStride);
    Tiles::template store<2>(sums + 16 * 32, kStride);
    Tiles::template store<3>(sums + 16 * 32 + 16, kStride);
  }
}

#endif

}  // namespace
}  // namespace fusedops::CPU_CAPABILITY
