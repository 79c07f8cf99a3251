// What stands for CUDA's runtime library and its memory, where the machine executes kernels.
#pragma once

#include <string>
#include <vector>

#include "../machine.h"

namespace ptx {

// What was wrong with the last launch that failed.
const std::string& finding();

// The memory of the tensors that exist (tensors.cpp), by address.
std::vector<Allocation> tensors();

}  // namespace ptx
