// The watch on memory: every load and store of a kernel comes here first (sanitizer.cpp). A launch
// stops at
//   * an access outside of the tensors, to the byte, or of the shared memory that was asked for;
//   * a read of shared memory that nothing of the block has written;
//   * two threads of a block at one place with no barrier between them, or two blocks, when either
//     writes: a race, in whatever order they happened to run.
// Tensors that nothing has written hold NaN (tensors.cpp): that shows in a result.
#include <dlfcn.h>
#include <link.h>

#include <cstdio>
#include <map>
#include <mutex>
#include <vector>

#include "machine.h"

namespace fusedops::cuda {
extern thread_local unsigned char dynamic_memory[];
// Dynamic shared memory: what csrc/cuda/device.cuh declares, as much as a launch may ask for.
alignas(16) thread_local unsigned char dynamic_memory[48 * 1024];
}  // namespace fusedops::cuda

namespace cuda_on_host {
namespace {

constexpr size_t kGranule = 2;  // bytes, the smallest type

// Who was last at a place. A clock counts launches, blocks and barriers.
struct Visits {
  uint32_t written = 0;
  uint32_t read = 0;
  uint32_t read_elsewhere = 0;  // by a block before that of `read`
  uint16_t writer = 0;
  uint16_t reader = 0;
  bool several_readers = false;  // at `read`
};

struct Region {
  uintptr_t begin = 0;
  size_t size = 0;
  std::vector<Visits> visits = {};

  bool holds(uintptr_t at) const { return at - begin < size; }
};

struct Memory {
  std::map<uintptr_t, Region> tensors;  // by address
  std::mutex lock;                      // of `tensors`: they may be freed by any thread
  Region* last = nullptr;
  Region shared;      // static and dynamic
  uintptr_t dynamic;  // where the dynamic part begins, and how much of it the launch has
  size_t dynamic_size = 0;
  Region call;
  uint32_t now = 0;
  uint32_t launch = 0;  // when it began
  uint32_t block = 0;
};
Memory memory;

// The thread-local memory of this library on this thread.
Region find_shared() {
  struct Search {
    uintptr_t inside;
    Region found;
  } search{reinterpret_cast<uintptr_t>(fusedops::cuda::dynamic_memory), {}};
  const auto look = [](dl_phdr_info* info, size_t, void* into) {
    auto* to = static_cast<Search*>(into);
    for (int i = 0; i < info->dlpi_phnum; ++i) {
      if (info->dlpi_phdr[i].p_type != PT_TLS) continue;
      const Region region{reinterpret_cast<uintptr_t>(info->dlpi_tls_data),
                          info->dlpi_phdr[i].p_memsz};
      if (region.holds(to->inside)) to->found = region;
    }
    return 0;
  };
  dl_iterate_phdr(look, &search);
  return search.found;
}

struct Access {
  uintptr_t at;
  size_t size;
  bool writes;
  const void* code;
};

[[noreturn]] void refuse(const Access& access, const std::string& what) {
  fail(std::string(access.writes ? "write" : "read") + " of " + std::to_string(access.size) +
       " bytes at " + line_of(access.code) + " " + what);
}

std::string where_is(uintptr_t at) {
  auto next = memory.tensors.upper_bound(at);
  if (next == memory.tensors.begin()) return "outside of every tensor";
  const Region& before = std::prev(next)->second;
  const size_t past = at - before.begin;
  return std::to_string(past) + " bytes from the beginning of a tensor of " +
         std::to_string(before.size);
}

Region* find(const Access& access) {
  if (memory.last != nullptr && memory.last->holds(access.at)) return memory.last;
  if (memory.shared.holds(access.at)) return &memory.shared;
  if (memory.call.holds(access.at)) return &memory.call;
  auto next = memory.tensors.upper_bound(access.at);
  if (next != memory.tensors.begin()) {
    Region& region = std::prev(next)->second;
    if (region.holds(access.at)) return memory.last = &region;
  }
  refuse(access, where_is(access.at));
}

// Whether a visit at `then` by thread `other` may happen at the same time as one by `me` now.
bool together(uint32_t then, unsigned other, unsigned me, bool shared) {
  if (then < (shared ? memory.block : memory.launch)) return false;
  return then < memory.block || (then == memory.now && other != me);
}

void visit(const Access& access, Visits& visits, bool shared, unsigned me) {
  const auto race = [&](const char* with, uint32_t then, unsigned other) {
    refuse(access, std::string("races with a ") + with +
                       (then < memory.block ? " of another block"
                                            : " of thread number " + std::to_string(other)));
  };
  if (shared && !access.writes && visits.written < memory.block) {
    refuse(access, "of shared memory that nothing has written");
  }
  if (together(visits.written, visits.writer, me, shared)) {
    race("write", visits.written, visits.writer);
  }
  if (access.writes) {
    const unsigned other = visits.several_readers ? ~me : visits.reader;
    if (together(visits.read, other, me, shared)) race("read", visits.read, visits.reader);
    if (together(visits.read_elsewhere, me, me, shared)) race("read", visits.read_elsewhere, me);
    visits.written = memory.now;
    visits.writer = static_cast<uint16_t>(me);
    return;
  }
  visits.several_readers =
      visits.read == memory.now && (visits.several_readers || visits.reader != me);
  if (visits.read < memory.block) visits.read_elsewhere = visits.read;
  visits.read = memory.now;
  visits.reader = static_cast<uint16_t>(me);
}

}  // namespace

void touch(uintptr_t at, size_t size, bool writes, const void* code) {
  const Running running = cuda_on_host::running();
  if (!running.any || at - running.stack < running.stack_size) return;
  const Access access{at, size, writes, code};
  Region& region = *find(access);
  const size_t first = at - region.begin;
  if (first + size > region.size) refuse(access, where_is(at));
  if (&region == &memory.call) return;
  const bool shared = &region == &memory.shared;
  const size_t into = at - memory.dynamic;
  if (shared && into < sizeof(fusedops::cuda::dynamic_memory) &&
      into + size > memory.dynamic_size) {
    refuse(access, std::to_string(into) + " bytes from the beginning of dynamic shared memory of " +
                       std::to_string(memory.dynamic_size));
  }
  if (region.visits.empty()) region.visits.resize(region.size / kGranule + 1);
  const size_t last = (first + size - 1) / kGranule;
  for (size_t i = first / kGranule; i <= last; ++i) {
    visit(access, region.visits[i], shared, running.thread);
  }
}

std::string line_of(const void* code) {
  Dl_info info;
  if (dladdr(code, &info) == 0) return "?";
  const auto offset =
      reinterpret_cast<uintptr_t>(code) - reinterpret_cast<uintptr_t>(info.dli_fbase);
  char command[4096];
  std::snprintf(command, sizeof(command), "addr2line -e '%s' 0x%zx", info.dli_fname, offset - 1);
  std::FILE* answer = popen(command, "r");
  if (answer == nullptr) return "?";
  char line[4096] = "?";
  if (std::fgets(line, sizeof(line), answer) == nullptr) line[0] = '?';
  pclose(answer);
  const std::string text = line;
  return text.substr(text.rfind('/') + 1, text.find_first_of(" \n") - text.rfind('/') - 1);
}

void watch_launch(const void* call, size_t size, size_t shared) {
  memory.dynamic = reinterpret_cast<uintptr_t>(fusedops::cuda::dynamic_memory);
  if (!memory.shared.holds(memory.dynamic)) memory.shared = find_shared();
  memory.dynamic_size = shared;
  memory.call = {reinterpret_cast<uintptr_t>(call), size};
  memory.last = nullptr;
  memory.launch = ++memory.now;
}

void watch_block() {
  memory.block = ++memory.now;
}

void watch_barrier() {
  ++memory.now;
}

void add_memory(const void* begin, size_t size) {
  const std::lock_guard guard(memory.lock);
  const auto at = reinterpret_cast<uintptr_t>(begin);
  memory.tensors[at] = {at, size};
}

void remove_memory(const void* begin) {
  const std::lock_guard guard(memory.lock);
  memory.tensors.erase(reinterpret_cast<uintptr_t>(begin));
}

}  // namespace cuda_on_host
