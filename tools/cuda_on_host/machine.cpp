// The fibers, and who runs when; see machine.h.
#include "machine.h"

#include <sys/mman.h>
#include <ucontext.h>
#include <csetjmp>

#include <algorithm>
#include <array>
#include <map>
#include <numeric>
#include <random>
#include <string_view>
#include <vector>

namespace cuda_on_host {
namespace {

constexpr size_t kStack = 64 * 1024;
constexpr unsigned kMostThreads = 1024;
constexpr unsigned kWarp = 32;
constexpr size_t kMostShared = 48 * 1024;  // more must be asked for on the hardware

enum class State { ready, at_barrier, at_shuffle, done };

struct Fiber {
  ucontext_t start;
  jmp_buf here;  // switched by _longjmp, which makes no system call as swapcontext does
  bool entered = false;
  State state = State::done;
  uint3 index;
  unsigned number;
  Place place;  // where it waits
  unsigned mask;
  uint64_t value;
  unsigned source;
};

enum Order { kForward, kBackward, kShuffled };

struct Machine {
  std::vector<Fiber> fibers{kMostThreads};
  char* stacks = nullptr;
  Fiber* running = nullptr;
  jmp_buf scheduler;
  unsigned threads = 0;  // of a block
  uint3 block;
  dim3 block_size;
  dim3 grid_size;
  void (*kernel)(const void*) = nullptr;
  const void* call = nullptr;
  std::string finding;

  int multiprocessors = 2;
  Order order = kForward;
  std::mt19937 random{1};
};
Machine machine;

std::string text_of(uint3 index) {
  return "(" + std::to_string(index.x) + ", " + std::to_string(index.y) + ", " +
         std::to_string(index.z) + ")";
}

std::string text_of(Place place) {
  const std::string path = place.file_name();
  return path.substr(path.rfind('/') + 1) + ":" + std::to_string(place.line());
}

std::string who() {
  return "thread " + text_of(machine.running->index) + " of block " + text_of(machine.block);
}

bool same(Place a, Place b) {
  return a.line() == b.line() && std::string_view(a.file_name()) == b.file_name();
}

// Back to the scheduler.
void wait() {
  if (_setjmp(machine.running->here) == 0) _longjmp(machine.scheduler, 1);
}

// A fiber serves block after block.
void fiber_main() {
  for (;;) {
    machine.kernel(machine.call);
    machine.running->state = State::done;
    wait();
  }
}

void resume(Fiber& fiber) {
  machine.running = &fiber;
  if (_setjmp(machine.scheduler) == 0) {
    if (fiber.entered) _longjmp(fiber.here, 1);
    fiber.entered = true;
    getcontext(&fiber.start);
    fiber.start.uc_stack = {machine.stacks + fiber.number * kStack, 0, kStack};
    fiber.start.uc_link = nullptr;
    makecontext(&fiber.start, fiber_main, 0);
    setcontext(&fiber.start);
  }
  machine.running = nullptr;
}

std::vector<unsigned> ordered(unsigned count) {
  std::vector<unsigned> order(count);
  std::iota(order.begin(), order.end(), 0u);
  if (machine.order == kBackward) std::reverse(order.begin(), order.end());
  if (machine.order == kShuffled) std::shuffle(order.begin(), order.end(), machine.random);
  return order;
}

// Says where the threads of a block are that can go no further.
std::string stuck() {
  std::map<std::string, unsigned> counts;
  for (unsigned i = 0; i < machine.threads; ++i) {
    const Fiber& fiber = machine.fibers[i];
    const bool waits = fiber.state != State::done;
    const std::string kind = fiber.state == State::at_barrier ? "barrier" : "shuffle";
    ++counts[waits ? "at the " + kind + " of " + text_of(fiber.place) : "are through"];
  }
  std::string text = "block " + text_of(machine.block) + " hangs";
  for (const auto& [where, count] : counts) {
    text += "; " + std::to_string(count) + " threads " + where;
  }
  return text;
}

// Lets the block pass its barrier when all threads that are not through wait at the same one.
bool pass_barrier() {
  const Fiber* first = nullptr;
  for (unsigned i = 0; i < machine.threads; ++i) {
    const Fiber& fiber = machine.fibers[i];
    if (fiber.state == State::done) continue;
    if (fiber.state != State::at_barrier) return false;
    if (first == nullptr) first = &fiber;
    if (!same(fiber.place, first->place)) return false;
  }
  for (unsigned i = 0; i < machine.threads; ++i) {
    Fiber& fiber = machine.fibers[i];
    if (fiber.state == State::at_barrier) fiber.state = State::ready;
  }
  watch_barrier();
  return true;
}

void run_block() {
  const auto order = ordered(machine.threads);
  for (unsigned i = 0; i < machine.threads; ++i) machine.fibers[i].state = State::ready;
  watch_block();
  unsigned left = machine.threads;
  while (left > 0) {
    bool moved = false;
    for (const unsigned i : order) {
      Fiber& fiber = machine.fibers[i];
      if (fiber.state != State::ready) continue;
      moved = true;
      resume(fiber);
      if (!machine.finding.empty()) return;
      left -= fiber.state == State::done;
    }
    if (!moved && !pass_barrier()) {
      machine.finding = stuck();
      return;
    }
  }
}

// Why the hardware would refuse a launch, or nothing.
std::string refusal(const cudaLaunchConfig_t& config) {
  const dim3 block = config.blockDim;
  const dim3 grid = config.gridDim;
  const uint64_t threads = uint64_t{block.x} * block.y * block.z;
  if (threads == 0 || threads > kMostThreads || block.z > 64) {
    return "a block of " + text_of(uint3{block.x, block.y, block.z}) + " threads";
  }
  if (grid.x == 0 || grid.y == 0 || grid.z == 0 || grid.x > 0x7fffffffu || grid.y > 65535 ||
      grid.z > 65535) {
    return "a grid of " + text_of(uint3{grid.x, grid.y, grid.z}) + " blocks";
  }
  if (config.dynamicSmemBytes > kMostShared) {
    return std::to_string(config.dynamicSmemBytes) + " bytes of shared memory";
  }
  return "";
}

void number_threads(dim3 block) {
  machine.threads = block.x * block.y * block.z;
  for (unsigned i = 0; i < machine.threads; ++i) {
    machine.fibers[i].number = i;
    machine.fibers[i].index = {i % block.x, i / block.x % block.y, i / block.x / block.y};
  }
}

}  // namespace

uint3 thread_index() {
  return machine.running->index;
}
uint3 block_index() {
  return machine.block;
}
dim3 block_size() {
  return machine.block_size;
}
dim3 grid_size() {
  return machine.grid_size;
}
unsigned lane() {
  return machine.running->number % kWarp;
}

void meet_block(Place place) {
  machine.running->state = State::at_barrier;
  machine.running->place = place;
  wait();
}

uint64_t exchange(unsigned mask, uint64_t value, unsigned source, Place place) {
  Fiber& me = *machine.running;
  const auto refuse = [place](const std::string& what) {
    fail(what + "; shuffle of " + text_of(place));
  };
  const auto named = [mask](unsigned l) { return l < kWarp && (mask >> l & 1) != 0; };
  if (!named(lane())) refuse("the mask leaves out the lane that calls");
  if (!named(source)) refuse("it reads lane " + std::to_string(source) + ", not in the mask");
  me.state = State::at_shuffle;
  me.place = place;
  me.mask = mask;
  me.value = value;
  me.source = source;
  const unsigned first = me.number - lane();
  bool all = true;
  for (unsigned l = 0; l < kWarp; ++l) {
    if (!named(l)) continue;
    if (first + l >= machine.threads || machine.fibers[first + l].state == State::done) {
      refuse("the mask names lane " + std::to_string(l) + ", which does not come");
    }
    const Fiber& other = machine.fibers[first + l];
    all = all && other.state == State::at_shuffle && other.mask == mask && same(other.place, place);
  }
  if (!all) {
    wait();
    return me.value;
  }
  // The last to come hands out the values.
  std::array<uint64_t, kWarp> values;
  for (unsigned l = 0; l < kWarp; ++l) {
    if (named(l)) values[l] = machine.fibers[first + l].value;
  }
  for (unsigned l = 0; l < kWarp; ++l) {
    if (!named(l)) continue;
    Fiber& fiber = machine.fibers[first + l];
    fiber.value = values[fiber.source];
    fiber.state = State::ready;
  }
  return me.value;
}

cudaError_t launch(const cudaLaunchConfig_t& config, void (*kernel)(const void*), const void* call,
                   size_t size) {
  machine.finding = refusal(config);
  if (!machine.finding.empty()) return cudaErrorInvalidConfiguration;
  if (machine.stacks == nullptr) {
    machine.stacks = static_cast<char*>(mmap(nullptr, kStack * kMostThreads, PROT_READ | PROT_WRITE,
                                             MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
  }
  number_threads(config.blockDim);
  machine.block_size = config.blockDim;
  machine.grid_size = config.gridDim;
  machine.kernel = kernel;
  machine.call = call;
  watch_launch(call, size, config.dynamicSmemBytes);
  const dim3 grid = config.gridDim;
  for (const unsigned block : ordered(grid.x * grid.y * grid.z)) {
    machine.block = {block % grid.x, block / grid.x % grid.y, block / grid.x / grid.y};
    run_block();
    if (!machine.finding.empty()) {
      for (Fiber& fiber : machine.fibers) fiber.entered = false;  // given up where they stand
      return cudaErrorLaunchFailure;
    }
  }
  return cudaSuccess;
}

const std::string& finding() {
  return machine.finding;
}

Running running() {
  const Fiber* fiber = machine.running;
  if (fiber == nullptr) return {};
  return {true, fiber->number, reinterpret_cast<uintptr_t>(machine.stacks) + fiber->number * kStack,
          kStack};
}

void fail(const std::string& what) {
  machine.finding = what + "; " + who();
  _longjmp(machine.scheduler, 1);
}

}  // namespace cuda_on_host

// Order of threads and blocks: 0 forward, 1 backward, 2 drawn.
extern "C" [[gnu::visibility("default")]] void cuda_on_host_configure(int order,
                                                                      int multiprocessors) {
  cuda_on_host::machine.order = static_cast<cuda_on_host::Order>(order);
  cuda_on_host::machine.multiprocessors = multiprocessors;
}

// The two calls of the runtime library that launchers make.
extern "C" cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}
extern "C" cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  if (attribute != cudaDevAttrMultiProcessorCount) return cudaErrorInvalidValue;
  *value = cuda_on_host::machine.multiprocessors;
  return cudaSuccess;
}
