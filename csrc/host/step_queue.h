// The queue of optimizer steps without its binding: threads of its own that square-sum and step the
// chunks of jobs. No Python and no torch, so that a thread sanitizer can watch it
// (tests/sanitizers/test_step_queue.py).
//
// A job is the tensors of one bucket. Its chunks (../cpu/optimizer/adamw.h) are taken one at a time
// by all threads: each sums the squares of the chunk's gradients, then steps the chunk while they
// are in the cache. A job is finished when all its chunks are; jobs begin in the order of
// submission. Sums are added in the order of the chunks: the same bits as those of
// fusedops::square_sums.
//
// The pointers belong to tensors that the submitter keeps alive until the job is finished.
#pragma once

#include <unistd.h>

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <system_error>
#include <thread>
#include <unordered_map>
#include <vector>

#include "../cpu/optimizer/adamw.h"
#include "../cpu/optimizer/adamw_chunks.h"

namespace fusedops {

// The numbers of a step, besides its tensors.
struct StepOptions {
  double beta1, beta2, eps;
  double grad_factor;
  bool stochastic;
  bool steps;  // or only the sums
};

// All methods may be called by any thread at any time.
class StepQueue {
 public:
  static constexpr int kMostThreads = 1024;

  explicit StepQueue(int threads) : state_(std::make_unique<State>()) {
    if (threads < 1 || threads > kMostThreads) {
      throw std::invalid_argument("StepQueue: threads must be 1 to " +
                                  std::to_string(kMostThreads) + ", got " +
                                  std::to_string(threads));
    }
    State& state = *state_;
    try {
      while (static_cast<int>(state.threads.size()) < threads) {
        state.threads.emplace_back([&state] { state.work(); });
      }
    } catch (const std::system_error& error) {
      const size_t started = state.threads.size();
      close();
      throw std::runtime_error("StepQueue: the system started " + std::to_string(started) + " of " +
                               std::to_string(threads) + " threads (" + error.what() + ")");
    }
  }

  StepQueue(const StepQueue&) = delete;
  StepQueue& operator=(const StepQueue&) = delete;

  ~StepQueue() {
    close();
    // In a forked process the threads that waited on the condition variables are gone, and their
    // destructors would wait for them.
    if (is_forked()) static_cast<void>(state_.release());
  }

  // Returns the number of the job.
  int64_t submit(std::vector<AdamWTensor> tensors, const StepOptions& options) {
    require_owner("submit");
    auto job = std::make_shared<Job>();
    job->tensors = std::move(tensors);
    for (const AdamWTensor& tensor : job->tensors) {
      job->grads.push_back({tensor.grad, tensor.numel, tensor.grad_dtype});
      job->first_chunks.push_back(job->chunks() + update_chunks(tensor.numel));
    }
    job->steps = options.steps;
    const auto count = static_cast<int64_t>(job->tensors.size());
    job->partials.resize(job->chunks());
    job->step = {job->tensors.data(),
                 job->first_chunks.data(),
                 count,
                 options.beta1,
                 options.beta2,
                 options.eps,
                 options.grad_factor,
                 options.stochastic,
                 true};
    job->sums = {job->grads.data(), job->first_chunks.data(), count, job->partials.data()};
    return state_->add(std::move(job));
  }

  // Waits for a job, forgets it and returns the square sum of each tensor's gradient. Threads that
  // wait for the same job each get the sums; who asks after one of them has returned gets an error.
  std::vector<double> wait(int64_t number) {
    require_owner("wait");
    return state_->wait(number);
  }

  // Finishes what was submitted and ends the threads; every caller returns when they have ended.
  void close() {
    if (is_forked()) {
      for (auto& thread : state_->threads) thread.detach();
      state_->threads.clear();
      return;
    }
    state_->close();
  }

 private:
  struct Job {
    std::vector<AdamWTensor> tensors;
    std::vector<SquareSumsTensor> grads;
    std::vector<int64_t> first_chunks{0};
    std::vector<double> partials;
    AdamWCall step{};
    SquareSumsCall sums{};
    bool steps = true;
    int64_t taken = 0;     // chunks that a thread has begun
    int64_t finished = 0;  // chunks that are done

    int64_t chunks() const { return first_chunks.back(); }
  };

  // What the threads share. A forked process must neither lock nor destroy it.
  struct State {
    std::mutex mutex;
    std::condition_variable has_work, is_done;
    std::deque<std::shared_ptr<Job>> waiting;  // those with chunks that no thread has begun
    std::unordered_map<int64_t, std::shared_ptr<Job>> jobs;
    int64_t next_number = 0;
    bool closed = false;
    std::mutex join_mutex;  // of `threads`, after the constructor
    std::vector<std::thread> threads;

    int64_t add(std::shared_ptr<Job> job) {
      const std::lock_guard lock(mutex);
      if (closed) throw std::runtime_error("StepQueue: submit after close");
      const int64_t number = next_number++;
      if (job->chunks() > 0) waiting.push_back(job);
      jobs.emplace(number, std::move(job));
      has_work.notify_all();
      return number;
    }

    std::vector<double> wait(int64_t number) {
      std::unique_lock lock(mutex);
      const auto found = jobs.find(number);
      if (found == jobs.end()) {
        throw std::invalid_argument("StepQueue: there is no job " + std::to_string(number) +
                                    ", or its sums were returned already");
      }
      const std::shared_ptr<Job> job = found->second;  // another waiting thread may erase it
      is_done.wait(lock, [&] { return job->finished == job->chunks(); });
      jobs.erase(number);
      lock.unlock();
      std::vector<double> sums(job->tensors.size());
      for (size_t i = 0; i < sums.size(); ++i) {
        for (int64_t c = job->first_chunks[i]; c < job->first_chunks[i + 1]; ++c) {
          sums[i] += job->partials[c];
        }
      }
      return sums;
    }

    void close() {
      {
        const std::lock_guard lock(mutex);
        closed = true;
        has_work.notify_all();
      }
      const std::lock_guard lock(join_mutex);
      for (auto& thread : threads) thread.join();
      threads.clear();
    }

    void work() {
      std::unique_lock lock(mutex);
      while (true) {
        has_work.wait(lock, [&] { return closed || !waiting.empty(); });
        if (waiting.empty()) return;
        const std::shared_ptr<Job> job = waiting.front();
        const int64_t chunk = job->taken++;
        if (job->taken == job->chunks()) waiting.pop_front();
        lock.unlock();
        sum_squares(job->sums, chunk, chunk + 1);
        if (job->steps) step_chunks(job->step, chunk, chunk + 1);
        lock.lock();
        if (++job->finished == job->chunks()) is_done.notify_all();
      }
    }
  };

  bool is_forked() const { return getpid() != owner_; }

  void require_owner(const char* method) const {
    if (is_forked()) {
      throw std::runtime_error(std::string("StepQueue: ") + method + " in a forked process: the " +
                               "threads of the queue exist only in process " +
                               std::to_string(owner_) + ", which made it");
    }
  }

  const pid_t owner_ = getpid();
  std::unique_ptr<State> state_;
};

}  // namespace fusedops
