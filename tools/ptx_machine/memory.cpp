// Loads, stores, moves, asynchronous copies, and matrices in shared memory.
#include <algorithm>

#include "instructions.h"

namespace ptx {
namespace {

const Operand* elements(const Operand& operand, int& count) {
  if (operand.kind != Operand::list) return count = 1, &operand;
  count = static_cast<int>(operand.elements.size());
  return operand.elements.data();
}

uint64_t extended(const Instruction& instruction, const uint8_t* bytes) {
  uint64_t value = 0;
  std::memcpy(&value, bytes, instruction.width);
  const int bits = 8 * instruction.width;
  if (instruction.is_signed && bits < 64 && value >> (bits - 1)) value |= ~uint64_t(0) << bits;
  return value;
}

enum class Space { global, shared, parameter, generic };

// Of the spaces that a generic address names: shared memory is a window of the addresses.
constexpr uint64_t kSharedWindow = uint64_t(1) << 62, kWindowSize = uint64_t(1) << 32;
bool is_shared(Space space, uint64_t address) {
  return space == Space::shared ||
         (space == Space::generic && address - kSharedWindow < kWindowSize);
}

template <Space space>
void load(Block& block, Warp& warp, const Instruction& instruction, uint32_t lanes) {
  int count;
  const auto* targets = elements(instruction.operands[0], count);
  const int bytes = count * instruction.width;
  for (int lane = 0; lane < kLanes; ++lane) {
    if (!(lanes >> lane & 1)) continue;
    uint8_t data[32];
    const auto address = block.address(warp, instruction.operands[1], lane);
    if (space == Space::parameter) {
      std::memcpy(data, block.parameters(address, bytes), bytes);
    } else if (is_shared(space, address)) {
      block.read_shared(warp, 1u << lane, uint32_t(address), data, bytes);
    } else {
      block.read_global(warp, 1u << lane, address, data, bytes);
    }
    for (int i = 0; i < count; ++i)
      block.set(warp, targets[i], lane, extended(instruction, data + i * instruction.width));
  }
}

template <Space space>
void store(Block& block, Warp& warp, const Instruction& instruction, uint32_t lanes) {
  int count;
  const auto* sources = elements(instruction.operands[1], count);
  const int bytes = count * instruction.width;
  for (int lane = 0; lane < kLanes; ++lane) {
    if (!(lanes >> lane & 1)) continue;
    uint8_t data[32];
    for (int i = 0; i < count; ++i) {
      const uint64_t value = block.value(warp, sources[i], lane);
      std::memcpy(data + i * instruction.width, &value, instruction.width);
    }
    const auto address = block.address(warp, instruction.operands[0], lane);
    if (is_shared(space, address)) {
      block.write_shared(warp, 1u << lane, uint32_t(address), data, bytes);
    } else {
      block.write_global(warp, 1u << lane, address, data, bytes);
    }
  }
}

// Lanes in their order. atom.global{.order}{.gpu}.operation.type result, [address], value {,
// other};
template <typename Type, Type change(Type old, Type value, Type other)>
void atomic(Block& block, Warp& warp, const Instruction& instruction, uint32_t lanes) {
  const auto has = [&](const char* order) {
    return std::ranges::count(instruction.parts, order) ||
           std::ranges::count(instruction.parts, "acq_rel");
  };
  const auto& operands = instruction.operands;
  for (int lane = 0; lane < kLanes; ++lane) {
    if (!(lanes >> lane & 1)) continue;
    const auto given = [&](size_t index) {
      const uint64_t bits = index < operands.size() ? block.value(warp, operands[index], lane) : 0;
      Type value;
      std::memcpy(&value, &bits, sizeof value);
      return value;
    };
    const auto address = block.address(warp, operands[1], lane);
    void* memory = block.atomic(warp, address, sizeof(Type), has("acquire"), has("release"));
    Type old;
    std::memcpy(&old, memory, sizeof old);
    const Type changed = change(old, given(2), given(3));
    std::memcpy(memory, &changed, sizeof changed);
    uint64_t bits = 0;
    std::memcpy(&bits, &old, sizeof old);
    block.set(warp, operands[0], lane, bits);
  }
}

template <typename Type>
Type sum(Type old, Type value, Type) {
  return old + value;
}
template <typename Type>
Type exchange(Type, Type value, Type) {
  return value;
}
template <typename Type>
Type exchange_if(Type old, Type expected, Type value) {
  return old == expected ? value : old;
}

// cvta.space.u64 makes a generic address of one of a space, cvta.to.space.u64 does the reverse.
template <uint64_t difference>
void change_space(Block& block, Warp& warp, const Instruction& instruction, uint32_t lanes) {
  for (int lane = 0; lane < kLanes; ++lane) {
    if (!(lanes >> lane & 1)) continue;
    const uint64_t address = block.value(warp, instruction.operands[1], lane);
    block.set(warp, instruction.operands[0], lane, address + difference);
  }
}

// mov of a value, or of a list into a wider register and back.
void move(Block& block, Warp& warp, const Instruction& instruction, uint32_t lanes) {
  const auto& target = instruction.operands[0];
  const auto& source = instruction.operands[1];
  const int bits = 8 * instruction.width;
  for (int lane = 0; lane < kLanes; ++lane) {
    if (!(lanes >> lane & 1)) continue;
    if (target.kind == Operand::list) {
      const int each = bits / static_cast<int>(target.elements.size());
      const uint64_t value = block.value(warp, source, lane);
      for (size_t i = 0; i < target.elements.size(); ++i)
        block.set(warp, target.elements[i], lane, value >> i * each & ((uint64_t(1) << each) - 1));
    } else if (source.kind == Operand::list) {
      const int each = bits / static_cast<int>(source.elements.size());
      uint64_t value = 0;
      for (size_t i = 0; i < source.elements.size(); ++i)
        value |= (block.value(warp, source.elements[i], lane) & ((uint64_t(1) << each) - 1))
                 << i * each;
      block.set(warp, target, lane, value);
    } else {
      block.set(warp, target, lane, block.value(warp, source, lane));
    }
  }
}

// cp.async.ca.shared.global [target], [source], bytes {, bytes of the source};
void copy(Block& block, Warp& warp, const Instruction& instruction, uint32_t lanes) {
  const auto& operands = instruction.operands;
  for (int lane = 0; lane < kLanes; ++lane) {
    if (!(lanes >> lane & 1)) continue;
    const auto filled = static_cast<uint32_t>(block.value(warp, operands[2], lane));
    const auto bytes =
        operands.size() > 3 ? static_cast<uint32_t>(block.value(warp, operands[3], lane)) : filled;
    const bool known =
        filled == 16 || (instruction.parts[2] == "ca" && (filled == 4 || filled == 8));
    if (!known || bytes > filled)
      block.fail("cp.async of " + std::to_string(bytes) + " bytes to " + std::to_string(filled));
    block.copy_async(warp,
                     {block.address(warp, operands[1], lane),
                      static_cast<uint32_t>(block.address(warp, operands[0], lane)),
                      static_cast<uint8_t>(bytes), static_cast<uint8_t>(filled), instruction.line});
  }
}

void commit(Block& block, Warp& warp, const Instruction&, uint32_t) {
  block.commit_copies(warp);
}

void wait(Block& block, Warp& warp, const Instruction& instruction, uint32_t) {
  block.wait_for_copies(warp, instruction.operands[0].value);
}

// Matrices of 8 x 8 elements of 16 bits: lane 8 m + r has the address of row r of matrix m, and
// lane l has the elements 2 (l % 4) and the next of row l / 4; transposed, of column l / 4.
void load_matrices(Block& block, Warp& warp, const Instruction& instruction, uint32_t lanes) {
  int count;
  const auto* targets = elements(instruction.operands[0], count);
  if (lanes != kAll) block.fail("ldmatrix without all lanes");
  const bool transposed = instruction.parts[5] == "trans";
  for (int matrix = 0; matrix < count; ++matrix) {
    uint16_t rows[8][8];
    for (int row = 0; row < 8; ++row) {
      const auto address = block.address(warp, instruction.operands[1], matrix * 8 + row);
      block.read_shared(warp, kAll, uint32_t(address), rows[row], 16);
    }
    for (int lane = 0; lane < kLanes; ++lane) {
      const int i = lane / 4, j = lane % 4 * 2;
      const uint32_t low = transposed ? rows[j][i] : rows[i][j];
      const uint32_t high = transposed ? rows[j + 1][i] : rows[i][j + 1];
      block.set(warp, targets[matrix], lane, high << 16 | low);
    }
  }
}

void store_matrices(Block& block, Warp& warp, const Instruction& instruction, uint32_t lanes) {
  int count;
  const auto* sources = elements(instruction.operands[1], count);
  if (lanes != kAll) block.fail("stmatrix without all lanes");
  const bool transposed = instruction.parts[5] == "trans";
  for (int matrix = 0; matrix < count; ++matrix) {
    uint16_t rows[8][8];
    for (int lane = 0; lane < kLanes; ++lane) {
      const auto value = static_cast<uint32_t>(block.value(warp, sources[matrix], lane));
      const int i = lane / 4, j = lane % 4 * 2;
      (transposed ? rows[j][i] : rows[i][j]) = static_cast<uint16_t>(value);
      (transposed ? rows[j + 1][i] : rows[i][j + 1]) = static_cast<uint16_t>(value >> 16);
    }
    for (int row = 0; row < 8; ++row) {
      const auto address = block.address(warp, instruction.operands[0], matrix * 8 + row);
      block.write_shared(warp, kAll, uint32_t(address), rows[row], 16);
    }
  }
}

}  // namespace

void add_memory(Table& table) {
  for (const char* type : {"b8", "u8", "s8", "b16", "u16", "s16", "b32", "u32", "s32", "f32", "b64",
                           "u64", "s64", "f64"}) {
    for (const char* vector : {"", "v2.", "v4."}) {
      const std::string what = std::string(vector) + type;
      table["ld.global." + what] = table["ld.global.nc." + what] = load<Space::global>;
      table["ld." + what] = load<Space::generic>;
      table["st." + what] = store<Space::generic>;
      table["ld.param." + what] = load<Space::parameter>;
      table["st.global." + what] = store<Space::global>;
      table["ld.shared." + what] = load<Space::shared>;
      table["st.shared." + what] = table["st.shared::cta." + what] = store<Space::shared>;
    }
    table[std::string("mov.") + type] = move;
  }
  for (const char* order : {"", "relaxed.gpu.", "acquire.gpu.", "release.gpu.", "acq_rel.gpu.",
                            "gpu.relaxed.", "gpu.acquire.", "gpu.release.", "gpu.acq_rel."}) {
    const std::string what = std::string("atom.global.") + order;
    table[what + "cas.b32"] = {atomic<uint32_t, exchange_if>, 4};
    table[what + "cas.b64"] = {atomic<uint64_t, exchange_if>, 4};
    table[what + "exch.b32"] = {atomic<uint32_t, exchange>, 3};
    table[what + "exch.b64"] = {atomic<uint64_t, exchange>, 3};
    table[what + "add.u32"] = table[what + "add.s32"] = {atomic<uint32_t, sum>, 3};
    table[what + "add.u64"] = {atomic<uint64_t, sum>, 3};
    table[what + "add.f32"] = {atomic<float, sum>, 3};
  }
  table["mov.pred"] = move;
  table["cvta.global.u64"] = table["cvta.to.global.u64"] = change_space<0>;
  table["cvta.shared.u64"] = change_space<kSharedWindow>;
  table["cvta.to.shared.u64"] = change_space<-kSharedWindow>;
  table["cp.async.ca.shared.global"] = table["cp.async.cg.shared.global"] = copy;
  table["cp.async.commit_group"] = commit;
  table["cp.async.wait_group"] = wait;
  for (const char* count : {"x1", "x2", "x4"}) {
    for (const char* order : {"", "trans."}) {
      const std::string what = std::string(".sync.aligned.m8n8.") + count + "." + order;
      table["ldmatrix" + what + "shared.b16"] = load_matrices;
      table["stmatrix" + what + "shared.b16"] = store_matrices;
    }
  }
}

}  // namespace ptx
