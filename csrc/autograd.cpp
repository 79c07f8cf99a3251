// Autograd for every op, once: a boxed kernel that records a graph node, and the node.
//
// fusedops::X runs below autograd; when a differentiable input requires a gradient, an OpNode
// saves the tensors that the op's description names and later calls fusedops::X_backward with an
// output_mask of the gradients that the engine asks for in that very pass. When X_backward is
// itself differentiated (create_graph), its composite of torch operations runs instead of the
// kernel. Small calls are what this file is for: a node in Python costs more than they do.
#include <algorithm>
#include <mutex>

#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/autograd/variable.h>

#include "common/registry.h"

namespace fusedops {
namespace {

using torch::autograd::SavedVariable;
using torch::autograd::variable_list;
using Indices = std::vector<int64_t>;

// What define_op says about the gradient of one op; indices into its arguments and returns.
struct Description {
  std::string name;
  Indices inputs;     // differentiable arguments
  Indices outputs;    // differentiable returns
  Indices saves;      // what the backward receives, in order: i for argument i, -1-j for return j
  Indices others;     // non-tensor arguments, all handed to the backward
  Indices stand_ins;  // per input: i for the gradient of input i, -2-j for that of output j, -1
  Indices saved_for;  // per save: the argument without whose gradient it is not needed, or -1
  // Empty, or: a save of which only the gradient of an argument reads more than the shape, where
  // another argument is the value. {save, argument with that gradient, argument with the value}
  Indices shape_only;
  std::string shape_only_value;
  c10::OperatorHandle backward;
};

// torch 2.13 counts references to nodes inside them, older versions outside: this file is right
// for both because it never names the pointer's type.
using NodePtr = decltype(torch::autograd::Edge::function);

// The pointer's type is a template parameter so that the form that torch has not is not looked at.
template <typename T, typename Pointer = NodePtr>
Pointer own(T* node) {
  if constexpr (std::is_same_v<Pointer, std::shared_ptr<torch::autograd::Node>>) {
    // deleteNode frees a deep graph without recursion; it is found by its argument's namespace.
    return Pointer(node, [](auto* p) { deleteNode(p); });
  } else {
    return Pointer::unsafe_steal_from_new(node);
  }
}

template <typename T, typename Pointer = NodePtr>
Pointer own_again(T* node) {
  if constexpr (std::is_same_v<Pointer, std::shared_ptr<torch::autograd::Node>>) {
    return node->shared_from_this();
  } else {
    return Pointer::unsafe_reclaim_from_nonowning(node);
  }
}

class OpNode : public torch::autograd::Node {
 public:
  OpNode(std::shared_ptr<const Description> description, torch::autograd::edge_list&& edges)
      : Node(std::move(edges)), description_(std::move(description)) {}

  std::string name() const override { return "fusedops_" + description_->name + "_backward"; }

  void save_inputs(at::ArrayRef<c10::IValue> arguments) {
    saved_.resize(description_->saves.size());
    for (size_t i = 0; i < saved_.size(); ++i) {
      const auto index = description_->saves[i];
      if (index < 0) continue;
      const auto reason = description_->saved_for[i];
      if (reason >= 0 && !requires_grad(arguments[reason])) continue;
      if (needs_shape_only(i, arguments)) {
        shape_ = arguments[index].toTensor().sym_sizes().vec();
        continue;
      }
      saved_[i] = SavedVariable(tensor_or_undefined(arguments[index]), false);
    }
    for (auto index : description_->others) others_.push_back(arguments[index]);
  }

  void save_outputs(at::ArrayRef<c10::IValue> returns) {
    for (size_t i = 0; i < saved_.size(); ++i) {
      const auto index = description_->saves[i];
      if (index >= 0) continue;
      const auto& output = tensor_or_undefined(returns[-1 - index]);
      saved_[i] = SavedVariable(output, output.defined() && output.grad_fn().get() == this);
    }
  }

  variable_list apply(variable_list&& grads) override {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto defined = [](const at::Tensor& grad) { return grad.defined(); };
    if (std::none_of(grads.begin(), grads.end(), defined)) return variable_list(num_outputs());
    torch::jit::Stack stack;
    stack.reserve(grads.size() + saved_.size() + others_.size() + 1);
    for (const auto& grad : grads)
      stack.push_back(grad.defined() ? c10::IValue(grad) : c10::IValue());
    for (size_t i = 0; i < saved_.size(); ++i) {
      auto tensor = saved_[i].unpack(own_again(this));
      // All outputs have the dtype of the input; the elements of this tensor are one.
      if (shape_ && description_->shape_only[0] == static_cast<int64_t>(i))
        tensor = std::find_if(grads.begin(), grads.end(), defined)
                     ->new_empty({1})
                     .expand_symint(*shape_);
      stack.push_back(tensor.defined() ? c10::IValue(std::move(tensor)) : c10::IValue());
    }
    for (auto& other : others_) stack.push_back(other);
    c10::List<bool> mask;
    for (size_t i = 0; i < num_outputs(); ++i) mask.push_back(task_should_compute_output(i));
    stack.push_back(std::move(mask));
    description_->backward.callBoxed(stack);
    variable_list results;
    results.reserve(stack.size());
    for (auto& value : stack) results.push_back(tensor_or_undefined(value));
    for (size_t i = 0; i < num_outputs(); ++i) {
      const auto other = description_->stand_ins[i];
      if (other == -1 || results[i].defined() || !task_should_compute_output(i)) continue;
      results[i] = other >= 0 ? results[other] : grads[-2 - other];
    }
    return results;
  }

  void release_variables() override {
    std::lock_guard<std::mutex> lock(mutex_);
    for (auto& saved : saved_) saved.reset_data();
  }

  static const at::Tensor& tensor_or_undefined(const c10::IValue& value) {
    static const at::Tensor undefined;
    return value.isTensor() ? value.toTensor() : undefined;
  }

  bool needs_shape_only(size_t save, at::ArrayRef<c10::IValue> arguments) const {
    const auto& places = description_->shape_only;
    return !places.empty() && places[0] == static_cast<int64_t>(save) &&
           !requires_grad(arguments[places[1]]) &&
           arguments[places[2]].toStringView() == description_->shape_only_value;
  }

  static bool requires_grad(const c10::IValue& value) {
    return value.isTensor() && value.toTensor().defined() && value.toTensor().requires_grad();
  }

 private:
  std::shared_ptr<const Description> description_;
  std::vector<SavedVariable> saved_;
  std::vector<c10::IValue> others_;
  std::optional<std::vector<c10::SymInt>> shape_;  // of the save that shape_only names
};

bool any_requires_grad(at::ArrayRef<c10::IValue> values) {
  for (const auto& value : values) {
    if (OpNode::requires_grad(value)) return true;
  }
  return false;
}

class ForwardAutograd : public c10::OperatorKernel {
 public:
  explicit ForwardAutograd(std::shared_ptr<const Description> description)
      : description_(std::move(description)) {}

  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                  torch::jit::Stack* stack) const {
    const auto arguments = torch::jit::last(*stack, op.schema().arguments().size());
    torch::autograd::edge_list edges;
    bool record = false;
    for (auto index : description_->inputs) {
      const auto& tensor = OpNode::tensor_or_undefined(arguments[index]);
      TORCH_CHECK_NOT_IMPLEMENTED(
          !tensor.defined() || !tensor._fw_grad(/*level=*/0).defined(), description_->name,
          ": forward-mode differentiation is not implemented; use reverse mode, or run the op "
          "in eager torch");
      record |= tensor.defined() && tensor.requires_grad();
    }
    NodePtr owner;
    OpNode* node = nullptr;
    if (record && c10::GradMode::is_enabled()) {
      for (auto index : description_->inputs) {
        const auto& tensor = OpNode::tensor_or_undefined(arguments[index]);
        edges.push_back(tensor.defined() ? torch::autograd::impl::gradient_edge(tensor)
                                         : torch::autograd::Edge());
      }
      node = new OpNode(description_, std::move(edges));
      owner = own(node);
      node->save_inputs(arguments);
    }
    {
      at::AutoDispatchBelowADInplaceOrView below;
      op.redispatchBoxed(keys & c10::after_autograd_keyset, stack);
    }
    if (node == nullptr) return;
    const auto returns = torch::jit::last(*stack, op.schema().returns().size());
    for (auto index : description_->outputs) {
      torch::autograd::set_history(returns[index].toTensor(), owner);
    }
    node->save_outputs(returns);
  }

 private:
  std::shared_ptr<const Description> description_;
};

// X_backward: the kernel below autograd, or the composite when it is itself differentiated.
class BackwardAutograd : public c10::OperatorKernel {
 public:
  explicit BackwardAutograd(c10::OperatorHandle composite) : composite_(composite) {}

  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                  torch::jit::Stack* stack) const {
    const auto arguments = torch::jit::last(*stack, op.schema().arguments().size());
    if (c10::GradMode::is_enabled() && any_requires_grad(arguments)) {
      composite_.callBoxed(stack);
      return;
    }
    at::AutoDispatchBelowADInplaceOrView below;
    op.redispatchBoxed(keys & c10::after_autograd_keyset, stack);
  }

 private:
  c10::OperatorHandle composite_;
};

// X below autograd, where X writes to arguments: counts their versions up, as torch's own operators
// do, so that a graph that saved one of them refuses it. Before the kernel runs, since one that
// fails may have written. Tensors of inference mode have no version.
class CountWrites : public c10::OperatorKernel {
 public:
  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                  torch::jit::Stack* stack) const {
    const auto& described = op.schema().arguments();
    const auto arguments = torch::jit::last(*stack, described.size());
    for (size_t i = 0; i < described.size(); ++i) {
      const auto* alias = described[i].alias_info();
      if (alias == nullptr || !alias->isWrite()) continue;
      if (!arguments[i].isList()) {
        count(arguments[i]);
        continue;
      }
      for (const auto& element : arguments[i].toListRef()) count(element);
    }
    at::AutoDispatchBelowADInplaceOrView below;
    op.redispatchBoxed(keys & c10::after_ADInplaceOrView_keyset, stack);
  }

 private:
  static void count(const c10::IValue& value) {
    const auto& tensor = OpNode::tensor_or_undefined(value);
    if (tensor.defined() && !tensor.is_inference()) tensor.unsafeGetTensorImpl()->bump_version();
  }
};

void differentiate(std::string name, std::vector<int64_t> inputs, std::vector<int64_t> outputs,
                   std::vector<int64_t> saves, std::vector<int64_t> others,
                   std::vector<int64_t> stand_ins, std::vector<int64_t> saved_for,
                   std::vector<int64_t> shape_only, std::string shape_only_value) {
  stand_ins.resize(inputs.size(), -1);
  saved_for.resize(saves.size(), -1);
  auto description = std::make_shared<const Description>(
      Description{name, std::move(inputs), std::move(outputs), std::move(saves), std::move(others),
                  std::move(stand_ins), std::move(saved_for), std::move(shape_only),
                  std::move(shape_only_value), find_operator("fusedops", name + "_backward")});
  install(name, c10::DispatchKey::Autograd, std::make_unique<ForwardAutograd>(description));
  install(
      name + "_backward", c10::DispatchKey::Autograd,
      std::make_unique<BackwardAutograd>(find_operator("fusedops", name + "_backward_composite")));
}

}  // namespace
}  // namespace fusedops

TORCH_LIBRARY_FRAGMENT(fusedops_native, m) {
  m.def("count_writes(str name) -> ()", [](std::string name) {
    fusedops::install(name, c10::DispatchKey::ADInplaceOrView,
                      std::make_unique<fusedops::CountWrites>());
  });
  m.def(
      "differentiate(str name, int[] inputs, int[] outputs, int[] saves, "
      "int[] others, int[] stand_ins=[], int[] saved_for=[], int[] shape_only=[], "
      "str shape_only_value='') -> ()",
      [](std::string name, std::vector<int64_t> inputs, std::vector<int64_t> outputs,
         std::vector<int64_t> saves, std::vector<int64_t> others, std::vector<int64_t> stand_ins,
         std::vector<int64_t> saved_for, std::vector<int64_t> shape_only,
         std::string shape_only_value) {
        fusedops::differentiate(std::move(name), std::move(inputs), std::move(outputs),
                                std::move(saves), std::move(others), std::move(stand_ins),
                                std::move(saved_for), std::move(shape_only),
                                std::move(shape_only_value));
      });
}
