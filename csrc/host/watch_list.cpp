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

// Whether an object is None or of one of the types.
bool is_plain(PyObject* tensor, PyObject* types) {
  if (tensor == Py_None) return true;
  for (Py_ssize_t i = 0, count = PyTuple_Size(types); i < count; ++i) {
    if (reinterpret_cast<PyObject*>(Py_TYPE(tensor)) == PyTuple_GetItem(types, i)) return true;
  }
  return false;
}

// Whether the parameters of a module are plain, and what has taken the place of one: libraries
// delete `weight` and assign a tensor. `own` is the module's dictionary.
bool has_plain_parameters(PyObject* own, PyObject* types) {
  static PyObject* const parameters = PyUnicode_InternFromString("_parameters");
  static PyObject* const names[] = {PyUnicode_InternFromString("weight"),
                                    PyUnicode_InternFromString("bias")};
  for (PyObject* name : names) {
    PyObject* tensor = PyDict_GetItemWithError(own, name);
    if (tensor != nullptr && !is_plain(tensor, types)) return false;
  }
  PyObject* table = PyDict_GetItemWithError(own, parameters);
  if (table == nullptr) return true;
  if (!PyDict_CheckExact(table)) return false;
  PyObject *name = nullptr, *tensor = nullptr;
  for (Py_ssize_t place = 0; PyDict_Next(table, &place, &name, &tensor) != 0;) {
    if (!is_plain(tensor, types)) return false;
  }
  return true;
}

}  // namespace

PyObject* is_unchanged(PyObject* /*module*/, PyObject* arguments) {
  PyObject *attributes = nullptr, *own = nullptr, *methods = nullptr, *types = nullptr;
  if (!PyArg_ParseTuple(arguments, "O!O!O!O!:is_unchanged", &PyTuple_Type, &attributes,
                        &PyDict_Type, &own, &PyTuple_Type, &methods, &PyTuple_Type, &types)) {
    return nullptr;
  }
  if (!has_plain_parameters(own, types)) Py_RETURN_FALSE;
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
