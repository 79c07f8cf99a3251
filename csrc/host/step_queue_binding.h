// The step queue as a type of Python, and identities of objects (step_queue.cpp).
#pragma once

#include "limited_api.h"

namespace fusedops {

// A new reference to the type StepQueue.
PyObject* step_queue_type();

int most_threads();

PyObject* identities(PyObject* module, PyObject* arguments, PyObject* keywords);

}  // namespace fusedops
