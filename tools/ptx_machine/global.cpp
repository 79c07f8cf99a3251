// Global memory: the tensors of a launch, and who touches them.
#include <sstream>

#include "machine.h"

namespace ptx {

void Block::read_global(const Warp& warp, uint32_t by, uint64_t address, void* to, int bytes) {
  watch_global(warp, by, address, bytes, "reads", nullptr);
  std::memcpy(to, reinterpret_cast<const void*>(address), bytes);
}

void Block::write_global(const Warp& warp, uint32_t by, uint64_t address, const void* from,
                         int bytes) {
  watch_global(warp, by, address, bytes, "writes", static_cast<const uint8_t*>(from));
  std::memcpy(reinterpret_cast<void*>(address), from, bytes);
}

size_t Block::allocation_of(uint64_t address, int bytes, int alignment, const char* verb) const {
  const auto& all = launch_.allocations;
  const auto after =
      std::upper_bound(all.begin(), all.end(), address,
                       [](uint64_t at, const Allocation& each) { return at < each.begin; });
  const bool aligned = address % alignment == 0;
  if (aligned && after != all.begin() && address + bytes <= std::prev(after)->end)
    return after - all.begin() - 1;
  std::ostringstream text;
  text << verb << " " << bytes << " bytes of global memory at 0x" << std::hex << address
       << std::dec;
  if (!aligned) fail(text.str() + ", which is not aligned");
  if (after != all.begin()) {
    const auto& before = *std::prev(after);
    text << ", " << static_cast<int64_t>(address - before.begin) << " bytes behind the begin of '"
         << before.name << "', which has " << before.end - before.begin;
  } else if (!all.empty()) {
    text << ", before every tensor";
  }
  fail(text.str());
}

// Blocks are never ordered, warps of a block by its barriers alone. Those that write the same bits
// do no harm.
void Block::watch_global(const Warp& warp, uint32_t by, uint64_t address, int bytes,
                         const char* verb, const uint8_t* written, int alignment) {
  const size_t which = allocation_of(address, bytes, alignment ? alignment : bytes, verb);
  const auto& allocation = launch_.allocations[which];
  auto& cells = touched_.cells[which];
  if (cells.empty()) cells.resize(allocation.end - allocation.begin);
  const auto* memory = reinterpret_cast<const uint8_t*>(address);
  const auto race = [&](const char* with, uint32_t block, int other) {
    const bool here = block == number_;
    fail(std::string(verb) + " global memory, " + std::to_string(address - allocation.begin) +
         " bytes behind the begin of '" + allocation.name + "', which " +
         (here ? "warp " + std::to_string(other) : "another block") + " " + with +
         (here ? " without a barrier between" : " too"));
  };
  for (int i = 0; i < bytes; ++i) {
    auto& cell = cells[address + i - allocation.begin];
    const bool same = written && memory[i] == written[i];
    const bool ordered = cell.writing_block == number_ &&
                         (!launch_.watches_warps || cell.write_clock <= warp.clock[cell.writer]);
    if (cell.writing_block && !ordered && !same) race("writes", cell.writing_block, cell.writer);
    watch_lanes(warp, cell.writing_lanes, by, written, same);
    if (written) {
      const bool apart = cell.reading_block && (cell.several_read || cell.reading_block != number_);
      if (apart && !same) race("reads", 0, 0);
      const uint32_t others = cell.readers & ~(1u << warp.number);
      if (launch_.watches_warps && cell.reading_block && cell.read_epoch == epoch_ && others &&
          !same)
        race("reads", number_, std::countr_zero(others));
      cell.writing_block = number_;
      cell.writer = static_cast<uint8_t>(warp.number);
      cell.write_clock = warp.clock[warp.number];
    } else {
      if (cell.reading_block != number_) {
        cell.several_read = cell.reading_block != 0;
        cell.readers = 0;
      } else if (cell.read_epoch != epoch_) {
        cell.readers = 0;
      }
      cell.reading_block = number_;
      cell.read_epoch = epoch_;
      cell.readers |= 1u << warp.number;
    }
  }
}

}  // namespace ptx
