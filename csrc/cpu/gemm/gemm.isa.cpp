// The matrix product (interface: gemm.h; which of the paths below a product takes: gemm_path.h).
//
// Blocking. B is packed in chunks of columns that stay in the shared cache; a thread packs a block
// of rows of A into its own L2 and multiplies it by every panel of the chunk, k block by k block,
// with the tiles of C in L1. Nothing of C is written before it is final. With few rows, a thread
// packs a panel of B into L1 and uses it at once, so that a small product reads the weights once.
// A single row, and a sum of at most kFewTerms (the weight gradient of few tokens is an outer
// product), are limited by memory: they read B where it lies, without packing.
// One Zen 5 core reaches 80 to 90 % of its peak, float32 and bfloat16, level with oneDNN.
//
// A batch (experts, each with its own B and few rows) turns this around: the threads pack the rows
// of many products into the shared cache, then each takes some columns of a product, packs those of
// B into its own L2 and multiplies them by all rows. A weight goes from memory to registers through
// one core only, and there are two barriers per kSharedBytes of packed rows, not two per product.
// A single product goes this way where A is the smaller operand and fits the shared cache: what
// threads share is then small, and B is not written to memory and read again.
//
// Sums. float32 accumulation (float64 for float64). k is cut into blocks of kBlockSteps steps; each
// block is one chain of multiply-adds from zero, and the blocks' sums are added in order. This does
// not depend on m, n, strides or threads: an element has the same bits whatever it is computed
// with, and blocks keep the rounding error of long sums down. An extra product is more blocks; a
// second B is a second panel for each, and twice the tiles.
#include "gemm.h"

#include "gemm_batch.h"

namespace fusedops::CPU_CAPABILITY {
void gemm(const GemmCall& call) {
  with_policy(call.dtype, [&](auto policy) {
    using Policy = decltype(policy);
    const Path path = choose_path<Policy>(call, false);
    if (path == Path::shared_rows) {
      Batch<Policy>(&call, 1).run();
    } else {
      Gemm<Policy>(call).run(path);
    }
  });
}

void gemm_batch(const GemmCall* calls, int64_t count) {
  if (count == 0) return;
  with_policy(calls[0].dtype, [&](auto policy) { Batch<decltype(policy)>(calls, count).run(); });
}

}  // namespace fusedops::CPU_CAPABILITY
