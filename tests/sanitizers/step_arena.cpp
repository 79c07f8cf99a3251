// Threads with arenas of their own run the same steps many times: buffers in the block must not
// overlap any that is alive, whatever was planned, whoever frees them and whenever the arena
// closes.
#include "runtime/arena/step_arena.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <mutex>
#include <random>
#include <stdexcept>
#include <thread>
#include <vector>

using namespace fusedops::arena;

namespace {

struct Buffer {
  unsigned char* pointer;
  size_t size;
  unsigned char value;
};

void check(bool condition, const char* what) {
  if (condition) return;
  std::fprintf(stderr, "%s\n", what);
  std::exit(1);
}

Buffer take(size_t size, unsigned char value) {
  Ticket ticket;
  void* pointer = nullptr;
  if (StepArena* const arena = current()) {
    pointer = allocate(*arena, static_cast<int64_t>(size), &ticket);
  }
  if (pointer == nullptr) {
    pointer = std::malloc(size);
    if (ticket.arena != nullptr) {
      ticket.deleter = std::free;
      ticket.context = pointer;
      track(pointer, ticket);
    }
  }
  std::memset(pointer, value, size);
  return {static_cast<unsigned char*>(pointer), size, value};
}

void give(const Buffer& buffer) {
  for (size_t i = 0; i < buffer.size; ++i) {
    check(buffer.pointer[i] == buffer.value, "a live buffer has changed");
  }
  if (release(buffer.pointer) == Released::kUnknown) std::free(buffer.pointer);
}

// Buffers that another thread frees.
std::mutex passed_lock;
std::deque<Buffer> passed;

// A plan that is wrong on purpose: many buffers share a place.
Plan plan_of(const Record& record, std::mt19937& random) {
  Plan plan;
  plan.sizes = record.sizes;
  plan.marks = record.marks;
  for (const int64_t size : record.sizes) {
    const int64_t offset = random() % 4 == 0 ? kOutside : int64_t(random() % 64) * 1024;
    plan.offsets.push_back(offset);
    if (offset != kOutside) plan.height = std::max(plan.height, offset + size);
  }
  return plan;
}

// While a step is open, its plan cannot be changed.
template <typename Function>
void check_refused(Function change) {
  try {
    change();
  } catch (const std::logic_error&) {
    return;
  }
  check(false, "a plan changed inside of a step");
}

void train(int seed, StepArena* arena) {
  std::mt19937 random(seed);
  std::vector<Buffer> kept;
  int64_t served = 0;
  for (int step = 0; step < 200; ++step) {
    std::mt19937 shapes(step % 5 == 4 ? step : 0);  // some steps differ from the others
    check(arena->begin(step % 7 == 6 ? 5 : 0), "the step does not begin");
    check(!arena->begin(0), "a step begins inside of another one");
    check_refused([&] { arena->set_plan(0, {}); });
    check_refused([&] { arena->drop_plan(0); });
    check_refused([&] { arena->renew(); });
    std::vector<Buffer> live;
    for (int i = 0; i < 60; ++i) {
      if (i % 20 == 0) arena->mark();
      live.push_back(take(512 + shapes() % 6000, static_cast<unsigned char>(random())));
      while (live.size() > shapes() % 8) {
        const size_t at = random() % live.size();
        const Buffer buffer = live[at];
        live.erase(live.begin() + static_cast<int64_t>(at));
        switch (random() % 16) {
          case 0:
            kept.push_back(buffer);
            break;
          case 1: {
            const std::lock_guard lock(passed_lock);
            passed.push_back(buffer);
            break;
          }
          default:
            give(buffer);
        }
      }
    }
    check(arena->end(), "the step was not open");
    served += arena->counts().served;
    for (const Buffer& buffer : live) give(buffer);
    while (kept.size() > 20) {
      give(kept.front());
      kept.erase(kept.begin());
    }
    std::deque<Buffer> others;
    {
      const std::lock_guard lock(passed_lock);
      others.swap(passed);
    }
    for (const Buffer& buffer : others) give(buffer);
    if (step % 10 == 0) arena->set_plan(0, plan_of(arena->record(step % 20 == 0), random));
    if (step % 50 == 49) arena->renew();
  }
  check(served > 0, "no buffer was in a block");
  arena->close();
  for (const Buffer& buffer : kept) give(buffer);
}

}  // namespace

int main() {
  std::vector<StepArena> arenas(4);  // they outlive all buffers
  std::vector<std::thread> threads;
  for (int seed = 0; seed < 4; ++seed) threads.emplace_back(train, seed, &arenas[seed]);
  for (std::thread& thread : threads) thread.join();
  for (const Buffer& buffer : passed) give(buffer);
  return 0;
}
