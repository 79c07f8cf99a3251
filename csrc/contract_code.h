// The code of a contract: what its integers mean, as fusedops/_core/_contract_code.py writes them,
// and what contract.cpp reads them into. Included there alone.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <variant>
#include <vector>

namespace fusedops {
namespace {

constexpr size_t kMostNames = 16;  // of each kind, in one operator
constexpr size_t kMostDepth = 16;  // of an expression

// In the order of _OPERATIONS.
enum class Operation : int64_t {
  constant,
  size,
  argument,
  word,
  given,
  itemsize,
  len,
  item,
  select,
  add,
  subtract,
  multiply,
  divide,
  modulo,
  less,
  less_equal,
  greater,
  greater_equal,
  equal,
  not_equal,
  both,
  either,
  unknown,
  count
};

using Expression = std::vector<int64_t>;

enum class AtomKind : int64_t { set, same, param, stat, mixed };

struct Atom {
  AtomKind kind;
  int64_t operand;  // a set of bits, or a letter
};

enum class SizeKind : int64_t { expression, list, name };

struct Size {
  bool broadcast;
  bool shorter;  // a broadcast list may lack its first sizes
  SizeKind kind;
  int64_t name = 0;
  Expression expression = {};
};

using Shape = std::vector<Size>;

struct TensorRule {
  int64_t argument;
  bool optional;
  bool dense;  // without gaps, laid out as the first such tensor
  int64_t binds;
  std::vector<Atom> atoms;
  std::vector<Shape> shapes;
};

struct Definition {
  bool is_list;
  int64_t name;
  int64_t first = 0, second = 0;
  Expression expression = {};
};

struct Range {
  int64_t argument;
  double low, high;
  bool low_open, high_open;
};

struct Choice {
  int64_t argument;
  std::vector<std::string> words;
};

struct Gradients {
  std::vector<int64_t> incoming;
  int64_t mask, count;
  std::vector<std::pair<int64_t, int64_t>> needs;
};

// A list of tensors; the first one's length is that of all, but for those that are empty and may.
struct List {
  int64_t argument;
  bool may_be_empty;
};

struct Elements;

using Step = std::variant<TensorRule, Definition, Expression, Range, Choice, Gradients,
                          std::shared_ptr<const Elements>>;

// Steps for the elements of one index, which then stand in the places of their lists.
struct Elements {
  std::vector<List> lists;
  int64_t number;  // the size that is the index
  std::vector<Step> steps;
};

// Reads the integers of a code from the front.
class Reader {
 public:
  Reader(const std::vector<int64_t>& code, const std::vector<std::string>& words,
         const std::vector<double>& bounds)
      : code_(code), words_(words), bounds_(bounds) {}

  int64_t number() { return code_.at(at_++); }

  std::vector<int64_t> numbers() {
    const int64_t count = number();
    std::vector<int64_t> found;
    for (int64_t i = 0; i < count; ++i) found.push_back(number());
    return found;
  }

  std::vector<std::pair<int64_t, int64_t>> pairs() {
    const int64_t count = number();
    std::vector<std::pair<int64_t, int64_t>> found;
    for (int64_t i = 0; i < count; ++i) {
      const int64_t first = number();
      found.emplace_back(first, number());
    }
    return found;
  }

  std::vector<Step> steps() {
    std::vector<Step> found(number());
    for (auto& each : found) each = step();
    return found;
  }

 private:
  Step step() {
    switch (number()) {
      case 1:
        return tensor();
      case 2: {
        Definition step{.is_list = number() != 0, .name = number()};
        if (step.is_list) {
          step.first = number();
          step.second = number();
        } else {
          step.expression = numbers();
        }
        return step;
      }
      case 3:
        return numbers();
      case 4: {
        const int64_t argument = number(), place = number();
        const bool low_open = number() != 0, high_open = number() != 0;
        return Range{argument, bounds_.at(place), bounds_.at(place + 1), low_open, high_open};
      }
      case 5: {
        Choice step{.argument = number(), .words = {}};
        for (auto each : numbers()) step.words.push_back(words_.at(each));
        return step;
      }
      case 7: {
        auto step = std::make_shared<Elements>();
        step->lists.resize(number());
        for (auto& list : step->lists) {
          list.argument = number();
          list.may_be_empty = number() != 0;
        }
        step->number = number();
        step->steps = steps();
        return step;
      }
      default: {
        Gradients step{.incoming = numbers(), .mask = number(), .count = number(), .needs = {}};
        step.needs = pairs();
        return step;
      }
    }
  }

  TensorRule tensor() {
    TensorRule rule{.argument = number(),
                    .optional = number() != 0,
                    .dense = number() != 0,
                    .binds = number(),
                    .atoms = {},
                    .shapes = {}};
    const int64_t atoms = number();
    for (int64_t i = 0; i < atoms; ++i) {
      const auto kind = static_cast<AtomKind>(number());
      rule.atoms.push_back({kind, number()});
    }
    rule.shapes.resize(number());
    for (auto& shape : rule.shapes) {
      shape.resize(number());
      for (auto& size : shape) {
        const int64_t how = number();
        size.broadcast = how > 0;
        size.shorter = how > 1;
        size.kind = static_cast<SizeKind>(number());
        if (size.kind == SizeKind::expression) {
          size.expression = numbers();
        } else {
          size.name = number();
        }
      }
    }
    return rule;
  }

  const std::vector<int64_t>& code_;
  const std::vector<std::string>& words_;
  const std::vector<double>& bounds_;
  size_t at_ = 0;
};

}  // namespace
}  // namespace fusedops
