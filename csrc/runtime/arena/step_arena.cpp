// Steps of arenas: which buffer lies where, and when it was freed.
#include "step_arena.h"

#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <mutex>
#include <new>
#include <stdexcept>
#include <string>
#include <utility>

namespace fusedops::arena {
namespace {

constexpr int64_t kHugePage = 2 << 20;
constexpr int64_t kWindow = 64;           // positions that are searched where sizes differ
constexpr size_t kMostBuffers = 1 << 20;  // of a step; later ones are not recorded

// Leaked, like the arenas: buffers are freed until the process ends.
std::mutex& mutex() {
  static auto* const lock = new std::mutex;
  return *lock;
}

std::unordered_map<void*, Ticket>& tickets() {
  static auto* const all = new std::unordered_map<void*, Ticket>;
  return *all;
}

thread_local StepArena* open_here = nullptr;

// Written under the mutex, by device.
std::array<std::atomic<StepArena*>, kMostDevices> open_on;

// A child of fork() has one thread, whose step is that of the parent: it uses other memory.
void watch_forks() {
  static const int registered = pthread_atfork([] { mutex().lock(); }, [] { mutex().unlock(); },
                                               [] {
                                                 open_here = nullptr;
                                                 for (auto& arena : open_on) arena = nullptr;
                                                 mutex().unlock();
                                               });
  (void)registered;
}

int64_t round_up(int64_t value, int64_t step) {
  return (value + step - 1) / step * step;
}

}  // namespace

Block::Block(int64_t size, Device* device, void* stream)
    : size(size), stream(stream), device_(device) {
  if (device_ != nullptr) {
    base = static_cast<char*>(device_->allocate(std::max<int64_t>(size, 1), stream));
    return;
  }
  mapped_ = static_cast<size_t>(round_up(std::max<int64_t>(size, 1), kHugePage) + kHugePage);
  mapping_ = mmap(nullptr, mapped_, PROT_READ | PROT_WRITE,
                  MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapping_ == MAP_FAILED) throw std::bad_alloc();
  const auto address = reinterpret_cast<int64_t>(mapping_);
  base = reinterpret_cast<char*>(round_up(address, kHugePage));
#ifdef MADV_HUGEPAGE
  madvise(base, mapped_ - kHugePage, MADV_HUGEPAGE);  // fails where the kernel has none
#endif
}

Block::~Block() {
  if (device_ == nullptr) {
    munmap(mapping_, mapped_);
    return;
  }
  wait_for_others(0, size);
  device_->free(base);
}

const Block::Live* Block::occupant(int64_t offset, int64_t size) const {
  auto next = live.lower_bound(offset);
  if (next != live.end() && next->first < offset + size) return &next->second;
  if (next == live.begin()) return nullptr;
  --next;
  return next->second.end > offset ? &next->second : nullptr;
}

void Block::free_place(int64_t offset, const std::vector<void*>& streams) {
  const auto place = live.find(offset);
  for (void* const other : streams) {
    void* const event = device_->record(other);
    if (event == nullptr) return;
    busy_.push_back({offset, place->second.end, event});
  }
  live.erase(place);
}

void Block::wait_for_others(int64_t offset, int64_t size) {
  std::erase_if(busy_, [&](const Busy& range) {
    if (range.begin >= offset + size || range.end <= offset) return false;
    device_->wait(stream, range.event);
    return true;
  });
}

void Block::drop_free_pages() {
  if (device_ != nullptr) return;
  const int64_t page = sysconf(_SC_PAGESIZE);
  int64_t free_from = 0;
  auto drop = [&](int64_t until) {
    const int64_t first = round_up(free_from, page), last = until / page * page;
    if (first < last) madvise(base + first, last - first, MADV_DONTNEED);
  };
  for (const auto& [offset, buffer] : live) {
    drop(offset);
    free_from = buffer.end;
  }
  drop(static_cast<int64_t>(mapped_) - kHugePage);
}

StepArena* StepArena::open_arena() const {
  return device_ == nullptr ? open_here : open_on[device_->index].load(std::memory_order_relaxed);
}

void StepArena::set_open_arena(StepArena* arena) const {
  if (device_ == nullptr) {
    open_here = arena;
  } else {
    open_on[device_->index].store(arena, std::memory_order_release);
  }
}

void StepArena::end_open_step() {
  if (open_arena() == this) set_open_arena(nullptr);
  planned_ = nullptr;
  open_ = false;
}

bool StepArena::begin(int64_t plan, void* stream) {
  watch_forks();
  const std::lock_guard lock(mutex());
  StepArena* const other = open_arena();
  if (open_ || (other != nullptr && other->open_)) return false;
  open_ = true;
  owner_ = std::this_thread::get_id();
  set_open_arena(this);
  previous_ = std::exchange(current_, Record{});
  current_.step = ++steps_;
  counts_ = Counts{};
  cursor_ = 0;
  const auto planned = plans_.find(plan);
  planned_ = planned == plans_.end() ? nullptr : &planned->second;
  plan_id_ = plan;
  stream_ = stream;
  if (planned_ != nullptr && block_->stream != stream) planned_ = nullptr;
  if (planned_ != nullptr) planned_->used.assign(planned_->plan.sizes.size(), false);
  return true;
}

void StepArena::mark() {
  const std::lock_guard lock(mutex());
  if (!open_ || owner_ != std::this_thread::get_id()) return;
  const size_t index = current_.marks.size();
  current_.marks.push_back(static_cast<int64_t>(current_.sizes.size()));
  if (planned_ != nullptr && index < planned_->plan.marks.size()) {
    cursor_ = planned_->plan.marks[index];
  }
}

bool StepArena::end() {
  const std::lock_guard lock(mutex());
  const bool was_open = open_;
  end_open_step();
  return was_open;
}

bool StepArena::is_open() const {
  const std::lock_guard lock(mutex());
  return open_;
}

bool StepArena::is_open_here() const {
  const std::lock_guard lock(mutex());
  return open_ && owner_ == std::this_thread::get_id();
}

// A plan that an open step follows must stay where it is.
void StepArena::check_no_step(const char* function) const {
  if (!open_) return;
  throw std::logic_error(std::string("StepArena.") + function +
                         ": no step may be open, and one is: call end() first");
}

void StepArena::set_plan(int64_t id, Plan plan) {
  const std::lock_guard lock(mutex());
  check_no_step("set_plan");
  // Buffers of the plan before would occupy places of this one.
  if (block_ == nullptr || block_->size < plan.height || block_->stream != stream_ ||
      !block_->live.empty()) {
    use_block(plan.height);
  }
  plans_[id] = Planned{std::move(plan), {}};
}

void StepArena::drop_plan(int64_t id) {
  const std::lock_guard lock(mutex());
  check_no_step("drop_plan");
  plans_.erase(id);
}

void StepArena::renew() {
  const std::lock_guard lock(mutex());
  check_no_step("renew");
  use_block(0);
}

void StepArena::use_block(int64_t height) {
  if (block_ != nullptr) {
    height = std::max(height, block_->size);
    block_->drop_free_pages();
  }
  block_ = nullptr;  // freed before the next one is allocated, unless a buffer in it lives
  try {
    block_ = std::make_shared<Block>(height, device_, stream_);
  } catch (...) {
    plans_.clear();
    throw;
  }
}

void StepArena::close() {
  const std::lock_guard lock(mutex());
  end_open_step();
  plans_.clear();
  if (block_ != nullptr) block_->drop_free_pages();
  block_ = nullptr;
  current_ = Record{};
  previous_ = Record{};
}

Record StepArena::record(bool previous) const {
  const std::lock_guard lock(mutex());
  return previous ? previous_ : current_;
}

Counts StepArena::counts() const {
  const std::lock_guard lock(mutex());
  return counts_;
}

int64_t StepArena::block_bytes() const {
  const std::lock_guard lock(mutex());
  return block_ == nullptr ? 0 : block_->size;
}

int64_t StepArena::live_bytes() const {
  const std::lock_guard lock(mutex());
  int64_t total = 0;
  if (block_ != nullptr) {
    for (const auto& [offset, buffer] : block_->live) total += buffer.end - offset;
  }
  return total;
}

bool StepArena::contains(const void* pointer) const {
  const std::lock_guard lock(mutex());
  const auto* const address = static_cast<const char*>(pointer);
  return block_ != nullptr && address >= block_->base && address < block_->base + block_->size;
}

// The position of the plan that an allocation belongs to, or -1. Where the step has other
// allocations than the plan, the nearest unused one of the same size is used: first one that was
// skipped, then one that is skipped to.
int64_t StepArena::find(int64_t size) {
  const auto& sizes = planned_->plan.sizes;
  const auto& used = planned_->used;
  const auto count = static_cast<int64_t>(sizes.size());
  auto matches = [&](int64_t at) { return !used[at] && sizes[at] == size; };
  if (cursor_ < count && matches(cursor_)) return cursor_++;
  for (int64_t at = std::max<int64_t>(0, cursor_ - kWindow); at < cursor_; ++at) {
    if (matches(at)) return at;
  }
  const int64_t last = std::min(count, cursor_ + kWindow);
  for (int64_t at = cursor_; at < last; ++at) {
    if (matches(at)) {
      cursor_ = at + 1;
      return at;
    }
  }
  return -1;
}

void* StepArena::serve(int64_t nbytes, Ticket* ticket) {
  const int64_t size = round_up(nbytes, device_ == nullptr ? kAlignment : kDeviceAlignment);
  const auto position = static_cast<int64_t>(current_.sizes.size());
  counts_.buffers += 1;
  counts_.bytes += size;
  if (current_.sizes.size() >= kMostBuffers) {
    counts_.unplanned += size;
    return nullptr;
  }
  current_.sizes.push_back(size);
  current_.ends.push_back(kAlive);
  current_.in_next.push_back(0);
  *ticket = Ticket{this, nullptr, current_.step, position, kOutside, nullptr, nullptr, {}};
  const int64_t entry = planned_ == nullptr ? -1 : find(size);
  if (entry < 0) {
    counts_.unplanned += size;
    return nullptr;
  }
  planned_->used[entry] = true;
  const int64_t offset = planned_->plan.offsets[entry];
  if (offset == kOutside) {
    counts_.outside += size;
    return nullptr;
  }
  if (const Block::Live* const other = block_->occupant(offset, size)) {
    if (other->step == current_.step) {
      counts_.occupied += size;
    } else {
      counts_.kept += size;
      // A buffer that outlives its step by more than another one is kept: the next one of its
      // position goes elsewhere.
      const auto plan = plans_.find(other->plan);
      if (other->step + 1 < current_.step && plan != plans_.end()) {
        plan->second.plan.offsets[other->entry] = kOutside;
      }
    }
    return nullptr;
  }
  block_->wait_for_others(offset, size);
  block_->live[offset] = {offset + size, current_.step, plan_id_, entry};
  counts_.served += size;
  ticket->block = block_;
  ticket->offset = offset;
  return block_->base + offset;
}

void StepArena::freed(const Ticket& ticket) {
  if (ticket.block != nullptr) ticket.block->free_place(ticket.offset, ticket.streams);
  if (ticket.step == current_.step) {
    current_.ends[ticket.position] = static_cast<int64_t>(current_.sizes.size());
  } else if (ticket.step == previous_.step) {
    // `current_` is the open step, or the last one if the step after it has not begun.
    previous_.ends[ticket.position] = static_cast<int64_t>(current_.sizes.size());
    previous_.in_next[ticket.position] = 1;
  }
}

StepArena* current() {
  return open_here;
}

StepArena* current_on(int device) {
  return open_on[device].load(std::memory_order_acquire);
}

void* allocate(StepArena& arena, int64_t nbytes, Ticket* ticket, void* stream) {
  const std::lock_guard lock(mutex());
  if (!arena.open_ || arena.stream_ != stream) return nullptr;
  if (nbytes < kLeastBytes) {
    arena.counts_.small += 1;
    arena.counts_.small_bytes += nbytes;
    return nullptr;
  }
  void* const pointer = arena.serve(nbytes, ticket);
  if (pointer != nullptr) tickets()[pointer] = *ticket;
  return pointer;
}

void track(void* pointer, const Ticket& ticket) {
  const std::lock_guard lock(mutex());
  tickets()[pointer] = ticket;
}

Released release(void* pointer) {
  Ticket ticket;
  {
    const std::lock_guard lock(mutex());
    const auto known = tickets().find(pointer);
    if (known == tickets().end()) return Released::kUnknown;
    ticket = std::move(known->second);
    tickets().erase(known);
    ticket.arena->freed(ticket);
  }
  // Outside of the lock: the block may be freed here, or other memory.
  if (ticket.block != nullptr) return Released::kInBlock;
  ticket.deleter(ticket.context);
  return Released::kElsewhere;
}

std::shared_ptr<Block> block_of(void* pointer) {
  const std::lock_guard lock(mutex());
  const auto known = tickets().find(pointer);
  return known == tickets().end() ? nullptr : known->second.block;
}

Released use_on(void* pointer, void* stream, Ticket* ticket) {
  const std::lock_guard lock(mutex());
  const auto known = tickets().find(pointer);
  if (known == tickets().end()) return Released::kUnknown;
  if (known->second.block == nullptr) {
    *ticket = known->second;
    return Released::kElsewhere;
  }
  auto& streams = known->second.streams;
  if (stream != known->second.block->stream &&
      std::find(streams.begin(), streams.end(), stream) == streams.end()) {
    streams.push_back(stream);
  }
  return Released::kInBlock;
}

}  // namespace fusedops::arena
