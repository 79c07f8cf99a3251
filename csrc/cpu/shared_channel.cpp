// fusedops_native.SharedChannel: collectives of the processes of one machine through their memory.
//
// Each rank copies what it gives into its own ring (shared_ring.h) and reads what it wants from
// those of the others: one copy and one pass, where sockets take four copies and two system calls
// for every 64 KiB. A collective is started, which copies as much as the ring has room for, and
// finished, which reads the others' pieces and copies the rest. Collectives are finished in the
// order in which they were started; all ranks start the same ones in the same order.
//
// A rank that waits sleeps after a short while, looks whether the others still run, and gives up
// after the time that the process group was given.
#include <chrono>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <torch/custom_class.h>
#include <torch/library.h>

#include "../common/binding.h"
#include "shared_ring.h"
#include "shared_sum.h"

namespace fusedops {
namespace {

enum class Kind { all_reduce, all_gather, reduce_scatter, all_to_all, shift };

Kind kind_of(const std::string& name) {
  if (name == "all_reduce") return Kind::all_reduce;
  if (name == "all_gather") return Kind::all_gather;
  if (name == "reduce_scatter") return Kind::reduce_scatter;
  if (name == "all_to_all") return Kind::all_to_all;
  TORCH_CHECK_VALUE(name == "shift", "SharedChannel: there is no collective ", name);
  return Kind::shift;
}

// One collective. What a rank gives consists of equal parts, one for each rank or one for all.
struct Message {
  Kind kind;
  int64_t source;    // of a shift: the rank that is read
  at::Tensor input;  // both kept alive
  at::Tensor output;
  int64_t parts;
  int64_t part_bytes;
  int64_t chunk_bytes;  // of each part in one piece
  int64_t pieces;
  int64_t posted = 0;
  int64_t collected = 0;

  int64_t bytes_of(int64_t piece) const {
    return std::min(chunk_bytes, part_bytes - piece * chunk_bytes);
  }
};

// Calls f(piece) for the pieces [begin, end) on as many threads as their bytes are worth.
template <typename F>
void each_piece(int64_t begin, int64_t end, const F& f) {
  const auto run = [&](int64_t from, int64_t to) {
    for (int64_t piece = from; piece < to; ++piece) f(piece);
  };
  if (end - begin < 4 || at::get_num_threads() == 1 || at::in_parallel_region()) {
    run(begin, end);
  } else {
    at::parallel_for(begin, end, 2, run);
  }
}

#if defined(__linux__)

class SharedChannel : public torch::CustomClassHolder {
 public:
  SharedChannel(int64_t rank, int64_t ranks) : rank_(rank), rings_(ranks) {
    TORCH_CHECK_VALUE(ranks >= 2 && ranks <= kMaxSharedRanks && rank >= 0 && rank < ranks,
                      "SharedChannel: rank ", rank, " of ", ranks, " ranks; there may be 2 to ",
                      kMaxSharedRanks);
    rings_[rank] = std::make_unique<Ring>();
  }

  ~SharedChannel() override {
    if (own().is_mapped()) own().leave();
  }

  // The number of this process' file, or -1 where there is no such memory.
  int64_t descriptor() { return own().is_mapped() ? own().descriptor() : -1; }

  void write_secret(int64_t secret) { own().secret() = secret; }

  // Opens the rings of the others; false when one cannot be had.
  bool connect(const std::vector<int64_t>& processes, const std::vector<int64_t>& descriptors,
               const std::vector<int64_t>& secrets) {
    TORCH_CHECK_VALUE(processes.size() == rings_.size() && descriptors.size() == rings_.size() &&
                          secrets.size() == rings_.size(),
                      "SharedChannel: connect takes a number for each of the ", ranks(), " ranks");
    for (int64_t peer = 0; peer < ranks(); ++peer) {
      if (peer != rank_) {
        rings_[peer] = std::make_unique<Ring>(processes[peer], descriptors[peer]);
        if (!rings_[peer]->is_mapped()) return false;
      }
      if (rings_[peer]->secret() != secrets[peer]) return false;
    }
    return true;
  }

  // Starts a collective and returns its number. Both tensors are left alone until it is finished.
  // A shift copies what rank `source` gives; each rank names another one.
  int64_t start(const std::string& name, const at::Tensor& input, const at::Tensor& output,
                int64_t source) {
    TORCH_CHECK_VALUE(source >= 0 && source < ranks(), "SharedChannel: no rank ", source);
    const std::lock_guard lock(mutex_);
    messages_.push_back(message(kind_of(name), source, input, output));
    post();
    return first_ + static_cast<int64_t>(messages_.size()) - 1;
  }

  // Waits until collective `number`, and all that were started before it, are finished; for each
  // piece of another rank at most `timeout` seconds.
  void finish(int64_t number, double timeout) {
    const std::lock_guard lock(mutex_);
    timeout_ = timeout;
    while (first_ <= number) {
      TORCH_CHECK_VALUE(!messages_.empty(), "SharedChannel: no collective ", number);
      collect();
      if (messages_.front().collected == messages_.front().pieces) {
        messages_.pop_front();
        ++first_;
      }
    }
  }

 private:
  Ring& own() { return *rings_[rank_]; }
  int64_t ranks() const { return static_cast<int64_t>(rings_.size()); }

  Message message(Kind kind, int64_t source, const at::Tensor& input,
                  const at::Tensor& output) const {
    const bool divided = kind == Kind::reduce_scatter || kind == Kind::all_to_all;
    const int64_t bytes = static_cast<int64_t>(input.nbytes());
    const int64_t expected = kind == Kind::all_gather       ? bytes * ranks()
                             : kind == Kind::reduce_scatter ? bytes / ranks()
                                                            : bytes;
    TORCH_CHECK_VALUE(input.is_contiguous() && output.is_contiguous() && input.is_cpu() &&
                          output.is_cpu() && input.scalar_type() == output.scalar_type(),
                      "SharedChannel: tensors must be contiguous, on the CPU and of one dtype");
    const int64_t parts = divided ? ranks() : 1;
    TORCH_CHECK_VALUE(bytes > 0 && input.numel() % parts == 0 &&
                          static_cast<int64_t>(output.nbytes()) == expected,
                      "SharedChannel: an output of ", output.nbytes(), " bytes does not fit ",
                      bytes, " bytes on each of ", ranks(), " ranks");
    if (kind == Kind::all_reduce || kind == Kind::reduce_scatter) dtype_of(input);
    const int64_t chunk = kPieceBytes / parts / 64 * 64;
    const int64_t part_bytes = bytes / parts;
    const int64_t pieces = (part_bytes + chunk - 1) / chunk;
    return {kind, source, input, output, parts, part_bytes, chunk, pieces};
  }

  // Copies as many pieces into the own ring as have room there.
  void post() {
    int64_t read = posted_;
    for (int64_t peer = 0; peer < ranks(); ++peer) {
      if (peer != rank_) read = std::min(read, rings_[peer]->consumed());
    }
    for (auto& each : messages_) {
      const int64_t room = read + kPieces - posted_;
      const int64_t count = std::min(room, each.pieces - each.posted);
      if (count == 0) {
        if (room == 0) return;
        continue;
      }
      const char* from = static_cast<const char*>(each.input.const_data_ptr());
      each_piece(each.posted, each.posted + count, [&](int64_t piece) {
        char* to = own().piece(posted_ + piece - each.posted);
        for (int64_t part = 0; part < each.parts; ++part) {
          std::memcpy(to + part * each.chunk_bytes,
                      from + part * each.part_bytes + piece * each.chunk_bytes,
                      each.bytes_of(piece));
        }
      });
      each.posted += count;
      posted_ += count;
      own().post(posted_);
    }
  }

  // Reads what is there of the first message, at least one piece.
  void collect() {
    auto& message = messages_.front();
    post();
    if (message.posted == message.collected) {  // until all have read what the next piece replaces
      for (int64_t peer = 0; peer < ranks(); ++peer) {
        if (peer == rank_) continue;
        wait(peer, [&] { return rings_[peer]->consumed() > posted_ - kPieces; });
      }
      post();
    }
    int64_t there = posted_;
    for (int64_t peer = 0; peer < ranks(); ++peer) {
      if (peer == rank_) continue;
      wait(peer, [&] { return rings_[peer]->posted() > collected_; });
      there = std::min(there, rings_[peer]->posted());
    }
    const int64_t count = std::min(there - collected_, message.pieces - message.collected);
    each_piece(message.collected, message.collected + count, [&](int64_t piece) {
      read(message, piece, collected_ - message.collected + piece);
    });
    message.collected += count;
    collected_ += count;
    own().consume(collected_);
  }

  // Reads one piece of all ranks, which lies in their rings under `number`.
  void read(Message& message, int64_t piece, int64_t number) {
    const int64_t offset = piece * message.chunk_bytes;
    const int64_t bytes = message.bytes_of(piece);
    const int64_t part = message.parts > 1 ? rank_ : 0;
    const char* input = static_cast<const char*>(message.input.const_data_ptr());
    char* output = static_cast<char*>(message.output.mutable_data_ptr());
    std::vector<const void*> from(ranks());
    for (int64_t peer = 0; peer < ranks(); ++peer) {
      from[peer] = peer == rank_ ? input + part * message.part_bytes + offset
                                 : rings_[peer]->piece(number) + part * message.chunk_bytes;
    }
    if (message.kind == Kind::all_reduce || message.kind == Kind::reduce_scatter) {
      const SharedSum sum{from.data(), ranks(), output + offset,
                          bytes / static_cast<int64_t>(message.input.element_size()),
                          dtype_of(message.input)};
      FUSEDOPS_CALL_ISA(shared_sum, sum);
      return;
    }
    if (message.kind == Kind::shift) {
      std::memcpy(output + offset, from[message.source], bytes);
      return;
    }
    for (int64_t peer = 0; peer < ranks(); ++peer) {
      char* to = output + peer * message.part_bytes + offset;
      if (to != from[peer]) std::memcpy(to, from[peer], bytes);
    }
  }

  // Waits for rank `peer` until `holds()`, which looks at its ring.
  template <typename F>
  void wait(int64_t peer, const F& holds) {
    for (int64_t turn = 0; turn < 2000; ++turn) {  // some 50 us: a sleep and a call take as long
      if (holds()) return;
#if defined(__x86_64__)
      __builtin_ia32_pause();
#endif
    }
    const auto began = std::chrono::steady_clock::now();
    while (true) {
      // In this order: what it posted before it left is there.
      const bool gone = rings_[peer]->is_closed() || !rings_[peer]->is_alive();
      if (holds()) return;
      TORCH_CHECK(!gone, "a collective through shared memory cannot finish: rank ", peer,
                  " of its group of ", ranks(), " has ended");
      const std::chrono::duration<double> waited = std::chrono::steady_clock::now() - began;
      TORCH_CHECK(waited.count() < timeout_, "a collective through shared memory timed out: rank ",
                  peer, " of its group of ", ranks(), " did not come within ", timeout_,
                  " s (the timeout of the process group)");
      rings_[peer]->sleep_unless(holds);
    }
  }

  const int64_t rank_;
  std::vector<std::unique_ptr<Ring>> rings_;
  std::mutex mutex_;
  double timeout_ = 0.0;          // seconds
  std::deque<Message> messages_;  // started and not finished
  int64_t first_ = 0;             // the number of the first of them
  int64_t posted_ = 0;            // pieces of this rank
  int64_t collected_ = 0;         // pieces of all ranks
};

TORCH_LIBRARY_FRAGMENT(fusedops_native, m) {
  m.class_<SharedChannel>("SharedChannel")
      .def(torch::init<int64_t, int64_t>())
      .def("descriptor", &SharedChannel::descriptor)
      .def("write_secret", &SharedChannel::write_secret)
      .def("connect", &SharedChannel::connect)
      .def("start", &SharedChannel::start)
      .def("finish", &SharedChannel::finish);
}

#endif

}  // namespace
}  // namespace fusedops
