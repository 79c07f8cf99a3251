// Bindings of swiglu and geglu on the CPU: fusedops_cpp::swiglu, fusedops_cpp::geglu and their
// backwards. Arguments were checked by fusedops/ops/_glu_math.py.
#include "glu.h"

#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "../../common/binding.h"

namespace fusedops {
namespace {

using Optional = std::optional<at::Tensor>;

// Tensors of one shape as matrices of rows that may be apart. Dense ones are one row.
class Rows {
 public:
  explicit Rows(std::initializer_list<at::Tensor> tensors) {
    bool dense = true;
    for (const auto& tensor : tensors) dense &= tensor.is_contiguous();
    const auto& like = *tensors.begin();
    columns_ = dense || like.dim() == 0 ? like.numel() : like.size(-1);
    rows_ = columns_ > 0 ? like.numel() / columns_ : 0;
    // reshape gives a view where the leading dimensions are evenly spaced, as those of a chunk are.
    for (const auto& tensor : tensors) {
      auto rows = tensor.reshape({rows_, columns_});
      matrices_.push_back(rows.stride(1) == 1 || columns_ == 1 ? rows : rows.contiguous());
    }
  }

  GluRows operator[](size_t index) const {
    return {data(matrices_[index]), matrices_[index].stride(0)};
  }
  int64_t rows() const { return rows_; }
  int64_t columns() const { return columns_; }

 private:
  std::vector<at::Tensor> matrices_;
  int64_t rows_;
  int64_t columns_;
};

at::Tensor forward(const at::Tensor& gate, const at::Tensor& up, Activation activation) {
  auto output = at::empty(gate.sizes(), gate.options());
  if (gate.numel() > 0) {
    const Rows in({gate, up});
    const GluForward arguments{in[0],        in[1],      mutable_data(output), in.rows(),
                               in.columns(), activation, dtype_of(gate)};
    FUSEDOPS_CALL_ISA(glu_forward, arguments);
  }
  return output;
}

std::tuple<at::Tensor, at::Tensor> backward(const Optional& grad_output, const at::Tensor& gate,
                                            const at::Tensor& up, Activation activation,
                                            const c10::List<bool>& output_mask) {
  at::Tensor dgate, dup;
  if (output_mask[0]) dgate = at::empty(gate.sizes(), gate.options());
  if (output_mask[1]) dup = at::empty(gate.sizes(), gate.options());
  if (gate.numel() > 0 && (dgate.defined() || dup.defined())) {
    const Rows in({grad_output->to(gate.scalar_type()), gate, up});
    const GluBackward arguments{
        in[0],     in[1],        in[2],      mutable_data(dgate), mutable_data(dup),
        in.rows(), in.columns(), activation, dtype_of(gate)};
    FUSEDOPS_CALL_ISA(glu_backward, arguments);
  }
  return {dgate, dup};
}

at::Tensor swiglu(const at::Tensor& gate, const at::Tensor& up) {
  return forward(gate, up, Activation::silu);
}

std::tuple<at::Tensor, at::Tensor> swiglu_backward(const Optional& grad_output,
                                                   const at::Tensor& gate, const at::Tensor& up,
                                                   c10::List<bool> output_mask) {
  return backward(grad_output, gate, up, Activation::silu, output_mask);
}

at::Tensor geglu(const at::Tensor& gate, const at::Tensor& up, std::string_view approximate) {
  return forward(gate, up, gelu_variant(approximate));
}

std::tuple<at::Tensor, at::Tensor> geglu_backward(const Optional& grad_output,
                                                  const at::Tensor& gate, const at::Tensor& up,
                                                  std::string_view approximate,
                                                  c10::List<bool> output_mask) {
  return backward(grad_output, gate, up, gelu_variant(approximate), output_mask);
}

}  // namespace

TORCH_LIBRARY_IMPL(fusedops_cpp, CPU, m) {
  m.impl("swiglu", swiglu);
  m.impl("swiglu_backward", swiglu_backward);
  m.impl("geglu", geglu);
  m.impl("geglu_backward", geglu_backward);
}

}  // namespace fusedops
