// Binding of mlp_tiled on the CPU: fusedops_cpp::mlp_tiled and fusedops_cpp::mlp_tiled_backward.
// The kernels are those of linear_act, linear_glu and grouped_mm. Arguments were checked by
// fusedops/ops/mlp_tiled.py.
//
// A tile of rows goes through the layer at a time. The backward makes the pre-activations of a tile
// again, and their gradients in their place: z and the hidden layer of one tile (gate, up and the
// hidden layer) are all that it needs besides its results, and later tiles use the same memory. The
// gradients of the parameters are sums over the tiles, in float32 (float64 for float64).
#include <algorithm>
#include <array>
#include <utility>

#include <torch/library.h>

#include "grouped_binding.h"
#include "linear_glu.h"

namespace fusedops {
namespace {

using Optional = std::optional<at::Tensor>;

constexpr const char* kOp = "mlp_tiled";

// The sum over tiles of a parameter's gradient.
class GradientSum {
 public:
  GradientSum() = default;
  explicit GradientSum(const at::Tensor& parameter) : type_(parameter.scalar_type()) {
    const auto options = parameter.options().dtype(statistics_type(parameter));
    const bool swapped = parameter.dim() == 2 && is_transposed(parameter);
    sum_ = at::empty((swapped ? parameter.t() : parameter).sizes(), options).zero_();
    if (swapped) sum_ = sum_.t();
  }

  bool is_wanted() const { return sum_.defined(); }

  // Adds grad^T * x for a weight.
  void add_product(const at::Tensor& grad, const at::Tensor& x) {
    if (!is_wanted()) return;
    const bool swapped = !sum_.is_contiguous();
    const auto& left = swapped ? x : grad;
    const auto& right = swapped ? grad : x;
    const int64_t m = left.size(1), n = right.size(1);
    const AddedProduct product{product_of(m, n, x.size(0), transposed(left), matrix(right), x),
                               mutable_data(sum_), n};
    FUSEDOPS_CALL_ISA(add_products, &product, int64_t{1});
  }

  // Adds the sums over the rows for a bias.
  void add_rows(const at::Tensor& grad) {
    if (!is_wanted()) return;
    const int64_t rows = grad.size(0);
    const GroupSums sums{data(grad), nullptr,      nullptr,        &rows, mutable_data(sum_),
                         1,          grad.size(1), dtype_of(grad), true};
    FUSEDOPS_CALL_ISA(group_sums, sums);
  }

  // Ends the sum.
  at::Tensor rounded() {
    const auto sum = std::exchange(sum_, at::Tensor());
    return sum.defined() ? sum.to(type_) : sum;
  }

 private:
  at::Tensor sum_;
  at::ScalarType type_ = at::kFloat;
};

struct Layer {
  at::Tensor w1, b1, up_weight, w2, b2;  // the biases and up_weight may be undefined
  Activation activation;

  bool gated() const { return up_weight.defined(); }
};

Layer layer_of(const at::Tensor& w1, const Optional& b1, const Optional& up_weight,
               const at::Tensor& w2, const Optional& b2, std::string_view activation) {
  return {w1, dense(b1), up_weight.value_or(at::Tensor()),
          w2, dense(b2), parse_activation(activation)};
}

// Both products of a gate; undefined results are not written.
void glu_into(const at::Tensor& x, const Layer& layer, const at::Tensor& gate, const at::Tensor& up,
              const at::Tensor& output) {
  auto call =
      product_of(x.size(0), layer.w1.size(0), x.size(1), matrix(x), transposed(layer.w1), x);
  const Matrix second_b = transposed(layer.up_weight);
  call.second_b = &second_b;
  const LinearGluForward arguments{call, mutable_data(gate), mutable_data(up), mutable_data(output),
                                   layer.activation};
  FUSEDOPS_CALL_ISA(linear_glu_forward, arguments);
}

at::Tensor forward(const at::Tensor& input, const at::Tensor& w1, const Optional& b1,
                   const Optional& up_weight, const at::Tensor& w2, const Optional& b2,
                   std::string_view activation, int64_t tile_tokens) {
  const auto layer = layer_of(w1, b1, up_weight, w2, b2, activation);
  const auto x = as_rows(input);
  const int64_t rows = x.size(0);
  auto shape = input.sizes().vec();
  shape.back() = w2.size(0);
  const auto output = at::empty(shape, input.options());
  const auto y = output.view({rows, w2.size(0)});
  const at::Tensor none;
  const auto hidden = at::empty({std::min(tile_tokens, rows), w1.size(0)}, input.options());
  for (int64_t row = 0; row < rows; row += tile_tokens) {
    const int64_t count = std::min(tile_tokens, rows - row);
    const auto here = x.narrow(0, row, count), h = hidden.narrow(0, 0, count);
    if (layer.gated()) {
      glu_into(here, layer, none, none, h);
    } else {
      linear_into(here, w1, layer.b1, layer.activation, none, h);
    }
    linear_into(h, w2, layer.b2, Activation::identity, none, y.narrow(0, row, count));
  }
  return output;
}

// What the backward of a tile works with. Gradients stand where the pre-activations were.
struct Buffers {
  at::Tensor z, up, hidden;  // z is the gate where there is one

  Buffers rows(int64_t count) const {
    const auto first = [&](const at::Tensor& all) {
      return all.defined() ? all.narrow(0, 0, count) : all;
    };
    return {first(z), first(up), first(hidden)};
  }
};

// Makes the gradients of the pre-activations, and the hidden layer.
void hidden_gradient(const at::Tensor& dy, const at::Tensor& x, const Layer& layer,
                     const Buffers& tile) {
  const auto product =
      product_of(x.size(0), layer.w1.size(0), dy.size(1), matrix(dy), matrix(layer.w2), dy);
  if (layer.gated()) {
    glu_into(x, layer, tile.z, tile.up, at::Tensor());
    const GluHiddenGradient arguments{product, mutable_data(tile.z), mutable_data(tile.up),
                                      mutable_data(tile.hidden), layer.activation};
    FUSEDOPS_CALL_ISA(glu_hidden_gradient, arguments);
    return;
  }
  linear_into(x, layer.w1, layer.b1, Activation::identity, at::Tensor(), tile.z);
  const HiddenGradient arguments{
      product, data(tile.z), mutable_data(tile.z), mutable_data(tile.hidden),
      nullptr, nullptr,      layer.activation};
  FUSEDOPS_CALL_ISA(hidden_gradient, arguments);
}

// dx = dz * w1, or the sum over gate and up, rounded once.
void input_gradient_into(const Layer& layer, const Buffers& tile, const at::Tensor& dx) {
  auto call =
      product_of(dx.size(0), dx.size(1), layer.w1.size(0), matrix(tile.z), matrix(layer.w1), dx);
  Factors extra{};
  if (layer.gated()) {
    extra = {matrix(tile.up), matrix(layer.up_weight)};
    call.extra_products = &extra;
    call.num_extra_products = 1;
  }
  call.plain_output = mutable_data(dx);
  const LinearForward arguments{call, nullptr, nullptr, mutable_data(dx), Activation::identity};
  FUSEDOPS_CALL_ISA(linear_forward, arguments);
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor> backward(
    const Optional& grad_output, const at::Tensor& input, const at::Tensor& w1, const Optional& b1,
    const Optional& up_weight, const at::Tensor& w2, const Optional& b2,
    std::string_view activation, int64_t tile_tokens, std::array<bool, 6> output_mask) {
  const auto layer = layer_of(w1, b1, up_weight, w2, b2, activation);
  const auto x = as_rows(input);
  const int64_t rows = x.size(0), most = std::min(tile_tokens, rows);
  // An expanded gradient, as that of a sum, is not copied at once.
  const auto dy = grad_output->reshape({rows, w2.size(0)});
  const auto sum_of = [&](bool wanted, const at::Tensor& parameter) {
    return wanted ? GradientSum(parameter) : GradientSum();
  };
  GradientSum dw1 = sum_of(output_mask[1], w1), db1 = sum_of(output_mask[2], layer.b1);
  GradientSum dup = sum_of(output_mask[3], layer.up_weight), dw2 = sum_of(output_mask[4], w2);
  GradientSum db2 = sum_of(output_mask[5], layer.b2);
  const auto dx = output_mask[0] ? at::empty(input.sizes(), input.options()) : at::Tensor();
  Buffers buffers;
  const bool all_but_b2 =
      std::find(output_mask.begin(), output_mask.begin() + 5, true) != output_mask.begin() + 5;
  if (all_but_b2) {
    const auto buffer = [&](bool wanted) {
      return wanted ? at::empty({most, w1.size(0)}, x.options()) : at::Tensor();
    };
    buffers = {buffer(true), buffer(layer.gated()), buffer(dw2.is_wanted())};
  }
  for (int64_t row = 0; row < rows; row += tile_tokens) {
    const int64_t count = std::min(tile_tokens, rows - row);
    const auto x_tile = x.narrow(0, row, count), dy_tile = dy.narrow(0, row, count).contiguous();
    db2.add_rows(dy_tile);
    if (!all_but_b2) continue;
    const auto tile = buffers.rows(count);
    hidden_gradient(dy_tile, x_tile, layer, tile);
    dw2.add_product(dy_tile, tile.hidden);
    db1.add_rows(tile.z);
    dw1.add_product(tile.z, x_tile);
    dup.add_product(tile.up, x_tile);
    if (dx.defined()) {
      input_gradient_into(layer, tile, dx.view({rows, x.size(1)}).narrow(0, row, count));
    }
  }
  buffers = {};
  return {dx, dw1.rounded(), db1.rounded(), dup.rounded(), dw2.rounded(), db2.rounded()};
}

}  // namespace

TORCH_LIBRARY_IMPL(fusedops_cpp, CPU, m) {
  m.impl("mlp_tiled", forward);
  m.impl("mlp_tiled_backward", backward);
}

}  // namespace fusedops
