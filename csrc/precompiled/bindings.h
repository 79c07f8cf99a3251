// Precompiled for the plain sources (tools/native.py): the headers of torch that every binding
// needs take longer to read than the bindings themselves. Nothing includes this file.
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>
