// Binding of rotary_embedding on CUDA: fusedops_cuda::rotary_embedding and its backward, which is
// the transposed map by the same kernel. Arguments were checked by
// fusedops/ops/rotary_embedding.py.
#include "rotary_embedding.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include "binding.h"

namespace fusedops::cuda {
namespace {

// The tensor itself when its heads are dense rows, whatever the order of the other dimensions.
at::Tensor with_dense_rows(const at::Tensor& tensor) {
  return tensor.stride(-1) == 1 ? tensor : tensor.contiguous();
}

// A tensor to rotate and the result, which takes over a dense layout.
struct Rotated {
  explicit Rotated(const at::Tensor& tensor)
      : input(with_dense_rows(tensor)), output(at::empty_like(input)) {}

  RotaryHeads heads() const {
    return {data(input),
            mutable_data(output),
            input.size(1),
            {input.stride(0), input.stride(1), input.stride(2)},
            {output.stride(0), output.stride(1), output.stride(2)}};
  }

  at::Tensor input;
  at::Tensor output;
};

using MaybeRotated = std::optional<Rotated>;

void run(const MaybeRotated& query, const MaybeRotated& key, const at::Tensor& cos_in,
         const at::Tensor& sin_in, bool interleaved, bool inverse) {
  const auto wanted = [](const MaybeRotated& t) { return t.has_value() && t->input.numel() > 0; };
  if (!wanted(query) && !wanted(key)) return;
  const auto cos = with_dense_rows(cos_in);
  const auto sin = with_dense_rows(sin_in);
  const auto& any = wanted(query) ? query->input : key->input;
  // A table for all batch entries has one row in place of theirs, or no batch dimension.
  const auto batch_stride = [&](const at::Tensor& table) {
    return table.dim() == 3 && table.size(0) > 1 ? table.stride(0) : 0;
  };
  const RotaryEmbedding arguments{
      {wanted(query) ? query->heads() : RotaryHeads{}, wanted(key) ? key->heads() : RotaryHeads{}},
      data(cos),
      data(sin),
      {batch_stride(cos), cos.stride(-2)},
      {batch_stride(sin), sin.stride(-2)},
      any.size(0),
      any.size(2),
      any.size(3),
      cos.size(-1),
      interleaved,
      inverse,
      type_of(any),
      type_of(cos)};
  C10_CUDA_CHECK(rotary_embedding(arguments, c10::cuda::getCurrentCUDAStream()));
}

std::tuple<at::Tensor, at::Tensor> forward(const at::Tensor& query, const at::Tensor& key,
                                           const at::Tensor& cos, const at::Tensor& sin,
                                           bool interleaved) {
  const c10::cuda::CUDAGuard guard(query.device());
  const MaybeRotated q(query), k(key);
  run(q, k, cos, sin, interleaved, false);
  return {q->output, k->output};
}

std::tuple<at::Tensor, at::Tensor> backward(const std::optional<at::Tensor>& grad_query,
                                            const std::optional<at::Tensor>& grad_key,
                                            const at::Tensor& cos, const at::Tensor& sin,
                                            bool interleaved, c10::List<bool> output_mask) {
  const c10::cuda::CUDAGuard guard(cos.device());
  MaybeRotated q, k;
  if (output_mask[0] && grad_query.has_value() && grad_query->defined()) q.emplace(*grad_query);
  if (output_mask[1] && grad_key.has_value() && grad_key->defined()) k.emplace(*grad_key);
  run(q, k, cos, sin, interleaved, true);
  return {q ? q->output : at::Tensor(), k ? k->output : at::Tensor()};
}

}  // namespace

TORCH_LIBRARY_IMPL(fusedops_cuda, CUDA, m) {
  m.impl("rotary_embedding", forward);
  m.impl("rotary_embedding_backward", backward);
}

}  // namespace fusedops::cuda
