// Binds what optimizers need of the host: the step queue (step_queue.h), and a number that tells
// whether an optimizer still has the same objects. No torch.
#include "step_queue.h"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

namespace fusedops {
namespace {

namespace py = pybind11;

DType dtype_of(const std::string& name) {
  if (name == "float32") return DType::f32;
  if (name == "bfloat16") return DType::bf16;
  if (name == "float16") return DType::f16;
  if (name == "float64") return DType::f64;
  throw std::invalid_argument("StepQueue: no kernel for dtype " + name);
}

// What a caller says of one tensor: see describe in fusedops/optim/_step_queue.py.
AdamWTensor tensor_of(const py::handle& given) {
  const auto address = [&](const char* name) {
    return reinterpret_cast<void*>(given.attr(name).cast<uintptr_t>());
  };
  const auto updated = [&](const char* from, const char* to) {
    return Updated{address(from), address(to)};
  };
  const auto number = [&](const char* name) { return given.attr(name).cast<double>(); };
  const auto integer = [&](const char* name) { return given.attr(name).cast<int64_t>(); };
  const auto dtype = [&](const char* name) {
    return dtype_of(given.attr(name).cast<std::string>());
  };
  AdamWTensor tensor{};
  tensor.param = updated("param", "new_param");
  tensor.exp_avg = updated("exp_avg", "new_exp_avg");
  tensor.exp_avg_sq = updated("exp_avg_sq", "new_exp_avg_sq");
  tensor.max_exp_avg_sq = updated("max_exp_avg_sq", "new_max_exp_avg_sq");
  tensor.grad = address("grad");
  tensor.copy = address("copy");
  tensor.numel = integer("numel");
  tensor.param_dtype = dtype("param_dtype");
  tensor.grad_dtype = dtype("grad_dtype");
  tensor.state_dtype = dtype("state_dtype");
  tensor.copy_dtype = dtype("copy_dtype");
  tensor.step_size = number("step_size");
  tensor.inverse_root = number("inverse_root");
  tensor.decay = number("decay");
  tensor.key = static_cast<uint64_t>(integer("key"));
  tensor.offset = static_cast<uint64_t>(integer("offset"));
  tensor.place = {integer("base"), integer("run"), integer("pitch")};
  return tensor;
}

int64_t submit(StepQueue& queue, const py::list& given, double beta1, double beta2, double eps,
               double grad_factor, bool stochastic, bool steps) {
  std::vector<AdamWTensor> tensors;
  for (const auto& each : given) tensors.push_back(tensor_of(each));
  return queue.submit(std::move(tensors), {beta1, beta2, eps, grad_factor, stochastic, steps});
}

// A number that another object changes, in the list, among the values of the dictionary, or among
// those of a dictionary there: some nanoseconds for each. Two different sets have the same number
// once in 2^64.
uint64_t identities(const py::list& objects, const py::dict& dictionaries) {
  uint64_t number = 0;
  const auto add = [&](const void* object) {
    number = (number ^ reinterpret_cast<uintptr_t>(object)) * 0x9e3779b97f4a7c15u;
    number ^= number >> 32;
  };
  for (const auto& object : objects) add(object.ptr());
  PyObject *key = nullptr, *value = nullptr, *inner_key = nullptr, *inner = nullptr;
  for (Py_ssize_t at = 0; PyDict_Next(dictionaries.ptr(), &at, &key, &value) != 0;) {
    add(value);
    if (PyDict_Check(value) == 0) continue;
    for (Py_ssize_t place = 0; PyDict_Next(value, &place, &inner_key, &inner) != 0;) add(inner);
  }
  return number;
}

}  // namespace

void bind_step_queue(py::module_& m) {
  m.def("identities", &identities, py::arg("objects"), py::arg("dictionaries"));
  m.attr("MOST_THREADS") = py::int_(int{StepQueue::kMostThreads});
  py::class_<StepQueue>(m, "StepQueue")
      .def(py::init<int>(), py::arg("threads"))
      .def("submit", &submit, py::arg("tensors"), py::kw_only(), py::arg("beta1"), py::arg("beta2"),
           py::arg("eps"), py::arg("grad_factor"), py::arg("stochastic"), py::arg("steps"))
      .def("wait", &StepQueue::wait, py::arg("number"), py::call_guard<py::gil_scoped_release>())
      .def("close", &StepQueue::close, py::call_guard<py::gil_scoped_release>());
}

}  // namespace fusedops
