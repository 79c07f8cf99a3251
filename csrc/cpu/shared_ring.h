// A ring of pieces in memory that the processes of one machine share: one rank writes it, all read
// it. Linux only; elsewhere `kHasSharedMemory` is false and nothing of this is called.
//
// The pieces of all ranks are numbered alike. Rank r writes its piece i once all ranks have read
// its piece i - kPieces; whoever wants piece i of rank r waits until r has posted more than i.
// Both counts lie in the ring's header, beside a word on which the system puts waiters to sleep.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>

#if defined(__linux__)
#include <cerrno>
#include <cstring>
#include <ctime>

#include <fcntl.h>
#include <linux/futex.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace fusedops {

#if defined(__linux__)
inline constexpr bool kHasSharedMemory = true;
#else
inline constexpr bool kHasSharedMemory = false;
#endif

inline constexpr int64_t kPieceBytes = 256 * 1024;
inline constexpr int64_t kPieces = 32;

#if defined(__linux__)

class Ring {
 public:
  // A new one of this process. Memory is taken when it is first written.
  Ring() : descriptor_(static_cast<int>(syscall(SYS_memfd_create, "fusedops", 1u /*CLOEXEC*/))) {
    if (descriptor_ >= 0 && ftruncate(descriptor_, kBytes) == 0) map();
  }

  // That of another process; which one is told by the process and its number of the file.
  Ring(int64_t process, int64_t descriptor) {
    const std::string path =
        "/proc/" + std::to_string(process) + "/fd/" + std::to_string(descriptor);
    descriptor_ = open(path.c_str(), O_RDWR | O_CLOEXEC);
    struct stat found{};
    if (descriptor_ >= 0 && fstat(descriptor_, &found) == 0 && found.st_size == kBytes) map();
#if defined(SYS_pidfd_open)
    process_ = static_cast<int>(syscall(SYS_pidfd_open, static_cast<pid_t>(process), 0u));
#endif
  }

  Ring(const Ring&) = delete;
  Ring& operator=(const Ring&) = delete;

  ~Ring() {
    if (header_ != nullptr) munmap(header_, kBytes);
    if (descriptor_ >= 0) close(descriptor_);
    if (process_ >= 0) close(process_);
  }

  bool is_mapped() const { return header_ != nullptr; }
  int64_t descriptor() const { return descriptor_; }
  // The secret that the owner wrote: whoever reads it has this ring and no other.
  std::atomic<int64_t>& secret() { return header_->secret; }
  int64_t posted() const { return header_->posted.load(std::memory_order_acquire); }
  int64_t consumed() const { return header_->consumed.load(std::memory_order_acquire); }
  bool is_closed() const { return header_->closed.load(std::memory_order_acquire) != 0; }
  char* piece(int64_t number) {
    return reinterpret_cast<char*>(header_) + kHeaderBytes + number % kPieces * kPieceBytes;
  }

  // By the owner.
  void post(int64_t count) { tell(header_->posted, count); }
  void consume(int64_t count) { tell(header_->consumed, count); }
  // A child that was forked has the ring as well, and may end at any time.
  void leave() {
    if (getpid() == creator_) tell(header_->closed, 1);
  }

  // Whether the owner's process runs; true where the system cannot tell.
  bool is_alive() const {
    if (process_ < 0) return true;
    pollfd asked{process_, POLLIN, 0};
    return poll(&asked, 1, 0) <= 0;
  }

  // Sleeps until `holds()`, which looks at this ring, is worth asking again: at most 50 ms.
  template <typename F>
  void sleep_unless(const F& holds) {
    header_->sleepers.fetch_add(1);
    const uint32_t heard = header_->bell.load();
    if (!holds()) {
      const timespec at_most{0, 50'000'000};
      syscall(SYS_futex, &header_->bell, FUTEX_WAIT, heard, &at_most, nullptr, 0);
    }
    header_->sleepers.fetch_sub(1);
  }

 private:
  struct Header {
    alignas(64) std::atomic<int64_t> posted;
    alignas(64) std::atomic<int64_t> consumed;
    alignas(64) std::atomic<int64_t> closed;
    std::atomic<int64_t> secret;
    alignas(64) std::atomic<uint32_t> bell;
    std::atomic<uint32_t> sleepers;
  };
  static_assert(std::atomic<int64_t>::is_always_lock_free);
  static_assert(sizeof(std::atomic<uint32_t>) == 4 && std::atomic<uint32_t>::is_always_lock_free);
  static constexpr int64_t kHeaderBytes = 4096;
  static constexpr int64_t kBytes = kHeaderBytes + kPieces * kPieceBytes;

  void map() {
    void* at = mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor_, 0);
    if (at != MAP_FAILED) header_ = static_cast<Header*>(at);
  }

  void tell(std::atomic<int64_t>& what, int64_t value) {
    what.store(value, std::memory_order_release);
    header_->bell.fetch_add(1);
    if (header_->sleepers.load() != 0) {
      syscall(SYS_futex, &header_->bell, FUTEX_WAKE, INT32_MAX, nullptr, nullptr, 0);
    }
  }

  const pid_t creator_ = getpid();
  int descriptor_ = -1;
  int process_ = -1;
  Header* header_ = nullptr;
};

#endif

}  // namespace fusedops
