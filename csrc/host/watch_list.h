// The comparison of watch lists as a function of Python (watch_list.cpp).
#pragma once

#include "limited_api.h"

namespace fusedops {

// is_unchanged(attributes, own, methods, types): whether each (owner, name, known) of the tuple
// still has the known object, the dictionary `own` of an instance has none of the methods, and its
// parameters are None or of the types.
PyObject* is_unchanged(PyObject* module, PyObject* arguments);

}  // namespace fusedops
