// What the bindings of csrc/host need of Python: its limited API only, so that one module serves
// Python 3.10 and everything newer. pybind11 needs more than that API has.
//
// A function that returns while Python has an exception set throws `Raised`; `guarded` turns it,
// and the exceptions of C++, into what Python expects of a function.
#pragma once

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030A0000
#include <Python.h>

#include <cstdint>
#include <exception>
#include <new>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace fusedops::python {

// Python has an exception set.
struct Raised {};

// A reference that is given back at the end of the scope; throws when there is none.
class Reference {
 public:
  explicit Reference(PyObject* object) : object_(object) {
    if (object == nullptr) throw Raised{};
  }
  Reference(const Reference&) = delete;
  Reference& operator=(const Reference&) = delete;
  ~Reference() { Py_XDECREF(object_); }

  PyObject* get() const { return object_; }
  PyObject* release() { return std::exchange(object_, nullptr); }

 private:
  PyObject* object_;
};

// Other Python threads run while this exists.
class Unlocked {
 public:
  Unlocked() : state_(PyEval_SaveThread()) {}
  Unlocked(const Unlocked&) = delete;
  Unlocked& operator=(const Unlocked&) = delete;
  ~Unlocked() { PyEval_RestoreThread(state_); }

 private:
  PyThreadState* state_;
};

inline int64_t integer(PyObject* object) {
  const int64_t value = PyLong_AsLongLong(object);
  if (value == -1 && PyErr_Occurred() != nullptr) throw Raised{};
  return value;
}

// Of the integers 0 to 2^64 - 1.
inline uint64_t natural(PyObject* object) {
  const uint64_t value = PyLong_AsUnsignedLongLong(object);
  if (value == UINT64_MAX && PyErr_Occurred() != nullptr) throw Raised{};
  return value;
}

inline double number(PyObject* object) {
  const double value = PyFloat_AsDouble(object);
  if (value == -1.0 && PyErr_Occurred() != nullptr) throw Raised{};
  return value;
}

inline std::string text(PyObject* object) {
  Py_ssize_t size = 0;
  const char* characters = PyUnicode_AsUTF8AndSize(object, &size);
  if (characters == nullptr) throw Raised{};
  return {characters, static_cast<size_t>(size)};
}

// Of a list of integers.
inline std::vector<int64_t> integers(PyObject* list) {
  std::vector<int64_t> values(PyList_Size(list));
  for (size_t i = 0; i < values.size(); ++i) {
    values[i] = integer(PyList_GetItem(list, static_cast<Py_ssize_t>(i)));
  }
  return values;
}

// A new list; `convert` returns a new reference, or null with an exception set.
template <typename T, typename F>
PyObject* list_of(const std::vector<T>& values, const F& convert) {
  Reference list(PyList_New(static_cast<Py_ssize_t>(values.size())));
  for (size_t i = 0; i < values.size(); ++i) {
    Reference item(convert(values[i]));
    PyList_SetItem(list.get(), static_cast<Py_ssize_t>(i), item.release());
  }
  return list.release();
}

// Calls f, which returns a new reference, with every exception turned into one of Python.
template <typename F>
PyObject* guarded(const F& f) noexcept {
  try {
    return f();
  } catch (const Raised&) {
  } catch (const std::invalid_argument& error) {
    PyErr_SetString(PyExc_ValueError, error.what());
  } catch (const std::bad_alloc&) {
    PyErr_NoMemory();
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
  return nullptr;
}

inline PyObject* none() {
  Py_INCREF(Py_None);
  return Py_None;
}

// Reads the arguments of a call as PyArg_ParseTupleAndKeywords does.
template <typename... Targets>
void parse(PyObject* arguments, PyObject* keywords, const char* format,
           const std::vector<const char*>& names, Targets*... targets) {
  std::vector<char*> words;
  for (const char* name : names) words.push_back(const_cast<char*>(name));
  words.push_back(nullptr);
  if (PyArg_ParseTupleAndKeywords(arguments, keywords, format, words.data(), targets...) == 0) {
    throw Raised{};
  }
}

using Function = PyObject* (*)(PyObject * self, PyObject* arguments, PyObject* keywords);

// A row of a table of functions or methods that take keywords.
inline PyMethodDef method(const char* name, Function function) {
  return {name, reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function)),
          METH_VARARGS | METH_KEYWORDS, nullptr};
}

}  // namespace fusedops::python
