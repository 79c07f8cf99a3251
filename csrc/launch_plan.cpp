#include "launch_plan.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <cstring>
#include <utility>
#include <variant>

#include <ATen/ScalarOps.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/DeviceGuard.h>
#include <c10/util/SmallVector.h>
#include <torch/library.h>

#include "common/registry.h"

namespace fusedops {
namespace {

std::atomic<const LaunchDriver*> current_driver{nullptr};
std::atomic<c10::DeviceType> planned_device{c10::DeviceType::CUDA};

struct Allocate {
  int64_t slot;
  at::ScalarType dtype;
  std::vector<int64_t> sizes, strides;
  bool zeroed;
};

struct View {
  int64_t slot, source, offset;  // elements
  std::vector<int64_t> sizes, strides;
};

// A call of a torch operator. Tensors among its arguments are put in before each call.
struct Call {
  c10::OperatorHandle op;
  std::vector<c10::IValue> arguments;
  std::vector<std::pair<size_t, int64_t>> tensors;  // argument, slot
  std::vector<std::pair<size_t, std::vector<int64_t>>> lists;
  std::vector<int64_t> results;  // slots, -1: what has one already
};

// A kernel's parameter: the address of a slot's tensor and `offset` bytes, a constant, or a map.
enum class ParameterKind : int64_t { address, constant, map };

struct Parameter {
  ParameterKind kind;
  int64_t slot, value;  // value: bytes behind the address, the constant's bits, or the map's index
};

struct Map {
  int64_t slot, offset;
  TensorMap arguments;
};

struct Launch {
  KernelLaunch launch;
  std::vector<Parameter> parameters;
  std::vector<Map> maps;
};

using Step = std::variant<Allocate, View, Call, Launch>;

// Reads the integers of a plan in the order in which fusedops/_core/launch_plans.py writes them.
class Reader {
 public:
  explicit Reader(const std::vector<int64_t>& code) : code_(code) {}

  int64_t number() {
    TORCH_CHECK(at_ < code_.size(), "a launch plan ends too early");
    return code_[at_++];
  }

  std::vector<int64_t> numbers() {
    std::vector<int64_t> result(checked_size());
    for (auto& value : result) value = number();
    return result;
  }

  size_t checked_size() {
    const int64_t size = number();
    TORCH_CHECK(size >= 0 && size <= static_cast<int64_t>(code_.size()),
                "a launch plan is damaged");
    return static_cast<size_t>(size);
  }

  int64_t slot(int64_t count) {
    const int64_t index = number();
    TORCH_CHECK(index >= 0 && index < count, "a launch plan has no slot ", index);
    return index;
  }

  bool done() const { return at_ == code_.size(); }

 private:
  const std::vector<int64_t>& code_;
  size_t at_ = 0;
};

TensorMap read_map(Reader& reader) {
  TensorMap map{};
  map.dtype = static_cast<uint32_t>(reader.number());
  map.swizzle = static_cast<uint32_t>(reader.number());
  map.fill = static_cast<uint32_t>(reader.number());
  const auto sizes = reader.numbers(), strides = reader.numbers(), box = reader.numbers();
  TORCH_CHECK(!sizes.empty() && sizes.size() <= 5 && strides.size() == sizes.size() &&
                  box.size() == sizes.size(),
              "a launch plan has a tensor map of rank ", sizes.size());
  map.rank = static_cast<uint32_t>(sizes.size());
  for (size_t dim = 0; dim < sizes.size(); ++dim) {
    map.sizes[dim] = static_cast<uint64_t>(sizes[dim]);
    map.strides[dim] = static_cast<uint64_t>(strides[dim]);
    map.box[dim] = static_cast<uint32_t>(box[dim]);
  }
  return map;
}

Launch read_launch(Reader& reader, int64_t slots) {
  Launch step{};
  step.launch.function = static_cast<uint64_t>(reader.number());
  for (auto& size : step.launch.grid) size = static_cast<uint32_t>(reader.number());
  step.launch.threads = static_cast<uint32_t>(reader.number());
  step.launch.shared = static_cast<uint32_t>(reader.number());
  for (size_t count = reader.checked_size(); count > 0; --count) {
    Parameter parameter{.kind = static_cast<ParameterKind>(reader.number()), .slot = 0, .value = 0};
    if (parameter.kind == ParameterKind::constant) {
      parameter.value = reader.number();
    } else if (parameter.kind == ParameterKind::address) {
      parameter.slot = reader.slot(slots);
      parameter.value = reader.number();
    } else {
      TORCH_CHECK(parameter.kind == ParameterKind::map, "a launch plan has an unknown parameter");
      parameter.value = static_cast<int64_t>(step.maps.size());
      const int64_t slot = reader.slot(slots);
      const int64_t offset = reader.number();
      step.maps.push_back({.slot = slot, .offset = offset, .arguments = read_map(reader)});
    }
    step.parameters.push_back(parameter);
  }
  return step;
}

// In the order of fusedops/_core/launch_plans.py.
enum class ArgumentKind : int64_t {
  none,
  tensor,
  integer,
  number,
  boolean,
  integers,
  booleans,
  tensors,
  device,
  text
};

c10::OperatorHandle operator_of(const std::string& name) {
  const auto dot = name.find('.');
  const auto overload = dot == std::string::npos ? "" : name.substr(dot + 1);
  return c10::Dispatcher::singleton().findSchemaOrThrow(name.substr(0, dot).c_str(),
                                                        overload.c_str());
}

Call read_call(Reader& reader, int64_t slots, const std::vector<std::string>& texts) {
  const auto text = [&] {
    const auto index = static_cast<size_t>(reader.number());
    TORCH_CHECK(index < texts.size(), "a launch plan has no text ", index);
    return texts[index];
  };
  Call step{.op = operator_of(text()), .arguments = {}, .tensors = {}, .lists = {}, .results = {}};
  for (size_t left = reader.checked_size(); left > 0; --left) {
    c10::IValue value;
    switch (static_cast<ArgumentKind>(reader.number())) {
      case ArgumentKind::none:
        break;
      case ArgumentKind::tensor:
        step.tensors.emplace_back(step.arguments.size(), reader.slot(slots));
        break;
      case ArgumentKind::integer:
        value = reader.number();
        break;
      case ArgumentKind::number:
        value = std::bit_cast<double>(reader.number());
        break;
      case ArgumentKind::boolean:
        value = reader.number() != 0;
        break;
      case ArgumentKind::integers:
        value = reader.numbers();
        break;
      case ArgumentKind::booleans: {
        c10::List<bool> flags;
        for (const auto flag : reader.numbers()) flags.push_back(flag != 0);
        value = std::move(flags);
        break;
      }
      case ArgumentKind::tensors:
        step.lists.emplace_back(step.arguments.size(), reader.numbers());
        for (const auto slot : step.lists.back().second) {
          TORCH_CHECK(slot >= 0 && slot < slots, "a launch plan has no slot ", slot);
        }
        break;
      case ArgumentKind::device: {
        const auto type = static_cast<c10::DeviceType>(reader.number());
        value = at::Device(type, static_cast<c10::DeviceIndex>(reader.number()));
        break;
      }
      case ArgumentKind::text:
        value = text();
        break;
      default:
        TORCH_CHECK(false, "a launch plan has an unknown argument");
    }
    const auto place = step.arguments.size();
    const auto& expected = step.op.schema().arguments().at(place);
    if (value.isScalar() && expected.type()->kind() == c10::TypeKind::TensorType) {
      value = at::native::wrapped_scalar_tensor(value.toScalar());
    }
    step.arguments.push_back(std::move(value));
  }
  step.results = reader.numbers();
  for (const auto slot : step.results) {
    TORCH_CHECK(slot >= -1 && slot < slots, "a launch plan has no slot ", slot);
  }
  return step;
}

Step read_step(Reader& reader, int64_t slots, const std::vector<std::string>& texts) {
  switch (reader.number()) {
    case 0: {
      Allocate step{.slot = reader.slot(slots),
                    .dtype = static_cast<at::ScalarType>(reader.number()),
                    .sizes = {},
                    .strides = {},
                    .zeroed = reader.number() != 0};
      step.sizes = reader.numbers();
      step.strides = reader.numbers();
      return step;
    }
    case 1: {
      View step{.slot = reader.slot(slots),
                .source = reader.slot(slots),
                .offset = reader.number(),
                .sizes = {},
                .strides = {}};
      step.sizes = reader.numbers();
      step.strides = reader.numbers();
      return step;
    }
    case 2:
      return read_call(reader, slots, texts);
    case 3:
      return read_launch(reader, slots);
    default:
      TORCH_CHECK(false, "a launch plan has an unknown step");
  }
}

// The tensors of a call that is running: its arguments, then what its plan allocates.
using Slots = c10::SmallVector<at::Tensor, 24>;

char* address_of(const at::Tensor& tensor, int64_t offset) {
  return static_cast<char*>(tensor.mutable_data_ptr()) + offset;
}

void check(const LaunchDriver& driver, int code, const char* what) {
  TORCH_CHECK(code == 0, "fusedops: ", what, " failed: ", driver.error(code));
}

void call(const Call& step, Slots& slots) {
  torch::jit::Stack stack(step.arguments);
  for (const auto& [argument, slot] : step.tensors) stack[argument] = slots[slot];
  for (const auto& [argument, places] : step.lists) {
    c10::List<at::Tensor> tensors;
    for (const auto slot : places) tensors.push_back(slots[slot]);
    stack[argument] = std::move(tensors);
  }
  step.op.callBoxed(stack);
  size_t next = 0;
  const auto take = [&](const at::Tensor& tensor) {
    const int64_t slot = step.results.at(next++);
    if (slot >= 0) slots[slot] = tensor;
  };
  for (const auto& value : stack) {
    if (value.isTensor()) {
      take(value.toTensor());
    } else {
      for (const auto& tensor : value.toTensorVector()) take(tensor);
    }
  }
}

void launch(const LaunchDriver& driver, const Launch& step, const Slots& slots, void* stream) {
  struct alignas(64) EncodedMap {
    std::array<std::byte, kMapBytes> bytes;
  };
  c10::SmallVector<EncodedMap, 4> maps(step.maps.size());
  for (size_t i = 0; i < maps.size(); ++i) {
    TensorMap arguments = step.maps[i].arguments;
    arguments.address = address_of(slots[step.maps[i].slot], step.maps[i].offset);
    check(driver, driver.encode(&maps[i], &arguments), "encoding a tensor map");
  }
  const size_t count = step.parameters.size();
  c10::SmallVector<int64_t, 64> values(count);
  c10::SmallVector<void*, 64> parameters(count);
  for (size_t i = 0; i < count; ++i) {
    const auto& parameter = step.parameters[i];
    values[i] = parameter.value;
    parameters[i] = &values[i];
    if (parameter.kind == ParameterKind::address) {
      values[i] = std::bit_cast<int64_t>(address_of(slots[parameter.slot], parameter.value));
    } else if (parameter.kind == ParameterKind::map) {
      parameters[i] = &maps[parameter.value];
    }
  }
  KernelLaunch arguments = step.launch;
  arguments.stream = stream;
  arguments.parameters = parameters.data();
  check(driver, driver.launch(&arguments), "the launch of a kernel");
}

thread_local std::shared_ptr<const LaunchPlan> recorded;

}  // namespace

struct LaunchPlan::Steps {
  at::Device device = at::kCPU;
  int64_t num_slots = 0;
  std::vector<Step> steps;
  std::vector<int64_t> results;  // a slot, or -1: no tensor
};

LaunchPlan::LaunchPlan(const std::vector<int64_t>& code, const std::vector<std::string>& texts)
    : steps_(std::make_unique<Steps>()) {
  Reader reader(code);
  const auto type = static_cast<c10::DeviceType>(reader.number());
  steps_->device = at::Device(type, static_cast<c10::DeviceIndex>(reader.number()));
  steps_->num_slots = reader.number();
  for (size_t count = reader.checked_size(); count > 0; --count) {
    steps_->steps.push_back(read_step(reader, steps_->num_slots, texts));
  }
  steps_->results = reader.numbers();
  for (auto slot : steps_->results) {
    TORCH_CHECK(slot >= -1 && slot < steps_->num_slots, "a launch plan has no slot ", slot);
  }
  TORCH_CHECK(reader.done(), "a launch plan has numbers that mean nothing");
}

LaunchPlan::LaunchPlan(const c10::OperatorHandle& native) : native_(native) {}

LaunchPlan::~LaunchPlan() = default;

void LaunchPlan::run(torch::jit::Stack& stack, size_t num_arguments) const {
  if (native_.has_value()) {
    native_->callBoxed(stack);
    return;
  }
  const LaunchDriver& driver = *current_driver.load(std::memory_order_acquire);
  Slots slots(steps_->num_slots);
  const auto arguments = torch::jit::last(stack, num_arguments);
  for (size_t i = 0; i < num_arguments; ++i) {
    if (arguments[i].isTensor()) slots[i] = arguments[i].toTensor();
  }
  const c10::DeviceGuard guard(steps_->device);
  void* stream = driver.stream(steps_->device.index());
  for (const auto& step : steps_->steps) {
    if (const auto* kernel = std::get_if<Launch>(&step)) {
      launch(driver, *kernel, slots, stream);
    } else if (const auto* make = std::get_if<Allocate>(&step)) {
      const auto options = at::TensorOptions().dtype(make->dtype).device(steps_->device);
      slots[make->slot] = at::empty_strided(make->sizes, make->strides, options);
      if (make->zeroed) slots[make->slot].zero_();
    } else if (const auto* view = std::get_if<View>(&step)) {
      const auto& source = slots[view->source];
      slots[view->slot] =
          source.as_strided(view->sizes, view->strides, source.storage_offset() + view->offset);
    } else {
      call(std::get<Call>(step), slots);
    }
  }
  torch::jit::drop(stack, num_arguments);
  for (auto slot : steps_->results) stack.emplace_back(slot < 0 ? at::Tensor() : slots[slot]);
}

bool has_plans(c10::DeviceType device) {
  return current_driver.load(std::memory_order_relaxed) != nullptr &&
         planned_device.load(std::memory_order_relaxed) == device;
}

std::shared_ptr<const LaunchPlan> take_recorded_plan() {
  return std::exchange(recorded, nullptr);
}

}  // namespace fusedops

TORCH_LIBRARY_FRAGMENT(fusedops_native, m) {
  // The plan of the call that runs in this thread: the operator fusedops_cuda::<native>, or what a
  // LaunchPlan is made of.
  m.def("set_recorded_plan(str native, int[] code, str[] texts) -> ()",
        [](std::string native, std::vector<int64_t> code, std::vector<std::string> texts) {
          using fusedops::LaunchPlan;
          fusedops::recorded = native.empty()
                                   ? std::make_shared<const LaunchPlan>(code, texts)
                                   : std::make_shared<const LaunchPlan>(
                                         fusedops::find_operator("fusedops_cuda", native));
        });
  // The addresses of the four functions of a LaunchDriver, and on which kind of device calls have
  // plans. No function: none has.
  m.def("set_launch_driver(int[] functions, Device device) -> ()",
        [](std::vector<int64_t> functions, at::Device device) {
          TORCH_CHECK(functions.empty() || functions.size() == 4,
                      "a launch driver has four functions");
          const fusedops::LaunchDriver* driver = nullptr;
          if (!functions.empty()) {
            auto* made =
                new fusedops::LaunchDriver();  // a plan that is running may hold the one before
            static_assert(sizeof(*made) == 4 * sizeof(int64_t));
            std::memcpy(made, functions.data(), sizeof(*made));
            driver = made;
          }
          fusedops::planned_device.store(device.type());
          fusedops::current_driver.store(driver, std::memory_order_release);
        });
}
