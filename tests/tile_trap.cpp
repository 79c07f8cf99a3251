// The tile instructions of AMX in software, for processors without them: each is an illegal
// instruction there, which this library catches, decodes from its bytes and executes. So the
// instructions that were built are tested, not a second form of them.
//
// What it does, and what it refuses, is written from the manual (Intel's software developer's
// manual, volume 2, "AMX instruction exception classes" E1 to E6 and the operation of each
// instruction) and shares nothing with csrc/cpu/gemm/tile_registers.h. Each thread has its own
// tiles. A fault prints the instruction and the rule, and ends the process as the processor would:
// #UD by SIGILL, #GP by SIGSEGV. Not here: a start_row other than zero, and instructions of other
// dtypes.
//
// Load it before the kernels (LD_PRELOAD; tests/trapped_tiles.py does) with
// FUSEDOPS_MAX_ISA=amx_trapped. They call fusedops_trap_tiles where they would ask the system for
// the registers; before that, a tile instruction is illegal as ever. Another handler of SIGILL,
// such as Python's faulthandler, must not be installed afterwards. An instruction takes a few
// microseconds.
#include <signal.h>
#include <ucontext.h>
#include <unistd.h>
#include <xmmintrin.h>

#include <atomic>
#include <cerrno>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>

namespace {

constexpr int kTiles = 8, kMaxRows = 16, kRowBytes = 64, kConfigBytes = 64;  // palette 1

struct State {
  bool configured;
  uint8_t config[kConfigBytes];
  alignas(64) uint8_t tiles[kTiles][kMaxRows][kRowBytes];

  int rows(int tile) const { return config[48 + tile]; }
  int bytes(int tile) const { return config[16 + 2 * tile] | config[17 + 2 * tile] << 8; }
};
__attribute__((tls_model("initial-exec"))) thread_local State state;

enum Kind { load_config, store_config, release, zero, load, load_once, store, dot, kKinds };
constexpr const char* kNames[kKinds] = {"ldtilecfg", "sttilecfg",   "tilerelease", "tilezero",
                                        "tileloadd", "tileloaddt1", "tilestored",  "tdpbf16ps"};
std::atomic<long> counts[kKinds];

// Ends the process by a signal, as the processor's fault would.
[[noreturn]] void fault(int number, const char* name, const char* rule) {
  char text[200];
  const int size = std::snprintf(text, sizeof(text), "tile trap: %s in %s: %s\n",
                                 number == SIGILL ? "#UD" : "#GP", name, rule);
  if (write(STDERR_FILENO, text, static_cast<size_t>(size)) < 0) _exit(1);
  signal(number, SIG_DFL);
  sigset_t mask;
  sigemptyset(&mask);
  sigaddset(&mask, number);
  pthread_sigmask(SIG_UNBLOCK, &mask, nullptr);
  raise(number);
  _exit(1);
}

struct Instruction {
  Kind kind = kKinds;
  int64_t size = 5;        // bytes
  int tile = 0;            // ModRM.reg; of tdpbf16ps the sums
  int rows = 0;            // of tdpbf16ps: ModRM.rm
  int columns = 0;         // of tdpbf16ps: VEX.vvvv
  char* memory = nullptr;  // base + displacement
  int64_t stride = 0;      // index * scale

  [[noreturn]] void undefined(const char* rule) const { fault(SIGILL, kNames[kind], rule); }
  void require(bool holds, const char* rule) const {
    if (!holds) undefined(rule);
  }
};

int64_t register_of(const ucontext_t& context, int number) {
  constexpr int kOrder[] = {REG_RAX, REG_RCX, REG_RDX, REG_RBX, REG_RSP, REG_RBP, REG_RSI, REG_RDI,
                            REG_R8,  REG_R9,  REG_R10, REG_R11, REG_R12, REG_R13, REG_R14, REG_R15};
  return context.uc_mcontext.gregs[kOrder[number]];
}

// The operand in memory of ModRM and what follows it, at `at`; `high_base` and `high_index` are the
// fourth bits of the registers' numbers.
void decode_memory(const uint8_t* at, const ucontext_t& context, bool high_base, bool high_index,
                   Instruction& to) {
  const int mode = at[0] >> 6, low = at[0] & 7;
  const uint8_t* next = at + 1;
  int64_t address = 0;
  bool relative = false, far = mode == 2;
  if (low == 4) {
    const int scale = *next >> 6, index = (*next >> 3 & 7) | high_index << 3, base = *next & 7;
    ++next;
    if (index != 4) to.stride = register_of(context, index) << scale;
    if (mode == 0 && base == 5) {
      far = true;
    } else {
      address = register_of(context, base | high_base << 3);
    }
  } else if (mode == 0 && low == 5) {
    relative = far = true;
  } else {
    address = register_of(context, low | high_base << 3);
  }
  int32_t displacement = 0;
  if (far) {
    std::memcpy(&displacement, next, 4);
    next += 4;
  } else if (mode == 1) {
    displacement = static_cast<int8_t>(*next++);
  }
  to.size = next - (at - 4);
  if (relative) address = reinterpret_cast<int64_t>(next);
  to.memory = reinterpret_cast<char*>(address + displacement);
}

// Whether a tile instruction stands at `code`: VEX.128.map 0F38, opcodes 49, 4B and 5C.
bool decode(const uint8_t* code, const ucontext_t& context, Instruction& to) {
  if (code[0] != 0xC4 || (code[1] & 31) != 2) return false;
  const bool high_reg = !(code[1] & 0x80), high_index = !(code[1] & 0x40);
  const bool high_base = !(code[1] & 0x20), in_memory = code[4] >> 6 != 3;
  const int prefix = code[2] & 3, low = code[4] & 7;  // prefix: none, 66, F3, F2
  to.tile = (code[4] >> 3 & 7) | high_reg << 3;
  to.rows = low | high_base << 3;
  to.columns = ~code[2] >> 3 & 15;
  constexpr Kind kOfMemory49[] = {load_config, store_config, kKinds, kKinds};
  constexpr Kind kOfMemory4B[] = {kKinds, load_once, store, load};
  if (code[3] == 0x49 && in_memory) to.kind = kOfMemory49[prefix];
  if (code[3] == 0x49 && !in_memory) to.kind = prefix == 0 ? release : prefix == 3 ? zero : kKinds;
  if (code[3] == 0x4B) to.kind = kOfMemory4B[prefix];
  if (code[3] == 0x5C && prefix == 2) to.kind = dot;
  if (to.kind == kKinds) return false;
  to.require((code[2] & 0x84) == 0, "VEX.W and VEX.L must be 0");
  to.require(to.kind == dot || to.columns == 0, "VEX.vvvv must be 1111b");
  const bool moves = to.kind == load || to.kind == load_once || to.kind == store;
  to.require(!moves || (in_memory && low == 4), "the operand must be memory with a SIB byte");
  to.require(to.kind != dot || !in_memory, "the operands must be tiles");
  to.require(moves || to.kind == dot || to.kind == zero || to.tile == 0, "ModRM.reg must be 0");
  to.require(to.kind != release || code[4] == 0xC0, "ModRM must be C0");
  to.require(to.kind != zero || low == 0, "ModRM.rm must be 0");
  if (in_memory) decode_memory(code + 4, context, high_base, high_index, to);
  return true;
}

void clear() {
  std::memset(&state, 0, sizeof(state));
}

void configure(const Instruction& call) {
  uint8_t config[kConfigBytes];
  std::memcpy(config, call.memory, sizeof(config));
  const auto require = [&call](bool holds, const char* rule) {
    if (!holds) fault(SIGSEGV, kNames[call.kind], rule);
  };
  require(config[0] <= 1, "there is no such palette");
  clear();
  if (config[0] == 0) return;
  require(config[1] == 0, "this trap knows no start_row");
  for (int i = 2; i < 16; ++i) require(config[i] == 0, "bytes 2 to 15 are reserved");
  for (int i = 16 + 2 * kTiles; i < 48; ++i) require(config[i] == 0, "bytes 32 to 47 are reserved");
  for (int i = 48 + kTiles; i < 64; ++i) require(config[i] == 0, "bytes 56 to 63 are reserved");
  std::memcpy(state.config, config, sizeof(config));
  for (int tile = 0; tile < kTiles; ++tile) {
    require(state.bytes(tile) <= kRowBytes, "colsb is more than 64");
    require(state.rows(tile) <= kMaxRows, "rows is more than 16");
    require((state.bytes(tile) == 0) == (state.rows(tile) == 0), "one of rows and colsb is 0");
  }
  state.configured = true;
}

void require_tile(const Instruction& call, int tile) {
  call.require(state.configured, "no tiles are configured");
  call.require(tile < kTiles, "there is no such tile");
  call.require(state.rows(tile) != 0, "the configuration leaves this tile out");
}

void move(const Instruction& call) {
  require_tile(call, call.tile);
  auto& tile = state.tiles[call.tile];
  const int rows = state.rows(call.tile), bytes = state.bytes(call.tile);
  if (call.kind != store) std::memset(tile, 0, sizeof(tile));
  for (int row = 0; row < rows; ++row) {
    char* memory = call.memory + row * call.stride;
    call.kind == store ? std::memcpy(memory, tile[row], bytes)
                       : std::memcpy(tile[row], memory, bytes);
  }
}

float widen(const uint8_t* element) {
  uint8_t bytes[4] = {0, 0, element[0], element[1]};
  float value;
  std::memcpy(&value, bytes, sizeof(value));
  return value;
}

// Not inlined: its arithmetic stays between the changes of the control word.
__attribute__((noinline)) void multiply(const Instruction& call, int rows, int depth, int columns) {
  for (int m = 0; m < rows; ++m) {
    float chains[2][kRowBytes / 4] = {};
    for (int k = 0; k < depth; ++k) {
      const uint8_t* pair = state.tiles[call.rows][m] + 4 * k;
      for (int half = 0; half < 2; ++half) {
        const float factor = widen(pair + 2 * half);
        for (int n = 0; n < columns; ++n) {
          const float column = widen(state.tiles[call.columns][k] + 4 * n + 2 * half);
          chains[half][n] = std::fma(factor, column, chains[half][n]);
        }
      }
    }
    for (int n = 0; n < columns; ++n) {
      float sum;
      std::memcpy(&sum, state.tiles[call.tile][m] + 4 * n, sizeof(sum));
      sum = sum + (chains[0][n] + chains[1][n]);
      std::memcpy(state.tiles[call.tile][m] + 4 * n, &sum, sizeof(sum));
    }
  }
}

void multiply(const Instruction& call) {
  for (const int tile : {call.tile, call.rows, call.columns}) require_tile(call, tile);
  call.require(call.tile != call.rows && call.tile != call.columns && call.rows != call.columns,
               "the three tiles must differ");
  const int rows = state.rows(call.tile), bytes = state.bytes(call.tile);
  const int depth = state.bytes(call.rows) / 4;
  call.require((bytes | state.bytes(call.rows) | state.bytes(call.columns)) % 4 == 0,
               "colsb must be a multiple of 4");
  call.require(rows == state.rows(call.rows), "rows of the sums and of the left tile differ");
  call.require(depth == state.rows(call.columns),
               "colsb / 4 of the left tile must be the rows of the right one");
  call.require(bytes == state.bytes(call.columns),
               "colsb of the sums and of the right tile differ");
  constexpr unsigned kAllMasked = 0x1F80, kSubnormalsAreZero = 0x8040;
  const unsigned control = _mm_getcsr();
  _mm_setcsr(kAllMasked | kSubnormalsAreZero);  // rounds to nearest even
  multiply(call, rows, depth, bytes / 4);
  _mm_setcsr(control);
}

void execute(const Instruction& call) {
  switch (call.kind) {
    case load_config:
      return configure(call);
    case store_config:  // zeros where nothing is configured
      std::memcpy(call.memory, state.config, kConfigBytes);
      return;
    case release:
      return clear();
    case zero:
      require_tile(call, call.tile);
      std::memset(state.tiles[call.tile], 0, sizeof(state.tiles[call.tile]));
      return;
    case dot:
      return multiply(call);
    default:
      return move(call);
  }
}

void on_illegal_instruction(int, siginfo_t*, void* raw) {
  auto& context = *static_cast<ucontext_t*>(raw);
  auto& pointer = context.uc_mcontext.gregs[REG_RIP];
  Instruction call;
  if (!decode(reinterpret_cast<const uint8_t*>(pointer), context, call)) {
    fault(SIGILL, "an instruction", "it is none of those that this trap knows");
  }
  execute(call);
  counts[call.kind].fetch_add(1, std::memory_order_relaxed);
  pointer += call.size;
}

}  // namespace

#define EXPORTED extern "C" __attribute__((visibility("default")))

// Returns an error number, or zero.
EXPORTED int fusedops_trap_tiles() {
  struct sigaction action = {};
  action.sa_sigaction = on_illegal_instruction;
  action.sa_flags = SA_SIGINFO;
  return sigaction(SIGILL, &action, nullptr) == 0 ? 0 : errno;
}

// How many instructions of a name all threads of this process have executed; -1: no such name.
EXPORTED long fusedops_trapped_tiles(const char* name) {
  for (int kind = 0; kind < kKinds; ++kind) {
    if (std::strcmp(name, kNames[kind]) == 0) return counts[kind].load();
  }
  return -1;
}
