// The comparison of watch lists as a function of Python (watch_list.cpp).
#pragma once

#include "limited_api.h"

namespace fusedops {

// is_unchanged(attributes, own, methods, types): whether each (owner, name, known) of the tuple
// still has the known object, the dictionary `own` of an instance has none of the methods, and its
// parameters are None or of the types.
PyObject* is_unchanged(PyObject* module, PyObject* arguments);

// values_of_block(root, nodes, attributes, types): the values that a forward needs which does the
// work of all modules of a block without calling them, or None where one of them must be called.
// A node is (parent, name, class, methods, fields): the module `name` of an earlier node, or the
// root for parent -1. Each module must be of exactly its class and in evaluation, its parameters
// None or of the types, and, but for the root, without hooks and without a `forward` of its own;
// methods and attributes are those of is_unchanged. The values are those of the fields, which are
// parameters or attributes of the instance, in the order of the nodes.
PyObject* values_of_block(PyObject* module, PyObject* arguments);

}  // namespace fusedops
