// Torch's CUDA allocator while steps of arenas (csrc/runtime/arena/step_arena.h) are used.
#pragma once

#include "../runtime/arena/step_arena.h"
#include "forwarding_allocator.h"

#if FUSEDOPS_KNOWS_CUDA_ALLOCATOR
namespace fusedops::cuda {

// Sets the allocator unless it is set, and returns a device's memory for arenas. It stays: a
// storage remembers how it is freed. Outside of steps it passes each call on.
//
// Raises: the present allocator is not torch's caching allocator.
arena::Device* arena_device(int index);

// The stream that is current on a device.
void* current_stream(int index);

}  // namespace fusedops::cuda
#endif
