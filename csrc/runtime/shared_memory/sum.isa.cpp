// The sum of the arrays of all ranks, an element at a time in registers: memory decides.
#include "sum.h"

#include <array>
#include <type_traits>

#include "../../cpu/common/vec.h"

namespace fusedops::CPU_CAPABILITY {
namespace {

// As `store_vec`, but for subnormal numbers of bfloat16, which vcvtneps2bf16 takes for zero.
template <typename T>
inline void store_exactly(T* to, const Vec<T>& vector) {
#if defined(CPU_CAPABILITY_AVX512)
  if constexpr (std::is_same_v<T, c10::BFloat16>) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), at::vec::cvtfp32_bf16(vector));
    return;
  }
#endif
  store_vec(to, vector);
}

// Sums of 1, 2, 4... neighbours wait on a stack; two of a size become one of the next.
template <typename T>
inline Vec<T> sum_ranks(const SharedSum& a, int64_t i, int64_t count) {
  struct Level {
    Vec<T> sum;
    int64_t neighbours;
  };
  std::array<Level, 7> stack;
  static_assert(kMaxSharedRanks < 1 << 7);
  int64_t depth = 0;
  for (int64_t rank = 0; rank < a.ranks; ++rank) {
    const T* from = static_cast<const T*>(a.parts[rank]) + i;
    Vec<T> sum = count < 0 ? load_vec(from) : load_vec(from, count);
    int64_t neighbours = 1;
    while (depth > 0 && stack[depth - 1].neighbours == neighbours) {
      sum = stack[--depth].sum + sum;
      neighbours *= 2;
    }
    stack[depth++] = {sum, neighbours};
  }
  Vec<T> total = stack[0].sum;
  for (int64_t level = 1; level < depth; ++level) total = total + stack[level].sum;
  return total;
}

template <typename T>
void sum(const SharedSum& a) {
  constexpr int64_t kLanes = Vec<T>::size();
  T* out = static_cast<T*>(a.out);
  int64_t i = 0;
  if (a.ranks == 2) {
    const T* first = static_cast<const T*>(a.parts[0]);
    const T* second = static_cast<const T*>(a.parts[1]);
    for (; i + kLanes <= a.numel; i += kLanes) {
      store_exactly(out + i, load_vec(first + i) + load_vec(second + i));
    }
  }
  for (; i + kLanes <= a.numel; i += kLanes) store_exactly(out + i, sum_ranks<T>(a, i, -1));
  if (i == a.numel) return;
  alignas(64) T last[kLanes];
  store_exactly(last, sum_ranks<T>(a, i, a.numel - i));
  std::copy(last, last + (a.numel - i), out + i);
}

}  // namespace

void shared_sum(const SharedSum& a) {
  switch_dtype(a.dtype, [&](auto t) { sum<decltype(t)>(a); });
}

}  // namespace fusedops::CPU_CAPABILITY
