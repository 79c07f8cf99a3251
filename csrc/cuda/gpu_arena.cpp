// Arenas on a GPU for Python.
#include "../runtime/arena/step_arena_binding.h"
#include "arena_allocator.h"

#if FUSEDOPS_KNOWS_CUDA_ALLOCATOR
namespace fusedops::cuda {
namespace {

class GpuArena final : public StepArenaBinding {
 public:
  explicit GpuArena(int64_t device)
      : StepArenaBinding(arena_device(static_cast<int>(device))),
        device_(static_cast<int>(device)) {}

  bool begin(int64_t plan) override { return arena_->begin(plan, current_stream(device_)); }

 private:
  const int device_;
};

}  // namespace
}  // namespace fusedops::cuda

TORCH_LIBRARY_FRAGMENT(fusedops_cuda, m) {
  fusedops::bind_step_arena<fusedops::cuda::GpuArena>(m, torch::init<int64_t>());
}
#endif
