// Collectives over rings of memory (ring.h): the protocol, without tensors.
//
// Each rank copies its input into its own ring and reads what it needs from those of the
// others: one copy and one pass, where sockets take four copies and two system calls for every
// 64 KiB. Collectives are read in the order in which they were started; all ranks start the same
// ones in the same order, and the stamp of each piece proves it: ranks that disagree close the
// channel on all of them. A sum over more than four ranks has two phases: each rank sums a part,
// and the parts are gathered.
//
// `advance` does what can be done without waiting. Who waits calls it, and sleeps on the ring of
// the rank that blocks it. A rank whose collectives lie in its ring completely is needed by nobody.
// One that has started more than the ring holds has a progress thread, which sleeps until a rank
// that waits requests progress: no wait depends on what another rank calls after its starts.
#pragma once

#include "ring.h"
#include "sum.h"

#if defined(__linux__)
#include <algorithm>
#include <atomic>
#include <chrono>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace fusedops {

enum class SharedKind {
  all_reduce,
  all_gather,
  reduce_scatter,
  all_to_all,
  shift,
  broadcast,
  exchange,
  sync
};

// What a rank starts. `source` is the rank that is read by a shift or a broadcast.
// Of an exchange `sends` and `receives` have the bytes for and from each rank, which lie one after
// the other, and `longest` is the most that any rank sends to another, the same on all ranks.
struct SharedCall {
  SharedKind kind;
  const void* input;
  void* output;
  int64_t bytes;  // of the input
  int64_t element_bytes;
  DType sum_dtype;  // of a sum
  int64_t dtype;    // of any
  int64_t source;
  std::string text;
  std::shared_ptr<const void> tensors;  // kept alive until the collective is finished
  std::vector<int64_t> sends{};
  std::vector<int64_t> receives{};
  int64_t longest = 0;
};

class SharedCollectives {
 public:
  using PieceFunction = std::function<void(int64_t piece)>;
  // Calls f(piece) for the pieces [begin, end), on as many threads as they are worth.
  using ForPieces = void (*)(int64_t begin, int64_t end, const PieceFunction& f);
  struct Functions {
    void (*sum)(const SharedSum&);
    ForPieces for_pieces;
  };
  struct Failure {
    ChannelFailure why = ChannelFailure::none;
    std::string reason;
  };

  SharedCollectives(int64_t rank, int64_t ranks, Functions functions)
      : rank_(rank), rings_(ranks), functions_(functions) {
    rings_[rank] = std::make_unique<Ring>();
  }

  ~SharedCollectives() {
    if (own().is_mapped()) own().leave();
    stop_ = true;
    if (!progress_thread_.joinable()) return;
    if (own().is_creator()) {
      own().request_progress();
      progress_thread_.join();
    } else {
      progress_thread_.detach();  // a forked child has none
    }
  }

  SharedCollectives(const SharedCollectives&) = delete;
  SharedCollectives& operator=(const SharedCollectives&) = delete;

  Ring& own() { return *rings_[rank_]; }
  int64_t rank() const { return rank_; }
  int64_t ranks() const { return static_cast<int64_t>(rings_.size()); }
  Ring* ring(int64_t peer) { return rings_[peer].get(); }
  void connect(int64_t peer, std::unique_ptr<Ring> ring) { rings_[peer] = std::move(ring); }

  Failure failure() {
    const std::lock_guard lock(mutex_);
    return failure_;
  }

  // The number of collectives that were started.
  int64_t started() {
    const std::lock_guard lock(mutex_);
    return started_;
  }

  // Starts a collective and returns its number. Nothing of it may be touched until it is finished.
  int64_t start(const SharedCall& call) {
    const std::lock_guard lock(mutex_);
    finished_.clear();
    std::vector<Message> messages = messages_of(call);
    int64_t pieces = 0;
    for (const auto& message : messages) pieces += message.pieces;
    // Whatever other ranks have not read, or this one has not, still takes room in a ring.
    const int64_t read_by_all = std::min(collected_, consumed_by_all().count);
    const bool fits = messages.size() == 1 && started_pieces_ + pieces - read_by_all <= kPieces;
    if (!fits && !progress_thread_.joinable()) {
      progress_thread_ = std::thread([this] { make_progress(); });
      own().set_has_progress_thread();
    }
    started_pieces_ += pieces;
    std::move(messages.begin(), messages.end(), std::back_inserter(messages_));
    post(functions_.for_pieces);
    return started_++;
  }

  // Waits until collective `number`, and all that were started before it, are finished; for each
  // advance of another rank at most `timeout` seconds.
  Failure finish(int64_t number, double timeout) {
    std::unique_lock lock(mutex_);
    ++waiters_;
    auto began = Clock::now();
    while (failure_.why == ChannelFailure::none && !messages_.empty() &&
           messages_.front().stamp.collective <= number) {
      if (advance(kPieces, functions_.for_pieces)) {
        began = Clock::now();
      } else {
        await(lock, began, timeout);
      }
    }
    --waiters_;
    finished_.clear();
    return failure_;
  }

 private:
  using Clock = std::chrono::steady_clock;
  static constexpr int64_t kDirectRanks = 4;  // up to here each rank reads all others' tensors

  // What a rank posts: one part that all read, a part for each rank, its own part of a whole, or
  // parts of different lengths for some ranks.
  enum class Form { one, divided, gathered, listed };

  struct Message {
    Form form;
    bool sums;
    DType sum_dtype;
    int64_t element_bytes;
    int64_t source;  // of `one`, without a sum
    bool posts;      // whether this rank gives any bytes
    const char* input;
    char* output;
    int64_t total;   // bytes of all parts
    int64_t stride;  // bytes of a part; the last ones may have fewer
    int64_t chunk;   // bytes of a part in one piece
    int64_t pieces;
    PieceStamp stamp;
    std::shared_ptr<const void> tensors;
    std::vector<int64_t> sends;
    std::vector<int64_t> receives;
    int64_t posted = 0;
    int64_t collected = 0;

    // Calls f(part, offset of the piece among all parts, bytes) for the parts that have such a
    // piece.
    template <class F>
    void for_parts(const std::vector<int64_t>& lengths, int64_t piece, const F& f) const {
      int64_t begin = 0;
      for (size_t part = 0; part < lengths.size(); ++part) {
        const int64_t bytes = std::min(lengths[part] - piece * chunk, chunk);
        if (bytes > 0) f(static_cast<int64_t>(part), begin + piece * chunk, bytes);
        begin += lengths[part];
      }
    }

    int64_t length(int64_t piece, int64_t part) const {
      const int64_t begin = part * stride + piece * chunk;
      return std::max<int64_t>(std::min({chunk, (part + 1) * stride - begin, total - begin}), 0);
    }
  };

  // What keeps `advance` from going on: a count of a peer's ring is at most `count`.
  struct Blocker {
    int64_t peer;
    bool consumes;  // what it has consumed, else what it has posted
    int64_t count;
  };

  bool is_past(const Blocker& blocker) const {
    const Ring& ring = *rings_[blocker.peer];
    return (blocker.consumes ? ring.consumed() : ring.posted()) > blocker.count;
  }

  std::vector<Message> messages_of(const SharedCall& call) {
    const int64_t numel = call.bytes / call.element_bytes;
    const bool in_two_phases =
        call.kind == SharedKind::all_reduce && ranks() > kDirectRanks && numel >= ranks();
    const bool sums =
        call.kind == SharedKind::all_reduce || call.kind == SharedKind::reduce_scatter;
    Form form = Form::one;
    int64_t total = call.bytes;
    int64_t stride = call.bytes;
    if (call.kind == SharedKind::all_gather) {
      form = Form::gathered;
      total *= ranks();
    } else if (call.kind == SharedKind::reduce_scatter || call.kind == SharedKind::all_to_all) {
      form = Form::divided;
      stride /= ranks();
    } else if (in_two_phases) {
      form = Form::divided;
      stride = (numel + ranks() - 1) / ranks() * call.element_bytes;
    } else if (call.kind == SharedKind::exchange) {
      form = Form::listed;
      stride = call.longest;
    }
    char* output = static_cast<char*>(call.output);
    char* part = in_two_phases ? output + std::min(rank_ * stride, total) : output;
    std::vector<Message> messages{
        message(call, form, sums, static_cast<const char*>(call.input), part, total, stride)};
    if (in_two_phases) {
      messages.push_back(message(call, Form::gathered, false, part, output, total, stride));
      messages.back().stamp.phase = 1;
    }
    return messages;
  }

  Message message(const SharedCall& call, Form form, bool sums, const char* input, char* output,
                  int64_t total, int64_t stride) const {
    const int64_t parts = form == Form::divided || form == Form::listed ? ranks() : 1;
    const int64_t chunk = kPieceBytes / parts / 64 * 64;
    const int64_t pieces = std::max<int64_t>((stride + chunk - 1) / chunk, 1);
    const bool is_broadcast = call.kind == SharedKind::broadcast;
    const int64_t behind = (rank_ - call.source + ranks()) % ranks();
    const int64_t root = is_broadcast ? call.source : call.kind == SharedKind::shift ? behind : 0;
    const int64_t bytes = form == Form::listed ? call.longest : call.bytes;
    PieceStamp stamp{started_, 0, static_cast<int64_t>(call.kind), call.dtype, root, bytes, {}};
    call.text.copy(stamp.text, sizeof(stamp.text) - 1);
    return {form,           sums,
            call.sum_dtype, call.element_bytes,
            call.source,    !is_broadcast || rank_ == call.source,
            input,          output,
            total,          stride,
            chunk,          pieces,
            stamp,          call.tensors,
            call.sends,     call.receives};
  }

  // Copies as many pieces into the own ring as have room there.
  void post(ForPieces for_pieces) {
    const int64_t read = consumed_by_all().count;
    for (auto& message : messages_) {
      if (message.stamp.phase == 1 && &message != &messages_.front()) return;  // not yet summed
      const int64_t room = read + kPieces - posted_;
      const int64_t count = std::min(room, message.pieces - message.posted);
      if (count == 0) {
        if (room == 0) return;
        continue;
      }
      for_pieces(message.posted, message.posted + count,
                 [&](int64_t piece) { write(message, piece, posted_ + piece - message.posted); });
      message.posted += count;
      posted_ += count;
      own().post(posted_);
    }
  }

  // The other rank that has consumed the fewest pieces.
  Blocker consumed_by_all() const {
    Blocker least{-1, true, 0};
    for (int64_t peer = 0; peer < ranks(); ++peer) {
      if (peer == rank_) continue;
      const int64_t count = rings_[peer]->consumed();
      if (least.peer < 0 || count < least.count) least = {peer, true, count};
    }
    return least;
  }

  // Writes one piece under `number` into the own ring.
  void write(const Message& message, int64_t piece, int64_t number) {
    char* to = own().piece(number);
    const int64_t offset = piece * message.chunk;
    own().stamp(number) = message.stamp;
    if (!message.posts) return;
    if (message.form == Form::listed) {
      return message.for_parts(message.sends, piece,
                               [&](int64_t part, int64_t from, int64_t bytes) {
                                 copy(to + part * message.chunk, message.input + from, bytes);
                               });
    }
    if (message.form != Form::divided) {
      const int64_t part = message.form == Form::gathered ? rank_ : 0;
      return copy(to, message.input + offset, message.length(piece, part));
    }
    for (int64_t part = 0; part < ranks(); ++part) {
      const int64_t bytes = message.length(piece, part);
      if (bytes > 0) {
        copy(to + part * message.chunk, message.input + part * message.stride + offset, bytes);
      }
    }
  }

  // Does what can be done without waiting: posts what has room, and reads at most `most` pieces of
  // the first message. Returns false, with `blocker_`, where nothing could be done.
  bool advance(int64_t most, ForPieces for_pieces) {
    const int64_t before = posted_;
    post(for_pieces);
    auto& message = messages_.front();
    most = std::min(most, message.pieces - message.collected);
    int64_t end = std::min(posted_, collected_ + most);
    int64_t absent = -1;
    for (int64_t peer = 0; peer < ranks(); ++peer) {
      if (peer == rank_) continue;
      const int64_t there = std::min(rings_[peer]->posted(), collected_ + most);
      for (int64_t number = collected_; number < there; ++number) {
        if (!(rings_[peer]->stamp(number) == message.stamp)) {
          disagree(message.stamp, peer, rings_[peer]->stamp(number));
          return true;
        }
      }
      if (there <= collected_ && absent < 0) absent = peer;
      end = std::min(end, there);
    }
    if (end <= collected_) {
      const bool is_full = posted_ <= collected_;
      blocker_ = is_full || absent < 0 ? consumed_by_all() : Blocker{absent, false, collected_};
      return posted_ > before;
    }
    const int64_t shift = collected_ - message.collected;
    for_pieces(collected_ - shift, end - shift,
               [&](int64_t piece) { read(message, piece, piece + shift); });
    message.collected += end - collected_;
    collected_ = end;
    own().consume(collected_);
    if (message.collected == message.pieces) {
      finished_.push_back(std::move(message.tensors));
      messages_.pop_front();
    }
    return true;
  }

  // Reads one piece of all ranks, which lies in their rings under `number`.
  void read(const Message& message, int64_t piece, int64_t number) {
    if (message.form == Form::listed) {
      return message.for_parts(
          message.receives, piece, [&](int64_t peer, int64_t to, int64_t bytes) {
            copy(message.output + to, rings_[peer]->piece(number) + rank_ * message.chunk, bytes);
          });
    }
    const int64_t offset = piece * message.chunk;
    const bool divided = message.form == Form::divided;
    const auto piece_of = [&](int64_t peer) -> const char* {
      if (peer != rank_) return rings_[peer]->piece(number) + (divided ? rank_ * message.chunk : 0);
      return message.input + (divided ? rank_ * message.stride : 0) + offset;
    };
    const int64_t mine = message.length(piece, divided ? rank_ : 0);
    if (message.sums) {
      if (mine == 0) return;
      std::vector<const void*> from(ranks());
      for (int64_t peer = 0; peer < ranks(); ++peer) from[peer] = piece_of(peer);
      return functions_.sum({from.data(), ranks(), message.output + offset,
                             mine / message.element_bytes, message.sum_dtype});
    }
    if (message.form == Form::one) {
      return copy(message.output + offset, piece_of(message.source), mine);
    }
    for (int64_t peer = 0; peer < ranks(); ++peer) {
      const int64_t bytes = divided ? mine : message.length(piece, peer);
      if (bytes > 0) {
        copy(message.output + peer * message.stride + offset, piece_of(peer), bytes);
      }
    }
  }

  static void copy(char* to, const char* from, int64_t bytes) {
    if (bytes > 0 && to != from) std::memcpy(to, from, bytes);
  }

  static void one_by_one(int64_t begin, int64_t end, const PieceFunction& f) {
    for (int64_t piece = begin; piece < end; ++piece) f(piece);
  }

  // Waits for `blocker_`, without the lock, for as long as one sleep takes. The caller asks again.
  void await(std::unique_lock<std::mutex>& lock, Clock::time_point began, double timeout) {
    const Blocker blocker = blocker_;
    const auto holds = [&] { return is_past(blocker); };
    lock.unlock();
    for (int64_t turn = 0; turn < 2000; ++turn) {  // some 50 us: a sleep and a call take as long
      if (holds()) return lock.lock();
#if defined(__x86_64__)
      __builtin_ia32_pause();
#endif
    }
    Ring& ring = *rings_[blocker.peer];
    // In this order: what it posted before it left is there.
    const bool gone = ring.is_closed() || !ring.is_alive();
    const bool is_late = std::chrono::duration<double>(Clock::now() - began).count() >= timeout;
    Failure failure = failure_of_others();
    if (failure.why == ChannelFailure::none && (gone || is_late) && !holds()) {
      const std::string name = name_of(blocker.peer);
      std::string seconds = std::to_string(timeout);
      seconds.erase(seconds.find_last_not_of('0') + 1);
      if (seconds.back() == '.') seconds.pop_back();
      failure = {ChannelFailure::lost_rank,
                 gone ? "a collective through shared memory cannot finish: " + name + " has ended"
                      : "a collective through shared memory timed out: " + name +
                            " did not come within " + seconds +
                            " s (the timeout of the process group)"};
    }
    if (failure.why == ChannelFailure::none) {
      request_progress();
      ring.sleep_unless(holds);
    }
    lock.lock();
    if (failure.why != ChannelFailure::none) fail(std::move(failure));
  }

  // Of all others: the rank that blocks this one may be blocked by any of them.
  void request_progress() {
    for (int64_t peer = 0; peer < ranks(); ++peer) {
      if (peer != rank_) rings_[peer]->request_progress();
    }
  }

  std::string name_of(int64_t peer) const {
    return "rank " + std::to_string(peer) + " of its group of " + std::to_string(ranks());
  }

  Failure failure_of_others() const {
    for (int64_t peer = 0; peer < ranks(); ++peer) {
      if (peer == rank_) continue;
      const ChannelFailure why = rings_[peer]->failure();
      if (why == ChannelFailure::none) continue;
      const std::string reason = rings_[peer]->reason();
      if (why == ChannelFailure::disagreement) return {why, reason};
      const bool is_passed_on = reason.rfind("rank ", 0) == 0;
      return {why, is_passed_on ? reason : name_of(peer) + " gave up: " + reason};
    }
    return {};
  }

  void disagree(const PieceStamp& mine, int64_t peer, const PieceStamp& theirs) {
    const auto say = [&](int64_t rank, const PieceStamp& stamp) {
      std::string text = "rank " + std::to_string(rank) + " called " + stamp.text;
      if (mine.collective != theirs.collective) {
        text += " as collective " + std::to_string(stamp.collective + 1);
      }
      return text;
    };
    std::string first = say(rank_, mine);
    std::string second = say(peer, theirs);
    if (peer < rank_) std::swap(first, second);
    fail({ChannelFailure::disagreement,
          "the ranks of a group of " + std::to_string(ranks()) + " disagree about its collective " +
              std::to_string(mine.collective + 1) + ": " + first + ", " + second});
  }

  // Closes the channel on this rank, and so on all that wait for it.
  void fail(Failure failure) {
    if (failure_.why != ChannelFailure::none) return;
    own().fail(failure.why, failure.reason);
    failure_ = std::move(failure);
    for (auto& message : messages_) finished_.push_back(std::move(message.tensors));
    messages_.clear();
  }

  // Whether a rank may wait for something that this one has started and not done. What a ring holds
  // is posted by its start, and makes nobody wait for room.
  bool is_needed() const {
    return failure_.why == ChannelFailure::none && waiters_ == 0 &&
           (posted_ < started_pieces_ || started_pieces_ - collected_ > kPieces);
  }

  void make_progress() {
    uint32_t seen = own().requests();
    while (!stop_) {
      own().sleep_until_request(seen);
      if (own().requests() == seen) continue;
      seen = own().requests();
      std::unique_lock lock(mutex_);
      while (!stop_ && is_needed()) {
        const bool advanced = advance(4, one_by_one);
        const Blocker blocker = blocker_;
        lock.unlock();
        if (!advanced) {
          request_progress();
          rings_[blocker.peer]->sleep_unless([&] { return is_past(blocker); });
        }
        lock.lock();
      }
    }
  }

  const int64_t rank_;
  std::vector<std::unique_ptr<Ring>> rings_;
  const Functions functions_;
  std::thread progress_thread_;
  std::atomic<bool> stop_ = false;

  std::mutex mutex_;  // of all that follows
  Failure failure_;
  std::deque<Message> messages_;  // started and not finished
  // The tensors of what is finished: to let go of one may take Python's lock, which the progress
  // thread must not wait for.
  std::vector<std::shared_ptr<const void>> finished_;
  Blocker blocker_{-1, false, 0};
  int64_t waiters_ = 0;         // threads in `finish`, which advance
  int64_t started_ = 0;         // collectives
  int64_t started_pieces_ = 0;  // of all of them
  int64_t posted_ = 0;          // pieces of this rank
  int64_t collected_ = 0;       // pieces of all ranks
};

}  // namespace fusedops

#endif
