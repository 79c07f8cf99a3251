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

std::vector<GlobalCell>& Block::cells_of(size_t allocation) {
  auto& cells = touched_.cells[allocation];
  const auto& memory = launch_.allocations[allocation];
  if (cells.empty()) cells.resize(memory.cell(memory.end - 1) + 1);
  return cells;
}

// An acquire that reads what a release has written orders what was before the release. Atomic
// operations of several blocks are no race.
void* Block::atomic(Warp& warp, uint64_t address, int bytes, bool acquires, bool releases) {
  const size_t which = allocation_of(address, bytes, bytes, "changes");
  const auto& allocation = launch_.allocations[which];
  auto& cells = cells_of(which);
  const auto wrong = [&](const std::string& why) {
    fail("changes global memory, " + std::to_string(address - allocation.begin) +
         " bytes behind the begin of '" + allocation.name + "', which " + why);
  };
  for (size_t i = allocation.cell(address); i <= allocation.cell(address + bytes - 1); ++i) {
    const auto& cell = cells[i];
    if (cell.writing_block && !written_before(warp, cell)) wrong("another block or warp writes");
    const uint32_t others = cell.readers & ~(1u << warp.number);
    if (cell.reading_block == number_ && cell.read_epoch == epoch_ && others)
      wrong("warp " + std::to_string(std::countr_zero(others)) +
            " reads without a barrier between");
  }
  auto& released = touched_.released[address];
  if (acquires) {
    for (const auto& [block, release] : released) {
      auto& known = known_[block];
      if (release.epoch >= known.epoch) known.epoch = release.epoch, known.warp = release.warp;
      if (known.clock.empty()) known.clock.resize(release.clock.size());
      join(known.clock, release.clock);
    }
  }
  if (releases) {
    for (const auto& [block, release] : known_) released[block] = release;
    released[number_] = {warp.clock, epoch_, static_cast<uint32_t>(warp.number)};
    ++warp.clock[warp.number];
  }
  return reinterpret_cast<void*>(address);
}

bool Block::written_before(const Warp& warp, const GlobalCell& cell) const {
  if (cell.writing_block == number_)
    return !launch_.watches_warps || cell.write_clock <= warp.clock[cell.writer];
  const auto release = known_.find(cell.writing_block);
  return release != known_.end() && cell.write_clock <= release->second.clock[cell.writer];
}

// Of another block: whether its reads are before a release of it that this block knows.
bool Block::read_before(const GlobalCell& cell) const {
  const auto release = known_.find(cell.reading_block);
  if (release == known_.end()) return false;
  const auto& [clock, epoch, warp] = release->second;
  return cell.read_epoch < epoch || (cell.read_epoch == epoch && cell.readers == 1u << warp);
}

// Blocks are ordered by atomic operations alone, warps of a block by its barriers. Those that write
// the same bits do no harm.
void Block::watch_global(const Warp& warp, uint32_t by, uint64_t address, int bytes,
                         const char* verb, const uint8_t* written, int alignment) {
  const size_t which = allocation_of(address, bytes, alignment ? alignment : bytes, verb);
  const auto& allocation = launch_.allocations[which];
  auto& cells = cells_of(which);
  const auto* memory = reinterpret_cast<const uint8_t*>(address);
  const auto race = [&](const char* with, uint32_t block, int other) {
    const bool here = block == number_;
    fail(std::string(verb) + " global memory, " + std::to_string(address - allocation.begin) +
         " bytes behind the begin of '" + allocation.name + "', which " +
         (here ? "warp " + std::to_string(other) : "another block") + " " + with +
         (here ? " without a barrier between" : " too"));
  };
  const auto unit = static_cast<int>(allocation.unit);
  for (int i = 0; i < bytes; i += unit) {
    auto& cell = cells[allocation.cell(address + i)];
    const bool same = written && !std::memcmp(memory + i, written + i, std::min(unit, bytes - i));
    if (cell.writing_block && !same && !written_before(warp, cell))
      race("writes", cell.writing_block, cell.writer);
    watch_lanes(warp, cell.writing_lanes, by, written, same);
    if (written) {
      const bool apart = cell.several_read || (cell.reading_block &&
                                               cell.reading_block != number_ && !read_before(cell));
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
        cell.several_read |= cell.reading_block && !read_before(cell);
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
