// A CUDA allocator of torch that passes every call to another one: the base of those that change a
// few. Torch has no such class, and its interface grows: what a version adds stands behind its
// number, and `known` is false for versions later than those that this was compiled for.
#pragma once

#include <c10/cuda/CUDACachingAllocator.h>
#include <torch/headeronly/version.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

// The last version of torch whose interface is below.
#define FUSEDOPS_KNOWS_CUDA_ALLOCATOR (TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR <= 15)

#if FUSEDOPS_KNOWS_CUDA_ALLOCATOR
namespace fusedops::cuda {

namespace caching = c10::cuda::CUDACachingAllocator;

class ForwardingAllocator : public caching::CUDAAllocator {
 public:
  explicit ForwardingAllocator(caching::CUDAAllocator* before) : before_(before) {}

  c10::DataPtr allocate(size_t nbytes) override { return before_->allocate(nbytes); }
  c10::DeleterFnPtr raw_deleter() const override { return before_->raw_deleter(); }
  void copy_data(void* to, const void* from, size_t nbytes) const override {
    before_->copy_data(to, from, nbytes);
  }
  void* raw_alloc(size_t nbytes) override { return before_->raw_alloc(nbytes); }
  void* raw_alloc_with_stream(size_t nbytes, cudaStream_t stream) override {
    return before_->raw_alloc_with_stream(nbytes, stream);
  }
  void raw_delete(void* pointer) override { before_->raw_delete(pointer); }

  void init(int device_count) override { before_->init(device_count); }
  bool initialized() override { return before_->initialized(); }
  void enable(bool value) override { before_->enable(value); }
  bool isEnabled() const override { return before_->isEnabled(); }
  std::string name() override { return before_->name(); }

  double getMemoryFraction(c10::DeviceIndex device) override {
    return before_->getMemoryFraction(device);
  }
  void setMemoryFraction(double fraction, c10::DeviceIndex device) override {
    before_->setMemoryFraction(fraction, device);
  }
  std::vector<caching::StreamSegmentSize> getExpandableSegmentSizes(
      c10::DeviceIndex device) override {
    return before_->getExpandableSegmentSizes(device);
  }
  void emptyCache(c10::MempoolId_t pool = {0, 0}) override { before_->emptyCache(pool); }
  void cacheInfo(c10::DeviceIndex device, size_t* largest) override {
    before_->cacheInfo(device, largest);
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    return before_->getDeviceStats(device);
  }
  void resetAccumulatedStats(c10::DeviceIndex device) override {
    before_->resetAccumulatedStats(device);
  }
  void resetPeakStats(c10::DeviceIndex device) override { before_->resetPeakStats(device); }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override {
    return before_->getMemoryInfo(device);
  }
  caching::SnapshotInfo snapshot(c10::MempoolId_t pool = {0, 0},
                                 bool include_traces = true) override {
    return before_->snapshot(pool, include_traces);
  }

  using caching::CUDAAllocator::recordStream;
  void recordStream(const c10::DataPtr& pointer, c10::cuda::CUDAStream stream) override {
    before_->recordStream(pointer, stream);
  }
  void* getBaseAllocation(void* pointer, size_t* size) override {
    return before_->getBaseAllocation(pointer, size);
  }
  caching::ShareableHandle shareIpcHandle(void* pointer) override {
    return before_->shareIpcHandle(pointer);
  }
  std::shared_ptr<void> getIpcDevPtr(std::string handle) override {
    return before_->getIpcDevPtr(std::move(handle));
  }
  void enablePeerAccess(c10::DeviceIndex device, c10::DeviceIndex other) override {
    before_->enablePeerAccess(device, other);
  }
  cudaError_t memcpyAsync(void* to, int to_device, const void* from, int from_device, size_t count,
                          cudaStream_t stream, bool peer_to_peer) override {
    return before_->memcpyAsync(to, to_device, from, from_device, count, stream, peer_to_peer);
  }

  // Pools of memory, and CUDA graphs.
  void beginAllocateToPool(c10::DeviceIndex device, c10::MempoolId_t pool,
                           std::function<bool(cudaStream_t)> filter) override {
    before_->beginAllocateToPool(device, pool, std::move(filter));
  }
  void endAllocateToPool(c10::DeviceIndex device, c10::MempoolId_t pool) override {
    before_->endAllocateToPool(device, pool);
  }
  void releasePool(c10::DeviceIndex device, c10::MempoolId_t pool) override {
    before_->releasePool(device, pool);
  }
  int getPoolUseCount(c10::DeviceIndex device, c10::MempoolId_t pool) override {
    return before_->getPoolUseCount(device, pool);
  }
  void createOrIncrefPool(c10::DeviceIndex device, c10::MempoolId_t pool,
                          std::shared_ptr<caching::CUDAAllocator> allocator = nullptr) override {
    before_->createOrIncrefPool(device, pool, std::move(allocator));
  }
  void setUseOnOOM(c10::DeviceIndex device, c10::MempoolId_t pool, bool use_on_oom) override {
    before_->setUseOnOOM(device, pool, use_on_oom);
  }
  void setNoSplit(c10::DeviceIndex device, c10::MempoolId_t pool) override {
    before_->setNoSplit(device, pool);
  }
  bool checkPoolLiveAllocations(c10::DeviceIndex device, c10::MempoolId_t pool,
                                const std::unordered_set<void*>& expected) override {
    return before_->checkPoolLiveAllocations(device, pool, expected);
  }
  std::shared_ptr<caching::AllocatorState> getCheckpointState(c10::DeviceIndex device,
                                                              c10::MempoolId_t pool) override {
    return before_->getCheckpointState(device, pool);
  }
  caching::CheckpointDelta setCheckpointPoolState(
      c10::DeviceIndex device, std::shared_ptr<caching::AllocatorState> state) override {
    return before_->setCheckpointPoolState(device, std::move(state));
  }

  // What watches the allocator.
  bool isHistoryEnabled() override { return before_->isHistoryEnabled(); }
  void recordHistory(bool enabled, caching::CreateContextFn recorder, size_t most_entries,
                     caching::RecordContext when, bool clear,
                     const std::vector<std::string>& skipped) override {
    before_->recordHistory(enabled, recorder, most_entries, when, clear, skipped);
  }
  void recordAnnotation(const std::vector<std::pair<std::string, std::string>>& values) override {
    before_->recordAnnotation(values);
  }
  void pushCompileContext(std::string& text) override { before_->pushCompileContext(text); }
  void popCompileContext() override { before_->popCompileContext(); }
  void setUserMetadata(const std::string& text) override { before_->setUserMetadata(text); }
  std::string getUserMetadata() override { return before_->getUserMetadata(); }
  void attachOutOfMemoryObserver(caching::OutOfMemoryObserver observer) override {
    before_->attachOutOfMemoryObserver(std::move(observer));
  }
  void attachAllocatorTraceTracker(caching::AllocatorTraceTracker tracker) override {
    before_->attachAllocatorTraceTracker(std::move(tracker));
  }

#if TORCH_VERSION_MINOR >= 12
  void attachOomRejectionObserver(caching::OomRejectionObserver observer) override {
    before_->attachOomRejectionObserver(std::move(observer));
  }
  std::shared_ptr<c10::GatheredContext> getContextForPointer(const void* pointer) override {
    return before_->getContextForPointer(pointer);
  }
#endif
#if TORCH_VERSION_MINOR >= 13
  void markCaptureBegin(c10::DeviceIndex device) override { before_->markCaptureBegin(device); }
  void markCaptureEnd(c10::DeviceIndex device) override { before_->markCaptureEnd(device); }
  c10::DataPtr allocateWithAddress(size_t size, void* address) override {
    return before_->allocateWithAddress(size, address);
  }
#endif
#if TORCH_VERSION_MINOR >= 14
  bool supportsUserMetadata() override { return before_->supportsUserMetadata(); }
  void annotateMemory(const void* pointer, const std::string& text) override {
    before_->annotateMemory(pointer, text);
  }
#endif

 protected:
  caching::CUDAAllocator* const before_;
};

}  // namespace fusedops::cuda
#endif
