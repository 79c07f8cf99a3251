// The queue of optimizer steps: threads of its own that square-sum and step the buckets of an
// offloaded optimizer while the backward still runs. A Python module (pybind11); no torch.
//
// A job is the tensors of one bucket. Its chunks (../cpu/adamw.h) are taken one at a time by all
// threads: each sums the squares of the chunk's gradients, then steps the chunk while they are in
// the cache. A job is finished when all its chunks are; jobs begin in the order of submission. Sums
// are added in the order of the chunks: the same bits as those of fusedops::square_sums.
//
// The pointers belong to tensors that the submitter keeps alive until the job is finished.
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "../cpu/adamw.h"
#include "../cpu/adamw_chunks.h"

namespace fusedops {
namespace {

namespace py = pybind11;

DType dtype_of(const std::string& name) {
  if (name == "float32") return DType::f32;
  if (name == "bfloat16") return DType::bf16;
  if (name == "float16") return DType::f16;
  if (name == "float64") return DType::f64;
  throw std::invalid_argument("StepQueue: no kernel for dtype " + name);
}

// What a caller says of one tensor: see TensorStep in fusedops/optim/_step_queue.py.
AdamWTensor tensor_of(const py::handle& given) {
  const auto address = [&](const char* name) {
    return reinterpret_cast<void*>(given.attr(name).cast<uintptr_t>());
  };
  const auto updated = [&](const char* from, const char* to) {
    return Updated{address(from), address(to)};
  };
  const auto number = [&](const char* name) { return given.attr(name).cast<double>(); };
  const auto integer = [&](const char* name) { return given.attr(name).cast<int64_t>(); };
  const auto dtype = [&](const char* name) {
    return dtype_of(given.attr(name).cast<std::string>());
  };
  AdamWTensor tensor{};
  tensor.param = updated("param", "new_param");
  tensor.exp_avg = updated("exp_avg", "new_exp_avg");
  tensor.exp_avg_sq = updated("exp_avg_sq", "new_exp_avg_sq");
  tensor.max_exp_avg_sq = updated("max_exp_avg_sq", "new_max_exp_avg_sq");
  tensor.grad = address("grad");
  tensor.copy = address("copy");
  tensor.numel = integer("numel");
  tensor.param_dtype = dtype("param_dtype");
  tensor.grad_dtype = dtype("grad_dtype");
  tensor.state_dtype = dtype("state_dtype");
  tensor.copy_dtype = dtype("copy_dtype");
  tensor.step_size = number("step_size");
  tensor.inverse_root = number("inverse_root");
  tensor.decay = number("decay");
  tensor.key = static_cast<uint64_t>(integer("key"));
  tensor.offset = static_cast<uint64_t>(integer("offset"));
  tensor.place = {integer("base"), integer("run"), integer("pitch")};
  return tensor;
}

struct Job {
  std::vector<AdamWTensor> tensors;
  std::vector<SquareSumsTensor> grads;
  std::vector<int64_t> first_chunks{0};
  std::vector<double> partials;
  AdamWCall step{};
  SquareSumsCall sums{};
  bool steps = true;     // or only the sums
  int64_t taken = 0;     // chunks that a thread has begun
  int64_t finished = 0;  // chunks that are done

  int64_t chunks() const { return first_chunks.back(); }
};

class StepQueue {
 public:
  explicit StepQueue(int threads) {
    if (threads < 1) throw std::invalid_argument("StepQueue: threads must be at least 1");
    for (int i = 0; i < threads; ++i) threads_.emplace_back([this] { work(); });
  }

  ~StepQueue() { close(); }

  // Returns the number of the job.
  int64_t submit(const py::list& given, double beta1, double beta2, double eps, double grad_factor,
                 bool stochastic, bool steps) {
    auto job = std::make_unique<Job>();
    for (const auto& each : given) {
      job->tensors.push_back(tensor_of(each));
      const AdamWTensor& tensor = job->tensors.back();
      job->grads.push_back({tensor.grad, tensor.numel, tensor.grad_dtype});
      job->first_chunks.push_back(job->chunks() + update_chunks(tensor.numel));
    }
    job->steps = steps;
    const auto count = static_cast<int64_t>(job->tensors.size());
    job->partials.resize(job->chunks());
    job->step = {job->tensors.data(),
                 job->first_chunks.data(),
                 count,
                 beta1,
                 beta2,
                 eps,
                 grad_factor,
                 stochastic,
                 true};
    job->sums = {job->grads.data(), job->first_chunks.data(), count, job->partials.data()};
    const std::lock_guard lock(mutex_);
    if (closed_) throw std::runtime_error("StepQueue: submit after close");
    const int64_t number = next_number_++;
    if (job->chunks() > 0) waiting_.push_back(job.get());
    jobs_.emplace(number, std::move(job));
    work_.notify_all();
    return number;
  }

  // Waits for a job, forgets it and returns the square sum of each tensor's gradient.
  std::vector<double> wait(int64_t number) {
    const py::gil_scoped_release without_gil;
    std::unique_lock lock(mutex_);
    const auto found = jobs_.find(number);
    if (found == jobs_.end()) throw std::invalid_argument("StepQueue: no such job");
    Job& job = *found->second;
    done_.wait(lock, [&] { return job.finished == job.chunks(); });
    std::vector<double> sums(job.tensors.size());
    for (size_t i = 0; i < sums.size(); ++i) {
      for (int64_t c = job.first_chunks[i]; c < job.first_chunks[i + 1]; ++c)
        sums[i] += job.partials[c];
    }
    jobs_.erase(number);  // not by the iterator: other jobs came and went
    return sums;
  }

  // Finishes what was submitted and ends the threads.
  void close() {
    {
      const std::lock_guard lock(mutex_);
      closed_ = true;
      work_.notify_all();
    }
    for (auto& thread : threads_) thread.join();
    threads_.clear();
  }

 private:
  void work() {
    std::unique_lock lock(mutex_);
    while (true) {
      work_.wait(lock, [&] { return closed_ || !waiting_.empty(); });
      if (waiting_.empty()) return;
      Job& job = *waiting_.front();
      const int64_t chunk = job.taken++;
      if (job.taken == job.chunks()) waiting_.pop_front();
      lock.unlock();
      sum_squares(job.sums, chunk, chunk + 1);
      if (job.steps) step_chunks(job.step, chunk, chunk + 1);
      lock.lock();
      if (++job.finished == job.chunks()) done_.notify_all();
    }
  }

  std::mutex mutex_;
  std::condition_variable work_, done_;
  std::deque<Job*> waiting_;  // those with chunks that no thread has begun
  std::unordered_map<int64_t, std::unique_ptr<Job>> jobs_;
  int64_t next_number_ = 0;
  bool closed_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace
}  // namespace fusedops

PYBIND11_MODULE(step_queue, m) {
  namespace py = pybind11;
  using fusedops::StepQueue;
  m.doc() = "Threads that step the buckets of an offloaded optimizer.";
  py::class_<StepQueue>(m, "StepQueue")
      .def(py::init<int>(), py::arg("threads"))
      .def("submit", &StepQueue::submit, py::arg("tensors"), py::kw_only(), py::arg("beta1"),
           py::arg("beta2"), py::arg("eps"), py::arg("grad_factor"), py::arg("stochastic"),
           py::arg("steps"))
      .def("wait", &StepQueue::wait, py::arg("number"))
      .def("close", &StepQueue::close, py::call_guard<py::gil_scoped_release>());
}
