// Compares what a patched module stands for with what is there (integrations/hf/original_code.py).
#include "watch_list.h"

namespace fusedops {
namespace {

// Whether the attribute of the owner is still the known object. An attribute that is gone has
// changed, unless None is what is known.
bool holds(PyObject* watched) {
  PyObject* known = PyTuple_GetItem(watched, 2);
  PyObject* value = PyObject_GetAttr(PyTuple_GetItem(watched, 0), PyTuple_GetItem(watched, 1));
  if (value == nullptr) {
    PyErr_Clear();
    return known == Py_None;
  }
  const bool same = value == known;
  Py_DECREF(value);
  return same;
}

}  // namespace

PyObject* is_unchanged(PyObject* /*module*/, PyObject* arguments) {
  PyObject *attributes = nullptr, *own = nullptr, *methods = nullptr;
  if (!PyArg_ParseTuple(arguments, "O!O!O!:is_unchanged", &PyTuple_Type, &attributes, &PyDict_Type,
                        &own, &PyTuple_Type, &methods)) {
    return nullptr;
  }
  for (Py_ssize_t i = 0, count = PyTuple_Size(methods); i < count; ++i) {
    const int overridden = PyDict_Contains(own, PyTuple_GetItem(methods, i));
    if (overridden < 0) return nullptr;
    if (overridden == 1) Py_RETURN_FALSE;
  }
  for (Py_ssize_t i = 0, count = PyTuple_Size(attributes); i < count; ++i) {
    if (!holds(PyTuple_GetItem(attributes, i))) Py_RETURN_FALSE;
  }
  Py_RETURN_TRUE;
}

}  // namespace fusedops
