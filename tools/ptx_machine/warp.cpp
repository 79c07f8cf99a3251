// Control flow, barriers, instructions of a whole warp, and the matrix product of mma.
#include <algorithm>
#include <cmath>

#include "instructions.h"

namespace ptx {
namespace {

void branch(Block& block, Warp& warp, const Instruction& instruction, uint32_t lanes) {
  block.branch(warp, instruction.operands[0].index, lanes);
}

void leave(Block& block, Warp& warp, const Instruction&, uint32_t lanes) {
  block.exit(warp, lanes);
}

void barrier(Block& block, Warp& warp, const Instruction& instruction, uint32_t lanes) {
  if (instruction.operands.size() != 1 || instruction.operands[0].value != 0)
    block.fail("bar.sync of another barrier than 0, or of a part of the block");
  block.wait_for_block(warp, lanes);
}

void meet(Block& block, Warp& warp, const Instruction&, uint32_t) {
  block.meet(warp);
}

// shfl.sync.mode.b32 d|p, a, b, c, mask;
template <typename Source>
void shuffle(Block& block, Warp& warp, const Instruction& instruction, uint32_t lanes,
             Source source) {
  const auto& operands = instruction.operands;
  uint64_t values[kLanes], results[kLanes];
  bool inside[kLanes];
  for (int lane = 0; lane < kLanes; ++lane) values[lane] = block.value(warp, operands[1], lane);
  for (int lane = 0; lane < kLanes; ++lane) {
    if (!(lanes >> lane & 1)) continue;
    block.check_members(lanes, lane, block.value(warp, operands[4], lane));
    const int by = static_cast<int>(block.value(warp, operands[2], lane) & 31);
    const int c = static_cast<int>(block.value(warp, operands[3], lane));
    const int clamp = c & 31, segments = c >> 8 & 31;
    const int most = (lane & segments) | (clamp & ~segments), least = lane & segments;
    int from = lane;
    inside[lane] = source(lane, by, most, least, segments, from);
    if (!inside[lane]) from = lane;
    if (!(lanes >> from & 1))
      block.fail("a lane reads lane " + std::to_string(from) +
                 ", which does not execute the shuffle");
    results[lane] = values[from];
  }
  for (int lane = 0; lane < kLanes; ++lane) {
    if (!(lanes >> lane & 1)) continue;
    block.set(warp, operands[0], lane, results[lane]);
    if (operands[0].second >= 0) warp.registers[operands[0].second][lane] = inside[lane];
  }
}
void shuffle_xor(Block& block, Warp& warp, const Instruction& instruction, uint32_t lanes) {
  shuffle(block, warp, instruction, lanes, [](int lane, int by, int most, int, int, int& from) {
    return (from = lane ^ by) <= most;
  });
}
void shuffle_index(Block& block, Warp& warp, const Instruction& instruction, uint32_t lanes) {
  shuffle(block, warp, instruction, lanes,
          [](int, int by, int most, int least, int segments, int& from) {
            return (from = least | (by & ~segments)) <= most;
          });
}
void shuffle_up(Block& block, Warp& warp, const Instruction& instruction, uint32_t lanes) {
  shuffle(block, warp, instruction, lanes, [](int lane, int by, int most, int, int, int& from) {
    return (from = lane - by) >= most;
  });
}
void shuffle_down(Block& block, Warp& warp, const Instruction& instruction, uint32_t lanes) {
  shuffle(block, warp, instruction, lanes, [](int lane, int by, int most, int, int, int& from) {
    return (from = lane + by) <= most;
  });
}

template <typename T, T (*join)(T, T)>
void reduce(Block& block, Warp& warp, const Instruction& instruction, uint32_t lanes) {
  const auto& operands = instruction.operands;
  bool begun = false;
  T result{};
  for (int lane = 0; lane < kLanes; ++lane) {
    if (!(lanes >> lane & 1)) continue;
    block.check_members(lanes, lane, block.value(warp, operands[2], lane));
    const auto value = static_cast<T>(block.value(warp, operands[1], lane));
    result = begun ? join(result, value) : value;
    begun = true;
  }
  for (int lane = 0; lane < kLanes; ++lane)
    if (lanes >> lane & 1) block.set(warp, operands[0], lane, static_cast<uint32_t>(result));
}
template <typename T>
T sum(T a, T b) {
  return static_cast<T>(static_cast<uint32_t>(a) + static_cast<uint32_t>(b));
}
template <typename T>
T larger(T a, T b) {
  return std::max(a, b);
}
template <typename T>
T smaller(T a, T b) {
  return std::min(a, b);
}

// mma.m16n8k16: lane l has of A the rows l/4 and l/4 + 8 and the columns 2 (l%4) and 8 more, of B
// the column l/4, of C and D the columns 2 (l%4), each with its neighbour.
template <float (*wide)(uint16_t)>
void multiply(Block& block, Warp& warp, const Instruction& instruction, uint32_t lanes) {
  if (lanes != kAll) block.fail("mma without all lanes");
  const auto& operands = instruction.operands;
  float a[16][16], b[16][8], c[16][8];
  const auto word = [&](int operand, int i, int lane) {
    return static_cast<uint32_t>(block.value(warp, operands[operand].elements[i], lane));
  };
  for (int lane = 0; lane < kLanes; ++lane) {
    const int group = lane / 4, pair = lane % 4 * 2;
    for (int i = 0; i < 4; ++i) {
      const uint32_t both = word(1, i, lane);
      const int row = group + (i % 2) * 8, column = pair + (i / 2) * 8;
      a[row][column] = wide(static_cast<uint16_t>(both));
      a[row][column + 1] = wide(static_cast<uint16_t>(both >> 16));
      c[group + (i / 2) * 8][pair + i % 2] = std::bit_cast<float>(word(3, i, lane));
    }
    for (int i = 0; i < 2; ++i) {
      const uint32_t both = word(2, i, lane);
      b[pair + i * 8][group] = wide(static_cast<uint16_t>(both));
      b[pair + i * 8 + 1][group] = wide(static_cast<uint16_t>(both >> 16));
    }
  }
  for (int row = 0; row < 16; ++row) {
    for (int column = 0; column < 8; ++column) {
      double total = c[row][column];
      for (int k = 0; k < 16; ++k) total += double(a[row][k]) * b[k][column];
      c[row][column] = static_cast<float>(total);
    }
  }
  for (int lane = 0; lane < kLanes; ++lane) {
    const int group = lane / 4, pair = lane % 4 * 2;
    for (int i = 0; i < 4; ++i)
      block.set(warp, operands[0].elements[i], lane,
                std::bit_cast<uint32_t>(c[group + (i / 2) * 8][pair + i % 2]));
  }
}
// mma.m16n8k8 of TF32: lane l has of A the rows l/4 and l/4 + 8 and the columns l%4 and l%4 + 4, of
// B the column l/4. The last 13 bits of a number are not read.
void multiply_tf32(Block& block, Warp& warp, const Instruction& instruction, uint32_t lanes) {
  if (lanes != kAll) block.fail("mma without all lanes");
  const auto& operands = instruction.operands;
  float a[16][8], b[8][8];
  const auto word = [&](int operand, int i, int lane) {
    return static_cast<uint32_t>(block.value(warp, operands[operand].elements[i], lane));
  };
  const auto number = [&](int operand, int i, int lane) {
    return std::bit_cast<float>(word(operand, i, lane) & 0xffffe000u);
  };
  for (int lane = 0; lane < kLanes; ++lane) {
    const int group = lane / 4, member = lane % 4;
    for (int i = 0; i < 4; ++i) a[group + (i % 2) * 8][member + (i / 2) * 4] = number(1, i, lane);
    for (int i = 0; i < 2; ++i) b[member + i * 4][group] = number(2, i, lane);
  }
  float sums[kLanes][4];
  for (int lane = 0; lane < kLanes; ++lane) {
    for (int i = 0; i < 4; ++i) {
      const int row = lane / 4 + (i / 2) * 8, column = lane % 4 * 2 + i % 2;
      double total = std::bit_cast<float>(word(3, i, lane));
      for (int k = 0; k < 8; ++k) total += double(a[row][k]) * b[k][column];
      sums[lane][i] = static_cast<float>(total);
    }
  }
  for (int lane = 0; lane < kLanes; ++lane)
    for (int i = 0; i < 4; ++i)
      block.set(warp, operands[0].elements[i], lane, std::bit_cast<uint32_t>(sums[lane][i]));
}
float half(uint16_t bits) {
  return static_cast<float>(std::bit_cast<_Float16>(bits));
}
float brain(uint16_t bits) {
  return widened(bits);
}

const Table& table() {
  static const Table all = [] {
    Table known;
    add_arithmetic(known);
    add_memory(known);
    add_warp(known);
    add_async(known);
    return known;
  }();
  return all;
}

}  // namespace

void add_warp(Table& table) {
  table["bra"] = table["bra.uni"] = branch;
  table["ret"] = table["exit"] = leave;
  table["bar.sync"] = table["barrier.sync"] = barrier;
  table["bar.warp.sync"] = meet;
  table["shfl.sync.bfly.b32"] = shuffle_xor;
  table["shfl.sync.idx.b32"] = shuffle_index;
  table["shfl.sync.up.b32"] = shuffle_up;
  table["shfl.sync.down.b32"] = shuffle_down;
  table["redux.sync.add.s32"] = reduce<int32_t, sum<int32_t>>;
  table["redux.sync.max.s32"] = reduce<int32_t, larger<int32_t>>;
  table["redux.sync.max.u32"] = reduce<uint32_t, larger<uint32_t>>;
  table["redux.sync.min.s32"] = reduce<int32_t, smaller<int32_t>>;
  table["redux.sync.min.u32"] = reduce<uint32_t, smaller<uint32_t>>;
  table["mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"] = multiply<brain>;
  table["mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32"] = multiply<half>;
  table["mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32"] = multiply_tf32;
}

void decode(Instruction& instruction) {
  const auto operands = instruction.operands.size();
  auto found = table().find(instruction.opcode + "/" + std::to_string(operands));
  if (found == table().end()) found = table().find(instruction.opcode);
  if (found == table().end())
    throw Error("PTX line " + std::to_string(instruction.line) + ": the machine does not know '" +
                instruction.opcode + "'");
  const auto& entry = found->second;
  if (entry.operands >= 0 && static_cast<size_t>(entry.operands) != operands)
    throw Error("PTX line " + std::to_string(instruction.line) + ": '" + instruction.opcode +
                "' has " + std::to_string(operands) + " operands, not " +
                std::to_string(entry.operands));
  instruction.handler = entry.handler;
  const auto& first = instruction.parts[0];
  const auto& type = instruction.parts.back();
  if (first == "ld" || first == "st" || (first == "mov" && type != "pred")) {
    instruction.width = std::stoi(type.substr(1)) / 8;
    instruction.is_signed = type[0] == 's';
  }
}

}  // namespace ptx
