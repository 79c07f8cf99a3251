// Binds what optimizers need of the host: the step queue (step_queue.h), and a number that tells
// whether an optimizer still has the same objects. No torch.
#include "step_queue.h"

#include "step_queue_binding.h"

namespace fusedops {
namespace {

using python::Reference;

struct QueueObject {
  PyObject_HEAD StepQueue* queue;
};

StepQueue& queue_of(PyObject* self) {
  return *reinterpret_cast<QueueObject*>(self)->queue;
}

DType dtype_of(const std::string& name) {
  if (name == "float32") return DType::f32;
  if (name == "bfloat16") return DType::bf16;
  if (name == "float16") return DType::f16;
  if (name == "float64") return DType::f64;
  throw std::invalid_argument("StepQueue: no kernel for dtype " + name);
}

// What a caller says of one tensor: see describe in fusedops/optim/_step_queue.py.
AdamWTensor tensor_of(PyObject* described) {
  const auto field = [&](const char* name) { return PyObject_GetAttrString(described, name); };
  const auto address = [&](const char* name) {
    return reinterpret_cast<void*>(python::natural(Reference(field(name)).get()));
  };
  const auto updated = [&](const char* from, const char* to) {
    return Updated{address(from), address(to)};
  };
  const auto number = [&](const char* name) {
    return python::number(Reference(field(name)).get());
  };
  const auto integer = [&](const char* name) {
    return python::integer(Reference(field(name)).get());
  };
  const auto dtype = [&](const char* name) {
    return dtype_of(python::text(Reference(field(name)).get()));
  };
  AdamWTensor tensor{};
  tensor.param = updated("param", "new_param");
  tensor.exp_avg = updated("exp_avg", "new_exp_avg");
  tensor.exp_avg_sq = updated("exp_avg_sq", "new_exp_avg_sq");
  tensor.max_exp_avg_sq = updated("max_exp_avg_sq", "new_max_exp_avg_sq");
  tensor.grad = address("grad");
  tensor.copy = {nullptr, address("copy")};  // it is staging memory, and holds no parameter yet
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

PyObject* make(PyTypeObject* type, PyObject* arguments, PyObject* keywords) {
  return python::guarded([&] {
    int threads = 0;
    python::parse(arguments, keywords, "i:StepQueue", {"threads"}, &threads);
    const auto allocate = reinterpret_cast<allocfunc>(PyType_GetSlot(type, Py_tp_alloc));
    Reference self(allocate(type, 0));
    reinterpret_cast<QueueObject*>(self.get())->queue = new StepQueue(threads);
    return self.release();
  });
}

void destroy(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  {
    const python::Unlocked unlocked;  // it waits for its threads
    delete reinterpret_cast<QueueObject*>(self)->queue;
  }
  reinterpret_cast<freefunc>(PyType_GetSlot(type, Py_tp_free))(self);
  Py_DECREF(type);
}

PyObject* submit(PyObject* self, PyObject* arguments, PyObject* keywords) {
  return python::guarded([&] {
    PyObject* described = nullptr;
    StepOptions options{};
    int stochastic = 0, steps = 0;
    python::parse(arguments, keywords, "O!$ddddpp:submit",
                  {"tensors", "beta1", "beta2", "eps", "grad_factor", "stochastic", "steps"},
                  &PyList_Type, &described, &options.beta1, &options.beta2, &options.eps,
                  &options.grad_factor, &stochastic, &steps);
    options.stochastic = stochastic != 0;
    options.steps = steps != 0;
    std::vector<AdamWTensor> tensors;
    for (Py_ssize_t i = 0; i < PyList_Size(described); ++i) {
      tensors.push_back(tensor_of(PyList_GetItem(described, i)));
    }
    return PyLong_FromLongLong(queue_of(self).submit(std::move(tensors), options));
  });
}

PyObject* wait(PyObject* self, PyObject* arguments, PyObject* keywords) {
  return python::guarded([&] {
    long long number = 0;
    python::parse(arguments, keywords, "L:wait", {"number"}, &number);
    std::vector<double> sums;
    {
      const python::Unlocked unlocked;
      sums = queue_of(self).wait(number);
    }
    return python::list_of(sums, PyFloat_FromDouble);
  });
}

PyObject* close(PyObject* self, PyObject* arguments, PyObject* keywords) {
  return python::guarded([&] {
    python::parse(arguments, keywords, ":close", {});
    {
      const python::Unlocked unlocked;
      queue_of(self).close();
    }
    return python::none();
  });
}

}  // namespace

PyObject* step_queue_type() {
  static PyMethodDef methods[] = {
      python::method("submit", submit),
      python::method("wait", wait),
      python::method("close", close),
      {nullptr, nullptr, 0, nullptr},
  };
  static PyType_Slot slots[] = {
      {Py_tp_new, reinterpret_cast<void*>(make)},
      {Py_tp_dealloc, reinterpret_cast<void*>(destroy)},
      {Py_tp_methods, methods},
      {0, nullptr},
  };
  static PyType_Spec spec = {"host.StepQueue", sizeof(QueueObject), 0, Py_TPFLAGS_DEFAULT, slots};
  return PyType_FromSpec(&spec);
}

int most_threads() {
  return StepQueue::kMostThreads;
}

// A number that another object changes, in the list, among the values of the dictionary, or among
// those of a dictionary there: some nanoseconds for each. Two different sets have the same number
// once in 2^64.
PyObject* identities(PyObject* /*module*/, PyObject* arguments, PyObject* keywords) {
  return python::guarded([&] {
    PyObject *objects = nullptr, *dictionaries = nullptr;
    python::parse(arguments, keywords, "O!O!:identities", {"objects", "dictionaries"}, &PyList_Type,
                  &objects, &PyDict_Type, &dictionaries);
    uint64_t number = 0;
    const auto add = [&](const void* object) {
      number = (number ^ reinterpret_cast<uintptr_t>(object)) * 0x9e3779b97f4a7c15u;
      number ^= number >> 32;
    };
    const Py_ssize_t count = PyList_Size(objects);
    for (Py_ssize_t i = 0; i < count; ++i) add(PyList_GetItem(objects, i));
    PyObject *key = nullptr, *value = nullptr, *inner_key = nullptr, *inner = nullptr;
    for (Py_ssize_t at = 0; PyDict_Next(dictionaries, &at, &key, &value) != 0;) {
      add(value);
      if (PyDict_Check(value) == 0) continue;
      for (Py_ssize_t place = 0; PyDict_Next(value, &place, &inner_key, &inner) != 0;) add(inner);
    }
    return PyLong_FromUnsignedLongLong(number);
  });
}

}  // namespace fusedops
