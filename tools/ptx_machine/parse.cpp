// Reads PTX, as Triton and nvcc write it, into a Program.
#include "program.h"

#include <cctype>
#include <cstring>
#include <optional>

namespace ptx {
namespace {

struct Token {
  std::string text;
  int line;
};

// The tokens of a module, without its debug information and the kernels of other names.
std::vector<Token> tokens_of(const std::string& text, const std::string& kernel) {
  std::vector<Token> tokens;
  int line = 1;
  size_t i = 0;
  const auto is_word = [](char c) { return std::isalnum(c) || std::strchr("_$.%:", c); };
  const auto skip_braces = [&] {
    int depth = 0;
    do {
      i = text.find_first_of("{}\n", i);
      if (i == std::string::npos) throw Error("PTX line " + std::to_string(line) + ": no '}'");
      line += text[i] == '\n';
      depth += text[i] == '{' ? 1 : text[i] == '}' ? -1 : 0;
      ++i;
    } while (depth || text[i - 1] == '\n');
  };
  while (i < text.size()) {
    const char c = text[i];
    if (c == '\n') {
      ++line;
      ++i;
    } else if (std::isspace(c)) {
      ++i;
    } else if (text.compare(i, 2, "//") == 0) {
      while (i < text.size() && text[i] != '\n') ++i;
    } else if (text.compare(i, 2, "/*") == 0) {
      const auto end = text.find("*/", i);
      for (; i < end + 2; ++i) line += text[i] == '\n';
    } else if (c == '"') {
      const auto end = text.find('"', i + 1);
      tokens.push_back({text.substr(i, end + 1 - i), line});
      i = end + 1;
    } else if (c == '-' && std::isdigit(text[i + 1])) {
      size_t end = i + 1;
      while (std::isalnum(text[end])) ++end;
      tokens.push_back({text.substr(i, end - i), line});
      i = end;
    } else if (is_word(c) && c != ':') {
      size_t end = i;
      // A colon belongs to a word in shared::cta, and ends it behind a label.
      while (end < text.size() && is_word(text[end])) {
        if (text[end] == ':') {
          if (text[end + 1] != ':') break;
          ++end;
        }
        ++end;
      }
      tokens.push_back({text.substr(i, end - i), line});
      i = end;
      const bool names_kernel = tokens.size() > 1 && tokens[tokens.size() - 2].text == ".entry";
      if (tokens.back().text == ".section" ||
          (names_kernel && !kernel.empty() && tokens.back().text != kernel)) {
        tokens.resize(tokens.size() - (names_kernel ? 2 : 1));
        skip_braces();
      }
    } else {
      tokens.push_back({std::string(1, c), line});
      ++i;
    }
  }
  return tokens;
}

std::optional<uint64_t> number(const std::string& text) {
  const bool negative = text[0] == '-';
  const std::string digits = text.substr(negative ? 1 : 0);
  if (digits.empty() || !std::isdigit(digits[0])) return std::nullopt;
  if (digits.size() > 2 && digits[0] == '0' && (digits[1] == 'f' || digits[1] == 'F')) {
    return std::stoull(digits.substr(2), nullptr, 16);
  }
  if (digits.size() > 2 && digits[0] == '0' && (digits[1] == 'd' || digits[1] == 'D')) {
    return std::stoull(digits.substr(2), nullptr, 16);
  }
  const bool binary = digits.size() > 2 && digits[0] == '0' && (digits[1] | 32) == 'b';
  size_t read = 0;
  const uint64_t value = std::stoull(binary ? digits.substr(2) : digits, &read, binary ? 2 : 0);
  read += binary ? 2 : 0;
  if (read < digits.size() && digits.substr(read) != "U")
    throw Error("the number '" + text + "', which the machine does not know");
  return negative ? ~value + 1 : value;
}

int bytes_of(const std::string& type) {  // ".b32", ".pred"
  if (type == ".pred") return 1;
  return std::stoi(type.substr(2)) / 8;
}

struct SharedVariable {
  int align = 1;
  int bytes = 0;   // 0: dynamic
  int place = -1;  // not known yet
};

class Parser {
 public:
  Parser(const std::string& text, const std::string& kernel) : tokens_(tokens_of(text, kernel)) {}

  Program run() {
    while (at_ < tokens_.size()) {
      const auto& word = peek();
      if (word == ".shared" || (word == ".extern" && peek(1) == ".shared")) {
        shared_variable();
      } else if (word == ".entry") {
        if (!program_.name.empty()) fail("a second kernel: the machine executes one");
        entry();
      } else if (word == ".file") {
        next();
        const int index = std::stoi(next());
        program_.files[index] = next();
      } else if (word == ".global" || word == ".const") {
        while (next() != ";") {
        }
      } else {
        next();
      }
    }
    if (program_.name.empty()) fail("no kernel (.entry)");
    resolve();
    program_.num_registers = static_cast<int>(num_registers_);
    return std::move(program_);
  }

 private:
  const std::string& peek(size_t ahead = 0) const {
    static const std::string end;
    return at_ + ahead < tokens_.size() ? tokens_[at_ + ahead].text : end;
  }
  std::string next() {
    if (at_ >= tokens_.size()) fail("the text ends");
    return tokens_[at_++].text;
  }
  void expect(const std::string& text) {
    const auto found = next();
    if (found != text) fail("'" + text + "' is expected, not '" + found + "'");
  }
  int line() const { return tokens_.empty() ? 0 : tokens_[std::min(at_, tokens_.size() - 1)].line; }
  [[noreturn]] void fail(const std::string& what) const {
    throw Error("PTX line " + std::to_string(line()) + ": " + what);
  }
  // [.extern] .shared .align 16 .b8 name[bytes];
  void shared_variable() {
    int align = 1, bytes = 1, element = 1;
    const bool dynamic = peek() == ".extern";
    std::string name;
    while (peek() != ";") {
      const auto word = next();
      if (word == ".align") {
        align = std::stoi(next());
      } else if (word.size() > 2 && word[0] == '.' && std::isdigit(word[2])) {
        element = bytes_of(word);
      } else if (word == "[") {
        if (peek() != "]") bytes = std::stoi(next());
        expect("]");
      } else if (word[0] != '.') {
        name = word;
      }
    }
    next();
    if (shared_placed_) fail("shared memory is declared behind its first use");
    shared_[name] = {align, dynamic ? 0 : bytes * element};
  }

  // Gives a place to what the kernel names from here on (a module has the variables of all its
  // kernels): dynamic shared memory is behind the others.
  void place_shared() {
    shared_placed_ = true;
    for (const bool dynamic : {false, true}) {
      for (size_t i = at_ - 1; i < tokens_.size(); ++i) {
        const auto found = shared_.find(tokens_[i].text);
        if (found == shared_.end() || (found->second.bytes == 0) != dynamic) continue;
        auto& [align, bytes, place] = found->second;
        auto& end = program_.static_shared;
        if (place >= 0) continue;
        end = (end + align - 1) / align * align;
        place = end;
        end += bytes;
      }
    }
  }

  void entry() {
    next();
    program_.name = next();
    if (peek() == "(") parameters();
    while (peek() != "{") {
      const auto word = next();
      if (word != ".reqntid" && word != ".maxntid") continue;
      int threads = std::stoi(next());
      while (peek() == ",") {
        next();
        threads *= std::stoi(next());
      }
      (word == ".reqntid" ? program_.required_threads : program_.most_threads) = threads;
    }
    next();
    scopes_.emplace_back();
    while (!scopes_.empty()) statement();
  }

  void parameters() {
    next();
    int offset = 0, align = 0, bytes = 0;
    while (true) {
      const auto word = next();
      if (word == "," || word == ")") {
        if (word == ")") return;
      } else if (word == ".param") {
        align = bytes = 0;
      } else if (word == ".align") {
        const int given = std::stoi(next());
        if (bytes == 0 || bytes == 1) align = std::max(align, given);
      } else if (word == ".ptr" || word == ".global") {
        continue;
      } else if (word[0] == '.') {
        bytes = bytes_of(word);
      } else {
        int total = bytes;
        if (peek() == "[") {
          next();
          total = bytes * std::stoi(next());
          expect("]");
        }
        const int aligned = std::max(align, bytes);
        offset = (offset + aligned - 1) / aligned * aligned;
        parameters_[word] = offset;
        program_.parameters.push_back({word, total, offset});
        offset += total;
        program_.parameter_bytes = offset;
      }
    }
  }

  void statement() {
    const auto& word = peek();
    if (word == "{") {
      next();
      scopes_.emplace_back();
    } else if (word == "}") {
      next();
      scopes_.pop_back();
    } else if (word == ";") {
      next();
    } else if (word == ".reg") {
      registers();
    } else if (word == ".loc") {
      const int here = line();
      next();
      file_ = std::stoi(next());
      source_line_ = std::stoi(next());
      while (line() == here) next();  // the column, and what was inlined where
    } else if (word == ".shared") {
      shared_variable();
    } else if (word == ".pragma" || word == ".local") {
      while (next() != ";") {
      }
    } else if (peek(1) == ":") {
      labels_[scoped(next())] = static_cast<int>(program_.code.size());
      next();
    } else {
      instruction();
    }
  }

  // .reg .b32 %r<2197>;   .reg .pred complete;   .reg .b16 a, b;
  void registers() {
    next();
    next();
    while (true) {
      const auto name = next();
      if (peek() == "<") {
        next();
        const int count = std::stoi(next());
        expect(">");
        for (int i = 0; i < count; ++i) declare(name + std::to_string(i));
      } else {
        declare(name);
      }
      if (next() == ";") return;
    }
  }
  void declare(const std::string& name) {
    scopes_.back()[name] = static_cast<int>(num_registers_++);
  }
  int register_of(const std::string& name) const {
    for (auto scope = scopes_.rbegin(); scope != scopes_.rend(); ++scope) {
      const auto found = scope->find(name);
      if (found != scope->end()) return found->second;
    }
    return -1;
  }
  // A label of inline assembly is known in its braces alone.
  std::string scoped(const std::string& label) {
    return label[0] == '$' ? label : label + "@" + std::to_string(scope_number());
  }
  size_t scope_number() {
    auto& scope = scopes_.back();
    const auto [place, is_new] = scope.try_emplace("@number", static_cast<int>(num_scopes_));
    num_scopes_ += is_new;
    return static_cast<size_t>(place->second);
  }

  void instruction() {
    Instruction result;
    result.line = line();
    result.source_line = source_line_;
    result.source_file = file_;
    if (peek() == "@") {
      next();
      if (peek() == "!") {
        next();
        result.guard_negated = true;
      }
      const auto name = next();
      result.guard = register_of(name);
      if (result.guard < 0) fail("no register " + name);
    }
    result.opcode = next();
    for (size_t begin = 0, end; begin <= result.opcode.size(); begin = end + 1) {
      end = std::min(result.opcode.find('.', begin), result.opcode.size());
      result.parts.push_back(result.opcode.substr(begin, end - begin));
    }
    while (peek() != ";") {
      result.operands.push_back(operand());
      if (peek() == ",") next();
    }
    next();
    program_.code.push_back(std::move(result));
  }

  Operand operand() {
    Operand result;
    const auto word = next();
    result.text = word;
    if (word == "!") {
      fail("an operand that is negated");
    } else if (word == "{") {
      result.kind = Operand::list;
      while (peek() != "}") {
        result.elements.push_back(operand());
        if (peek() == ",") next();
      }
      next();
    } else if (word == "[") {
      result = address();
    } else if (word == "_") {
      result.kind = Operand::none;
      result.second = behind_bar();
    } else if (const auto value = number(word)) {
      result.kind = Operand::constant;
      result.value = *value;
    } else if (const int index = register_of(word); index >= 0) {
      result.kind = Operand::reg;
      result.index = index;
      result.second = behind_bar();
    } else if (parameters_.count(word)) {
      result.kind = Operand::constant;  // its place; cvta.param makes an address of it
      result.value = static_cast<uint64_t>(parameters_[word]);
    } else if (shared_.count(word)) {
      if (!shared_placed_) place_shared();
      result.kind = Operand::constant;
      result.value = static_cast<uint64_t>(shared_[word].place);
    } else if (word[0] == '%') {
      result.kind = Operand::special;
      result.index = special(word);
    } else {
      result.kind = Operand::label;
      result.text = scoped(word);
    }
    return result;
  }

  // The predicate in %r1|%p1, or -1.
  int behind_bar() {
    if (peek() != "|") return -1;
    next();
    const auto name = next();
    const int index = register_of(name);
    if (index < 0 && name != "_") fail("no register " + name);
    return index;
  }

  Operand address() {
    Operand result;
    result.kind = Operand::address;
    const auto base = operand();
    if (base.kind == Operand::reg) {
      result.index = base.index;
    } else if (base.kind == Operand::constant) {
      result.value = base.value;
    } else {
      fail("an address of '" + base.text + "'");
    }
    while (peek() != "]") {
      const auto word = next();
      if (word == ",") {
        result.elements.push_back(operand());
      } else if (word == "+") {
        const auto offset = number(next());
        if (!offset) fail("an offset that is no number");
        result.value += *offset;
      } else if (const auto offset = number(word)) {
        result.value += *offset;
      } else {
        fail("'" + word + "' in an address");
      }
    }
    next();
    return result;
  }

  int special(const std::string& name) {
    static const char* names[] = {"%tid.x",    "%tid.y",    "%tid.z",   "%ntid.x",  "%ntid.y",
                                  "%ntid.z",   "%ctaid.x",  "%ctaid.y", "%ctaid.z", "%nctaid.x",
                                  "%nctaid.y", "%nctaid.z", "%laneid",  "%warpid"};
    for (int i = 0; i < num_specials; ++i)
      if (name == names[i]) return i;
    fail("no register " + name);
  }

  static void collect(const Operand& operand, std::vector<int>& registers) {
    if (operand.kind != Operand::label && operand.kind != Operand::special && operand.index >= 0)
      registers.push_back(operand.index);
    if (operand.second >= 0) registers.push_back(operand.second);
    for (const auto& element : operand.elements) collect(element, registers);
  }

  void resolve() {
    for (auto& each : program_.code) {
      for (const auto& operand : each.operands) collect(operand, each.registers);
      for (auto& operand : each.operands) {
        if (operand.kind != Operand::label) continue;
        const auto found = labels_.find(operand.text);
        if (found == labels_.end())
          throw Error("PTX line " + std::to_string(each.line) + ": no label " + operand.text);
        operand.index = found->second;
      }
      decode(each);
    }
  }

  std::vector<Token> tokens_;
  size_t at_ = 0;
  Program program_;
  std::vector<std::unordered_map<std::string, int>> scopes_;
  std::unordered_map<std::string, SharedVariable> shared_;
  bool shared_placed_ = false;
  std::unordered_map<std::string, int> parameters_, labels_;
  size_t num_registers_ = 0, num_scopes_ = 0;
  int file_ = 0, source_line_ = 0;
};

}  // namespace

Program parse(const std::string& text, const std::string& kernel) {
  return Parser(text, kernel).run();
}

}  // namespace ptx
