// A PTX kernel as the machine executes it: instructions with decoded operands.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <vector>

namespace ptx {

class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

struct Operand {
  enum Kind : uint8_t { none, reg, constant, special, address, list, label };
  Kind kind = none;
  int index = -1;      // register; of an address its base, or -1; of a label its instruction
  int second = -1;     // the predicate behind | in %r1|%p1, or -1
  uint64_t value = 0;  // constant; offset of an address
  std::string text;    // as it is written
  std::vector<Operand> elements;  // of a list, or {tensor map, coordinates...} of an address
};

enum Special : int {
  tid_x,
  tid_y,
  tid_z,
  ntid_x,
  ntid_y,
  ntid_z,
  ctaid_x,
  ctaid_y,
  ctaid_z,
  nctaid_x,
  nctaid_y,
  nctaid_z,
  laneid,
  warpid,
  num_specials
};

class Block;
struct Warp;
struct Instruction;
using Handler = void (*)(Block&, Warp&, const Instruction&, uint32_t lanes);

struct Instruction {
  Handler handler = nullptr;
  std::string opcode;
  std::vector<std::string> parts;  // the opcode at its dots
  std::vector<Operand> operands;
  std::vector<int> registers;  // all that it reads or writes
  int guard = -1;              // predicate register, or -1
  bool guard_negated = false;
  int line = 0;         // of the PTX
  int source_line = 0;  // of Python or C++, by the last .loc
  int source_file = 0;
  int width = 0;  // bytes of an element (memory), by the handler's family
  int count = 1;  // elements (memory)
  bool is_signed = false;
  mutable bool executed = false;  // by any lane of any launch
};

struct Parameter {
  std::string name;
  int bytes = 0;
  int offset = 0;
};

struct Program {
  std::string name;
  std::vector<Parameter> parameters;
  int parameter_bytes = 0;
  int num_registers = 0;
  int static_shared = 0;     // bytes before dynamic shared memory
  int most_threads = 1024;   // .maxntid
  int required_threads = 0;  // .reqntid, or 0
  std::vector<Instruction> code;
  std::unordered_map<int, std::string> files;
};

// Parses one kernel of a module, or the only one; raises Error with a line of the PTX.
Program parse(const std::string& text, const std::string& kernel = "");

// Sets handler and element sizes; raises Error for an instruction that the machine does not know.
void decode(Instruction& instruction);

}  // namespace ptx
