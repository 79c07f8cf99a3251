// Binding of causal_conv1d on the CPU: fusedops_cpp::causal_conv1d and its backward. Arguments were
// checked by fusedops/ops/causal_conv1d.py, but for the values of cu_seqlens.
#include "causal_conv1d.h"

#include <algorithm>
#include <optional>
#include <tuple>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "../../common/binding.h"
#include "../../common/sequences.h"

namespace fusedops {
namespace {

// A result [batch, channels, tokens] in the layout that the public function promises, and its rows.
struct Result {
  explicit Result(const at::Tensor& input) {
    const auto batch = input.size(0), channels = input.size(1), tokens = input.size(2);
    const bool tokens_first = input.stride(1) == 1 && input.stride(2) != 1;
    if (tokens_first) {
      tensor = at::empty({batch, tokens, channels}, input.options()).transpose(1, 2);
    } else {
      tensor = at::empty({batch, channels, tokens}, input.options());
    }
    const bool dense_rows = tokens_first || channels <= 1 || tokens <= 1;
    rows = dense_rows ? tensor : at::empty({batch, tokens, channels}, input.options());
    copied = !dense_rows;
  }

  at::Tensor finished() const {
    if (copied) tensor.copy_(rows.transpose(1, 2));
    return tensor;
  }

  at::Tensor tensor;
  at::Tensor rows;  // dense memory of [batch, tokens, channels]
  bool copied;
};

// The arguments as the kernels read them.
struct Arguments {
  Arguments(const at::Tensor& input_in, const at::Tensor& weight_in,
            const std::optional<at::Tensor>& bias_in, const std::optional<at::Tensor>& state_in,
            const std::optional<at::Tensor>& cu_seqlens, std::string_view activation)
      : input(token_rows(input_in.transpose(1, 2))),
        weight(weight_in.t().to(statistics_type(input_in)).contiguous()),
        bias(dense(bias_in)),
        state(states(state_in)),
        starts(sequence_starts(cu_seqlens, input_in.size(0), input_in.size(2))),
        silu(activation == "silu") {
    if (bias.defined()) bias = bias.to(weight.scalar_type());
    // Their number, and so the sums of the gradients, depends on the sequences alone.
    const int64_t length = std::max<int64_t>(32, (input.size(0) + 63) / 64);
    for (size_t n = 0; n + 1 < starts.size(); ++n) {
      const int64_t tokens = starts[n + 1] - starts[n];
      for (int64_t begin = 0; begin == 0 || begin < tokens; begin += length) {
        chunks.push_back({static_cast<int64_t>(n), begin, std::min(tokens, begin + length)});
      }
    }
  }

  // States as [sequences, width - 1, channels].
  static at::Tensor states(const std::optional<at::Tensor>& tensor) {
    return tensor.has_value() && tensor->defined() ? tensor->transpose(1, 2).contiguous()
                                                   : at::Tensor();
  }

  at::Tensor empty_states() const {
    const int64_t sequences = static_cast<int64_t>(starts.size()) - 1;
    return at::empty({sequences, weight.size(0) - 1, weight.size(1)}, input.options());
  }

  CausalConv1d call() const {
    return {data(input),
            input.stride(0),
            data(weight),
            data(bias),
            data(state),
            starts.data(),
            static_cast<int64_t>(starts.size()) - 1,
            weight.size(1),
            weight.size(0),
            silu,
            dtype_of(input)};
  }

  at::Tensor input, weight, bias, state;
  std::vector<int64_t> starts;
  std::vector<ConvChunk> chunks;
  bool silu;
};

std::tuple<at::Tensor, at::Tensor> forward(const at::Tensor& input, const at::Tensor& weight,
                                           const std::optional<at::Tensor>& bias,
                                           const std::optional<at::Tensor>& initial_state,
                                           const std::optional<at::Tensor>& cu_seqlens,
                                           std::string_view activation) {
  const Arguments arguments(input, weight, bias, initial_state, cu_seqlens, activation);
  const Result output(input);
  const auto state = arguments.empty_states();
  if (state.numel() > 0) {
    const CausalConv1dForward call{arguments.call(), mutable_data(output.rows),
                                   mutable_data(state)};
    FUSEDOPS_CALL_ISA(causal_conv1d_forward, call, arguments.chunks.data(),
                      static_cast<int64_t>(arguments.chunks.size()));
  }
  return {output.finished(), state.transpose(1, 2).contiguous()};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> backward(
    const std::optional<at::Tensor>& grad_output, const std::optional<at::Tensor>& grad_state,
    const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
    const std::optional<at::Tensor>& initial_state, const std::optional<at::Tensor>& cu_seqlens,
    std::string_view activation, c10::List<bool> output_mask) {
  const Arguments arguments(input, weight, bias, initial_state, cu_seqlens, activation);
  const int64_t chunks = static_cast<int64_t>(arguments.chunks.size());
  const int64_t channels = weight.size(0), width = weight.size(1);
  at::Tensor dy;
  if (grad_output.has_value() && grad_output->defined()) {
    dy = token_rows(grad_output->to(input.scalar_type()).transpose(1, 2));
  }
  std::optional<Result> dx;
  at::Tensor dstate, dinitial, partials, dparameters;
  if (grad_state.has_value() && grad_state->defined()) {
    dstate = Arguments::states(grad_state->to(input.scalar_type()));
  }
  if (output_mask[0]) dx.emplace(input);
  if (output_mask[3]) dinitial = arguments.empty_states();
  if (output_mask[1] || output_mask[2]) {
    partials = at::empty({chunks, width + 1, channels}, arguments.weight.options());
    dparameters = at::empty({width + 1, channels}, arguments.weight.options());
  }
  if (channels > 0) {
    const CausalConv1dBackward call{arguments.call(),
                                    data(dy),
                                    dy.defined() ? dy.stride(0) : 0,
                                    data(dstate),
                                    dx ? mutable_data(dx->rows) : nullptr,
                                    mutable_data(dinitial),
                                    mutable_data(partials),
                                    mutable_data(dparameters)};
    FUSEDOPS_CALL_ISA(causal_conv1d_backward, call, arguments.chunks.data(), chunks);
  }
  at::Tensor dweight, dbias;
  if (output_mask[1]) {
    dweight = dparameters.narrow(0, 0, width).t().to(weight.scalar_type()).contiguous();
  }
  if (output_mask[2]) dbias = dparameters[width].to(bias->scalar_type()).clone();
  if (dinitial.defined()) dinitial = dinitial.transpose(1, 2).contiguous();
  return {dx ? dx->finished() : at::Tensor(), dweight, dbias, dinitial};
}

}  // namespace

TORCH_LIBRARY_IMPL(fusedops_cpp, CPU, m) {
  m.impl("causal_conv1d", forward);
  m.impl("causal_conv1d_backward", backward);
}

}  // namespace fusedops
