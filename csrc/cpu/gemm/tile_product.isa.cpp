// One product of tiles in either form, for the test that compares them (interface:
// tile_product.h).
#include "tile_registers.h"

#include "tile_product.h"

namespace fusedops::CPU_CAPABILITY {

void tile_product([[maybe_unused]] const TileProduct& a) {
#if defined(CPU_CAPABILITY_AVX512)
  const auto run = [&](auto tiles) {
    using Tiles = decltype(tiles);
    Tiles::configure();
    multiply_tiles<Tiles, true>(a.steps, a.rows, a.columns, a.sums, true, [] {});
    Tiles::release();
  };
  if (a.emulated) {
    run(EmulatedTiles());
  } else {
    run(HardwareTiles());
  }
#endif
}

}  // namespace fusedops::CPU_CAPABILITY
