// Many threads submit to, wait for and close queues of steps. The kernels are stand-ins that read
// and write all elements of a chunk, so that a sanitizer sees who touches which memory when.
#include "host/step_queue.h"

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <optional>

namespace fusedops {
namespace {

// Calls f(tensor, begin, end, chunk) for the chunks first .. last - 1.
template <typename Call, typename F>
void for_each_chunk(const Call& call, int64_t first, int64_t last, const F& f) {
  for (int64_t chunk = first; chunk < last; ++chunk) {
    const int64_t tensor =
        std::upper_bound(call.first_chunks, call.first_chunks + call.count + 1, chunk) -
        call.first_chunks - 1;
    const int64_t begin = (chunk - call.first_chunks[tensor]) * kUpdateChunk;
    const int64_t end = std::min(begin + kUpdateChunk, call.tensors[tensor].numel);
    f(call.tensors[tensor], begin, end, chunk);
  }
}

}  // namespace

void sum_squares(const SquareSumsCall& call, int64_t first, int64_t last) {
  for_each_chunk(call, first, last, [&](const auto& tensor, int64_t begin, int64_t end, int64_t c) {
    const auto* data = static_cast<const float*>(tensor.data);
    double sum = 0.0;
    for (int64_t i = begin; i < end; ++i) sum += static_cast<double>(data[i]) * data[i];
    call.partials[c] = sum;
  });
}

void step_chunks(const AdamWCall& call, int64_t first, int64_t last) {
  for_each_chunk(call, first, last, [](const auto& tensor, int64_t begin, int64_t end, int64_t) {
    const auto* from = static_cast<const float*>(tensor.param.from);
    const auto* grad = static_cast<const float*>(tensor.grad);
    auto* to = static_cast<float*>(tensor.param.to);
    for (int64_t i = begin; i < end; ++i) to[i] = from[i] - grad[i];
  });
}

}  // namespace fusedops

namespace {

using fusedops::AdamWTensor;
using fusedops::StepQueue;

void require(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "failed: %s\n", what);
  std::_Exit(1);
}

constexpr int64_t kElements = 3 * fusedops::kUpdateChunk + 7;

// The memory of one job. Parameters begin as 1, gradients are 2.
struct Bucket {
  std::vector<float> param = std::vector<float>(kElements, 1.0F);
  std::vector<float> grad = std::vector<float>(kElements, 2.0F);

  std::vector<AdamWTensor> tensors() {
    AdamWTensor tensor{};
    tensor.param = {param.data(), param.data()};
    tensor.grad = grad.data();
    tensor.numel = kElements;
    AdamWTensor empty{};
    return {tensor, empty};
  }
  bool is_stepped() const {
    return std::all_of(param.begin(), param.end(), [](float x) { return x == -1.0F; });
  }
};

constexpr fusedops::StepOptions kStep{0.9, 0.99, 1e-8, 1.0, false, true};

bool are_right(const std::vector<double>& sums) {
  return sums.size() == 2 && sums[0] == 4.0 * kElements && sums[1] == 0.0;
}

// Returns the sums of a job, or nothing where another thread got them before.
std::optional<std::vector<double>> try_wait(StepQueue& queue, int64_t number) {
  try {
    return queue.wait(number);
  } catch (const std::invalid_argument&) {
    return std::nullopt;
  }
}

template <typename F>
void on_threads(int count, const F& f) {
  std::vector<std::thread> threads;
  for (int i = 0; i < count; ++i) threads.emplace_back([&f, i] { f(i); });
  for (auto& thread : threads) thread.join();
}

void submit_and_wait_from_many_threads() {
  StepQueue queue(3);
  on_threads(4, [&](int) {
    for (int round = 0; round < 20; ++round) {
      Bucket bucket;
      require(are_right(queue.wait(queue.submit(bucket.tensors(), kStep))), "sums of a job");
      require(bucket.is_stepped(), "every element is stepped once");
    }
  });
}

void wait_for_one_job_from_many_threads() {
  StepQueue queue(2);
  for (int round = 0; round < 30; ++round) {
    Bucket bucket;
    const int64_t number = queue.submit(bucket.tensors(), kStep);
    std::atomic<int> answers{0};
    on_threads(4, [&](int) {
      const auto sums = try_wait(queue, number);
      if (!sums.has_value()) return;
      require(are_right(*sums), "sums that several threads wait for");
      ++answers;
    });
    require(answers >= 1, "a thread gets the sums");
    require(!try_wait(queue, number).has_value(), "a job is forgotten");
  }
}

void close_from_many_threads_while_others_submit() {
  for (int round = 0; round < 30; ++round) {
    StepQueue queue(3);
    on_threads(6, [&](int thread) {
      if (thread % 2 == 0) return queue.close();
      Bucket bucket;
      try {
        require(are_right(queue.wait(queue.submit(bucket.tensors(), kStep))), "a job before close");
      } catch (const std::runtime_error& error) {
        require(std::strstr(error.what(), "submit after close") != nullptr, error.what());
      }
    });
  }
}

}  // namespace

int main() {
  submit_and_wait_from_many_threads();
  wait_for_one_job_from_many_threads();
  close_from_many_threads_while_others_submit();
  return 0;
}
