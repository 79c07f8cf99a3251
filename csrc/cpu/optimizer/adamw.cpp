// Bindings of adamw and square_sums on the CPU. They trust their caller, the router
// (../router.cpp), which has checked the lists by the contracts in fusedops/ops/adamw.py and
// square_sums.py.
#include "adamw.h"

#include <cmath>
#include <vector>

#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "../../common/binding.h"
#include "../../common/parallel.h"
#include "adamw_chunks.h"

namespace fusedops {

void step_chunks(const AdamWCall& call, int64_t first, int64_t last) {
  FUSEDOPS_CALL_ISA(adamw_chunks, call, first, last);
}

void sum_squares(const SquareSumsCall& call, int64_t first, int64_t last) {
  FUSEDOPS_CALL_ISA(square_sums_chunks, call, first, last);
}

namespace {

using Optional = std::optional<at::Tensor>;

// From this many chunks on what is written does not stay in the cache for its reader anyway.
constexpr int64_t kStreamChunks = 512;

Updated in_place(at::TensorList tensors, size_t index) {
  if (tensors.empty()) return {};
  void* data = tensors[index].mutable_data_ptr();
  return {data, data};
}

double scalar(const at::Tensor& tensor) {
  return dtype_of(tensor) == DType::f64 ? *tensor.const_data_ptr<double>()
                                        : *tensor.const_data_ptr<float>();
}

double count_step(const at::Tensor& step) {
  const double next = scalar(step) + 1.0;
  if (dtype_of(step) == DType::f64) {
    *step.mutable_data_ptr<double>() = next;
  } else {
    *step.mutable_data_ptr<float>() = static_cast<float>(next);
  }
  return next;
}

// How many chunks there are before each tensor, and at the end of all.
template <typename Tensor>
std::vector<int64_t> first_chunks(const std::vector<Tensor>& tensors) {
  std::vector<int64_t> first{0};
  for (const auto& tensor : tensors) first.push_back(first.back() + update_chunks(tensor.numel));
  return first;
}

void adamw(at::TensorList params, at::TensorList grads, at::TensorList exp_avgs,
           at::TensorList exp_avg_sqs, at::TensorList max_exp_avg_sqs, at::TensorList copies,
           at::TensorList steps, const Optional& grad_factor, const Optional& found_inf,
           const Optional& learning_rate, at::IntArrayRef draws, at::ArrayRef<double> weight_decays,
           double lr, double beta1, double beta2, double eps, bool maximize, bool bias_correction) {
  if (found_inf.has_value() && scalar(*found_inf) != 0.0) return;
  if (learning_rate.has_value()) lr = scalar(*learning_rate);
  const size_t count = params.size();
  std::vector<AdamWTensor> tensors(count);
  for (size_t i = 0; i < count; ++i) {
    const auto& param = params[i];
    AdamWTensor& t = tensors[i];
    t.param = in_place(params, i);
    t.exp_avg = in_place(exp_avgs, i);
    t.exp_avg_sq = in_place(exp_avg_sqs, i);
    t.max_exp_avg_sq = in_place(max_exp_avg_sqs, i);
    t.grad = in_place(grads, i).from;
    t.copy = in_place(copies, i);
    t.numel = param.numel();
    t.param_dtype = dtype_of(param);
    t.grad_dtype = dtype_of(grads[i]);
    t.state_dtype = dtype_of(exp_avgs[i]);
    t.copy_dtype = copies.empty() ? t.param_dtype : dtype_of(copies[i]);
  }
  for (size_t i = 0; i < count; ++i) {
    AdamWTensor& t = tensors[i];
    const double step = count_step(steps[i]);
    t.step_size = bias_correction ? lr / (1.0 - std::pow(beta1, step)) : lr;
    t.inverse_root = bias_correction ? 1.0 / std::sqrt(1.0 - std::pow(beta2, step)) : 1.0;
    t.decay = lr * weight_decays[i];
    if (!draws.empty()) {
      t.key = static_cast<uint64_t>(draws[4 * i]);
      t.offset = 2 * static_cast<uint64_t>(step);
      t.place = {draws[4 * i + 1], draws[4 * i + 2], draws[4 * i + 3]};
    }
  }
  const auto first = first_chunks(tensors);
  const double factor = grad_factor.has_value() ? scalar(*grad_factor) : 1.0;
  const AdamWCall call{tensors.data(),
                       first.data(),
                       static_cast<int64_t>(count),
                       beta1,
                       beta2,
                       eps,
                       maximize ? -factor : factor,
                       !draws.empty(),
                       first.back() >= kStreamChunks};
  parallel_rows(first.back(), kUpdateChunk * 16,
                [&](int64_t begin, int64_t end) { step_chunks(call, begin, end); });
}

at::Tensor square_sums(at::TensorList inputs) {
  std::vector<SquareSumsTensor> tensors;
  std::vector<at::Tensor> dense;  // keeps copies alive
  for (const auto& input : inputs) {
    dense.push_back(input.is_non_overlapping_and_dense() ? input : input.contiguous());
    tensors.push_back({data(dense.back()), input.numel(), dtype_of(input)});
  }
  const auto first = first_chunks(tensors);
  std::vector<double> partials(first.back());
  const SquareSumsCall call{tensors.data(), first.data(), static_cast<int64_t>(tensors.size()),
                            partials.data()};
  parallel_rows(first.back(), kUpdateChunk * 4,
                [&](int64_t begin, int64_t end) { sum_squares(call, begin, end); });
  auto sums = at::empty({static_cast<int64_t>(tensors.size())}, at::kDouble);
  auto* to = sums.mutable_data_ptr<double>();
  for (size_t i = 0; i < tensors.size(); ++i) {
    to[i] = 0.0;
    for (int64_t chunk = first[i]; chunk < first[i + 1]; ++chunk) to[i] += partials[chunk];
  }
  return sums;
}

}  // namespace

TORCH_LIBRARY_IMPL(fusedops_cpp, CPU, m) {
  m.impl("adamw", adamw);
  m.impl("square_sums", square_sums);
}

}  // namespace fusedops
