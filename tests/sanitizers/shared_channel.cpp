// Drawn programs of collectives through shared memory (csrc/runtime/shared_memory), whose
// ranks are threads over one mapping: a thread sanitizer sees all of their accesses.
//
//   shared_channel PROGRAMS FIRST_SEED
//
// Each program draws the number of ranks, the collectives, what lies between their starts, and for
// each rank the order of its waits. In some of them one rank disagrees about a collective, or ends
// before the others: then all others must get an error. Exit code 1 says that a value was wrong.
#include <atomic>
#include <barrier>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <numeric>
#include <random>
#include <thread>
#include <vector>

#include "runtime/shared_memory/collectives.h"

namespace {

using namespace fusedops;

std::atomic<bool> is_wrong = false;

void expect(bool holds, unsigned seed, int64_t rank, int64_t step, const char* what) {
  if (holds || is_wrong.exchange(true)) return;
  std::fprintf(stderr, "seed %u, rank %ld, step %ld: %s\n", seed, static_cast<long>(rank),
               static_cast<long>(step), what);
}

void sum(const SharedSum& parts) {
  DEFAULT::shared_sum(parts);
}

void for_pieces(int64_t begin, int64_t end, const SharedCollectives::PieceFunction& f) {
  for (int64_t piece = begin; piece < end; ++piece) f(piece);
}

struct Step {
  SharedKind kind;
  int64_t numel;  // of each part
  bool is_double;
  int64_t root;  // source of a broadcast, distance of a shift
  bool barrier;  // behind the start
};

enum class Ending { good, disagreement, lost_rank };

struct Program {
  unsigned seed;
  int64_t ranks;
  std::vector<Step> steps;
  Ending ending;
  int64_t bad_rank;
  int64_t bad_step;
};

Program drawn(unsigned seed) {
  std::mt19937 draws(seed);
  const auto below = [&](int64_t end) { return static_cast<int64_t>(draws() % end); };
  Program program{seed, 2 + below(5), {}, static_cast<Ending>(seed % 3), 0, 0};
  const int64_t length = below(3) == 0 ? 60 : 12;  // more than the pieces of a ring
  for (int64_t i = 0; i < length; ++i) {
    const int64_t most = length == 60 ? 300 : below(4) == 0 ? 400'000 : 3'000;
    program.steps.push_back({static_cast<SharedKind>(below(8)), below(6) == 0 ? 0 : below(most),
                             below(2) == 0, 1 + below(program.ranks - 1), below(5) == 0});
  }
  program.bad_rank = below(program.ranks);
  program.bad_step = below(length);
  return program;
}

// What `rank` gives: small integers, whose sums are exact.
double given(int64_t rank, int64_t step, int64_t i) {
  return static_cast<double>((rank * 5 + step + i) % 7);
}

// The elements that one rank sends to another in an exchange, of which some are none.
int64_t part_size(const Step& step, int64_t number, int64_t from, int64_t to) {
  return from == to ? 0 : step.numel * ((from * 3 + to * 5 + number) % 4) / 3;
}

// The sizes of the parts that a rank sends, or receives.
std::vector<int64_t> part_sizes(const Step& step, int64_t number, int64_t rank, int64_t ranks,
                                bool sends) {
  std::vector<int64_t> sizes;
  for (int64_t peer = 0; peer < ranks; ++peer) {
    sizes.push_back(sends ? part_size(step, number, rank, peer)
                          : part_size(step, number, peer, rank));
  }
  return sizes;
}

// Element `i` of all that a rank receives in an exchange.
double exchanged(const Step& step, int64_t number, int64_t rank, int64_t ranks, int64_t i) {
  int64_t from = 0;
  for (; i >= part_size(step, number, from, rank); ++from) i -= part_size(step, number, from, rank);
  for (int64_t to = 0; to < rank; ++to) i += part_size(step, number, from, to);
  return given(from, number, i);
}

double expected(const Step& step, int64_t number, int64_t rank, int64_t ranks, int64_t i) {
  const auto sum_at = [&](int64_t at) {
    double total = 0;
    for (int64_t peer = 0; peer < ranks; ++peer) total += given(peer, number, at);
    return total;
  };
  switch (step.kind) {
    case SharedKind::all_reduce:
      return sum_at(i);
    case SharedKind::reduce_scatter:
      return sum_at(rank * step.numel + i);
    case SharedKind::all_gather:
      return given(i / step.numel, number, i % step.numel);
    case SharedKind::all_to_all:
      return given(i / step.numel, number, rank * step.numel + i % step.numel);
    case SharedKind::exchange:
      return exchanged(step, number, rank, ranks, i);
    case SharedKind::shift:
      return given((rank + ranks - step.root) % ranks, number, i);
    default:
      return given(step.root, number, i);
  }
}

int64_t sum_of(const std::vector<int64_t>& sizes) {
  return std::accumulate(sizes.begin(), sizes.end(), int64_t{0});
}

template <typename T>
struct Buffers {
  std::vector<T> input;
  std::vector<T> output;
};

struct Started {
  int64_t number = -1;
  std::function<bool()> is_right;  // whether the output is what it should be
};

template <typename T>
Started started(SharedCollectives& channel, const Step& step, int64_t number) {
  const int64_t rank = channel.rank(), ranks = channel.ranks();
  const bool divided =
      step.kind == SharedKind::reduce_scatter || step.kind == SharedKind::all_to_all;
  std::vector<int64_t> sends;
  std::vector<int64_t> receives;
  if (step.kind == SharedKind::exchange) {
    sends = part_sizes(step, number, rank, ranks, true);
    receives = part_sizes(step, number, rank, ranks, false);
  }
  const int64_t numel = step.kind == SharedKind::sync       ? 0
                        : step.kind == SharedKind::exchange ? sum_of(sends)
                                                            : step.numel * (divided ? ranks : 1);
  auto buffers = std::make_shared<Buffers<T>>();
  for (int64_t i = 0; i < numel; ++i) {
    buffers->input.push_back(static_cast<T>(given(rank, number, i)));
  }
  buffers->output.resize(step.kind == SharedKind::all_gather       ? numel * ranks
                         : step.kind == SharedKind::reduce_scatter ? numel / ranks
                         : step.kind == SharedKind::exchange       ? sum_of(receives)
                                                                   : numel);
  for (auto* sizes : {&sends, &receives}) {
    for (auto& size : *sizes) size *= static_cast<int64_t>(sizeof(T));
  }
  const bool in_place = step.kind == SharedKind::all_reduce && number % 2 == 0;
  if (in_place) buffers->output = buffers->input;
  const int64_t source =
      step.kind == SharedKind::shift ? (rank + ranks - step.root) % ranks : step.root;
  const int64_t started =
      channel.start({step.kind, in_place ? buffers->output.data() : buffers->input.data(),
                     buffers->output.data(), numel * static_cast<int64_t>(sizeof(T)), sizeof(T),
                     sizeof(T) == 8 ? DType::f64 : DType::f32, sizeof(T), source, "collective",
                     buffers, sends, receives, step.numel * static_cast<int64_t>(sizeof(T))});
  return {started, [buffers, step, number, rank, ranks] {
            for (int64_t i = 0; i < static_cast<int64_t>(buffers->output.size()); ++i) {
              const double value = expected(step, number, rank, ranks, i);
              if (buffers->output[i] != static_cast<T>(value)) return false;
            }
            return true;
          }};
}

class Rank {
 public:
  Rank(const Program& program, std::unique_ptr<SharedCollectives> channel, std::barrier<>& barrier)
      : program_(program),
        channel_(std::move(channel)),
        barrier_(barrier),
        draws_(program.seed * 64 + static_cast<unsigned>(channel_->rank())) {}

  void run() {
    const int64_t rank = channel_->rank();
    const bool is_bad = rank == program_.bad_rank;
    const int64_t length = static_cast<int64_t>(program_.steps.size());
    const unsigned patience = draws_() % 2 == 0 ? 3 : 50;  // starts for each wait
    for (int64_t i = 0; i < length && !failed_; ++i) {
      Step step = program_.steps[i];
      if (is_bad && i == program_.bad_step) {
        if (program_.ending == Ending::lost_rank) break;
        if (program_.ending == Ending::disagreement) step.is_double = !step.is_double;
      }
      started_.push_back(step.is_double ? started<double>(*channel_, step, i)
                                        : started<float>(*channel_, step, i));
      waiting_.push_back(i);
      while (!waiting_.empty() && draws_() % patience == 0 && !failed_) wait_for_one();
      if (step.barrier && program_.ending == Ending::good) barrier_.arrive_and_wait();
    }
    const bool ends_early = is_bad && program_.ending == Ending::lost_rank;
    while (!waiting_.empty() && !failed_ && !ends_early) wait_for_one();
    if (ends_early) return channel_.reset();
    // Who started a collective that the others did not has an error; it then starts no other.
    expect(failed_ == (program_.ending != Ending::good), program_.seed, rank, length,
           failed_ ? failure_.reason.c_str() : "no error was raised");
  }

 private:
  void wait_for_one() {
    const size_t at = draws_() % waiting_.size();
    const int64_t i = waiting_[at];
    waiting_.erase(waiting_.begin() + static_cast<int64_t>(at));
    SharedCollectives::Failure failure;
    const auto finish = [&] { failure = channel_->finish(started_[i].number, 60.0); };
    if (draws_() % 4 == 0) {  // two threads of one rank wait at once
      std::thread other([&] { channel_->finish(started_[i].number / 2, 60.0); });
      finish();
      other.join();
    } else {
      finish();
    }
    if (failure.why != ChannelFailure::none) {
      const auto wanted = program_.ending == Ending::disagreement ? ChannelFailure::disagreement
                                                                  : ChannelFailure::lost_rank;
      expect(program_.ending != Ending::good && failure.why == wanted, program_.seed,
             channel_->rank(), i, failure.reason.c_str());
      failure_ = failure;
      failed_ = true;
      return;
    }
    expect(started_[i].is_right(), program_.seed, channel_->rank(), i, "another value");
  }

  const Program& program_;
  std::unique_ptr<SharedCollectives> channel_;
  std::barrier<>& barrier_;
  std::mt19937 draws_;
  std::vector<Started> started_;
  std::vector<int64_t> waiting_;
  bool failed_ = false;
  SharedCollectives::Failure failure_;
};

void run(const Program& program) {
  std::vector<std::unique_ptr<SharedCollectives>> channels;
  for (int64_t rank = 0; rank < program.ranks; ++rank) {
    channels.push_back(std::make_unique<SharedCollectives>(
        rank, program.ranks, SharedCollectives::Functions{sum, for_pieces}));
  }
  for (auto& mine : channels) {
    for (auto& other : channels) {
      if (mine != other) mine->connect(other->rank(), std::make_unique<Ring>(&other->own()));
    }
  }
  std::barrier barrier(program.ranks);
  std::vector<std::unique_ptr<Rank>> ranks;
  for (auto& channel : channels) {
    ranks.push_back(std::make_unique<Rank>(program, std::move(channel), barrier));
  }
  std::vector<std::thread> threads;
  for (auto& rank : ranks) threads.emplace_back([&rank] { rank->run(); });
  for (auto& thread : threads) thread.join();
}

}  // namespace

int main(int count, char** arguments) {
  if (count != 3) return 2;
  const auto first = static_cast<unsigned>(std::atoi(arguments[2]));
  const auto end = first + static_cast<unsigned>(std::atoi(arguments[1]));
  for (unsigned seed = first; seed < end && !is_wrong; ++seed) run(drawn(seed));
  return is_wrong ? 1 : 0;
}
