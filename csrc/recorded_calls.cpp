// The operator calls of a function, recorded once and run again with other inputs.
//
// A decoding step of a small model spends a third of its time in Python: modules, arguments, views.
// The same calls from a list take some 2 us each. It is the CUDA graph of a CPU: the calls see the
// dispatcher as before (autograd, autocast and routing included), results are allocated by the
// operators, and only the decisions of Python are fixed. Two recordings that are equal show that
// these decisions do not depend on the step (fusedops/generation/recorded_step.py).
#include <algorithm>
#include <memory>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <ATen/record_function.h>
#include <torch/custom_class.h>
#include <torch/library.h>

namespace fusedops {
namespace {

using Tensors = std::vector<at::Tensor>;

// Where a tensor argument comes from: `element` of a list, or -1.
struct Place {
  int64_t argument, element, value;
  bool operator==(const Place&) const = default;
};

struct Call {
  c10::OperatorHandle op;
  std::vector<c10::IValue> arguments;  // those of `places` are empty
  std::vector<Place> places;
  std::vector<int64_t> results;   // numbers of values: of all tensors, lists in their order
  std::vector<int64_t> released;  // values that no later call needs
};

bool are_equal(const c10::IValue& left, const c10::IValue& right) {
  if (left.isTensor() && right.isTensor()) {
    const auto &a = left.toTensor(), &b = right.toTensor();
    if (!a.defined() || !b.defined() || !a.unsafeGetTensorImpl()->is_wrapped_number()) {
      return a.is_same(b);
    }
    return b.unsafeGetTensorImpl()->is_wrapped_number() && a.scalar_type() == b.scalar_type() &&
           c10::IValue(a.item()) == c10::IValue(b.item());
  }
  if (left.isTensorList() || right.isTensorList()) {
    if (!left.isTensorList() || !right.isTensorList()) return false;
    const auto a = left.toTensorVector(), b = right.toTensorVector();
    return std::equal(a.begin(), a.end(), b.begin(), b.end(),
                      [](const auto& x, const auto& y) { return x.is_same(y); });
  }
  if (left.isList() && right.isList()) {
    const auto a = left.toListRef(), b = right.toListRef();
    return std::equal(a.begin(), a.end(), b.begin(), b.end(), are_equal);
  }
  return left == right;
}

bool are_equal(const Call& a, const Call& b) {
  return a.op.operator_name() == b.op.operator_name() && a.places == b.places &&
         a.results == b.results &&
         std::equal(a.arguments.begin(), a.arguments.end(), b.arguments.begin(), b.arguments.end(),
                    [](const auto& x, const auto& y) { return are_equal(x, y); });
}

class RecordedCalls : public torch::CustomClassHolder {
 public:
  // Records the calls of this thread until `stop`. The calls may read `inputs`, which later runs
  // replace, and `constants`, which they find where they are.
  void start(const Tensors& inputs, const Tensors& constants) {
    TORCH_CHECK(recording == nullptr, "RecordedCalls: this thread records already");
    for (const auto& tensor : inputs) number_of(tensor);
    num_inputs_ = inputs.size();
    for (const auto& tensor : constants) constants_.emplace(tensor.unsafeGetTensorImpl(), tensor);
    recording = this;
    handle_ = at::addThreadLocalCallback(at::RecordFunctionCallback(enter, leave)
                                             .needsInputs(true)
                                             .needsOutputs(true)
                                             .scopes({at::RecordScope::FUNCTION}));
  }

  // Ends the recording; `outputs` are the results of the runs. Returns why the calls cannot be run
  // again, or "".
  std::string stop(const Tensors& outputs) {
    TORCH_CHECK(recording == this, "RecordedCalls: this thread records nothing");
    at::removeCallback(handle_);
    recording = nullptr;
    for (const auto& tensor : outputs) {
      outputs_.push_back(known(tensor));
      if (outputs_.back() < 0) refuse("a result comes from no call");
    }
    num_values_ = kept_.size();
    constants_.clear();
    numbers_.clear();
    kept_.clear();
    if (reason_.empty()) release();
    return reason_;
  }

  bool equals(const c10::intrusive_ptr<RecordedCalls>& other) const {
    return outputs_ == other->outputs_ && num_inputs_ == other->num_inputs_ &&
           std::equal(calls_.begin(), calls_.end(), other->calls_.begin(), other->calls_.end(),
                      [](const Call& a, const Call& b) { return are_equal(a, b); });
  }

  Tensors run(const Tensors& inputs) const {
    TORCH_CHECK(recording != this && reason_.empty() && inputs.size() == num_inputs_,
                "RecordedCalls: nothing is recorded for ", inputs.size(), " inputs");
    Tensors values(num_values_);
    std::copy(inputs.begin(), inputs.end(), values.begin());
    torch::jit::Stack stack;
    for (const auto& call : calls_) {
      stack.assign(call.arguments.begin(), call.arguments.end());
      for (auto place = call.places.begin(); place != call.places.end();) {
        auto& argument = stack[place->argument];
        if (place->element < 0) {
          argument = values[place++->value];
          continue;
        }
        const auto list = argument.toList().copy();
        const auto index = place->argument;
        for (; place != call.places.end() && place->argument == index; ++place) {
          list.set(place->element, values[place->value]);
        }
        argument = list;
      }
      call.op.callBoxed(&stack);
      auto result = call.results.begin();
      for_each_tensor(stack, [&](const at::Tensor& tensor) { values[*result++] = tensor; });
      for (const auto value : call.released) values[value].reset();
    }
    Tensors outputs;
    for (const auto value : outputs_) outputs.push_back(values[value]);
    return outputs;
  }

 private:
  template <typename F>
  static void for_each_tensor(at::ArrayRef<c10::IValue> values, const F& function) {
    for (const auto& value : values) {
      if (value.isTensor()) {
        function(value.toTensor());
      } else if (value.isTensorList()) {
        for (const auto& tensor : value.toTensorVector()) function(tensor);
      }
    }
  }

  static std::unique_ptr<at::ObserverContext> enter(const at::RecordFunction& function) {
    if (recording != nullptr && recording->depth_++ == 0) recording->begin_call(function);
    return nullptr;
  }

  static void leave(const at::RecordFunction& function, at::ObserverContext*) {
    if (recording != nullptr && --recording->depth_ == 0) recording->end_call(function);
  }

  void begin_call(const at::RecordFunction& function) {
    const auto name = function.operator_name();
    const auto op = name ? c10::Dispatcher::singleton().findSchema(*name) : std::nullopt;
    if (!op) return refuse(std::string(function.name()) + " is no operator");
    for (const auto tag : op->getTags()) {
      if (tag == at::Tag::data_dependent_output || tag == at::Tag::dynamic_output_shape) {
        refuse(c10::toString(*name) + " depends on the values of tensors");
      }
    }
    Call call{*op, {}, {}, {}, {}};
    for (const auto& argument : function.inputs()) {
      const auto index = static_cast<int64_t>(call.arguments.size());
      if (argument.isTensor()) {
        call.arguments.push_back(taken(argument.toTensor(), index, -1, call));
      } else if (argument.isList()) {
        // Lists are shared by their copies, and a run must not write to this one.
        const auto list = argument.toList().copy();
        for (size_t i = 0; i < list.size(); ++i) {
          const c10::IValue element = list.get(i);
          if (element.isTensor()) {
            list.set(i, taken(element.toTensor(), index, static_cast<int64_t>(i), call));
          }
        }
        call.arguments.emplace_back(list);
      } else {
        call.arguments.push_back(argument);
      }
    }
    calls_.push_back(std::move(call));
  }

  void end_call(const at::RecordFunction& function) {
    if (!reason_.empty() || calls_.empty()) return;
    for_each_tensor(function.outputs(), [&](const at::Tensor& tensor) {
      calls_.back().results.push_back(number_of(tensor));
    });
  }

  // What a call keeps of a tensor argument: nothing of a value.
  at::Tensor taken(const at::Tensor& tensor, int64_t argument, int64_t element, Call& call) {
    if (!tensor.defined()) return tensor;
    if (const auto value = known(tensor); value >= 0) {
      call.places.push_back({argument, element, value});
      return {};
    }
    auto* impl = tensor.unsafeGetTensorImpl();
    if (!impl->is_wrapped_number() && !constants_.contains(impl)) {
      refuse(c10::toString(call.op.operator_name()) + " reads a tensor that no call made");
    }
    return tensor;
  }

  // The number of a tensor that is a value, or -1. Torch's factories (torch.arange) return another
  // tensor object with the same memory than their operator.
  int64_t known(const at::Tensor& tensor) const {
    const auto same = numbers_.find(tensor.unsafeGetTensorImpl());
    if (same != numbers_.end()) return same->second;
    for (size_t value = 0; value < kept_.size(); ++value) {
      if (kept_[value].defined() && kept_[value].is_alias_of(tensor) &&
          kept_[value].dtype() == tensor.dtype() && kept_[value].sizes() == tensor.sizes() &&
          kept_[value].strides() == tensor.strides() &&
          kept_[value].storage_offset() == tensor.storage_offset()) {
        return static_cast<int64_t>(value);
      }
    }
    return -1;
  }

  // The number of a value. It is kept alive until the end, so that no other tensor takes its place.
  int64_t number_of(const at::Tensor& tensor) {
    const auto next = static_cast<int64_t>(kept_.size());
    if (!tensor.defined()) {
      kept_.push_back(tensor);
      return next;
    }
    const auto [known, is_new] = numbers_.emplace(tensor.unsafeGetTensorImpl(), next);
    if (is_new) kept_.push_back(tensor);
    return known->second;
  }

  void release() {
    std::vector<int64_t> last(num_values_, -1);
    for (size_t i = 0; i < calls_.size(); ++i) {
      for (const auto& place : calls_[i].places) last[place.value] = static_cast<int64_t>(i);
      for (const auto value : calls_[i].results) last[value] = static_cast<int64_t>(i);
    }
    for (const auto value : outputs_) last[value] = -1;
    for (size_t value = 0; value < num_values_; ++value) {
      if (last[value] >= 0) calls_[last[value]].released.push_back(static_cast<int64_t>(value));
    }
  }

  void refuse(const std::string& reason) {
    if (reason_.empty()) reason_ = reason;
  }

  static thread_local RecordedCalls* recording;

  std::vector<Call> calls_;
  std::vector<int64_t> outputs_;
  size_t num_inputs_ = 0, num_values_ = 0;
  std::string reason_;
  // While it records
  at::CallbackHandle handle_ = 0;
  int64_t depth_ = 0;
  std::unordered_map<c10::TensorImpl*, at::Tensor> constants_;
  std::unordered_map<c10::TensorImpl*, int64_t> numbers_;
  Tensors kept_;
};

thread_local RecordedCalls* RecordedCalls::recording = nullptr;

}  // namespace
}  // namespace fusedops

TORCH_LIBRARY_FRAGMENT(fusedops_native, m) {
  using fusedops::RecordedCalls;
  m.class_<RecordedCalls>("RecordedCalls")
      .def(torch::init<>())
      .def("start", &RecordedCalls::start)
      .def("stop", &RecordedCalls::stop)
      .def("equals", &RecordedCalls::equals)
      .def("run", &RecordedCalls::run);
}
