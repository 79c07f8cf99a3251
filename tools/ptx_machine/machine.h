// Executes a kernel: blocks in any order, warps of 32 lanes with masks, memory that is checked.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <random>

#include "program.h"

namespace ptx {

constexpr int kLanes = 32;
constexpr uint32_t kAll = 0xffffffff;
constexpr size_t kMostBarriers = 64;
constexpr uint64_t kMostSteps = 50'000'000;  // of the warps of a block: what takes more hangs

// Makes a clock know what another one knows.
inline void join(std::vector<uint32_t>& clock, const std::vector<uint32_t>& other) {
  for (size_t i = 0; i < clock.size() && i < other.size(); ++i)
    clock[i] = std::max(clock[i], other[i]);
}

// Memory that a launch may use: a tensor.
struct Allocation {
  uint64_t begin = 0, end = 0;
  std::string name;
  uint64_t unit = 1;  // bytes of an element: what is watched as one
  size_t cell(uint64_t address) const { return (address - begin) / unit; }
};

struct Dim {
  int x = 1, y = 1, z = 1;
  int count() const { return x * y * z; }
};

struct Launch {
  const Program* program = nullptr;
  Dim grid, block;
  int dynamic_shared = 0;
  std::vector<uint8_t> parameters;
  std::vector<Allocation> allocations;  // sorted by their begin
  uint64_t seed = 0;
  bool watches_warps = true;  // of a block: their races in global memory are errors
};

// A part of a warp whose lanes are at one instruction.
struct Fragment {
  int at = 0;
  uint32_t lanes = 0;
};

// A copy to shared memory that cp.async has issued and that has not landed.
struct Copy {
  uint64_t source = 0;
  uint32_t target = 0;
  uint8_t bytes = 0, filled = 0;  // the first are copied, up to `filled` are zeros
  int line = 0;
};

// A product of a warp's rows (wgmma) that was issued and not waited for.
struct Product {
  const Instruction* instruction = nullptr;
  uint64_t left = 0, right = 0;  // descriptors of the matrices in shared memory
  bool adds = false;             // to the accumulator
  bool negates = false;          // A or B, not both
};

// An mbarrier in shared memory.
struct Barrier {
  uint32_t expected = 0, pending = 0;  // arrivals
  int64_t bytes = 0;                   // that copies still have to bring
  uint32_t phase = 0;                  // completed phases
  size_t clock = 0;                    // its place in the clocks of warps
  std::vector<uint32_t> arrived;       // what happened before the arrivals of this phase
  std::vector<uint32_t> released;      // before those of the last completed one
};

// 16 bytes of a box: `bytes` of them are in global memory, from the byte `begin` on.
struct Piece {
  uint64_t global = 0;
  uint32_t shared = 0;
  uint8_t begin = 0, bytes = 0;
};

// A box of a tensor on its way to shared memory (cp.async.bulk.tensor).
struct Box {
  std::vector<Piece> pieces;
  uint32_t barrier = 0;
  int swizzle = 0;
  bool late = false;  // lands when a warp has asked its barrier in vain
};

// Lanes of one warp that have written a byte since they met (bar.warp.sync, bar.sync).
struct WritingLanes {
  uint32_t meeting = 0, lanes = 0;
};

struct Warp {
  int number = 0;
  uint32_t meeting = 0;  // of its lanes: a number that no other one has in the launch
  uint32_t exited = 0;
  std::vector<Fragment> fragments;  // by instruction, the first runs
  std::vector<std::array<uint64_t, kLanes>> registers;
  uint32_t at_barrier = 0;        // lanes that wait for the block
  std::vector<Copy> open_copies;  // since the last commit_group
  std::vector<std::vector<Copy>> groups;
  std::vector<uint32_t> clock;  // per warp and mbarrier: what happened before (races)
  std::vector<Box> open_boxes;  // stores of boxes since the last commit_group
  std::vector<std::vector<Box>> box_groups;
  std::vector<Product> open_products;
  std::vector<std::vector<Product>> product_groups;
  std::vector<uint32_t> fenced;  // what of that was before a fence of the two proxies
  bool polls = false;            // the last step asked an mbarrier in vain
  // Registers of products under way: a product may read them, or write them, until the wait.
  enum Use : uint8_t { idle, read_by_product, written_by_product };
  std::vector<Use> in_flight;
  size_t num_in_flight = 0;
  uint64_t num_products = 0;      // that were issued
  bool fenced_registers = false;  // by wgmma.fence, since the last wait for products
};

// Of a byte of shared memory: whether it was written, and by whom it was touched last.
struct Cell {
  uint32_t write_clock = 0;
  uint32_t readers = 0, read_epoch = 0;  // warps, and how many barriers the block had passed
  uint8_t writer = 0;
  bool written = false, in_flight = false;
  bool generic = false;  // written by a store or cp.async, not by the asynchronous proxy
  WritingLanes writing_lanes;
};

// Of an element of global memory: by whom it was touched last. Blocks count from 1.
struct GlobalCell {
  uint32_t writing_block = 0, write_clock = 0;
  uint32_t reading_block = 0, read_epoch = 0, readers = 0;
  uint8_t writer = 0;
  bool several_read = false;  // blocks
  WritingLanes writing_lanes;
};

// What a block had done when it released: the clock of the warp that did, and the block's epoch.
struct Release {
  std::vector<uint32_t> clock;
  uint32_t epoch = 0, warp = 0;
};
using Releases = std::map<uint32_t, Release>;  // by block, its last one

// What the blocks of a launch share.
struct Touched {
  std::vector<std::vector<GlobalCell>> cells;  // of each allocation, once it is touched
  std::map<uint64_t, Releases> released;       // by the address of an atomic operation
  uint32_t num_meetings = 0;
};

class Block {
 public:
  Block(const Launch& launch, Touched& touched, Dim index, std::mt19937_64& random);
  void run();
  [[noreturn]] void fail(const std::string& what) const;  // what the instruction did, and where

  uint64_t value(const Warp& warp, const Operand& operand, int lane) const {
    switch (operand.kind) {
      case Operand::reg:
        return warp.registers[operand.index][lane];
      case Operand::constant:
        return operand.value;
      case Operand::special:
        return special(warp, operand.index, lane);
      default:
        fail("'" + operand.text + "' is no value");
    }
  }
  uint64_t address(const Warp& warp, const Operand& operand, int lane) const {
    return operand.value + (operand.index >= 0 ? warp.registers[operand.index][lane] : 0);
  }
  void set(Warp& warp, const Operand& operand, int lane, uint64_t value) {
    if (operand.kind != Operand::reg) return;
    if (warp.num_in_flight && warp.in_flight[operand.index])
      fail("writes " + operand.text + ", which a wgmma under way uses");
    warp.registers[operand.index][lane] = value;
  }

  // Memory. Each raises Error with who, where and what. `by` are the lanes: one, or all of them.
  void read_global(const Warp& warp, uint32_t by, uint64_t address, void* to, int bytes);
  void write_global(const Warp& warp, uint32_t by, uint64_t address, const void* from, int bytes);
  // Global memory for an atomic operation, which also orders blocks.
  void* atomic(Warp& warp, uint64_t address, int bytes, bool acquires, bool releases);
  void read_shared(Warp& warp, uint32_t by, uint64_t address, void* to, int bytes);
  void write_shared(Warp& warp, uint32_t by, uint64_t address, const void* from, int bytes);
  const uint8_t* parameters(uint64_t offset, size_t bytes) const {
    if (offset > launch_.parameters.size() || offset + bytes > launch_.parameters.size())
      fail("reads " + std::to_string(bytes) + " bytes of parameters at " + std::to_string(offset));
    return launch_.parameters.data() + offset;
  }

  // The lanes of a mask are those that execute an instruction, and `lane` is one of them.
  void check_members(uint32_t lanes, int lane, uint64_t mask) const {
    if (mask & kAll & ~uint64_t(lanes)) fail("the mask names lanes that do not execute it");
    if (!(mask >> lane & 1))
      fail("lane " + std::to_string(lane) + ", which the mask does not name");
  }
  void branch(Warp& warp, int target, uint32_t lanes);
  void exit(Warp& warp, uint32_t lanes);
  void wait_for_block(Warp& warp, uint32_t lanes);
  void meet(Warp& warp) { warp.meeting = ++touched_.num_meetings; }
  void copy_async(Warp& warp, Copy copy);
  void commit_copies(Warp& warp);
  void wait_for_copies(Warp& warp, size_t groups_left);

  // The asynchronous proxy of sm_90 (async.cpp).
  void begin_barrier(Warp& warp, uint64_t address, uint32_t count);
  void end_barrier(uint64_t address);
  void arrive(Warp& warp, uint64_t address, uint32_t bytes);
  bool passed(Warp& warp, uint64_t address, uint32_t parity);
  void copy_box(Warp& warp, Box box);
  void store_box(Warp& warp, Box box);
  void wait_for_boxes(Warp& warp, size_t groups_left);
  void issue(Warp& warp, Product product);
  void commit_products(Warp& warp);
  void wait_for_products(Warp& warp, size_t groups_left);
  void fence_proxy(Warp& warp) {
    join(warp.fenced, warp.clock);
    ++warp.clock[warp.number];  // what the warp writes from now on
  }

 private:
  Barrier& barrier_at(uint64_t address);
  void complete(Barrier& barrier);
  void land_piece(const Box& box, size_t row);
  void land_some_boxes();
  void execute(Warp& warp, const Product& product);
  void check_matrix(Warp& warp, uint64_t address);
  void check_in_flight(const Warp& warp, const Instruction& instruction) const;
  std::string writer(const Cell& cell) const;
  uint64_t special(const Warp& warp, int index, int lane) const;
  void step(Warp& warp);
  void release_barrier();
  void land(Warp& warp, const Copy& copy);
  void land_some(Warp& warp);
  void check_shared(uint64_t address, int bytes) const;
  void note_reader(const Warp& warp, uint64_t address);
  void check_readers(const Warp& warp, uint64_t address, const char* verb) const;
  size_t allocation_of(uint64_t address, int bytes, int alignment, const char* verb) const;
  std::vector<GlobalCell>& cells_of(size_t allocation);
  bool written_before(const Warp& warp, const GlobalCell& cell) const;
  bool read_before(const GlobalCell& cell) const;
  void watch_global(const Warp& warp, uint32_t by, uint64_t address, int bytes, const char* verb,
                    const uint8_t* written, int alignment = 0);
  void watch_lanes(const Warp& warp, WritingLanes& writing, uint32_t by, bool writes, bool same);

  const Launch& launch_;
  const Program& program_;
  Touched& touched_;
  Dim index_;
  uint32_t number_ = index_.x + launch_.grid.x * (index_.y + launch_.grid.y * index_.z) + 1u;
  std::mt19937_64& random_;
  Releases known_;  // of other blocks, by acquiring
  std::vector<Warp> warps_;
  std::vector<uint8_t> shared_;
  std::vector<Cell> cells_;
  std::vector<std::pair<Warp*, Fragment>> waiting_;  // at the barrier
  std::map<uint64_t, Barrier> barriers_;             // by their address
  std::map<uint64_t, Barrier> ended_;                // those that were invalidated
  std::vector<Box> boxes_;                           // under way
  uint32_t epoch_ = 1;                               // one more at each barrier of the block
  size_t num_clocks_ = 0, num_barriers_ = 0;
  uint64_t num_steps_ = 0;
  uint64_t vain_polls_ = 0;  // of mbarriers, since something happened
  // What runs now, for messages.
  const Warp* running_ = nullptr;
  const Instruction* current_ = nullptr;
  uint32_t lanes_ = 0;
};

// Runs all blocks of a launch, in an order that the seed decides.
void run(const Launch& launch);

}  // namespace ptx
