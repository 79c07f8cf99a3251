// sm_90: barriers in shared memory, boxes of tensors (TMA), and products of warp groups (wgmma).
//
// What the hardware may do late is done late: a box lands row by row after its issue, and a product
// reads shared memory and writes its accumulator at any moment up to the wait for it.
#include "instructions.h"
#include "tensor_map.h"

namespace ptx {
namespace {

constexpr uint64_t kParameters = uint64_t(1) << 60;

// Bits 4 to 6 of an address are exchanged by those of its row: 1 is 32 bytes, 2 is 64, 3 is 128.
uint32_t swizzled(uint64_t address, int mode) {
  const uint32_t mask = (1u << mode) - 1;
  return static_cast<uint32_t>(address) ^ (static_cast<uint32_t>(address >> 7) & mask) << 4;
}

int first_of(uint32_t lanes) {
  return std::countr_zero(lanes);
}

template <typename Function>
void each(uint32_t lanes, Function function) {
  for (int lane = 0; lane < kLanes; ++lane)
    if (lanes >> lane & 1) function(lane);
}

void elect(Block& block, Warp& warp, const Instruction& instruction, uint32_t lanes) {
  const int leader = first_of(lanes);
  const auto& operands = instruction.operands;
  each(lanes, [&](int lane) {
    block.check_members(lanes, lane, block.value(warp, operands[1], lane));
    block.set(warp, operands[0], lane, static_cast<uint64_t>(leader));
    warp.registers[operands[0].second][lane] = lane == leader;
  });
}

void initialise(Block& block, Warp& warp, const Instruction& instruction, uint32_t lanes) {
  each(lanes, [&](int lane) {
    block.begin_barrier(warp, block.address(warp, instruction.operands[0], lane),
                        static_cast<uint32_t>(block.value(warp, instruction.operands[1], lane)));
  });
}
void invalidate(Block& block, Warp& warp, const Instruction& instruction, uint32_t lanes) {
  each(lanes,
       [&](int lane) { block.end_barrier(block.address(warp, instruction.operands[0], lane)); });
}
// mbarrier.arrive.expect_tx.shared.b64 _, [barrier], bytes;
void expect(Block& block, Warp& warp, const Instruction& instruction, uint32_t lanes) {
  const auto& operands = instruction.operands;
  each(lanes, [&](int lane) {
    block.arrive(warp, block.address(warp, operands[1], lane),
                 static_cast<uint32_t>(block.value(warp, operands[2], lane)));
  });
}
void try_wait(Block& block, Warp& warp, const Instruction& instruction, uint32_t lanes) {
  const auto& operands = instruction.operands;
  each(lanes, [&](int lane) {
    const bool passed = block.passed(warp, block.address(warp, operands[1], lane),
                                     static_cast<uint32_t>(block.value(warp, operands[2], lane)));
    block.set(warp, operands[0], lane, passed);
  });
}

void parameter_address(Block& block, Warp& warp, const Instruction& instruction, uint32_t lanes) {
  each(lanes, [&](int lane) {
    // A generic address of parameters; the machine gives such addresses to tensor maps alone.
    block.set(warp, instruction.operands[0], lane,
              block.value(warp, instruction.operands[1], lane) + kParameters);
  });
}

// The pieces of the box of a tensor map that [map, {x, y}] names, in shared memory at `target`.
Box box_of(Block& block, Warp& warp, const Operand& operand, uint32_t target, int lane) {
  TensorMap map;
  const auto offset = block.address(warp, operand, lane) - kParameters;
  std::memcpy(&map, block.parameters(offset, sizeof(map)), sizeof(map));
  if (map.rank < 1 || map.rank > 5 || !std::has_single_bit(map.element_bytes))
    block.fail("no tensor map is there");
  const auto& coordinates = operand.elements.at(0).elements;
  if (coordinates.size() != map.rank) block.fail("a box of another rank than its tensor map");
  const int inner = map.rank - 1;
  int64_t begin[5];
  for (int i = 0; i < map.rank; ++i)
    begin[inner - i] = static_cast<int32_t>(block.value(warp, coordinates[i], lane));
  if (target % 128)
    block.fail("a box in shared memory at " + std::to_string(target) +
               ", which is no multiple of 128 bytes");
  if (map.padding) block.fail("a tensor map that pads with NaN, which the machine does not know");
  const uint32_t inner_bytes = map.block[inner] * map.element_bytes;
  if (inner_bytes % 16 || (map.swizzle && inner_bytes > 16u << map.swizzle))
    block.fail("a box whose rows have " + std::to_string(inner_bytes) +
               " bytes: they must be a multiple of 16, and not more than the swizzle");
  Box box;
  box.swizzle = map.swizzle;
  // Of 16 bytes at a time: the tensor may begin or end within them.
  const int elements = 16 / map.element_bytes;
  int64_t rows = 1;
  for (int i = 0; i < inner; ++i) rows *= map.block[i];
  const int pieces = static_cast<int>(map.block[inner]) / elements;
  for (int64_t row = 0; row < rows; ++row) {
    int64_t left = row, offset = 0;
    bool inside = true;
    for (int i = inner - 1; i >= 0; --i) {
      const int64_t at = begin[i] + left % map.block[i];
      left /= map.block[i];
      inside &= at >= 0 && at < int64_t(map.shape[i]);
      offset += at * static_cast<int64_t>(map.strides[i]);
    }
    for (int piece = 0; piece < pieces; ++piece) {
      const int64_t column = begin[inner] + piece * elements;
      const int64_t first = std::max<int64_t>(column, 0);
      const int64_t last = std::min<int64_t>(column + elements, map.shape[inner]);
      Piece part;
      part.shared = target + static_cast<uint32_t>((row * pieces + piece) * 16);
      if (inside && first < last) {
        part.global = map.base + (offset + first) * map.element_bytes;
        part.begin = static_cast<uint8_t>((first - column) * map.element_bytes);
        part.bytes = static_cast<uint8_t>((last - first) * map.element_bytes);
      }
      box.pieces.push_back(part);
    }
  }
  return box;
}

// cp.async.bulk.tensor.2d.... [target], [map, {x, y}], [barrier];
void load_box(Block& block, Warp& warp, const Instruction& instruction, uint32_t lanes) {
  const auto& operands = instruction.operands;
  each(lanes, [&](int lane) {
    const auto target = static_cast<uint32_t>(block.address(warp, operands[0], lane));
    Box box = box_of(block, warp, operands[1], target, lane);
    box.barrier = static_cast<uint32_t>(block.address(warp, operands[2], lane));
    block.copy_box(warp, std::move(box));
  });
}

// cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [map, {x, y}], [source];
void store_box(Block& block, Warp& warp, const Instruction& instruction, uint32_t lanes) {
  const auto& operands = instruction.operands;
  each(lanes, [&](int lane) {
    const auto source = static_cast<uint32_t>(block.address(warp, operands[1], lane));
    block.store_box(warp, box_of(block, warp, operands[0], source, lane));
  });
}
void commit_boxes(Block&, Warp& warp, const Instruction&, uint32_t) {
  warp.box_groups.push_back(std::move(warp.open_boxes));
  warp.open_boxes.clear();
}
void wait_for_boxes(Block& block, Warp& warp, const Instruction& instruction, uint32_t) {
  block.wait_for_boxes(warp, instruction.operands[0].value);
}

void fence_registers(Block&, Warp& warp, const Instruction&, uint32_t) {
  warp.fenced_registers = true;
}
void fence(Block& block, Warp& warp, const Instruction&, uint32_t) {
  block.fence_proxy(warp);
}
void commit(Block& block, Warp& warp, const Instruction&, uint32_t) {
  block.commit_products(warp);
}
void wait(Block& block, Warp& warp, const Instruction& instruction, uint32_t) {
  block.wait_for_products(warp, instruction.operands[0].value);
}

// wgmma: accumulator, A (descriptor or registers), B, whether it adds, signs, transpositions.
void multiply(Block& block, Warp& warp, const Instruction& instruction, uint32_t lanes) {
  if (lanes != kAll) block.fail("wgmma without all lanes");
  const auto& operands = instruction.operands;
  const bool in_registers = operands[1].kind == Operand::list;
  Product product;
  product.instruction = &instruction;
  if (!in_registers) product.left = block.value(warp, operands[1], 0);
  product.right = block.value(warp, operands[2], 0);
  product.adds = block.value(warp, operands[3], 0) & 1;
  if (operands.size() != (in_registers ? 7 : 8) ||
      operands[0].elements.size() != std::stoul(instruction.parts[4].substr(4)) / 2 ||
      (in_registers && operands[1].elements.size() != 4))
    block.fail("wgmma with another number of operands or registers");
  for (const uint64_t descriptor : {product.left, product.right})
    if (descriptor >> 49 & 7) block.fail("wgmma with a base offset, which the machine has not");
  // -1 negates A or B.
  product.negates = (operands[4].value != 1) != (operands[5].value != 1);
  block.issue(warp, product);
}

}  // namespace

void add_async(Table& table) {
  table["elect.sync"] = elect;
  table["mbarrier.init.shared::cta.b64"] = initialise;
  table["mbarrier.inval.shared::cta.b64"] = invalidate;
  table["cvta.param.u64"] = parameter_address;
  for (const char* space : {"shared", "shared::cta"}) {
    const std::string end = std::string(space) + ".b64";
    table["mbarrier.arrive.expect_tx." + end] = expect;
    table["mbarrier.try_wait.parity." + end] = try_wait;
  }
  for (const char* rank : {"1d", "2d", "3d", "4d", "5d"}) {
    const std::string box = std::string("cp.async.bulk.tensor.") + rank + ".";
    for (const char* space : {"shared::cta", "shared::cluster"})
      table[box + space + ".global.mbarrier::complete_tx::bytes"] = load_box;
    table[box + "global.shared::cta.bulk_group"] = {store_box, 2};
  }
  table["cp.async.bulk.commit_group"] = {commit_boxes, 0};
  table["cp.async.bulk.wait_group"] = table["cp.async.bulk.wait_group.read"] = {wait_for_boxes, 1};
  table["fence.proxy.async.shared::cta"] = fence;
  table["wgmma.fence.sync.aligned"] = fence_registers;
  table["wgmma.commit_group.sync.aligned"] = commit;
  table["wgmma.wait_group.sync.aligned"] = wait;
  for (int n = 8; n <= 256; n += 8)
    for (const char* types : {"f32.bf16.bf16", "f32.f16.f16"})
      table["wgmma.mma_async.sync.aligned.m64n" + std::to_string(n) + "k16." + types] = multiply;
}

Barrier& Block::barrier_at(uint64_t address) {
  const auto found = barriers_.find(address);
  if (found == barriers_.end())
    fail("no mbarrier at " + std::to_string(address) + ": it was not initialised");
  return found->second;
}

void Block::begin_barrier(Warp&, uint64_t address, uint32_t count) {
  check_shared(address, 8);
  Barrier barrier;
  barrier.expected = barrier.pending = count;
  // What lies at the address of a former barrier goes on with its clock, from an even phase.
  const auto former = ended_.find(address);
  barrier.clock = warps_.size() + num_barriers_;
  if (former != ended_.end()) {
    barrier.clock = former->second.clock;
    barrier.phase = (former->second.phase + 1) & ~1u;
  } else if (++num_barriers_ > kMostBarriers) {
    fail("more than 64 mbarriers");
  }
  if (!barriers_.try_emplace(address, barrier).second)
    fail("a second mbarrier.init at " + std::to_string(address));
}

void Block::end_barrier(uint64_t address) {
  const auto& barrier = barrier_at(address);
  if (barrier.bytes) fail("mbarrier.inval while a copy is under way");
  ended_[address] = barrier;
  barriers_.erase(address);
}

void Block::arrive(Warp& warp, uint64_t address, uint32_t bytes) {
  auto& barrier = barrier_at(address);
  barrier.bytes += bytes;
  barrier.arrived.resize(num_clocks_);
  join(barrier.arrived, warp.clock);
  if (barrier.pending == 0) fail("an arrival too many");
  --barrier.pending;
  complete(barrier);
}

void Block::complete(Barrier& barrier) {
  if (barrier.pending || barrier.bytes) return;
  ++barrier.phase;
  barrier.pending = barrier.expected;
  barrier.released = barrier.arrived;
  vain_polls_ = 0;
}

// A wait for the phase of a parity: it has passed if the present phase has the other one.
bool Block::passed(Warp& warp, uint64_t address, uint32_t parity) {
  auto& barrier = barrier_at(address);
  const bool passed = (barrier.phase & 1) != (parity & 1);
  warp.polls = !passed;
  vain_polls_ = passed ? 0 : vain_polls_ + 1;
  if (passed) {
    join(warp.clock, barrier.released);
    warp.clock[barrier.clock] = std::max(warp.clock[barrier.clock], barrier.phase);
  }
  return passed;
}

void Block::copy_box(Warp& warp, Box box) {
  for (const auto& piece : box.pieces) {
    const uint32_t target = swizzled(piece.shared, box.swizzle);
    check_shared(target, 16);
    if (piece.bytes) watch_global(warp, kAll, piece.global, piece.bytes, "copies", nullptr, 1);
    for (uint32_t i = target; i < target + 16; ++i) {
      auto& cell = cells_[i];
      check_readers(warp, i, "copies to");
      if (cell.written && cell.write_clock > warp.clock[cell.writer])
        fail("copies to shared memory at " + std::to_string(i) +
             ", which is written without a "
             "barrier between");
      cell.in_flight = true;
      shared_[i] = 0xff;
    }
  }
  barrier_at(box.barrier);
  box.late = random_() % 2;
  boxes_.push_back(std::move(box));
}

// A store of a box reads shared memory, and writes global memory, at the wait for it.
void Block::store_box(Warp& warp, Box box) {
  for (const auto& piece : box.pieces) check_matrix(warp, swizzled(piece.shared, box.swizzle));
  warp.open_boxes.push_back(std::move(box));
}

void Block::wait_for_boxes(Warp& warp, size_t groups_left) {
  while (warp.box_groups.size() > groups_left) {
    for (const auto& box : warp.box_groups.front()) {
      for (const auto& piece : box.pieces) {
        if (!piece.bytes) continue;
        const auto* from = &shared_[swizzled(piece.shared, box.swizzle) + piece.begin];
        watch_global(warp, kAll, piece.global, piece.bytes, "stores a box to", from, 1);
        std::memcpy(reinterpret_cast<void*>(piece.global), from, piece.bytes);
      }
    }
    warp.box_groups.erase(warp.box_groups.begin());
  }
}

void Block::land_piece(const Box& box, size_t row) {
  const auto& piece = box.pieces[row];
  auto* target = &shared_[swizzled(piece.shared, box.swizzle)];
  std::memset(target, 0, 16);
  std::memcpy(target + piece.begin, reinterpret_cast<const void*>(piece.global), piece.bytes);
}

void Block::land_some_boxes() {
  if (random_() % 16) return;
  const size_t which = random_() % boxes_.size();
  auto& box = boxes_[which];
  if (box.late && vain_polls_ == 0) return;
  if (random_() % 2) {  // a part of it
    land_piece(box, random_() % box.pieces.size());
    return;
  }
  auto& barrier = barrier_at(box.barrier);
  for (size_t row = 0; row < box.pieces.size(); ++row) {
    land_piece(box, row);
    const uint32_t target = swizzled(box.pieces[row].shared, box.swizzle);
    for (uint32_t i = target; i < target + 16; ++i) {
      auto& cell = cells_[i];
      cell.in_flight = false;
      cell.written = true;
      cell.writer = static_cast<uint8_t>(barrier.clock);
      cell.write_clock = barrier.phase + 1;
      cell.generic = false;
    }
  }
  barrier.bytes -= static_cast<int64_t>(box.pieces.size()) * 16;
  boxes_.erase(boxes_.begin() + static_cast<long>(which));
  complete(barrier);
}

// The registers of a product, and how it uses them.
template <typename Function>
static void each_register(const Instruction& instruction, Function function) {
  for (const auto& operand : instruction.operands[0].elements)
    function(operand, Warp::written_by_product);
  if (instruction.operands[1].kind == Operand::list)
    for (const auto& operand : instruction.operands[1].elements)
      function(operand, Warp::read_by_product);
}

void Block::issue(Warp& warp, Product product) {
  // LLVM moves writes of the operands behind the fence; ptxas then places it behind them.
  if (warps_.size() % 4) fail("wgmma in a block that is no multiple of 128 threads");
  ++warp.num_products;
  if (!warp.fenced_registers) fail("wgmma without wgmma.fence since the last wait");
  each_register(*product.instruction, [&](const Operand& operand, Warp::Use use) {
    auto& now = warp.in_flight[operand.index];
    warp.num_in_flight += now == Warp::idle;
    now = std::max(now, use);
  });
  warp.open_products.push_back(product);
}

// Only another product may use the accumulator of a product under way, as its own accumulator.
void Block::check_in_flight(const Warp& warp, const Instruction& instruction) const {
  const bool is_product = instruction.parts[0] == "wgmma";
  const size_t own =
      is_product && !instruction.operands.empty() ? instruction.operands[0].elements.size() : 0;
  for (size_t i = own; i < instruction.registers.size(); ++i)
    if (warp.in_flight[instruction.registers[i]] == Warp::written_by_product)
      fail("uses the accumulator of a wgmma before the wait for it");
}

void Block::commit_products(Warp& warp) {
  warp.product_groups.push_back(std::move(warp.open_products));
  warp.open_products.clear();
}

void Block::wait_for_products(Warp& warp, size_t groups_left) {
  while (warp.product_groups.size() > groups_left) {
    for (const auto& product : warp.product_groups.front()) execute(warp, product);
    warp.product_groups.erase(warp.product_groups.begin());
  }
  warp.fenced_registers = false;
  // What the products that are left use is in flight still.
  std::fill(warp.in_flight.begin(), warp.in_flight.end(), Warp::idle);
  warp.num_in_flight = 0;
  const auto mark = [&](const std::vector<Product>& products) {
    for (const auto& product : products)
      each_register(*product.instruction, [&](const Operand& operand, Warp::Use use) {
        auto& now = warp.in_flight[operand.index];
        warp.num_in_flight += now == Warp::idle;
        now = std::max(now, use);
      });
  };
  for (const auto& group : warp.product_groups) mark(group);
  mark(warp.open_products);
}

// Where an element of a matrix in shared memory lies: row is of A or column of B, k of the sum.
static uint64_t place(uint64_t descriptor, bool transposed, int row, int k) {
  const uint64_t start = (descriptor & 0x3fff) << 4;
  const uint64_t leading = (descriptor >> 16 & 0x3fff) << 4;
  const uint64_t stride = (descriptor >> 32 & 0x3fff) << 4;
  const int mode = static_cast<int>(descriptor >> 62);  // 0 none, 1: 128 bytes, 2: 64, 3: 32
  const uint64_t width = mode ? 256u >> mode : 16;      // bytes of a row of the pattern
  const int swizzle = mode ? 4 - mode : 0;
  uint64_t linear;
  if (!transposed) {  // k is contiguous
    const uint64_t byte = static_cast<uint64_t>(k) * 2;
    linear = row % 8 * width + row / 8 * stride;
    linear += mode ? byte : byte / 16 * leading + byte % 16;
  } else {
    const uint64_t byte = static_cast<uint64_t>(row) * 2;
    linear = k % 8 * width + byte % width;
    linear += byte / width * (mode ? leading : stride) + k / 8 * (mode ? stride : leading);
  }
  return swizzled(start + linear, swizzle);
}

// Eight elements, which are 16 bytes at `address`.
void Block::check_matrix(Warp& warp, uint64_t address) {
  check_shared(address, 16);
  for (int i = 0; i < 16; ++i) {
    const auto& cell = cells_[address + i];
    const auto wrong = [&](const std::string& why) {
      fail("the asynchronous proxy reads shared memory at " + std::to_string(address + i) + why);
    };
    if (cell.in_flight) wrong(" before the wait for its copy");
    if (!cell.written) wrong(", which nobody has written");
    if (cell.write_clock > warp.clock[cell.writer])
      wrong(", which is written without a barrier between");
    if (cell.generic && cell.write_clock > warp.fenced[cell.writer])
      wrong(", written by warp " + std::to_string(cell.writer) + " without fence.proxy.async");
    note_reader(warp, address + i);
  }
}

void Block::execute(Warp& warp, const Product& product) {
  const auto& instruction = *product.instruction;
  current_ = product.instruction;
  const auto& operands = instruction.operands;
  const int n = std::stoi(instruction.parts[4].substr(4));
  const bool half = instruction.parts.back() == "f16";
  const auto& a_registers = operands[1].elements;
  const bool in_registers = operands[1].kind == Operand::list;
  const bool a_transposed = !in_registers && operands[6].value & 1;
  const bool b_transposed = operands[in_registers ? 6 : 7].value & 1;
  const auto number = [half](uint16_t bits) {
    return half ? static_cast<float>(std::bit_cast<_Float16>(bits)) : widened(bits);
  };
  // Reads 16 values of the sum of `count` rows of A, or columns of B, from `first` on.
  const auto read = [&](int count, uint64_t descriptor, bool transposed, int first, auto to) {
    const int row_step = transposed ? 8 : 1, k_step = transposed ? 1 : 8;
    for (int row = 0; row < count; row += row_step) {
      for (int k = 0; k < 16; k += k_step) {
        const uint64_t address = place(descriptor, transposed, first + row, k);
        check_matrix(warp, address);
        uint16_t bits[8];
        std::memcpy(bits, &shared_[address], 16);
        for (int i = 0; i < 8; ++i) to(row + transposed * i, k + !transposed * i) = number(bits[i]);
      }
    }
  };
  const int rows = warp.number % 4 * 16;  // of the 64 of the warp group
  const double sign = product.negates ? -1.0 : 1.0;
  std::vector<float> a(16 * 16), b(static_cast<size_t>(n) * 16);
  for (int row = 0; in_registers && row < 16; ++row) {
    for (int k = 0; k < 16; ++k) {
      const int lane = row % 8 * 4 + k % 8 / 2;
      const auto both = warp.registers[a_registers[row / 8 + k / 8 * 2].index][lane];
      a[row * 16 + k] = number(static_cast<uint16_t>(both >> 16 * (k % 2)));
    }
  }
  if (!in_registers)
    read(16, product.left, a_transposed, rows,
         [&](int row, int k) -> float& { return a[row * 16 + k]; });
  read(n, product.right, b_transposed, 0,
       [&](int column, int k) -> float& { return b[k * n + column]; });
  std::vector<double> totals(n);
  for (int row = 0; row < 16; ++row) {
    const auto accumulator = [&](int column) -> uint64_t& {
      const auto& target = operands[0].elements[column / 8 * 4 + row / 8 * 2 + column % 2];
      return warp.registers[target.index][row % 8 * 4 + column % 8 / 2];
    };
    for (int column = 0; column < n; ++column)
      totals[column] =
          product.adds ? std::bit_cast<float>(static_cast<uint32_t>(accumulator(column))) : 0.0;
    for (int k = 0; k < 16; ++k) {
      const double left = sign * a[row * 16 + k];
      for (int column = 0; column < n; ++column) totals[column] += left * b[k * n + column];
    }
    for (int column = 0; column < n; ++column)
      accumulator(column) = std::bit_cast<uint32_t>(static_cast<float>(totals[column]));
  }
}

}  // namespace ptx
