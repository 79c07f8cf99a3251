// Warps, barriers, shared memory and messages.
#include "machine.h"

#include <algorithm>
#include <numeric>
#include <sstream>

namespace ptx {

Block::Block(const Launch& launch, Touched& touched, Dim index, std::mt19937_64& random)
    : launch_(launch),
      program_(*launch.program),
      touched_(touched),
      index_(index),
      random_(random) {
  const int threads = launch.block.count();
  warps_.resize((threads + kLanes - 1) / kLanes);
  for (size_t i = 0; i < warps_.size(); ++i) {
    auto& warp = warps_[i];
    warp.number = static_cast<int>(i);
    const int left = threads - static_cast<int>(i) * kLanes;
    const uint32_t lanes = left >= kLanes ? kAll : (1u << left) - 1;
    warp.exited = ~lanes;
    warp.fragments = {{0, lanes}};
    // What was not written is a NaN in every type.
    warp.registers.resize(program_.num_registers);
    for (auto& values : warp.registers) values.fill(0x7fffffff7fff7fffULL);
    warp.in_flight.assign(warp.registers.size(), Warp::idle);
    warp.clock.assign(warps_.size() + kMostBarriers, 0);
    warp.fenced = warp.clock;
    warp.clock[i] = 1;
    meet(warp);
  }
  num_clocks_ = warps_.size() + kMostBarriers;
  const size_t bytes = program_.static_shared + launch.dynamic_shared;
  shared_.assign(bytes, 0xff);
  cells_.resize(bytes);
}

void Block::fail(const std::string& what) const {
  std::ostringstream text;
  text << program_.name << ": " << what;
  if (current_) {
    text << "\n  in '" << current_->opcode << "', PTX line " << current_->line;
    const auto file = program_.files.find(current_->source_file);
    text << ", line " << current_->source_line;
    if (file != program_.files.end()) text << " of " << file->second;
  }
  text << "\n  block (" << index_.x << ", " << index_.y << ", " << index_.z << ")";
  if (running_) text << ", warp " << running_->number << ", lanes " << std::hex << lanes_;
  throw Error(text.str());
}

uint64_t Block::special(const Warp& warp, int index, int lane) const {
  const auto& block = launch_.block;
  const int thread = warp.number * kLanes + lane;
  switch (index) {
    case tid_x:
      return thread % block.x;
    case tid_y:
      return thread / block.x % block.y;
    case tid_z:
      return thread / block.x / block.y;
    case ntid_x:
      return block.x;
    case ntid_y:
      return block.y;
    case ntid_z:
      return block.z;
    case ctaid_x:
      return index_.x;
    case ctaid_y:
      return index_.y;
    case ctaid_z:
      return index_.z;
    case nctaid_x:
      return launch_.grid.x;
    case nctaid_y:
      return launch_.grid.y;
    case nctaid_z:
      return launch_.grid.z;
    case laneid:
      return lane;
    default:
      return warp.number;
  }
}

void Block::run() {
  const auto finished = [](const Warp& warp) { return warp.exited == kAll; };
  const auto runnable = [&](const Warp& warp) {
    return !finished(warp) && !warp.fragments.empty();
  };
  while (!std::all_of(warps_.begin(), warps_.end(), finished)) {
    std::vector<Warp*> ready;
    for (auto& warp : warps_)
      if (runnable(warp)) ready.push_back(&warp);
    if (ready.empty()) fail("no warp can go on: the block hangs");
    // One warp runs far ahead, or a few steps: what is ordered by luck alone is seen.
    auto& warp = *ready[random_() % ready.size()];
    const int steps = random_() % 4 == 0 ? 1 << 30 : static_cast<int>(random_() % 64) + 1;
    for (int i = 0; i < steps && runnable(warp); ++i) {
      warp.polls = false;
      if (++num_steps_ > kMostSteps) fail("the block does not end");
      step(warp);
      if (!boxes_.empty()) land_some_boxes();
      if (warp.polls) break;
    }
    if (vain_polls_ > 10000 && boxes_.empty())
      fail("every warp waits for an mbarrier that nobody completes");
    release_barrier();
  }
  for (size_t i = 0; i < warps_.size(); ++i)
    if (warps_[i].num_products != warps_[i / 4 * 4].num_products)
      fail("a wgmma that only some of the four warps of their group execute");
}

void Block::step(Warp& warp) {
  auto& first = warp.fragments.front();
  if (first.at >= static_cast<int>(program_.code.size())) fail("the code ends without ret");
  const auto& instruction = program_.code[first.at];
  uint32_t lanes = first.lanes;
  if (instruction.guard >= 0) {
    const auto& predicate = warp.registers[instruction.guard];
    for (int lane = 0; lane < kLanes; ++lane)
      if (bool(predicate[lane] & 1) == instruction.guard_negated) lanes &= ~(1u << lane);
  }
  running_ = &warp;
  current_ = &instruction;
  lanes_ = lanes;
  ++first.at;
  if (lanes && warp.num_in_flight) check_in_flight(warp, instruction);
  if (lanes) {
    instruction.executed = true;
    instruction.handler(*this, warp, instruction, lanes);
  }
  if (!warp.open_copies.empty() || !warp.groups.empty()) land_some(warp);
  // The fragment that is behind runs: lanes meet again where their paths do.
  auto& fragments = warp.fragments;
  if (fragments.size() > 1) {
    std::sort(fragments.begin(), fragments.end(),
              [](const Fragment& a, const Fragment& b) { return a.at < b.at; });
    for (size_t i = 1; i < fragments.size();) {
      if (fragments[i].at == fragments[i - 1].at) {
        fragments[i - 1].lanes |= fragments[i].lanes;
        fragments.erase(fragments.begin() + i);
      } else {
        ++i;
      }
    }
  }
}

// Takes lanes out of the fragment that runs.
static void leave(Warp& warp, uint32_t lanes) {
  auto& first = warp.fragments.front();
  first.lanes &= ~lanes;
  if (!first.lanes) warp.fragments.erase(warp.fragments.begin());
}

void Block::branch(Warp& warp, int target, uint32_t lanes) {
  leave(warp, lanes);
  warp.fragments.push_back({target, lanes});
}

void Block::exit(Warp& warp, uint32_t lanes) {
  warp.exited |= lanes;
  if (warp.exited == kAll && !(warp.open_boxes.empty() && warp.box_groups.empty()))
    fail("ends before the wait for a box that it stores");
  leave(warp, lanes);
}

void Block::wait_for_block(Warp& warp, uint32_t lanes) {
  // bar.sync is aligned: all threads of a warp execute the same one.
  if (current_->parts[0] == "bar" && (lanes | warp.exited) != kAll)
    fail("a part of the lanes of a warp arrives");
  const int after = warp.fragments.front().at;
  warp.at_barrier |= lanes;
  leave(warp, lanes);
  waiting_.push_back({&warp, {after, lanes}});
}

void Block::release_barrier() {
  for (const auto& warp : warps_)
    if ((warp.at_barrier | warp.exited) != kAll) return;
  for (const auto& [warp, fragment] : waiting_)
    if (fragment.at != waiting_[0].second.at) fail("the block waits at two barriers");
  std::vector<uint32_t> joined(num_clocks_), fenced(num_clocks_);
  for (const auto& warp : warps_) {
    join(joined, warp.clock);
    join(fenced, warp.fenced);
  }
  for (auto& warp : warps_) {
    warp.at_barrier = 0;
    vain_polls_ = 0;
    warp.clock = joined;
    warp.fenced = fenced;
    ++warp.clock[warp.number];
    meet(warp);
  }
  ++epoch_;
  for (auto& [warp, fragment] : waiting_) warp->fragments.push_back(fragment);
  waiting_.clear();
}

void Block::check_shared(uint64_t address, int bytes) const {
  const bool inside = address + bytes <= shared_.size() && address + bytes >= address;
  if (inside && address % bytes == 0) return;
  const auto what = std::to_string(bytes) + " bytes of shared memory at " + std::to_string(address);
  if (!inside) fail("accesses " + what + " of " + std::to_string(shared_.size()));
  fail("accesses " + what + ", which is not aligned");
}

// Reads since the last barrier of the block are not ordered before what other warps write.
void Block::note_reader(const Warp& warp, uint64_t address) {
  auto& cell = cells_[address];
  if (cell.read_epoch != epoch_) cell.readers = 0;
  cell.read_epoch = epoch_;
  cell.readers |= 1u << warp.number;
}

void Block::check_readers(const Warp& warp, uint64_t address, const char* verb) const {
  const auto& cell = cells_[address];
  const uint32_t others = cell.readers & ~(1u << warp.number);
  if (cell.read_epoch == epoch_ && others)
    fail(std::string(verb) + " shared memory at " + std::to_string(address) + ", which warp " +
         std::to_string(std::countr_zero(others)) + " reads without a barrier between");
}

std::string Block::writer(const Cell& cell) const {
  return cell.writer < warps_.size() ? "warp " + std::to_string(cell.writer) : "a copy";
}

// Lanes of a warp need not run in step: what one writes, another may read or write once they have
// met. Those that write the same bits do no harm. A read before the write of another lane is no
// error: Triton's kernels have it where all lanes load one element and one of them stores it.
void Block::watch_lanes(const Warp& warp, WritingLanes& writing, uint32_t by, bool writes,
                        bool same) {
  if (writing.meeting != warp.meeting) writing = {warp.meeting, 0};
  const uint32_t one = by == kAll ? 0 : by;
  const bool own = !writes && (writing.lanes & one);
  const uint32_t others = writing.lanes & ~one;
  if (others && !own && !same)
    fail("lane " + std::to_string(std::countr_zero(others)) +
         " writes the same byte without a barrier between");
  if (writes) writing.lanes |= by;
}

void Block::read_shared(Warp& warp, uint32_t by, uint64_t address, void* to, int bytes) {
  check_shared(address, bytes);
  for (int i = 0; i < bytes; ++i) {
    auto& cell = cells_[address + i];
    const auto where = [&] { return "shared memory at " + std::to_string(address + i); };
    if (cell.in_flight) fail("reads " + where() + " before the wait for its asynchronous copy");
    if (!cell.written) fail("reads " + where() + ", which nobody has written");
    if (cell.write_clock > warp.clock[cell.writer])
      fail("reads " + where() + ", which " + writer(cell) + " writes without a barrier between");
    note_reader(warp, address + i);
    watch_lanes(warp, cell.writing_lanes, by, false, false);
  }
  std::memcpy(to, &shared_[address], bytes);
}

void Block::write_shared(Warp& warp, uint32_t by, uint64_t address, const void* from, int bytes) {
  check_shared(address, bytes);
  for (int i = 0; i < bytes; ++i) {
    auto& cell = cells_[address + i];
    const auto where = [&] { return "shared memory at " + std::to_string(address + i); };
    if (cell.in_flight) fail("writes " + where() + ", to which an asynchronous copy is under way");
    // Lanes that hold the same element write the same bits, in any order.
    const bool same = shared_[address + i] == static_cast<const uint8_t*>(from)[i];
    if (cell.written && !same && cell.write_clock > warp.clock[cell.writer])
      fail("writes " + where() + ", which " + writer(cell) + " writes without a barrier between");
    check_readers(warp, address + i, "writes");
    watch_lanes(warp, cell.writing_lanes, by, true, same && cell.written);
    cell.written = true;
    cell.writer = static_cast<uint8_t>(warp.number);
    cell.write_clock = warp.clock[warp.number];
    cell.generic = true;
  }
  std::memcpy(&shared_[address], from, bytes);
}

void Block::copy_async(Warp& warp, Copy copy) {
  check_shared(copy.target, copy.filled);
  if (copy.bytes) watch_global(warp, kAll, copy.source, copy.bytes, "copies", nullptr, copy.filled);
  for (int i = 0; i < copy.filled; ++i) {
    auto& cell = cells_[copy.target + i];
    check_readers(warp, copy.target + i, "copies to");
    if (cell.written && cell.write_clock > warp.clock[cell.writer])
      fail("copies to shared memory at " + std::to_string(copy.target + i) + ", which " +
           writer(cell) + " writes without a barrier between");
    cell.in_flight = true;
    shared_[copy.target + i] = 0xff;
  }
  warp.open_copies.push_back(copy);
}

void Block::commit_copies(Warp& warp) {
  warp.groups.push_back(std::move(warp.open_copies));
  warp.open_copies.clear();
}

void Block::wait_for_copies(Warp& warp, size_t groups_left) {
  while (warp.groups.size() > groups_left) {
    for (const auto& copy : warp.groups.front()) {
      land(warp, copy);
      for (int i = 0; i < copy.filled; ++i) {
        auto& cell = cells_[copy.target + i];
        cell.in_flight = false;
        cell.written = true;
        cell.writer = static_cast<uint8_t>(warp.number);
        cell.write_clock = warp.clock[warp.number];
        cell.generic = true;
      }
    }
    warp.groups.erase(warp.groups.begin());
  }
}

void Block::land(Warp&, const Copy& copy) {
  std::memset(&shared_[copy.target], 0, copy.filled);
  std::memcpy(&shared_[copy.target], reinterpret_cast<const void*>(copy.source), copy.bytes);
}

// A copy may land at any moment before the wait; its bytes may be used after the wait alone.
void Block::land_some(Warp& warp) {
  if (random_() % 8 || warp.groups.empty()) return;
  const auto& group = warp.groups[random_() % warp.groups.size()];
  if (!group.empty()) land(warp, group[random_() % group.size()]);
}

void run(const Launch& launch) {
  const int threads = launch.block.count();
  const auto& program = *launch.program;
  const auto given = program.name + ": blocks of " + std::to_string(threads) + " threads, ";
  if (program.required_threads && threads != program.required_threads)
    throw Error(given + "not of " + std::to_string(program.required_threads) + " (.reqntid)");
  if (threads < 1 || threads > program.most_threads)
    throw Error(given + "and the kernel allows " + std::to_string(program.most_threads));
  std::mt19937_64 random(launch.seed);
  Touched touched;
  touched.cells.resize(launch.allocations.size());
  std::vector<int> order(launch.grid.count());
  std::iota(order.begin(), order.end(), 0);
  std::shuffle(order.begin(), order.end(), random);
  for (const int i : order) {
    const auto& grid = launch.grid;
    Block(launch, touched, {i % grid.x, i / grid.x % grid.y, i / grid.x / grid.y}, random).run();
  }
}

}  // namespace ptx
