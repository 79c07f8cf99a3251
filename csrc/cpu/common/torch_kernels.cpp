// Replaces torch's own kernels of some operators on the CPU, and restores them (fusedops/cpu.py).
//
// The kernels are registered in torch's dispatcher, above its own, as long as a torch::Library
// lives. One that cannot run a call, or is not faster, calls torch's by static dispatch (at::cpu).
#include "torch_kernels.h"

#include <array>
#include <atomic>
#include <memory>
#include <mutex>

#include <c10/util/Exception.h>

namespace fusedops {
namespace {

constexpr std::array kNames{"mm",
                            "addmm",
                            "addmv",
                            "bmm",
                            "baddbmm",
                            "scaled_dot_product_attention",
                            "scaled_dot_product_attention_backward"};
constexpr size_t kCount = static_cast<size_t>(TorchOperator::count);
static_assert(kNames.size() == kCount);

std::atomic<bool> replaces_bfloat16{false}, replaces_float16{false};
std::atomic<int64_t> least{0};
std::array<std::array<std::atomic<int64_t>, 2>, kCount> calls{};  // bfloat16, float16

std::mutex mutex;
std::unique_ptr<torch::Library>& library() {
  static auto* owner = new std::unique_ptr<torch::Library>();  // not destroyed after the dispatcher
  return *owner;
}

// torch warns that a kernel is registered twice, which is the purpose here.
struct NoWarnings : c10::WarningHandler {
  void process(const c10::Warning&) override {}
};

void replace(bool bfloat16, bool float16, int64_t least_multiplications) {
  const std::lock_guard<std::mutex> lock(mutex);
  if (library() != nullptr) return;
  replaces_bfloat16 = bfloat16;
  replaces_float16 = float16;
  least = least_multiplications;
  for (auto& counts : calls) {
    for (auto& count : counts) count = 0;
  }
  NoWarnings handler;
  const c10::WarningUtils::WarningHandlerGuard guard(&handler);
  auto made = std::make_unique<torch::Library>(torch::Library::IMPL, "aten", c10::DispatchKey::CPU,
                                               __FILE__, __LINE__);
  replace_products(*made);
  replace_attention(*made);
  library() = std::move(made);
}

void restore() {
  const std::lock_guard<std::mutex> lock(mutex);
  library().reset();
}

c10::Dict<std::string, int64_t> counts() {
  c10::Dict<std::string, int64_t> found;
  for (size_t i = 0; i < kCount; ++i) {
    const std::string name = kNames[i];
    if (const int64_t count = calls[i][0]) found.insert(name + " bfloat16", count);
    if (const int64_t count = calls[i][1]) found.insert(name + " float16", count);
  }
  return found;
}

}  // namespace

bool is_replaced(const at::Tensor& tensor) {
  const auto dtype = tensor.scalar_type();
  return ((dtype == at::kHalf && replaces_float16.load(std::memory_order_relaxed)) ||
          (dtype == at::kBFloat16 && replaces_bfloat16.load(std::memory_order_relaxed))) &&
         tensor.layout() == at::kStrided;
}

int64_t least_product() {
  return least.load(std::memory_order_relaxed);
}

void count_call(TorchOperator called, const at::Tensor& tensor) {
  const bool is_float16 = tensor.scalar_type() == at::kHalf;
  calls[static_cast<size_t>(called)][is_float16 ? 1 : 0].fetch_add(1, std::memory_order_relaxed);
}

}  // namespace fusedops

TORCH_LIBRARY_FRAGMENT(fusedops_native, m) {
  m.def("replace_torch_kernels(bool bfloat16, bool float16, int least) -> ()", fusedops::replace);
  m.def("restore_torch_kernels() -> ()", fusedops::restore);
  m.def("torch_kernels_are_replaced() -> bool", [] { return fusedops::library() != nullptr; });
  m.def("replaced_calls() -> Dict(str, int)", fusedops::counts);
}
