// One use of tile instructions per name, for test_trapped_tiles.py: the allowed ones compare what
// they read and write and return 0, the others must not return.
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <string_view>

extern "C" int fusedops_trap_tiles();

namespace {

struct alignas(64) Config {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};
static_assert(sizeof(Config) == 64);

void load_config(const Config& config) {
  asm volatile("ldtilecfg %0" ::"m"(config));
}

void release() {
  asm volatile("tilerelease" ::);
}

void zero() {
  asm volatile("tilezero %%tmm0" ::);
}

void multiply() {
  asm volatile("tdpbf16ps %%tmm2, %%tmm1, %%tmm0" ::);
}

alignas(64) uint8_t memory[4096];

bool differ(const void* left, const void* right, int size) {
  return std::memcmp(left, right, size) != 0;
}

// What configures, releases and zeroes.
int configurations() {
  Config config, stored;
  const Config zeros = {0, 0, {}, {}, {}};
  asm volatile("sttilecfg %0" : "=m"(stored));
  if (differ(&stored, &zeros, 64)) return 1;
  config.rows[2] = 4;
  load_config(config);
  asm volatile("sttilecfg %0" : "=m"(stored));
  if (differ(&stored, &config, 64)) return 2;
  std::memset(memory, 1, sizeof(memory));
  asm volatile("tileloadd (%0,%1,1), %%tmm2" ::"r"(memory), "r"(64L) : "memory");
  asm volatile("tilezero %%tmm2" ::);
  asm volatile("tilestored %%tmm2, (%0,%1,1)" ::"r"(memory), "r"(64L) : "memory");
  if (memory[0] != 0 || memory[4 * 64 - 1] != 0 || memory[4 * 64] != 1) return 3;
  release();
  asm volatile("sttilecfg %0" : "=m"(stored));
  return differ(&stored, &zeros, 64) ? 4 : 0;
}

template <typename Change>
void with_config(const Change& change) {
  Config config;
  change(config);
  load_config(config);
}

int run(std::string_view name) {
  if (name == "before permission") return zero(), 0;
  if (fusedops_trap_tiles() != 0) return 9;
  if (name == "configurations") return configurations();
  if (name == "unconfigured") zero();
  if (name == "palette") with_config([](Config& c) { c.palette = 2; });
  if (name == "reserved") with_config([](Config& c) { c.reserved[13] = 1; });
  if (name == "reserved bytes") with_config([](Config& c) { c.bytes[8] = 1; });
  if (name == "reserved rows") with_config([](Config& c) { c.rows[15] = 1; });
  if (name == "rows") with_config([](Config& c) { c.rows[3] = 17; });
  if (name == "bytes") with_config([](Config& c) { c.bytes[3] = 65; });
  if (name == "rows without bytes") with_config([](Config& c) { c.bytes[3] = 0; });
  if (name == "illegal instruction") __builtin_trap();
  with_config([](Config& c) { c.rows[7] = c.bytes[7] = 0; });
  if (name == "released") release(), zero();
  if (name == "palette 0") with_config([](Config& c) { c.palette = 0; }), zero();
  if (name == "left out") asm volatile("tilezero %%tmm7" ::);
  if (name == "no such tile") asm volatile(".byte 0xC4, 0x62, 0x7B, 0x49, 0xC0" ::);  // tmm8
  if (name == "vvvv") asm volatile(".byte 0xC4, 0xE2, 0x73, 0x49, 0xC0" ::);
  if (name == "no SIB") asm volatile(".byte 0xC4, 0xE2, 0x7B, 0x4B, 0x00" ::"a"(memory));
  if (name == "same tiles") asm volatile(".byte 0xC4, 0xE2, 0x72, 0x5C, 0xC1" ::);  // 0, 1, 1
  if (name == "rows of left") with_config([](Config& c) { c.rows[1] = 8; }), multiply();
  if (name == "depth") with_config([](Config& c) { c.bytes[1] = 32; }), multiply();
  if (name == "columns") with_config([](Config& c) { c.bytes[2] = 32; }), multiply();
  if (name == "multiple of 4") {
    with_config([](Config& c) { c.bytes[0] = c.bytes[2] = 30; }), multiply();
  }
  return 8;  // should have faulted
}

}  // namespace

int main(int, char** arguments) {
  return run(arguments[1]);
}
