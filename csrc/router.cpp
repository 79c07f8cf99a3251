// Autocast and routing for every op, once, as boxed kernels.
//
// The route of fusedops::X: the first call of a signature (known_calls.h) goes to
// fusedops::X_choose, which is Python (fusedops/_core/backends.py): it checks the call against the
// contract, raises the errors and chooses a backend. Later calls of the same signature skip the
// check, and on the CPU all of Python: the C++ kernel fusedops_cpp::X runs, unless a backend was
// requested or a floating tensor has another dtype than float32, bfloat16, float16 and float64.
#include <algorithm>
#include <array>
#include <atomic>
#include <map>
#include <utility>

#include <ATen/autocast_mode.h>

#include "common/registry.h"
#include "known_calls.h"

namespace fusedops {
namespace {

std::atomic<bool> route_to_python{false};

// Whether the call for which the router asks Python next, in this thread, satisfies its contract.
thread_local bool call_is_checked = false;

// The dtypes of the C++ kernels.
constexpr std::array kDtypes{at::kFloat, at::kBFloat16, at::kHalf, at::kDouble};

// What the router knows of one op.
struct State {
  std::atomic<int64_t> count{0};  // calls of the C++ kernel
  KnownCalls calls;
};

// Lives as long as the process; the map is only written while ops are defined.
std::map<std::string, State>& states() {
  static auto* map = new std::map<std::string, State>();
  return *map;
}

bool has_cpp_dtypes(at::ArrayRef<c10::IValue> arguments) {
  for (const auto& value : arguments) {
    if (!value.isTensor() || !value.toTensor().defined()) continue;
    const auto dtype = value.toTensor().scalar_type();
    const bool is_known = std::find(kDtypes.begin(), kDtypes.end(), dtype) != kDtypes.end();
    if (at::isFloatingType(dtype) && !is_known) return false;
  }
  return true;
}

class Router : public c10::OperatorKernel {
 public:
  // On a GPU (`on_cpu` does not hold) Python chooses.
  Router(const std::string& name, bool on_cpu, std::vector<int64_t> unread)
      : unread_(std::move(unread)),
        choose_(find_operator("fusedops", name + "_choose")),
        state_(states()[name]) {
    if (on_cpu) native_ = c10::Dispatcher::singleton().findSchema({"fusedops_cpp::" + name, ""});
  }

  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet,
                  torch::jit::Stack* stack) const {
    const auto arguments = torch::jit::last(*stack, op.schema().arguments().size());
    const bool to_python = route_to_python.load(std::memory_order_relaxed);
    thread_local Signature signature;
    const bool has_signature = signature.write(arguments, unread_);
    const bool is_known = has_signature && state_.calls.contains(signature);
    if (is_known && native_.has_value() && !to_python && has_cpp_dtypes(arguments)) {
      state_.count.fetch_add(1, std::memory_order_relaxed);
      native_->callBoxed(stack);
      return;
    }
    // The call may run other operators in this thread.
    const Signature own = signature;
    call_is_checked = is_known;
    choose_.callBoxed(stack);
    if (has_signature && !is_known) state_.calls.add(own);
  }

 private:
  std::vector<int64_t> unread_;
  std::optional<c10::OperatorHandle> native_;
  c10::OperatorHandle choose_;
  State& state_;
};

class Autocast : public c10::OperatorKernel {
 public:
  Autocast(std::string rule, c10::DeviceType device)
      : rule_(std::move(rule)),
        device_(device),
        key_(at::autocast::get_autocast_dispatch_key_from_device_type(device)) {}

  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet,
                  torch::jit::Stack* stack) const {
    c10::impl::ExcludeDispatchKeyGuard without_autocast(key_);
    const size_t count = op.schema().arguments().size();
    const auto arguments = torch::jit::last(*stack, count);
    // With rounding "hf" a norm keeps the dtypes, as the models do.
    const auto is_hf = [](const auto& value) {
      return value.isString() && value.toStringView() == "hf";
    };
    const bool keeps = rule_ == "norm" && std::any_of(arguments.begin(), arguments.end(), is_hf);
    const auto dtype = wanted(arguments);
    for (size_t i = 0; i < count && !keeps; ++i) {
      auto& value = torch::jit::peek(*stack, i, count);
      if (value.isTensor() && eligible(value.toTensor())) {
        value = at::autocast::cached_cast(dtype, value.toTensor(), device_);
      }
    }
    op.callBoxed(stack);
  }

 private:
  bool eligible(const at::Tensor& tensor) const {
    return tensor.defined() && tensor.device().type() == device_ &&
           (tensor.scalar_type() == at::kFloat || tensor.scalar_type() == at::kHalf ||
            tensor.scalar_type() == at::kBFloat16);
  }

  at::ScalarType wanted(at::ArrayRef<c10::IValue> arguments) const {
    if (rule_ == "lower") return at::autocast::get_autocast_dtype(device_);
    if (rule_ == "norm") return at::kFloat;
    std::optional<at::ScalarType> widest;
    for (const auto& value : arguments) {
      if (!value.isTensor() || !eligible(value.toTensor())) continue;
      const auto dtype = value.toTensor().scalar_type();
      widest = widest ? at::promote_types(*widest, dtype) : dtype;
    }
    return widest.value_or(at::kFloat);
  }

  std::string rule_;
  c10::DeviceType device_;
  c10::DispatchKey key_;
};

}  // namespace
}  // namespace fusedops

TORCH_LIBRARY_FRAGMENT(fusedops_native, m) {
  // `unread`: places of the numbers that the contract does not read.
  m.def("route(str name, int[] unread) -> ()", [](std::string name, std::vector<int64_t> unread) {
    for (const auto key : {c10::DispatchKey::CPU, c10::DispatchKey::CUDA}) {
      const bool on_cpu = key == c10::DispatchKey::CPU;
      fusedops::install(name, key, std::make_unique<fusedops::Router>(name, on_cpu, unread));
    }
  });
  m.def("autocast(str name, str rule) -> ()", [](std::string name, std::string rule) {
    if (rule != "norm") {
      fusedops::install(name, c10::DispatchKey::AutocastCPU,
                        std::make_unique<fusedops::Autocast>(rule, c10::DeviceType::CPU));
    }
    fusedops::install(name, c10::DispatchKey::AutocastCUDA,
                      std::make_unique<fusedops::Autocast>(rule, c10::DeviceType::CUDA));
  });
  m.def("take_call_is_checked() -> bool",
        [] { return std::exchange(fusedops::call_is_checked, false); });
  m.def("set_route_to_python(bool on) -> ()", [](bool on) { fusedops::route_to_python.store(on); });
  m.def("count(str name) -> int",
        [](std::string name) -> int64_t { return fusedops::states()[name].count.load(); });
  m.def("reset_counts() -> ()", []() {
    for (auto& [name, state] : fusedops::states()) state.count.store(0);
  });
}
