// A ring of pieces in memory that the processes of one machine share: one rank writes it, all read
// it. Linux only.
//
// The pieces of all ranks are numbered alike. Rank r writes its piece i once all ranks have read
// its piece i - kPieces; a reader of piece i of rank r waits until r has posted more than i.
// Both counts lie in the ring's header, with a word on which the system puts waiters to sleep.
// Each piece has a stamp that says which collective it belongs to.
#pragma once

#if defined(__linux__)
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <ctime>
#include <memory>
#include <string>

#include <fcntl.h>
#include <linux/futex.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace fusedops {

inline constexpr int64_t kPieceBytes = 256 * 1024;
inline constexpr int64_t kPieces = 32;

// What a piece belongs to. The stamps of one piece are equal on all ranks, or the ranks disagree.
struct PieceStamp {
  int64_t collective;  // its number in the group, from 0
  int64_t phase;       // 1 for the parts of a sum that are gathered
  int64_t kind;
  int64_t dtype;
  int64_t root;    // rank whose tensor is broadcast; of a shift, how far the source is behind
  int64_t bytes;   // that a rank gives
  char text[112];  // the call in words, for messages

  bool operator==(const PieceStamp& other) const {
    return collective == other.collective && phase == other.phase && kind == other.kind &&
           dtype == other.dtype && root == other.root && bytes == other.bytes &&
           std::strncmp(text, other.text, sizeof(text)) == 0;
  }
};

// Why a rank closed its channel.
enum class ChannelFailure : int64_t { none, lost_rank, disagreement };

class Ring {
 public:
  // A new one of this process. Memory is taken when it is first written.
  Ring() : descriptor_(static_cast<int>(syscall(SYS_memfd_create, "fusedops", 1u /*CLOEXEC*/))) {
    if (descriptor_ >= 0 && ftruncate(descriptor_, kBytes) == 0) map();
  }

  // That of another process; the process and its file descriptor name it.
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

  // That of another rank which is a thread of this process, in the same mapping: a sanitizer of
  // threads sees its accesses.
  explicit Ring(const Ring* owner) : header_(owner->header_) {}

  Ring(const Ring&) = delete;
  Ring& operator=(const Ring&) = delete;

  ~Ring() {
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
    return reinterpret_cast<char*>(header_.get()) + kHeaderBytes + number % kPieces * kPieceBytes;
  }
  PieceStamp& stamp(int64_t number) { return header_->stamps[number % kPieces]; }

  // Why the owner closed its channel, and the reason in words.
  ChannelFailure failure() const {
    return static_cast<ChannelFailure>(header_->failure.load(std::memory_order_acquire));
  }
  std::string reason() const { return header_->reason; }

  // By the owner.
  void post(int64_t count) { publish(header_->posted, count); }
  void consume(int64_t count) { publish(header_->consumed, count); }
  void fail(ChannelFailure why, const std::string& reason) {
    const auto size = std::min(reason.size(), sizeof(header_->reason) - 1);
    std::copy(reason.begin(), reason.begin() + static_cast<int64_t>(size), header_->reason);
    publish(header_->failure, static_cast<int64_t>(why));
  }
  // A child that was forked has the ring as well, and may end at any time.
  void leave() {
    if (is_creator()) publish(header_->closed, 1);
  }
  bool is_creator() const { return getpid() == creator_; }

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
    if (!holds()) sleep(header_->bell, heard, 50'000'000);
    header_->sleepers.fetch_sub(1);
  }

  // Asks the owner's progress thread, if it has one, to go on with what it has started.
  void request_progress() {
    header_->requests.fetch_add(1);
    if (header_->has_progress_thread.load() != 0) wake(header_->requests);
  }

  // By the owner's progress thread: sleeps until there are other requests than `seen`, at most 1 s.
  uint32_t requests() const { return header_->requests.load(); }
  void set_has_progress_thread() { header_->has_progress_thread = 1; }
  void sleep_until_request(uint32_t seen) { sleep(header_->requests, seen, 999'999'999); }

 private:
  struct Header {
    alignas(64) std::atomic<int64_t> posted;
    alignas(64) std::atomic<int64_t> consumed;
    alignas(64) std::atomic<int64_t> closed;
    std::atomic<int64_t> secret;
    std::atomic<int64_t> failure;
    alignas(64) std::atomic<uint32_t> bell;
    std::atomic<uint32_t> sleepers;
    alignas(64) std::atomic<uint32_t> requests;
    std::atomic<uint32_t> has_progress_thread;
    char reason[1024];
    PieceStamp stamps[kPieces];
  };
  static_assert(std::atomic<int64_t>::is_always_lock_free);
  static_assert(sizeof(std::atomic<uint32_t>) == 4 && std::atomic<uint32_t>::is_always_lock_free);
  static constexpr int64_t kHeaderBytes = 8192;
  static_assert(sizeof(Header) <= kHeaderBytes);
  static constexpr int64_t kBytes = kHeaderBytes + kPieces * kPieceBytes;

  void map() {
    void* at = mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor_, 0);
    if (at == MAP_FAILED) return;
    header_ = {static_cast<Header*>(at), [](Header* header) { munmap(header, kBytes); }};
  }

  void publish(std::atomic<int64_t>& what, int64_t value) {
    what.store(value, std::memory_order_release);
    header_->bell.fetch_add(1);
    if (header_->sleepers.load() != 0) wake(header_->bell);
  }

  static void sleep(std::atomic<uint32_t>& word, uint32_t value, int64_t nanoseconds) {
    const timespec at_most{0, nanoseconds};
    syscall(SYS_futex, &word, FUTEX_WAIT, value, &at_most, nullptr, 0);
  }
  static void wake(std::atomic<uint32_t>& word) {
    syscall(SYS_futex, &word, FUTEX_WAKE, INT32_MAX, nullptr, nullptr, 0);
  }

  const pid_t creator_ = getpid();
  int descriptor_ = -1;
  int process_ = -1;
  std::shared_ptr<Header> header_;
};

}  // namespace fusedops

#endif
