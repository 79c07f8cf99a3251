// Binding of moe_router_loss on the CPU: fusedops_cpp::moe_router_loss and its backward. Arguments
// were checked by fusedops/ops/moe_router_loss.py.
#include "moe_router_loss.h"

#include <array>
#include <numeric>
#include <vector>

#include <ATen/ops/empty.h>
#include <ATen/ops/scalar_tensor.h>
#include <torch/library.h>

#include "../../common/binding.h"
#include "../../common/parallel.h"

namespace fusedops {
namespace {

using Optional = std::optional<at::Tensor>;

// The arguments, laid out densely for as long as the kernel runs.
struct Dense {
  Dense(const at::Tensor& logits, const Optional& weights_in, const Optional& z_weight,
        const Optional& mask_in, std::string_view score)
      : x(logits.contiguous()), mask(dense(mask_in)) {
    if (weights_in.has_value()) weights = weights_in->to(statistics_type(x)).contiguous();
    const int64_t sequences = weights.defined() ? weights.size(0) : 1;
    input = {data(x),
             data(weights),
             z_weight.has_value() ? z_weight->item().toDouble() : 0.0,
             static_cast<const bool*>(data(mask)),
             score == "sigmoid",
             x.size(0),
             x.size(1),
             std::max<int64_t>(1, x.size(0) / sequences),
             dtype_of(x)};
  }

  at::Tensor x, weights, mask;
  MoeRouterLossInput input;
};

at::Tensor forward(const at::Tensor& logits, const Optional& weights, const Optional& z_weight,
                   const Optional& mask, std::string_view score) {
  const Dense arguments(logits, weights, z_weight, mask, score);
  std::vector<double> partials(Chunks(arguments.input.tokens).count);
  const MoeRouterLossForward call{arguments.input, partials.data()};
  FUSEDOPS_CALL_ISA(moe_router_loss_forward, call);
  const double loss = std::accumulate(partials.begin(), partials.end(), 0.0);
  return at::scalar_tensor(loss, logits.options().dtype(statistics_type(logits)));
}

at::Tensor backward(const Optional& grad_loss, const at::Tensor& logits, const Optional& weights,
                    const Optional& z_weight, const Optional& mask, std::string_view score,
                    std::array<bool, 1> output_mask) {
  if (!output_mask[0]) return {};
  const Dense arguments(logits, weights, z_weight, mask, score);
  auto grad_logits = at::empty(logits.sizes(), arguments.x.options());
  const MoeRouterLossBackward call{arguments.input, grad_loss->item().toDouble(),
                                   mutable_data(grad_logits)};
  FUSEDOPS_CALL_ISA(moe_router_loss_backward, call);
  return grad_logits;
}

}  // namespace

TORCH_LIBRARY_IMPL(fusedops_cpp, CPU, m) {
  m.impl("moe_router_loss", forward);
  m.impl("moe_router_loss_backward", backward);
}

}  // namespace fusedops
