// The instructions that the machine knows, by opcode.
#pragma once

#include <map>
#include <string>

#include "machine.h"

namespace ptx {

// What executes an instruction, and how many operands it has; -1: the handler looks itself.
struct Entry {
  Handler handler = nullptr;
  int operands = -1;
  constexpr Entry() = default;
  constexpr Entry(Handler handler, int operands = -1) : handler(handler), operands(operands) {}
};

// By opcode, or by opcode, "/" and the number of operands.
using Table = std::map<std::string, Entry>;

void add_arithmetic(Table& table);
void add_memory(Table& table);
void add_warp(Table& table);
void add_async(Table& table);

// The bits of a float rounded to bfloat16, to nearest, ties to even; a NaN is 0x7fff.
inline uint16_t bfloat16(float value) {
  const auto bits = std::bit_cast<uint32_t>(value);
  if (value != value) return 0x7fff;
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
inline float widened(uint16_t bits) {
  return std::bit_cast<float>(uint32_t(bits) << 16);
}

}  // namespace ptx
