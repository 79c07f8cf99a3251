// Per-thread scratch memory of the matrix products.
//
// A product packs its operands into buffers of a few MiB. Fresh pages cost 0.1 ms a MiB here (page
// faults), as much as the packing itself, so each thread keeps its buffers until it ends. What is
// larger than kKeptBytes is freed when the next smaller request comes.
#pragma once

#include <cstddef>

namespace fusedops {

enum class Workspace {
  packed_a,
  packed_b,
  panel_b,
  tiles,
  partial_sums,
  attention,
  dequantized,
  activations
};

// At least `bytes` bytes, 64-byte aligned, uninitialised, valid until this thread's next request
// for the same `slot`. Throws std::bad_alloc. Under torch.use_deterministic_algorithms with
// torch.utils.deterministic.fill_uninitialized_memory the bytes are those of NaN.
void* workspace(Workspace slot, size_t bytes);

}  // namespace fusedops
