// Binding of moe_mlp on the CPU: fusedops_cpp::moe_mlp, and two forms of its backward: one makes
// the gradients of the parameters (moe_mlp_backward), one adds them to buffers
// (moe_mlp_add_gradients). Arguments were checked by fusedops/ops/moe_mlp.py; the values of the
// plan's tensors are looked through here.
//
// Forward: two batches of products (gemm.isa.cpp) and the sum over each token's rows. The first
// gathers the tokens' rows while it packs them; only the hidden layer is between the two.
// Backward: the products that it must have (five; one more where the pre-activation was not kept),
// of which those over the tokens' rows and gradients gather them as well.
#include "moe_mlp.h"

#include <algorithm>
#include <array>
#include <vector>

#include <torch/library.h>

#include "../product/grouped_binding.h"
#include "moe_rows.h"

namespace fusedops {
namespace {

using Optional = std::optional<at::Tensor>;

constexpr const char* kOp = "moe_mlp";

// The rows of a plan: which token each is, its probability, its group.
struct Rows {
  Rows(const at::Tensor& input, const at::Tensor& probs, const at::Tensor& permutation,
       const at::Tensor& positions, const at::Tensor& offsets)
      : groups(kOp, offsets, permutation.numel()),
        slots(permutation.contiguous()),
        places(positions.contiguous()) {
    const int64_t rows = slots.numel(), top_k = positions.size(1);
    const auto weights = probs.contiguous();
    tokens = at::empty({rows}, slots.options());
    scale = at::empty({rows}, probs.options());
    const auto* slot = slots.const_data_ptr<int32_t>();
    const auto* place = places.const_data_ptr<int32_t>();
    auto* token = tokens.mutable_data_ptr<int32_t>();
    for (int64_t r = 0; r < rows; ++r) {
      TORCH_CHECK_VALUE(slot[r] >= 0 && slot[r] < rows, kOp, ": plan.permutation must be in [0, ",
                        rows, "), got ", slot[r]);
      TORCH_CHECK_VALUE(place[r] >= 0 && place[r] < rows, kOp, ": plan.positions must be in [0, ",
                        rows, "), got ", place[r]);
      token[r] = static_cast<int32_t>(slot[r] / top_k);
    }
    with_statistics(scale, [&]<typename A>(A* to) {
      const A* from = weights.const_data_ptr<A>();
      for (int64_t r = 0; r < rows; ++r) to[r] = from[slot[r]];
    });
  }

  int64_t count() const { return groups.rows(); }
  const int32_t* token(int64_t row = 0) const { return tokens.const_data_ptr<int32_t>() + row; }

  // The rows of a matrix [tokens, size] in the order of the plan.
  Matrix gathered(const at::Tensor& matrix) const {
    return {matrix.const_data_ptr(), matrix.stride(0), matrix.stride(1), token(), nullptr};
  }

  const void* scale_from(int64_t row) const {
    return static_cast<const char*>(scale.const_data_ptr()) + row * scale.element_size();
  }

  // output[t] = sum over the slots of t, in their order, of their rows.
  at::Tensor combine(const at::Tensor& rows) const {
    auto output = at::empty({places.size(0), rows.size(1)}, rows.options());
    const MoeCombine arguments{
        {places.const_data_ptr<int32_t>(), places.size(0), places.size(1), count()},
        {data(rows), rows.size(1)},
        nullptr,
        mutable_data(output),
        rows.size(1),
        dtype_of(rows)};
    if (output.numel() > 0) FUSEDOPS_CALL_ISA(moe_combine, arguments);
    return output;
  }

  Groups groups;
  at::Tensor slots, places, tokens, scale;
};

Gate gate_of(std::string_view activation, bool gated, bool interleaved) {
  const bool clamped = activation == "swiglu_oai";
  return {clamped ? Activation::fast_gelu : parse_activation(activation),
          !gated        ? GateLayout::none
          : interleaved ? GateLayout::pairs
                        : GateLayout::halves,
          clamped};
}

// hidden = scale * h(x * w1 + b1) of all rows; `preactivation` may be undefined.
void first_product(const Rows& rows, const at::Tensor& x, const at::Tensor& w1,
                   const at::Tensor& b1, const Gate& gate, const at::Tensor& preactivation,
                   const at::Tensor& hidden) {
  const int64_t columns = hidden.size(1), size = x.element_size();
  std::vector<ExpertForward> experts;
  for (int64_t e = 0; e < rows.groups.count(); ++e) {
    const int64_t first = rows.groups.begin(e);
    const auto weight = matrix_of(w1, e);
    auto up = weight;
    up.data = static_cast<const char*>(up.data) + columns * up.column_stride * size;
    const int64_t n = gate.layout == GateLayout::halves ? columns : w1.size(2);
    experts.push_back({product_of(rows.groups.size(e), n, w1.size(1),
                                  from_row(rows.gathered(x), first, size), weight, x),
                       up, rows_from(b1, e), rows.scale_from(first),
                       mutable_rows_from(preactivation, first), mutable_rows_from(hidden, first),
                       columns, gate});
  }
  FUSEDOPS_CALL_ISA(expert_forward, experts.data(), static_cast<int64_t>(experts.size()));
}

// output = rows * w2 + scale * b2.
void second_product(const Rows& rows, const at::Tensor& hidden, const at::Tensor& w2,
                    const at::Tensor& b2, const at::Tensor& output) {
  std::vector<LinearForward> products;
  for (int64_t e = 0; e < rows.groups.count(); ++e) {
    const int64_t first = rows.groups.begin(e);
    const auto call = product_of(rows.groups.size(e), w2.size(2), w2.size(1),
                                 from_row(matrix(hidden), first, hidden.element_size()),
                                 matrix_of(w2, e), hidden);
    products.push_back({call, rows_from(b2, e), nullptr, mutable_rows_from(output, first),
                        Activation::identity, rows.scale_from(first)});
  }
  FUSEDOPS_CALL_ISA(linear_forward_batch, products.data(), static_cast<int64_t>(products.size()));
}

std::tuple<at::Tensor, at::Tensor> forward(const at::Tensor& input, const at::Tensor& probs,
                                           const at::Tensor& permutation,
                                           const at::Tensor& positions, const at::Tensor& offsets,
                                           const at::Tensor& w1, const at::Tensor& w2,
                                           const Optional& b1, const Optional& b2,
                                           std::string_view activation, bool gated,
                                           bool interleaved, bool keep_preactivation) {
  const Rows rows(input, probs, permutation, positions, offsets);
  const auto hidden = at::empty({rows.count(), w2.size(1)}, input.options());
  const auto kept =
      at::empty({keep_preactivation ? permutation.numel() : 0, w1.size(2)}, input.options());
  first_product(rows, input, w1, dense(b1), gate_of(activation, gated, interleaved),
                keep_preactivation ? kept : at::Tensor(), hidden);
  if (keep_preactivation) zero_rows_from(kept, rows.count());
  const auto output = at::empty({rows.count(), w2.size(2)}, input.options());
  second_product(rows, hidden, w2, dense(b2), output);
  return {rows.combine(output), kept};
}

// From the gradient of the output: those of the pre-activation and of the probabilities, and the
// hidden layer, each where it is defined.
void hidden_gradients(const Rows& rows, const at::Tensor& grad, const at::Tensor& w2,
                      const at::Tensor& preactivation, const Gate& gate, const at::Tensor& dz,
                      const at::Tensor& hidden, const at::Tensor& dots) {
  const int64_t columns = w2.size(1), size = grad.element_size();
  std::vector<ExpertBackward> experts;
  for (int64_t e = 0; e < rows.groups.count(); ++e) {
    const int64_t first = rows.groups.begin(e);
    experts.push_back(
        {product_of(rows.groups.size(e), columns, w2.size(2),
                    from_row(rows.gathered(grad), first, size), transposed(matrix_of(w2, e)), grad),
         rows_from(preactivation, first), rows.scale_from(first), mutable_rows_from(dz, first),
         mutable_rows_from(hidden, first), mutable_rows_from(dots, first),
         dots.defined() ? dots.size(1) : 0, gate});
  }
  FUSEDOPS_CALL_ISA(expert_backward, experts.data(), static_cast<int64_t>(experts.size()));
}

at::Tensor probability_gradient(const Rows& rows, const at::Tensor& grad, const at::Tensor& probs,
                                const at::Tensor& b2, const at::Tensor& dots, int64_t columns) {
  const auto gradient = at::empty(probs.sizes(), probs.options());
  const SlotGradients arguments{rows.slots.const_data_ptr<int32_t>(),
                                rows.token(),
                                rows.groups.ends(),
                                data(dots),
                                dots.size(1),
                                columns,
                                data(grad),
                                data(b2),
                                grad.size(1),
                                rows.groups.count(),
                                rows.slots.numel(),
                                mutable_data(gradient),
                                dtype_of(grad)};
  FUSEDOPS_CALL_ISA(slot_gradients, arguments);
  return gradient;
}

// Those that are asked for. Of the parameters (w1 and after) some may be there before: buffers of
// the accumulation dtype, to which the gradients are added.
struct Gradients {
  at::Tensor input, probs, w1, w2, b1, b2;
};

void differentiate(Gradients& to, std::array<bool, 6> wanted, const at::Tensor& grad_output,
                   const at::Tensor& input, const at::Tensor& probs, const at::Tensor& permutation,
                   const at::Tensor& positions, const at::Tensor& offsets, const at::Tensor& w1,
                   const at::Tensor& w2, const Optional& b1, const Optional& b2,
                   const at::Tensor& preactivation, std::string_view activation, bool gated,
                   bool interleaved) {
  const auto [wants_input, wants_probs, wants_w1, wants_w2, wants_b1, wants_b2] = wanted;
  const Rows rows(input, probs, permutation, positions, offsets);
  const auto weight_gradient = [&](const Matrix& x, const Matrix& grad, const at::Tensor& weight,
                                   at::Tensor& gradient) {
    if (gradient.defined()) {
      add_weight_gradient(kOp, rows.groups, x, grad, weight, gradient);
    } else {
      gradient = grouped_weight_gradient(rows.groups, x, grad, weight);
    }
  };
  const auto bias_gradient = [&](const at::Tensor& grad, at::Tensor& gradient,
                                 const int32_t* places = nullptr, const void* scale = nullptr) {
    if (gradient.defined()) {
      add_row_sums(kOp, rows.groups, grad, gradient, places, scale);
    } else {
      gradient = grouped_row_sums(rows.groups, grad, places, scale);
    }
  };
  const auto gate = gate_of(activation, gated, interleaved);
  const auto dy = grad_output.contiguous();
  const auto options = input.options();
  const int64_t count = rows.count(), columns = w2.size(1), width = w1.size(2);
  if (wants_input || wants_probs || wants_w1 || wants_w2 || wants_b1) {
    auto z = preactivation.contiguous();
    if (z.size(0) != permutation.numel()) {
      z = at::empty({count, width}, options);
      grouped_product(rows.groups, rows.gathered(input), w1, dense(b1), Activation::identity,
                      at::Tensor(), z);
    }
    at::Tensor dz, hidden, dots;
    if (wants_input || wants_w1 || wants_b1) dz = at::empty({count, width}, options);
    if (wants_w2) hidden = at::empty({count, columns}, options);
    if (wants_probs) {
      const int64_t parts = (columns + kLeastTileColumns - 1) / kLeastTileColumns;
      dots = at::empty({count, parts}, probs.options());
    }
    hidden_gradients(rows, dy, w2, z, gate, dz, hidden, dots);
    if (wants_probs) to.probs = probability_gradient(rows, dy, probs, dense(b2), dots, columns);
    if (wants_w2) weight_gradient(matrix(hidden), rows.gathered(dy), w2, to.w2);
    if (wants_b1) bias_gradient(dz, to.b1);
    if (wants_w1) weight_gradient(rows.gathered(input), matrix(dz), w1, to.w1);
    if (wants_input) {
      const auto grads = at::empty({count, input.size(1)}, options);
      grouped_product(rows.groups, matrix(dz), w1.transpose(1, 2), at::Tensor(),
                      Activation::identity, at::Tensor(), grads);
      to.input = rows.combine(grads);
    }
  }
  if (wants_b2) bias_gradient(dy, to.b2, rows.token(), data(rows.scale));
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor> backward(
    const Optional& grad_output, const at::Tensor& input, const at::Tensor& probs,
    const at::Tensor& permutation, const at::Tensor& positions, const at::Tensor& offsets,
    const at::Tensor& w1, const at::Tensor& w2, const Optional& b1, const Optional& b2,
    const at::Tensor& preactivation, std::string_view activation, bool gated, bool interleaved,
    bool /*keep_preactivation*/, std::array<bool, 6> output_mask) {
  Gradients made;
  differentiate(made, output_mask, *grad_output, input, probs, permutation, positions, offsets, w1,
                w2, b1, b2, preactivation, activation, gated, interleaved);
  return {made.input, made.probs, made.w1, made.w2, made.b1, made.b2};
}

std::tuple<at::Tensor, at::Tensor> add_gradients(
    const Optional& into_w1, const Optional& into_w2, const Optional& into_b1,
    const Optional& into_b2, const at::Tensor& grad_output, const at::Tensor& input,
    const at::Tensor& probs, const at::Tensor& permutation, const at::Tensor& positions,
    const at::Tensor& offsets, const at::Tensor& w1, const at::Tensor& w2, const Optional& b1,
    const Optional& b2, const at::Tensor& preactivation, std::string_view activation, bool gated,
    bool interleaved, bool /*keep_preactivation*/, std::array<bool, 2> output_mask) {
  Gradients to{at::Tensor(),
               at::Tensor(),
               into_w1.value_or(at::Tensor()),
               into_w2.value_or(at::Tensor()),
               into_b1.value_or(at::Tensor()),
               into_b2.value_or(at::Tensor())};
  const std::array<bool, 6> wanted{output_mask[0],  output_mask[1],  to.w1.defined(),
                                   to.w2.defined(), to.b1.defined(), to.b2.defined()};
  differentiate(to, wanted, grad_output, input, probs, permutation, positions, offsets, w1, w2, b1,
                b2, preactivation, activation, gated, interleaved);
  return {to.input, to.probs};
}

}  // namespace

TORCH_LIBRARY_IMPL(fusedops_cpp, CPU, m) {
  m.impl("moe_mlp", forward);
  m.impl("moe_mlp_backward", backward);
  m.impl("moe_mlp_add_gradients", add_gradients);
}

}  // namespace fusedops
