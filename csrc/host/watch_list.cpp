// Compares what a patched module stands for with what is there (integrations/hf/original_code.py).
#include "watch_list.h"

#include <memory>

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

// Whether a dictionary has one of the names.
bool has_any(PyObject* dictionary, PyObject* names) {
  for (Py_ssize_t i = 0, count = PyTuple_Size(names); i < count; ++i) {
    if (PyDict_GetItemWithError(dictionary, PyTuple_GetItem(names, i)) != nullptr) return true;
  }
  return false;
}

bool all_hold(PyObject* attributes) {
  for (Py_ssize_t i = 0, count = PyTuple_Size(attributes); i < count; ++i) {
    if (!holds(PyTuple_GetItem(attributes, i))) return false;
  }
  return true;
}

// The entry of a dictionary that is an attribute of a module; null where there is none.
PyObject* entry(PyObject* own, const char* attribute, PyObject* name) {
  const python::Reference key(PyUnicode_InternFromString(attribute));
  PyObject* table = PyDict_GetItemWithError(own, key.get());
  return table != nullptr && PyDict_Check(table) ? PyDict_GetItemWithError(table, name) : nullptr;
}

bool evaluates(PyObject* own) {
  static PyObject* const training = PyUnicode_InternFromString("training");
  return PyDict_GetItemWithError(own, training) == Py_False;
}

// Whether something hangs on a module that only runs if the module is called.
bool has_hooks(PyObject* own) {
  static PyObject* const forward = PyUnicode_InternFromString("forward");
  static PyObject* const names[] = {PyUnicode_InternFromString("_forward_hooks"),
                                    PyUnicode_InternFromString("_forward_pre_hooks"),
                                    PyUnicode_InternFromString("_backward_hooks"),
                                    PyUnicode_InternFromString("_backward_pre_hooks")};
  if (PyDict_GetItemWithError(own, forward) != nullptr) return true;
  for (PyObject* name : names) {
    PyObject* hooks = PyDict_GetItemWithError(own, name);
    if (hooks == nullptr || !PyDict_Check(hooks) || PyDict_Size(hooks) != 0) return true;
  }
  return false;
}

}  // namespace

PyObject* is_unchanged(PyObject* /*module*/, PyObject* arguments) {
  PyObject *attributes = nullptr, *own = nullptr, *methods = nullptr, *types = nullptr;
  if (!PyArg_ParseTuple(arguments, "O!O!O!O!:is_unchanged", &PyTuple_Type, &attributes,
                        &PyDict_Type, &own, &PyTuple_Type, &methods, &PyTuple_Type, &types)) {
    return nullptr;
  }
  const bool same =
      has_plain_parameters(own, types) && !has_any(own, methods) && all_hold(attributes);
  return PyBool_FromLong(same ? 1 : 0);
}

PyObject* values_of_block(PyObject* /*module*/, PyObject* arguments) {
  PyObject *root = nullptr, *nodes = nullptr, *attributes = nullptr, *types = nullptr;
  if (!PyArg_ParseTuple(arguments, "OO!O!O!:values_of_block", &root, &PyTuple_Type, &nodes,
                        &PyTuple_Type, &attributes, &PyTuple_Type, &types)) {
    return nullptr;
  }
  return python::guarded([&] {
    if (!all_hold(attributes)) return python::none();
    const python::Reference values(PyList_New(0));
    std::vector<std::unique_ptr<python::Reference>> dictionaries;
    for (Py_ssize_t i = 0, count = PyTuple_Size(nodes); i < count; ++i) {
      PyObject* node = PyTuple_GetItem(nodes, i);
      const int64_t parent = python::integer(PyTuple_GetItem(node, 0));
      PyObject* module = root;
      if (parent >= 0) {
        PyObject* own = dictionaries.at(static_cast<size_t>(parent))->get();
        module = entry(own, "_modules", PyTuple_GetItem(node, 1));
      }
      if (module == nullptr ||
          reinterpret_cast<PyObject*>(Py_TYPE(module)) != PyTuple_GetItem(node, 2)) {
        return python::none();
      }
      dictionaries.push_back(
          std::make_unique<python::Reference>(PyObject_GenericGetDict(module, nullptr)));
      PyObject* own = dictionaries.back()->get();
      if (!evaluates(own) || (parent >= 0 && has_hooks(own)) || !has_plain_parameters(own, types) ||
          has_any(own, PyTuple_GetItem(node, 3))) {
        return python::none();
      }
      PyObject* fields = PyTuple_GetItem(node, 4);
      for (Py_ssize_t j = 0, size = PyTuple_Size(fields); j < size; ++j) {
        PyObject* name = PyTuple_GetItem(fields, j);
        PyObject* value = PyDict_GetItemWithError(own, name);
        if (value == nullptr) value = entry(own, "_parameters", name);
        if (value == nullptr) return python::none();
        if (PyList_Append(values.get(), value) != 0) throw python::Raised{};
      }
    }
    Py_INCREF(values.get());
    return values.get();
  });
}

}  // namespace fusedops
