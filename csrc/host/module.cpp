// The Python module of code that needs no torch, by the limited API (limited_api.h).
#include "limited_api.h"

#include "arena.h"
#include "step_queue_binding.h"
#include "watch_list.h"

namespace fusedops {
namespace {

PyObject* place(PyObject* /*module*/, PyObject* arguments, PyObject* keywords) {
  return python::guarded([&] {
    PyObject *lower = nullptr, *upper = nullptr, *size = nullptr, *pinned = nullptr;
    long long capacity = 0;
    double seconds = 0.0;
    python::parse(arguments, keywords, "O!O!O!$O!Ld:place",
                  {"lower", "upper", "size", "pinned", "capacity", "seconds"}, &PyList_Type, &lower,
                  &PyList_Type, &upper, &PyList_Type, &size, &PyList_Type, &pinned, &capacity,
                  &seconds);
    const auto lowers = python::integers(lower), uppers = python::integers(upper);
    const auto sizes = python::integers(size), offsets = python::integers(pinned);
    std::vector<arena::Buffer> buffers(sizes.size());
    if (lowers.size() != sizes.size() || uppers.size() != sizes.size() ||
        offsets.size() != sizes.size()) {
      throw std::invalid_argument("place: the lists must have the same length");
    }
    for (size_t i = 0; i < sizes.size(); ++i) {
      buffers[i] = {lowers[i], uppers[i], sizes[i], offsets[i]};
    }
    arena::Placement placement;
    {
      const python::Unlocked unlocked;
      placement = arena::place(buffers, capacity, seconds);
    }
    const python::Reference placed(python::list_of(placement.offsets, PyLong_FromLongLong));
    return Py_BuildValue("{s:O,s:L,s:L}", "offsets", placed.get(), "height",
                         static_cast<long long>(placement.height), "bound",
                         static_cast<long long>(placement.bound));
  });
}

PyObject* make_module() {
  static PyMethodDef functions[] = {
      python::method("place", place),
      python::method("identities", identities),
      {"is_unchanged", is_unchanged, METH_VARARGS, nullptr},
      {"values_of_block", values_of_block, METH_VARARGS, nullptr},
      {nullptr, nullptr, 0, nullptr},
  };
  static PyModuleDef definition = {PyModuleDef_HEAD_INIT,
                                   "host",
                                   "Threads of an offloaded optimizer, identities and watch lists "
                                   "of objects, offsets of an arena.",
                                   -1,
                                   functions,
                                   nullptr,
                                   nullptr,
                                   nullptr,
                                   nullptr};
  python::Reference module(PyModule_Create(&definition));
  python::Reference queue(step_queue_type());
  if (PyModule_AddObject(module.get(), "StepQueue", queue.get()) != 0) throw python::Raised{};
  queue.release();
  if (PyModule_AddIntConstant(module.get(), "MOST_THREADS", most_threads()) != 0) {
    throw python::Raised{};
  }
  return module.release();
}

}  // namespace
}  // namespace fusedops

extern "C" __attribute__((visibility("default"))) PyObject* PyInit_host() {
  return fusedops::python::guarded(fusedops::make_module);
}
