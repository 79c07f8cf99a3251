// Autocast and CPU routing for every op, once, as boxed kernels.
//
// The route of fusedops::X on the CPU: the C++ kernel fusedops_cpp::X when the floating tensors
// are float32, bfloat16 or float64 and no backend was requested; otherwise fusedops::X_choose,
// which is Python and knows the rest (fusedops/_core/backends.py).
#include <atomic>
#include <map>

#include <ATen/autocast_mode.h>

#include "common/registry.h"

namespace fusedops {
namespace {

std::atomic<bool> route_to_python{false};

// Counters live as long as the process; the map is only written while ops are being defined.
std::map<std::string, std::atomic<int64_t>>& counts() {
  static auto* map = new std::map<std::string, std::atomic<int64_t>>();
  return *map;
}

bool has_cpp_dtypes(at::ArrayRef<c10::IValue> arguments) {
  for (const auto& value : arguments) {
    if (!value.isTensor() || !value.toTensor().defined()) continue;
    const auto dtype = value.toTensor().scalar_type();
    if (at::isFloatingType(dtype) && dtype != at::kFloat && dtype != at::kBFloat16 &&
        dtype != at::kDouble) {
      return false;
    }
  }
  return true;
}

class Router : public c10::OperatorKernel {
 public:
  explicit Router(const std::string& name)
      : native_(c10::Dispatcher::singleton().findSchema({"fusedops_cpp::" + name, ""})),
        choose_(find_operator("fusedops", name + "_choose")),
        count_(counts()[name]) {}

  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet,
                  torch::jit::Stack* stack) const {
    const auto arguments = torch::jit::last(*stack, op.schema().arguments().size());
    if (native_.has_value() && !route_to_python.load(std::memory_order_relaxed) &&
        has_cpp_dtypes(arguments)) {
      count_.fetch_add(1, std::memory_order_relaxed);
      native_->callBoxed(stack);
    } else {
      choose_.callBoxed(stack);
    }
  }

 private:
  std::optional<c10::OperatorHandle> native_;
  c10::OperatorHandle choose_;
  std::atomic<int64_t>& count_;
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
    const auto dtype = wanted(torch::jit::last(*stack, count));
    for (size_t i = 0; i < count; ++i) {
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
  m.def("route(str name) -> ()", [](std::string name) {
    fusedops::install(name, c10::DispatchKey::CPU, std::make_unique<fusedops::Router>(name));
  });
  m.def("autocast(str name, str rule) -> ()", [](std::string name, std::string rule) {
    if (rule != "norm") {
      fusedops::install(name, c10::DispatchKey::AutocastCPU,
                        std::make_unique<fusedops::Autocast>(rule, c10::DeviceType::CPU));
    }
    fusedops::install(name, c10::DispatchKey::AutocastCUDA,
                      std::make_unique<fusedops::Autocast>(rule, c10::DeviceType::CUDA));
  });
  m.def("set_route_to_python(bool on) -> ()", [](bool on) { fusedops::route_to_python.store(on); });
  m.def("count(str name) -> int",
        [](std::string name) -> int64_t { return fusedops::counts()[name].load(); });
  m.def("reset_counts() -> ()", []() {
    for (auto& [name, count] : fusedops::counts()) count.store(0);
  });
}
