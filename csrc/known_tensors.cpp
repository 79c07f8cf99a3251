// Tensors that a step is given again and again: whether they are still what the step was made for.
//
// An optimizer over hundreds of tensors asks this once per step instead of looking at each of them
// in Python: some 20 ns for a tensor here, more than a microsecond there. Only what describes a
// tensor is read, never its elements, and no tensor is kept alive: an owner may free or move what
// it has between two steps. The operator of the step is not called either, which tells autograd
// what it writes: this does.
#include <algorithm>
#include <vector>

#include <ATen/ops/empty.h>
#include <torch/custom_class.h>
#include <torch/library.h>

namespace fusedops {
namespace {

constexpr uintptr_t kVector = 16;  // bytes that a GPU loads at once

uintptr_t address_of(const c10::TensorImpl& tensor) {
  return reinterpret_cast<uintptr_t>(tensor.data());
}

// Everything that a kernel knows of a tensor, except its address.
struct Form {
  explicit Form(const c10::TensorImpl& tensor)
      : sizes(tensor.sizes().begin(), tensor.sizes().end()),
        strides(tensor.strides().begin(), tensor.strides().end()),
        dtype(tensor.dtype()),
        device(tensor.device()),
        is_contiguous(tensor.is_contiguous()),
        is_aligned(address_of(tensor) % kVector == 0) {}

  bool fits(const c10::TensorImpl& tensor) const {
    if (tensor.layout() != at::kStrided || tensor.device() != device || tensor.dtype() != dtype ||
        tensor.sizes() != at::IntArrayRef(sizes)) {
      return false;
    }
    const bool same_strides = tensor.strides() == at::IntArrayRef(strides);
    return (same_strides || (is_contiguous && tensor.is_contiguous())) &&
           (address_of(tensor) % kVector == 0) == is_aligned;
  }

  c10::SmallVector<int64_t, 4> sizes, strides;
  caffe2::TypeMeta dtype;
  at::Device device;
  bool is_contiguous, is_aligned;
};

struct Known {
  explicit Known(const at::Tensor& tensor)
      : tensor(tensor.getIntrusivePtr()), form(*tensor.unsafeGetTensorImpl()) {
    address = address_of(*tensor.unsafeGetTensorImpl());
  }

  // The caller's objects hold the tensor while this looks at it. To lock it would cost ten times as
  // much: the count of a tensor that Python alone holds also counts for its Python object.
  bool is_unchanged() const {
    if (tensor.use_count() == 0) return false;
    const c10::TensorImpl& now = *tensor._unsafe_get_target();
    return form.fits(now) && address_of(now) == address;
  }

  void count_write() const {
    c10::TensorImpl& now = *tensor._unsafe_get_target();
    if (!now.is_inference()) now.bump_version();
  }

  c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl> tensor;
  Form form;
  uintptr_t address;
};

// `kept` are tensors that stay where they are; `given` are those of one step, of which others of
// the same form may follow at other addresses.
class KnownTensors : public torch::CustomClassHolder {
 public:
  KnownTensors(const std::vector<at::Tensor>& kept, const std::vector<at::Tensor>& given)
      : kept_(kept.begin(), kept.end()) {
    for (const auto& tensor : given) {
      forms_.emplace_back(*tensor.unsafeGetTensorImpl());
      addresses_.push_back(address(tensor));
    }
  }

  // How many of the given tensors lie elsewhere than those before; -1 where one of them, or one of
  // the kept ones, is no longer what it was, and then the tensors before count on.
  int64_t update(const std::vector<at::Tensor>& given) {
    if (given.size() != forms_.size()) return -1;
    for (const auto& known : kept_) {
      if (!known.is_unchanged()) return -1;
    }
    for (size_t i = 0; i < given.size(); ++i) {
      if (!given[i].defined() || !forms_[i].fits(*given[i].unsafeGetTensorImpl())) return -1;
    }
    int64_t moved = 0;
    for (size_t i = 0; i < given.size(); ++i) {
      const int64_t now = address(given[i]);
      moved += now != addresses_[i];
      addresses_[i] = now;
    }
    return moved;
  }

  // Lets the versions of the kept tensors say that they were written. After an update that found
  // them unchanged: their owner still holds them.
  void count_writes() {
    for (const auto& known : kept_) known.count_write();
  }

  // int64, of the tensors that were given last.
  at::Tensor addresses() const {
    auto result = at::empty({static_cast<int64_t>(addresses_.size())}, at::kLong);
    std::copy(addresses_.begin(), addresses_.end(), result.mutable_data_ptr<int64_t>());
    return result;
  }

 private:
  static int64_t address(const at::Tensor& tensor) {
    return static_cast<int64_t>(address_of(*tensor.unsafeGetTensorImpl()));
  }

  std::vector<Known> kept_;
  std::vector<Form> forms_;
  std::vector<int64_t> addresses_;
};

}  // namespace
}  // namespace fusedops

TORCH_LIBRARY_FRAGMENT(fusedops_native, m) {
  using fusedops::KnownTensors;
  using Tensors = std::vector<at::Tensor>;
  m.class_<KnownTensors>("KnownTensors")
      .def(torch::init<const Tensors&, const Tensors&>())
      .def("update", &KnownTensors::update)
      .def("count_writes", &KnownTensors::count_writes)
      .def("addresses", &KnownTensors::addresses);
}
