// See contract.h. A tree of steps is made from the code once; a call walks through it with a few
// small arrays on the stack.
#include "contract.h"

#include <array>
#include <cmath>
#include <forward_list>
#include <map>
#include <optional>
#include <span>
#include <tuple>

#include <c10/util/SmallVector.h>
#include <c10/util/safe_numerics.h>
#include <torch/library.h>

#include "contract_code.h"
#include "launch_plan.h"

namespace fusedops {
namespace {

// `unknown` where a number depends on what is not known, `wrong` where it has no value.
enum class State { known, unknown, wrong };

struct Number {
  int64_t value = 0;
  State state = State::unknown;
};

Number number_if(bool known, int64_t value) {
  return {known ? value : 0, known ? State::known : State::unknown};
}

bool is_given(const c10::IValue& value) {
  return value.isTensor() && value.toTensor().defined();
}

bool is_float(at::ScalarType type) {
  return type == at::kHalf || type == at::kBFloat16 || type == at::kFloat || type == at::kDouble;
}

// One argument while the elements of an index stand in the places of their lists.
struct Column {
  bool is_list = false;
  at::ArrayRef<c10::IValue> elements = {};
};

// What follows from the arguments checked so far.
struct Known {
  at::ArrayRef<c10::IValue> arguments;
  at::ArrayRef<Column> columns = {};  // one for each argument, inside of Elements
  size_t index = 0;
  std::array<std::optional<int64_t>, kMostNames> sizes = {};
  std::array<std::optional<at::IntArrayRef>, kMostNames> lists = {};
  std::array<at::ScalarType, kMostNames> letters;  // Undefined: not known
  // Lists that no tensor holds; `lists` refers to them, so they must not move.
  std::forward_list<c10::SmallVector<int64_t, 8>> kept = {};
  const at::Tensor* layout = nullptr;  // the first tensor that must be dense

  explicit Known(at::ArrayRef<c10::IValue> arguments) : arguments(arguments) {
    letters.fill(at::ScalarType::Undefined);
  }

  const c10::IValue& argument(int64_t place) const {
    static const c10::IValue none;
    if (columns.empty() || !columns[place].is_list) return arguments[place];
    const auto& elements = columns[place].elements;
    return elements.empty() ? none : elements[index];
  }
};

int64_t integer_of(const c10::IValue& value) {
  if (value.isBool()) return value.toBool();
  return value.isInt() ? value.toInt() : value.toSymInt().expect_int();
}

// As in Python the first operand that is not known or is wrong decides, and `and` and `or` look at
// the second one only where they need it.
Number compute(Operation operation, Number a, Number b) {
  if (a.state != State::known) return a;
  if (operation == Operation::both && !a.value) return {0, State::known};
  if (operation == Operation::either && a.value) return {1, State::known};
  if (b.state != State::known) return b;
  Number result{0, State::known};
  bool overflows = false;
  switch (operation) {
    case Operation::add:
      overflows = __builtin_add_overflow(a.value, b.value, &result.value);
      break;
    case Operation::subtract:
      overflows = __builtin_sub_overflow(a.value, b.value, &result.value);
      break;
    case Operation::multiply:
      overflows = __builtin_mul_overflow(a.value, b.value, &result.value);
      break;
    case Operation::divide:
    case Operation::modulo: {
      // As in Python: towards minus infinity.
      if (b.value == 0 || (b.value == -1 && a.value == INT64_MIN)) {
        overflows = true;
        break;
      }
      const int64_t rest = a.value % b.value;
      const bool below = rest != 0 && (rest < 0) != (b.value < 0);
      result.value =
          operation == Operation::divide ? a.value / b.value - below : rest + below * b.value;
      break;
    }
    case Operation::less:
      result.value = a.value < b.value;
      break;
    case Operation::less_equal:
      result.value = a.value <= b.value;
      break;
    case Operation::greater:
      result.value = a.value > b.value;
      break;
    case Operation::greater_equal:
      result.value = a.value >= b.value;
      break;
    case Operation::equal:
      result.value = a.value == b.value;
      break;
    case Operation::not_equal:
      result.value = a.value != b.value;
      break;
    case Operation::both:
    case Operation::either:
      result.value = b.value != 0;
      break;
    default:
      overflows = true;
  }
  if (overflows) result.state = State::wrong;
  return result;
}

}  // namespace

struct Contract::Rules {
  std::vector<std::string> words;
  std::vector<int64_t> tensors;
  std::vector<std::pair<int64_t, int64_t>> lists, letters;  // name, argument
  std::vector<Step> steps;

  Number evaluate(const Expression& code, const Known& known) const {
    std::array<Number, kMostDepth> stack;
    size_t top = 0;
    const auto push = [&](int64_t value) { stack[top++] = {value, State::known}; };
    for (size_t at = 0; at < code.size();) {
      const auto operation = static_cast<Operation>(code[at++]);
      switch (operation) {
        case Operation::constant:
          push(code[at++]);
          break;
        case Operation::size: {
          const auto& size = known.sizes[code[at++]];
          stack[top++] = number_if(size.has_value(), size.value_or(0));
          break;
        }
        case Operation::argument:
          push(integer_of(known.argument(code[at++])));
          break;
        case Operation::word: {
          const auto& value = known.argument(code[at]);
          push(value.toStringView() == words[code[at + 1]]);
          at += 2;
          break;
        }
        case Operation::given:
          push(is_given(known.argument(code[at++])));
          break;
        case Operation::itemsize: {
          const auto& value = known.argument(code[at++]);
          const bool given = is_given(value);
          stack[top++] = number_if(given, given ? value.toTensor().element_size() : 0);
          break;
        }
        case Operation::len: {
          const auto& list = known.lists[code[at++]];
          stack[top++] = number_if(list.has_value(), list ? list->size() : 0);
          break;
        }
        case Operation::item: {
          const auto& list = known.lists[code[at++]];
          Number& number = stack[top - 1];
          if (!list) number = {};
          if (number.state != State::known) break;
          const auto count = static_cast<int64_t>(list->size());
          const int64_t index = number.value + (number.value < 0 ? count : 0);
          const bool inside = index >= 0 && index < count;
          number = inside ? Number{(*list)[index], State::known} : Number{0, State::wrong};
          break;
        }
        case Operation::count:
          push(static_cast<int64_t>(known.argument(code[at++]).toListRef().size()));
          break;
        case Operation::select: {
          top -= 2;
          Number& condition = stack[top - 1];
          if (condition.state == State::known) {
            condition = condition.value ? stack[top] : stack[top + 1];
          }
          break;
        }
        case Operation::unknown:
          stack[top++] = {};
          break;
        default:
          --top;
          stack[top - 1] = compute(operation, stack[top - 1], stack[top]);
      }
    }
    return stack[0];
  }

  // Whether the dtype is right; binds the letter that it has.
  static bool fits(const TensorRule& rule, at::ScalarType type, Known& known) {
    if (rule.binds >= 0) {
      auto& letter = known.letters[rule.binds];
      if (letter != at::ScalarType::Undefined) return letter == type;
      letter = type;
    }
    for (const auto& atom : rule.atoms) {
      if (atom.kind == AtomKind::set) {
        const auto place = static_cast<int64_t>(type);
        if (place < 63 && (atom.operand >> place & 1)) return true;
        continue;
      }
      const auto letter = known.letters[atom.operand];
      if (letter == at::ScalarType::Undefined) {
        if (is_float(type)) return true;
        continue;
      }
      if (atom.kind == AtomKind::mixed) {
        if (is_float(type) && (letter == at::kDouble) == (type == at::kDouble)) return true;
        continue;
      }
      const bool half = letter == at::kHalf || letter == at::kBFloat16;
      if (atom.kind == AtomKind::stat) {
        if (type == (letter == at::kDouble ? at::kDouble : at::kFloat)) return true;
      } else if (type == letter || (atom.kind == AtomKind::param && half && type == at::kFloat)) {
        return true;
      }
    }
    return false;
  }

  static bool broadcasts(at::IntArrayRef sizes, at::IntArrayRef wanted) {
    if (sizes.size() != wanted.size()) return false;
    for (size_t i = 0; i < sizes.size(); ++i) {
      if (sizes[i] != wanted[i] && sizes[i] != 1) return false;
    }
    return true;
  }

  // Whether the sizes are as described; known then has the names that they tell, and if they are
  // not may have some of them.
  bool match(const Shape& shape, at::IntArrayRef sizes, Known& known) const {
    size_t fixed = 0;
    bool free = false;
    for (const auto& each : shape) {
      if (each.kind != SizeKind::list) {
        ++fixed;
      } else if (known.lists[each.name] && !each.shorter) {
        fixed += known.lists[each.name]->size();
      } else {
        free = true;
      }
    }
    if (sizes.size() < fixed || (sizes.size() > fixed && !free)) return false;
    size_t at = 0;
    for (const auto& each : shape) {
      if (each.kind == SizeKind::list) {
        auto& list = known.lists[each.name];
        const bool open_ended = each.shorter || !list;
        const auto part = sizes.slice(at, open_ended ? sizes.size() - fixed : list->size());
        at += part.size();
        if (!list) {
          list = part;
          continue;
        }
        const size_t left_out =
            each.shorter && list->size() > part.size() ? list->size() - part.size() : 0;
        const auto wanted = list->slice(left_out);
        if (!(each.broadcast ? broadcasts(part, wanted) : part == wanted)) return false;
        continue;
      }
      const int64_t size = sizes[at++];
      Number wanted;
      if (each.kind == SizeKind::name) {
        auto& name = known.sizes[each.name];
        if (!name && !each.broadcast) name = size;
        wanted = number_if(name.has_value(), name.value_or(0));
      } else {
        wanted = evaluate(each.expression, known);
      }
      if (wanted.state == State::wrong) return false;
      if (wanted.state == State::known && size != wanted.value && !(each.broadcast && size == 1))
        return false;
    }
    return true;
  }

  bool allows(const TensorRule& rule, Known& known) const {
    const auto& value = known.argument(rule.argument);
    if (!is_given(value)) return rule.optional;
    const auto& tensor = value.toTensor();
    if (!fits(rule, tensor.scalar_type(), known)) return false;
    const auto& last = rule.shapes.back();
    for (const auto& shape : rule.shapes) {
      if (&shape == &last) break;
      const auto sizes = known.sizes;
      const auto lists = known.lists;
      if (match(shape, tensor.sizes(), known)) return !rule.dense || is_laid_out(tensor, known);
      known.sizes = sizes;
      known.lists = lists;
    }
    // Where this one does not fit either the call is refused, whatever is known.
    return match(last, tensor.sizes(), known) && (!rule.dense || is_laid_out(tensor, known));
  }

  static bool is_laid_out(const at::Tensor& tensor, Known& known) {
    if (known.layout == nullptr) known.layout = &tensor;
    const at::Tensor& first = *known.layout;
    if (tensor.is_contiguous() && first.is_contiguous()) return true;
    return tensor.strides() == first.strides() && tensor.is_non_overlapping_and_dense();
  }

  bool allows(const std::shared_ptr<const Elements>& step, Known& known) const {
    const auto list_of = [&](const List& list) {
      return known.argument(list.argument).toListRef();
    };
    const size_t count = list_of(step->lists[0]).size();
    for (const auto& list : step->lists) {
      const size_t size = list_of(list).size();
      if (size != count && !(list.may_be_empty && size == 0)) return false;
    }
    c10::SmallVector<Column, 24> columns(known.arguments.size());
    for (const auto& list : step->lists) columns[list.argument] = {true, list_of(list)};
    for (size_t i = 0; i < count; ++i) {
      Known element(known.arguments);
      element.columns = columns;
      element.index = i;
      element.sizes = known.sizes;
      element.lists = known.lists;
      element.letters = known.letters;
      element.sizes[step->number] = static_cast<int64_t>(i);
      if (!allows(step->steps, element)) return false;
    }
    return true;
  }

  bool allows(const std::vector<Step>& all, Known& known) const {
    for (const auto& step : all) {
      if (!std::visit([&](const auto& each) { return allows(each, known); }, step)) return false;
    }
    return true;
  }

  bool allows(const Definition& step, Known& known) const {
    if (!step.is_list) {
      const auto number = evaluate(step.expression, known);
      if (number.state == State::known) known.sizes[step.name] = number.value;
      return number.state != State::wrong;
    }
    const auto &first = known.lists[step.first], &second = known.lists[step.second];
    if (!first || !second) return true;
    if (first->size() != second->size()) return false;
    c10::SmallVector<int64_t, 8> wide;
    for (size_t i = 0; i < first->size(); ++i) {
      wide.push_back((*second)[i] == 1 ? (*first)[i] : (*second)[i]);
    }
    if (!broadcasts(*first, wide) || !broadcasts(*second, wide)) return false;
    known.lists[step.name] = known.kept.emplace_front(std::move(wide));
    return true;
  }

  bool allows(const Expression& step, Known& known) const {
    const auto number = evaluate(step, known);
    return number.state == State::unknown || (number.state == State::known && number.value != 0);
  }

  static bool allows(const Range& step, Known& known) {
    const double value = known.argument(step.argument).toDouble();
    return (step.low_open ? step.low < value : step.low <= value) &&
           (step.high_open ? value < step.high : value <= step.high);
  }

  static bool allows(const Choice& step, Known& known) {
    const auto word = known.argument(step.argument).toStringView();
    return std::find(step.words.begin(), step.words.end(), word) != step.words.end();
  }

  static bool allows(const Gradients& step, Known& known) {
    bool any = false;
    for (auto place : step.incoming) any |= is_given(known.argument(place));
    const auto mask = known.argument(step.mask).toListRef();
    if (!any || static_cast<int64_t>(mask.size()) != step.count) return false;
    for (const auto& [place, argument] : step.needs) {
      if (mask[place].toBool() && !is_given(known.argument(argument))) return false;
    }
    return true;
  }
};

namespace {

std::map<std::string, Contract>& contracts() {
  static auto* map = new std::map<std::string, Contract>();
  return *map;
}

thread_local Verdict last_verdict = Verdict::none;

}  // namespace

Contract::Contract(const std::vector<int64_t>& code, std::vector<std::string> words,
                   std::vector<double> bounds)
    : rules_(std::make_unique<Rules>()) {
  Reader reader(code, words, bounds);
  for (int i = 0; i < 3; ++i) {
    TORCH_CHECK(reader.number() <= static_cast<int64_t>(kMostNames), "a contract has more than ",
                kMostNames, " names of one kind");
  }
  rules_->tensors = reader.numbers();
  rules_->lists = reader.pairs();
  rules_->letters = reader.pairs();
  rules_->steps = reader.steps();
  rules_->words = std::move(words);
}

Contract::~Contract() = default;

bool Contract::allows(at::ArrayRef<c10::IValue> arguments) const {
  Known known(arguments);
  const at::Tensor* first = nullptr;
  const auto is_beside_first = [&](const c10::IValue& value) {
    if (!is_given(value)) return true;
    const auto& tensor = value.toTensor();
    if (first == nullptr) first = &tensor;
    return tensor.device() == first->device();
  };
  for (auto place : rules_->tensors) {
    if (!arguments[place].isList()) {
      if (!is_beside_first(arguments[place])) return false;
      continue;
    }
    for (const auto& element : arguments[place].toListRef()) {
      if (!is_beside_first(element)) return false;
    }
  }
  for (const auto& [name, place] : rules_->letters) {
    const auto type = static_cast<at::ScalarType>(arguments[place].toInt());
    if (!is_float(type)) return false;
    known.letters[name] = type;
  }
  for (const auto& [name, place] : rules_->lists) {
    c10::SmallVector<int64_t, 8> sizes;
    for (const auto& each : arguments[place].toListRef()) sizes.push_back(integer_of(each));
    known.lists[name] = known.kept.emplace_front(std::move(sizes));
  }
  return rules_->allows(rules_->steps, known);
}

const Contract* contract_of(const std::string& name) {
  const auto found = contracts().find(name);
  return found == contracts().end() ? nullptr : &found->second;
}

void set_verdict(Verdict verdict) {
  last_verdict = verdict;
}

}  // namespace fusedops

TORCH_LIBRARY_FRAGMENT(fusedops_native, m) {
  m.def("contract(str name, int[] code, str[] words, float[] bounds) -> ()",
        [](std::string name, std::vector<int64_t> code, std::vector<std::string> words,
           std::vector<double> bounds) {
          fusedops::contracts().try_emplace(name, code, std::move(words), std::move(bounds));
        });
  // The verdict of the router, and the number of the plan that it requests.
  m.def("take_verdict() -> (int, int)", [] {
    const auto verdict = std::exchange(fusedops::last_verdict, fusedops::Verdict::none);
    return std::tuple(static_cast<int64_t>(verdict), fusedops::take_plan_request());
  });
}
