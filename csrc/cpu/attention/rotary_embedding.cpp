// Binding of rotary_embedding on the CPU: fusedops_cpp::rotary_embedding and its backward, which is
// the transposed map by the same kernel. Arguments were checked by
// fusedops/ops/rotary_embedding.py.
#include "rotary_embedding.h"

#include <optional>
#include <tuple>

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include "../../common/binding.h"

namespace fusedops {
namespace {

// A tensor to rotate and the result, which takes over a dense layout.
struct Rotated {
  // The tensor itself when its heads are dense rows, whatever the order of the other dimensions.
  static at::Tensor with_dense_rows(const at::Tensor& tensor) {
    return tensor.stride(-1) == 1 ? tensor : tensor.contiguous();
  }

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
  const auto cos = Rotated::with_dense_rows(cos_in);
  const auto sin = Rotated::with_dense_rows(sin_in);
  const auto& any = wanted(query) ? query->input : key->input;
  // A table for all batch entries has one row in place of theirs, or no batch dimension.
  const auto batch_stride = [&](const at::Tensor& table) {
    return table.dim() == 3 && table.size(0) > 1 ? table.stride(0) : 0;
  };
  const auto heads = [&](const MaybeRotated& t) { return wanted(t) ? t->heads() : RotaryHeads{}; };
  const RotaryEmbedding arguments{{heads(query), heads(key)},
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
                                  dtype_of(any),
                                  dtype_of(cos)};
  FUSEDOPS_CALL_ISA(rotary_embedding, arguments);
}

std::tuple<at::Tensor, at::Tensor> forward(const at::Tensor& query, const at::Tensor& key,
                                           const at::Tensor& cos, const at::Tensor& sin,
                                           bool interleaved) {
  const MaybeRotated q(query), k(key);
  run(q, k, cos, sin, interleaved, false);
  return {q->output, k->output};
}

std::tuple<at::Tensor, at::Tensor> backward(const std::optional<at::Tensor>& grad_query,
                                            const std::optional<at::Tensor>& grad_key,
                                            const at::Tensor& cos, const at::Tensor& sin,
                                            bool interleaved, c10::List<bool> output_mask) {
  MaybeRotated q, k;
  if (output_mask[0] && grad_query.has_value() && grad_query->defined()) q.emplace(*grad_query);
  if (output_mask[1] && grad_key.has_value() && grad_key->defined()) k.emplace(*grad_key);
  run(q, k, cos, sin, interleaved, true);
  return {q ? q->output : at::Tensor(), k ? k->output : at::Tensor()};
}

}  // namespace

TORCH_LIBRARY_IMPL(fusedops_cpp, CPU, m) {
  m.impl("rotary_embedding", forward);
  m.impl("rotary_embedding_backward", backward);
}

}  // namespace fusedops
