// The bindings of rotary_embedding, once for CPU and CUDA; the backward is the transposed map by
// the same kernel. What is theirs alone is how the arguments are typed and run (csrc/cpu and
// csrc/cuda/rotary_embedding.cpp). Arguments were checked by fusedops/ops/rotary_embedding.py.
#pragma once

#include <optional>
#include <tuple>

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include "binding.h"

namespace fusedops {

// A tensor to rotate and the result, which takes over a dense layout.
struct Rotated {
  // The tensor itself when its heads are dense rows, whatever the order of the other dimensions.
  static at::Tensor with_dense_rows(const at::Tensor& tensor) {
    return tensor.stride(-1) == 1 ? tensor : tensor.contiguous();
  }

  explicit Rotated(const at::Tensor& tensor)
      : input(with_dense_rows(tensor)), output(at::empty_like(input)) {}

  template <typename Heads>
  Heads heads() const {
    return {data(input),
            mutable_data(output),
            input.size(1),
            {input.stride(0), input.stride(1), input.stride(2)},
            {output.stride(0), output.stride(1), output.stride(2)}};
  }

  at::Tensor input;
  at::Tensor output;
};

// The operators over a device's RotaryEmbedding and RotaryHeads, its names of dtypes and its
// kernel.
template <typename Arguments, typename Heads, auto kTypeOf,
          void (*kRun)(const Arguments&, c10::Device)>
struct RotaryOperators {
  using Tensor = at::Tensor;
  using MaybeRotated = std::optional<Rotated>;

  static void run(const MaybeRotated& query, const MaybeRotated& key, const Tensor& cos_in,
                  const Tensor& sin_in, bool interleaved, bool inverse) {
    const auto wanted = [](const MaybeRotated& t) { return t.has_value() && t->input.numel() > 0; };
    if (!wanted(query) && !wanted(key)) return;
    const auto cos = Rotated::with_dense_rows(cos_in);
    const auto sin = Rotated::with_dense_rows(sin_in);
    const auto& any = wanted(query) ? query->input : key->input;
    // A table for all batch entries has one row in place of theirs, or no batch dimension.
    const auto batch_stride = [&](const Tensor& table) {
      return table.dim() == 3 && table.size(0) > 1 ? table.stride(0) : 0;
    };
    const auto heads = [&](const MaybeRotated& t) {
      return wanted(t) ? t->template heads<Heads>() : Heads{};
    };
    const Arguments arguments{{heads(query), heads(key)},
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
                              kTypeOf(any),
                              kTypeOf(cos)};
    kRun(arguments, any.device());
  }

  static std::tuple<Tensor, Tensor> forward(const Tensor& query, const Tensor& key,
                                            const Tensor& cos, const Tensor& sin,
                                            bool interleaved) {
    const MaybeRotated q(query), k(key);
    run(q, k, cos, sin, interleaved, false);
    return {q->output, k->output};
  }

  static std::tuple<Tensor, Tensor> backward(const std::optional<Tensor>& grad_query,
                                             const std::optional<Tensor>& grad_key,
                                             const Tensor& cos, const Tensor& sin, bool interleaved,
                                             c10::List<bool> output_mask) {
    MaybeRotated q, k;
    if (output_mask[0] && grad_query.has_value() && grad_query->defined()) q.emplace(*grad_query);
    if (output_mask[1] && grad_key.has_value() && grad_key->defined()) k.emplace(*grad_key);
    run(q, k, cos, sin, interleaved, true);
    return {q ? q->output : Tensor(), k ? k->output : Tensor()};
  }

  static void implement(torch::Library& m) {
    m.impl("rotary_embedding", forward);
    m.impl("rotary_embedding_backward", backward);
  }
};

}  // namespace fusedops
