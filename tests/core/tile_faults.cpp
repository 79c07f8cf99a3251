// One use of tile instructions per name, for test_trapped_tiles.py: the allowed ones compare what
// they read and write with loops and return 0, the others must not return.
#include <cmath>
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

alignas(64) uint8_t memory[4096], copy[4096];

bool differ(const void* left, const void* right, int size) {
  return std::memcmp(left, right, size) != 0;
}

float widen(const uint8_t* element) {
  const uint32_t bits = element[0] << 16 | element[1] << 24;
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

// A product of 3 x 5 pairs and 5 pairs x 7, in tiles of these sizes.
int small_product() {
  Config config;
  config.rows[0] = config.rows[1] = 3, config.rows[2] = 5;
  config.bytes[0] = config.bytes[2] = 7 * 4, config.bytes[1] = 5 * 4;
  load_config(config);
  float sums[3][7] = {}, expected[3][7] = {};
  for (int m = 0; m < 3; ++m) {
    for (int n = 0; n < 7; ++n) expected[m][n] = sums[m][n] = static_cast<float>(m - n);
  }
  for (int i = 0; i < 200; ++i) {  // bfloat16 numbers between 0.5 and 2, of both signs
    memory[2 * i] = static_cast<uint8_t>(i * 37);
    memory[2 * i + 1] = static_cast<uint8_t>(i % 3 == 0 ? 0xBF : 0x3F);
  }
  const uint8_t *left = memory, *right = memory + 3 * 20;
  asm volatile("tileloadd (%0,%1,1), %%tmm0" ::"r"(sums), "r"(28L) : "memory");
  asm volatile("tileloadd (%0,%1,1), %%tmm1" ::"r"(left), "r"(20L) : "memory");
  asm volatile("tileloaddt1 (%0,%1,4), %%tmm2" ::"r"(right), "r"(7L) : "memory");
  multiply();
  asm volatile("tilestored %%tmm0, (%0,%1,1)" ::"r"(sums), "r"(28L) : "memory");
  for (int m = 0; m < 3; ++m) {
    for (int n = 0; n < 7; ++n) {
      float even = 0, odd = 0;
      for (int k = 0; k < 5; ++k) {
        const uint8_t *row = left + m * 20 + k * 4, *column = right + k * 28 + n * 4;
        even = std::fma(widen(row), widen(column), even);
        odd = std::fma(widen(row + 2), widen(column + 2), odd);
      }
      expected[m][n] += even + odd;
    }
  }
  return differ(sums, expected, sizeof(sums));
}

// Every part of an address, and registers of both halves.
int addresses() {
  load_config(Config());
  for (int i = 0; i < 4096; ++i) memory[i] = static_cast<uint8_t>(i * 7 + i / 256);
  register const uint8_t* base asm("r13") = memory;
  register int64_t index asm("r12") = 32;
  asm volatile("tileloadd 0x40(%0,%1,2), %%tmm7" ::"r"(base), "r"(index) : "memory");
  asm volatile("tilestored %%tmm7, 0x400(%0,%1,4)" ::"r"(copy), "r"(16L) : "memory");
  if (differ(copy + 0x400, memory + 0x40, 1024)) return 1;
  asm volatile("tileloadd (%0,%1,1), %%tmm3" ::"r"(memory + 1024), "r"(-64L) : "memory");
  asm volatile("tilestored %%tmm3, (%0,%1,8)" ::"r"(copy), "r"(8L) : "memory");
  for (int row = 0; row < 16; ++row) {
    if (differ(copy + 64 * row, memory + 1024 - 64 * row, 64)) return 2;
  }
  asm volatile("tileloadd -0x40(%0), %%tmm5" ::"r"(memory + 128) : "memory");  // no index: stride 0
  asm volatile("tilestored %%tmm5, (%0,%1,1)" ::"r"(copy), "r"(64L) : "memory");
  for (int row = 0; row < 16; ++row) {
    if (differ(copy + 64 * row, memory + 64, 64)) return 3;
  }
  return 0;
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
  if (name == "small product") return small_product();
  if (name == "addresses") return addresses();
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
