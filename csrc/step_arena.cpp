// Steps of arenas: which buffer lies where, and when it was freed.
#include "step_arena.h"

#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <mutex>
#include <new>
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

// A child of fork() has one thread, whose step is that of the parent: it uses other memory.
void watch_forks() {
  static const int registered = pthread_atfork([] { mutex().lock(); }, [] { mutex().unlock(); },
                                               [] {
                                                 open_here = nullptr;
                                                 mutex().unlock();
                                               });
  (void)registered;
}

int64_t round_up(int64_t value, int64_t step) {
  return (value + step - 1) / step * step;
}

}  // namespace

Block::Block(int64_t size) : size(size) {
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
  munmap(mapping_, mapped_);
}

const Block::Live* Block::occupant(int64_t offset, int64_t size) const {
  auto next = live.lower_bound(offset);
  if (next != live.end() && next->first < offset + size) return &next->second;
  if (next == live.begin()) return nullptr;
  --next;
  return next->second.end > offset ? &next->second : nullptr;
}

void Block::drop_free_pages() {
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

bool StepArena::begin(int64_t plan) {
  watch_forks();
  const std::lock_guard lock(mutex());
  if (open_ || (open_here != nullptr && open_here->open_)) return false;
  open_ = true;
  open_here = this;
  previous_ = std::exchange(current_, Record{});
  current_.step = ++steps_;
  counts_ = Counts{};
  cursor_ = 0;
  const auto planned = plans_.find(plan);
  planned_ = planned == plans_.end() ? nullptr : &planned->second;
  plan_id_ = plan;
  if (planned_ != nullptr) planned_->used.assign(planned_->plan.sizes.size(), false);
  return true;
}

void StepArena::mark() {
  const std::lock_guard lock(mutex());
  if (!open_ || open_here != this) return;
  const size_t index = current_.marks.size();
  current_.marks.push_back(static_cast<int64_t>(current_.sizes.size()));
  if (planned_ != nullptr && index < planned_->plan.marks.size()) {
    cursor_ = planned_->plan.marks[index];
  }
}

bool StepArena::end() {
  const std::lock_guard lock(mutex());
  if (open_here == this) open_here = nullptr;
  planned_ = nullptr;
  return std::exchange(open_, false);
}

bool StepArena::is_open() const {
  const std::lock_guard lock(mutex());
  return open_;
}

bool StepArena::is_open_here() const {
  const std::lock_guard lock(mutex());
  return open_ && open_here == this;
}

void StepArena::set_plan(int64_t id, Plan plan) {
  const std::lock_guard lock(mutex());
  const int64_t height = plan.height;
  plans_[id] = Planned{std::move(plan), {}};
  // Buffers of the plan before would occupy places of this one.
  if (block_ == nullptr || block_->size < height || !block_->live.empty()) use_block(height);
}

void StepArena::drop_plan(int64_t id) {
  const std::lock_guard lock(mutex());
  plans_.erase(id);
}

void StepArena::renew() {
  const std::lock_guard lock(mutex());
  use_block(0);
}

void StepArena::use_block(int64_t height) {
  if (block_ != nullptr) {
    height = std::max(height, block_->size);
    block_->drop_free_pages();
  }
  block_ = nullptr;  // unmapped before the next one is mapped, unless a buffer in it lives
  block_ = std::make_shared<Block>(height);
}

void StepArena::close() {
  const std::lock_guard lock(mutex());
  if (open_here == this) open_here = nullptr;
  open_ = false;
  planned_ = nullptr;
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
  const int64_t size = round_up(nbytes, kAlignment);
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
  *ticket = Ticket{this, nullptr, current_.step, position, kOutside, nullptr, nullptr};
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
  block_->live[offset] = {offset + size, current_.step, plan_id_, entry};
  counts_.served += size;
  ticket->block = block_;
  ticket->offset = offset;
  return block_->base + offset;
}

void StepArena::freed(const Ticket& ticket) {
  if (ticket.block != nullptr) ticket.block->live.erase(ticket.offset);
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

void* allocate(StepArena& arena, int64_t nbytes, Ticket* ticket) {
  const std::lock_guard lock(mutex());
  if (!arena.open_) return nullptr;
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
  // Outside of the lock: the block may be unmapped here, or other memory freed.
  if (ticket.block != nullptr) return Released::kInBlock;
  ticket.deleter(ticket.context);
  return Released::kElsewhere;
}

}  // namespace fusedops::arena
