// Steps in an arena of a GPU, on streams that are threads of the host: a buffer keeps its values
// until every stream that uses it is done, whatever was planned and whoever frees it.
//
// The allocator is that of csrc/cuda. CUDA's runtime, torch's streams and its caching allocator are
// stand-ins: work on a stream is a function that its thread runs later.
#include "cuda/arena_allocator.h"

#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAStream.h>

#include <atomic>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <mutex>
#include <random>
#include <thread>
#include <vector>

namespace arena = fusedops::arena;
namespace caching = c10::cuda::CUDACachingAllocator;

namespace {

void check(bool condition, const char* what) {
  if (condition) return;
  std::fprintf(stderr, "%s\n", what);
  std::_Exit(1);
}

// A stream: what is queued runs in order, on a thread of its own.
class Queue {
 public:
  Queue() : thread_([this] { run(); }) {}
  ~Queue() {
    push(nullptr);
    thread_.join();
  }

  void push(std::function<void()> work) {
    const std::lock_guard guard(lock_);
    works_.push_back(std::move(work));
    changed_.notify_one();
  }

  void synchronize() {
    std::atomic<bool> done = false;
    push([&] {
      done = true;
      done.notify_one();
    });
    done.wait(false);
  }

  std::atomic<bool> capturing = false;

 private:
  void run() {
    for (;;) {
      std::unique_lock guard(lock_);
      changed_.wait(guard, [this] { return !works_.empty(); });
      const auto work = std::move(works_.front());
      works_.pop_front();
      guard.unlock();
      if (!work) return;
      work();
    }
  }

  std::mutex lock_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> works_;
  std::thread thread_;  // last: it uses the others
};

using Signal = std::shared_ptr<std::atomic<bool>>;

Queue* queue_of(void* stream) {
  return static_cast<Queue*>(stream);
}

thread_local Queue* current_queue = nullptr;
std::atomic<int> waits = 0, native_streams = 0;

}  // namespace

// CUDA's runtime.
cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int) {
  return cudaSuccess;
}
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  *status =
      queue_of(stream)->capturing ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned int) {
  *event = reinterpret_cast<cudaEvent_t>(new Signal(std::make_shared<std::atomic<bool>>(false)));
  return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  queue_of(stream)->push([signal = *reinterpret_cast<Signal*>(event)] {
    *signal = true;
    signal->notify_all();
  });
  return cudaSuccess;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned int) {
  waits += queue_of(stream) == current_queue;
  queue_of(stream)->push([signal = *reinterpret_cast<Signal*>(event)] { signal->wait(false); });
  return cudaSuccess;
}
cudaError_t cudaEventDestroy(cudaEvent_t event) {
  delete reinterpret_cast<Signal*>(event);
  return cudaSuccess;
}
cudaError_t cudaGetLastError() {
  return cudaSuccess;
}
const char* cudaGetErrorString(cudaError_t) {
  return "";
}
cudaError_t cudaMemGetInfo(size_t*, size_t*) {
  return cudaErrorNotSupported;
}

// Torch's part of it.
namespace c10::cuda {
DeviceIndex current_device() {
  return 0;
}
DeviceIndex ExchangeDevice(DeviceIndex) {
  return 0;
}
DeviceIndex MaybeExchangeDevice(DeviceIndex) {
  return 0;
}
cudaError_t GetDevice(DeviceIndex* device) {
  *device = 0;
  return cudaSuccess;
}
cudaError_t SetDevice(DeviceIndex, const bool) {
  return cudaSuccess;
}
cudaError_t MaybeSetDevice(DeviceIndex) {
  return cudaSuccess;
}
void c10_cuda_check_implementation(int32_t, const char*, const char*, uint32_t, bool) {
  check(false, "an error of CUDA");
}
CUDAStream of_queue(const Queue* queue) {
  const auto id = static_cast<StreamId>(reinterpret_cast<intptr_t>(queue));
  const c10::Device device(c10::DeviceType::CUDA, 0);
  return CUDAStream(CUDAStream::UNCHECKED, c10::Stream(c10::Stream::UNSAFE, device, id));
}
cudaStream_t CUDAStream::stream() const {
  return reinterpret_cast<cudaStream_t>(static_cast<intptr_t>(stream_.id()));
}
CUDAStream getCurrentCUDAStream(DeviceIndex) {
  return of_queue(current_queue);
}
namespace CUDACachingAllocator {
std::atomic<CUDAAllocator*> allocator;
}
}  // namespace c10::cuda

namespace {

// Gives out host memory and frees none of it before the end: it is what lies elsewhere.
class Native final : public fusedops::cuda::ForwardingAllocator {
 public:
  Native() : ForwardingAllocator(nullptr) {}
  ~Native() override {
    for (void* const pointer : all_) std::free(pointer);
  }

  std::string name() override { return "native"; }
  void emptyCache(c10::MempoolId_t) override {}
  void* raw_alloc_with_stream(size_t nbytes, cudaStream_t) override {
    const std::lock_guard guard(lock_);
    return all_.emplace_back(std::aligned_alloc(512, (nbytes + 511) / 512 * 512));
  }
  void raw_delete(void*) override {}
  c10::DataPtr allocate(size_t nbytes) override {
    void* const pointer = raw_alloc_with_stream(nbytes, nullptr);
    return {pointer, pointer, &nothing, c10::Device(c10::DeviceType::CUDA, 0)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &nothing; }
  void recordStream(const c10::DataPtr& pointer, c10::cuda::CUDAStream) override {
    check(pointer.get_deleter() == &nothing, "the caching allocator does not know the memory");
    ++native_streams;
  }
  void* getBaseAllocation(void* pointer, size_t*) override { return pointer; }
  caching::ShareableHandle shareIpcHandle(void*) override { return {1024, "block"}; }
  void beginAllocateToPool(c10::DeviceIndex, c10::MempoolId_t,
                           std::function<bool(cudaStream_t)>) override {}
  void endAllocateToPool(c10::DeviceIndex, c10::MempoolId_t) override {}

 private:
  static void nothing(void*) {}

  std::mutex lock_;
  std::vector<void*> all_;
};

constexpr size_t kSize = 4096;

struct Buffer {
  c10::DataPtr data;
  unsigned char value;
};

void read(Queue* queue, const Buffer& buffer, int microseconds) {
  queue->push([pointer = static_cast<unsigned char*>(buffer.data.get()), value = buffer.value,
               microseconds] {
    std::this_thread::sleep_for(std::chrono::microseconds(microseconds));
    for (size_t i = 0; i < kSize; ++i) {
      check(pointer[i] == value, "a buffer changed before a stream had read it");
    }
  });
}

Buffer allocate_and_fill(unsigned char value) {
  Buffer buffer{caching::get()->allocate(kSize), value};
  current_queue->push([pointer = buffer.data.get(), value] { std::memset(pointer, value, kSize); });
  return buffer;
}

// A plan whose buffers share eight places.
arena::Plan plan_of(const arena::Record& record) {
  arena::Plan plan;
  plan.sizes = record.sizes;
  for (size_t i = 0; i < record.sizes.size(); ++i) plan.offsets.push_back(int64_t(i % 8) * kSize);
  plan.height = 8 * kSize;
  return plan;
}

void compute(Queue* other, std::mt19937& random, int buffers) {
  std::deque<Buffer> live;
  for (int i = 0; i < buffers; ++i) {
    live.push_back(allocate_and_fill(static_cast<unsigned char>(random())));
    if (random() % 3 == 0) {
      // `other` waits for the values and reads them later; the host frees the buffer at once.
      cudaEvent_t written;
      cudaEventCreateWithFlags(&written, 0);
      cudaEventRecord(written, reinterpret_cast<cudaStream_t>(current_queue));
      cudaStreamWaitEvent(reinterpret_cast<cudaStream_t>(other), written, 0);
      cudaEventDestroy(written);
      caching::get()->recordStream(live.back().data, c10::cuda::of_queue(other));
      read(other, live.back(), static_cast<int>(random() % 300));
    }
    read(current_queue, live.back(), 0);
    if (live.size() > random() % 6) live.pop_front();
  }
}

}  // namespace

int main() {
  Native native;
  caching::allocator = &native;
  {
    Queue compute_queue, other_queue;
    current_queue = &compute_queue;
    auto* const device = fusedops::cuda::arena_device(0);
    check(caching::get() != &native, "the allocator is not set");
    static auto* const steps = new arena::StepArena(device);
    static auto* const second = new arena::StepArena(device);
    int64_t served = 0;
    for (int step = 0; step < 60; ++step) {
      std::mt19937 random(step % 4 == 3 ? step : 0);
      check(steps->begin(0, &compute_queue), "the step does not begin");
      check(!second->begin(0, &compute_queue), "two steps are open on a device");
      compute(&other_queue, random, 40);
      // The backward runs on a thread of its own, on the same stream.
      std::thread backward([&] {
        current_queue = &compute_queue;
        compute(&other_queue, random, 40);
      });
      backward.join();
      served += steps->counts().served;
      check(steps->end(), "the step is not open");
      if (step < 3 || step % 20 == 0) steps->set_plan(0, plan_of(steps->record(false)));
    }
    check(served > 0, "the block served nothing");
    check(waits > 0, "the step waited for no other stream");
    check(native_streams > 0, "the caching allocator was not told of a stream");

    // On another stream, in a pool and while a graph is captured the block serves nothing.
    const auto place = [] { return steps->contains(caching::get()->allocate(kSize).get()); };
    steps->begin(0, &compute_queue);
    check(place(), "the block does not serve the first buffer");
    caching::get()->beginAllocateToPool(0, {0, 1}, nullptr);
    check(!place(), "the block serves a pool");
    caching::get()->endAllocateToPool(0, {0, 1});
    compute_queue.capturing = true;
    check(!place(), "the block serves a graph");
    compute_queue.capturing = false;
    current_queue = &other_queue;
    check(!place(), "the block serves another stream");
    current_queue = &compute_queue;
    check(place(), "the block does not serve the step any more");

    // Within the block handles are those of the block; a place whose last user is captured is kept.
    Buffer inside = allocate_and_fill(1);
    check(steps->contains(inside.data.get()), "the buffer is not in the block");
    const auto* const base =
        static_cast<char*>(caching::get()->getBaseAllocation(inside.data.get(), nullptr));
    const auto offset = static_cast<char*>(inside.data.get()) - base;
    check(caching::get()->shareIpcHandle(inside.data.get()).offset == 1024 + offset,
          "the handle is not that of the buffer");
    caching::get()->recordStream(inside.data, c10::cuda::of_queue(&other_queue));
    other_queue.capturing = true;
    const int64_t live = steps->live_bytes();
    inside.data.clear();
    check(steps->live_bytes() == live, "a place was freed whose user is unknown");
    other_queue.capturing = false;
    steps->end();

    // Steps on another stream than the block's run without it, until there is a plan for them.
    check(steps->begin(0, &other_queue), "the step does not begin on another stream");
    current_queue = &other_queue;
    check(!place(), "the block of another stream serves the step");
    steps->end();
    steps->set_plan(0, plan_of(steps->record(false)));
    steps->begin(0, &other_queue);
    check(place(), "the new block does not serve the step");
    steps->end();
    steps->close();
    compute_queue.synchronize();
    other_queue.synchronize();
  }
}
