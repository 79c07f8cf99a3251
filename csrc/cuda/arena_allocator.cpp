// Steps in an arena on a GPU: which allocations an arena serves, and what else its buffers need.
#include "arena_allocator.h"

#if FUSEDOPS_KNOWS_CUDA_ALLOCATOR
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAStream.h>

#include <array>
#include <atomic>
#include <mutex>

namespace fusedops::cuda {
namespace {

using arena::Released;
using arena::Ticket;

bool is_capturing(cudaStream_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  return cudaStreamIsCapturing(stream, &status) != cudaSuccess ||
         status != cudaStreamCaptureStatusNone;
}

// A device is current while this lives. Unlike torch's guard it throws nothing.
class OnDevice {
 public:
  explicit OnDevice(int index) : before_(static_cast<c10::DeviceIndex>(index)) {
    c10::cuda::GetDevice(&before_);
    c10::cuda::SetDevice(static_cast<c10::DeviceIndex>(index));
  }
  ~OnDevice() { c10::cuda::SetDevice(before_); }
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;

 private:
  c10::DeviceIndex before_;
};

class ArenaAllocator final : public ForwardingAllocator {
 public:
  using ForwardingAllocator::ForwardingAllocator;

  c10::DataPtr allocate(size_t nbytes) override {
    const c10::DeviceIndex device = c10::cuda::current_device();
    arena::StepArena* const step = arena::current_on(device);
    // A pool of the user's, or of a CUDA graph, gets what is allocated for it.
    if (step == nullptr || nbytes == 0 || pools_[device].load() > 0) {
      return before_->allocate(nbytes);
    }
    const cudaStream_t stream = c10::cuda::getCurrentCUDAStream(device).stream();
    if (is_capturing(stream)) return before_->allocate(nbytes);
    Ticket ticket;
    void* const pointer = arena::allocate(*step, static_cast<int64_t>(nbytes), &ticket, stream);
    const c10::Device place(c10::DeviceType::CUDA, device);
    if (pointer != nullptr) return {pointer, pointer, &free, place};
    c10::DataPtr other = before_->allocate(nbytes);
    if (ticket.arena == nullptr || other.get() != other.get_context()) return other;
    ticket.deleter = other.get_deleter();
    ticket.context = other.release_context();
    arena::track(ticket.context, ticket);
    return {ticket.context, ticket.context, &free, place};
  }

  c10::DeleterFnPtr raw_deleter() const override { return &free; }

  using ForwardingAllocator::recordStream;
  void recordStream(const c10::DataPtr& pointer, c10::cuda::CUDAStream stream) override {
    Ticket ticket;
    switch (arena::use_on(pointer.get(), stream.stream(), &ticket)) {
      case Released::kInBlock:
        return;
      case Released::kElsewhere: {
        // The caching allocator knows its memory by the function that frees it.
        c10::DataPtr other(pointer.get(), ticket.context, ticket.deleter, pointer.device());
        before_->recordStream(other, stream);
        other.release_context();
        return;
      }
      case Released::kUnknown:
        before_->recordStream(pointer, stream);
    }
  }

  // The caching allocator knows the block, not what lies in it.
  void* getBaseAllocation(void* pointer, size_t* size) override {
    const auto block = arena::block_of(pointer);
    return before_->getBaseAllocation(block == nullptr ? pointer : block->base, size);
  }

  caching::ShareableHandle shareIpcHandle(void* pointer) override {
    const auto block = arena::block_of(pointer);
    if (block == nullptr) return before_->shareIpcHandle(pointer);
    auto handle = before_->shareIpcHandle(block->base);
    handle.offset += static_cast<char*>(pointer) - block->base;
    return handle;
  }

  void beginAllocateToPool(c10::DeviceIndex device, c10::MempoolId_t pool,
                           std::function<bool(cudaStream_t)> filter) override {
    before_->beginAllocateToPool(device, pool, std::move(filter));
    ++pools_[device];
  }

  void endAllocateToPool(c10::DeviceIndex device, c10::MempoolId_t pool) override {
    before_->endAllocateToPool(device, pool);
    --pools_[device];
  }

 private:
  static void free(void* pointer);

  std::array<std::atomic<int>, arena::kMostDevices> pools_{};  // that are filled, by device
};

ArenaAllocator* installed = nullptr;
caching::CUDAAllocator* native = nullptr;  // the one before it

void ArenaAllocator::free(void* pointer) {
  if (arena::release(pointer) == Released::kUnknown) native->raw_deleter()(pointer);
}

class CudaDevice final : public arena::Device {
 public:
  using arena::Device::Device;

  void* allocate(int64_t size, void* stream) override {
    const OnDevice guard(index);
    // The memory of the steps before, which the caching allocator keeps, becomes the block.
    native->emptyCache();
    return native->raw_alloc_with_stream(size, static_cast<cudaStream_t>(stream));
  }

  void free(void* pointer) override { native->raw_delete(pointer); }

  // Never throws: buffers are freed by destructors.
  void* record(void* stream) override {
    const auto queue = static_cast<cudaStream_t>(stream);
    if (is_capturing(queue)) return nullptr;
    const OnDevice guard(index);
    cudaEvent_t event = nullptr;
    if (cudaEventCreateWithFlags(&event, cudaEventDisableTiming) == cudaSuccess &&
        cudaEventRecord(event, queue) != cudaSuccess) {
      cudaEventDestroy(event);
      event = nullptr;
    }
    return event;
  }

  void wait(void* stream, void* event) override {
    const auto seen = static_cast<cudaEvent_t>(event);
    C10_CUDA_CHECK_WARN(cudaStreamWaitEvent(static_cast<cudaStream_t>(stream), seen, 0));
    C10_CUDA_CHECK_WARN(cudaEventDestroy(seen));
  }
};

void install() {
  static std::once_flag once;
  std::call_once(once, [] {
    native = caching::get();
    TORCH_CHECK(native->name() == "native",
                "use_arena needs torch's caching allocator on a GPU, got the allocator '",
                native->name(), "': unset the backend of PYTORCH_ALLOC_CONF");
    installed = new ArenaAllocator(native);
    caching::allocator.store(installed);
  });
}

}  // namespace

arena::Device* arena_device(int index) {
  TORCH_CHECK(0 <= index && index < arena::kMostDevices, "use_arena: there is no device ", index);
  install();
  static std::array<arena::Device*, arena::kMostDevices> devices{};
  static std::mutex lock;
  const std::lock_guard guard(lock);
  if (devices[index] == nullptr) devices[index] = new CudaDevice(index);
  return devices[index];
}

void* current_stream(int index) {
  return c10::cuda::getCurrentCUDAStream(static_cast<c10::DeviceIndex>(index)).stream();
}

}  // namespace fusedops::cuda
#endif
