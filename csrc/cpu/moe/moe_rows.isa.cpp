// moe_permute, moe_unpermute and moe_relayout on the CPU: rows that move.
//
// All go token by token (or row by row): each output row is written once, by one thread, and a sum
// over slots is taken in the order of the slots, in float32 (float64 for float64): the result
// depends neither on threads nor on where the experts' rows were computed. Traffic is the least
// there is: scatter reads a token once and writes its top_k rows; combine reads the kept rows once
// and writes the token; its backward reads both and writes the rows. Rows of dropped slots are
// never read. Outputs larger than the cache are streamed around it.
#include "moe_rows.h"

#include <cstring>
#include <type_traits>
#include <vector>

#include "../../common/parallel.h"
#include "../common/vec.h"

namespace fusedops::CPU_CAPABILITY {
namespace {

// Copies (or, from null, clears) a row. Streamed rows begin at and are multiples of 64 bytes: they
// go as vectors of float, which moves bits unchanged.
inline void write_row(bool stream, void* to, const void* from, int64_t bytes) {
  if (!stream) {
    if (from == nullptr)
      std::memset(to, 0, bytes);
    else
      std::memcpy(to, from, bytes);
    return;
  }
  using V = Vec<float>;
  const auto* source = static_cast<const float*>(from);
  auto* target = static_cast<float*>(to);
  const auto count = bytes / static_cast<int64_t>(sizeof(float));
  for (int64_t i = 0; i < count; i += V::size()) {
    stream_vec(target + i, source == nullptr ? V(0.0f) : load_vec(source + i));
  }
}

// A tensor without columns has no memory, and its rows no place.
template <typename T>
inline const T* row_of(const MoeRows& rows, int64_t row) {
  return rows.data == nullptr ? nullptr : static_cast<const T*>(rows.data) + row * rows.stride;
}

// Vectors of a row that are summed together: enough to hide the latency of their additions.
constexpr int64_t kUnroll = 4;

template <typename T>
struct Source {
  const T* row;
  Acc<T> weight;
};

// Columns [c, c + kVectors * size) of the weighted sum; `count` < 0 is a full block.
template <typename T, bool kWeighted, int kVectors>
inline __attribute__((always_inline)) void sum_block(const Source<T>* sources, int64_t num_sources,
                                                     int64_t c, bool stream, T* out) {
  using V = Vec<T>;
  V sum[kVectors];
  for (int v = 0; v < kVectors; ++v) sum[v] = V(Acc<T>(0));
  for (int64_t s = 0; s < num_sources; ++s) {
    const T* from = sources[s].row + c;
    const V weight(sources[s].weight);
    for (int v = 0; v < kVectors; ++v) {
      const V value = load_vec(from + v * V::size());
      if constexpr (kWeighted)
        sum[v] = at::vec::fmadd(weight, value, sum[v]);
      else
        sum[v] = sum[v] + value;
    }
  }
  for (int v = 0; v < kVectors; ++v) {
    store_or_stream(stream, out + c + v * V::size(), sum[v], V::size(), std::true_type());
  }
}

template <typename T, bool kWeighted>
void combine(const MoeCombine& a) {
  using V = Vec<T>;
  constexpr int64_t kBlock = kUnroll * V::size();
  const auto* probs = static_cast<const Acc<T>*>(a.probs);
  auto* output = static_cast<T*>(a.output);
  const bool stream = should_stream(output, a.slots.tokens, a.size);
  const int64_t bytes = (a.slots.top_k + 1) * a.size * sizeof(T);
  parallel_rows(a.slots.tokens, bytes, [&](int64_t begin, int64_t end) {
    std::vector<Source<T>> kept(a.slots.top_k);
    for (int64_t token = begin; token < end; ++token) {
      int64_t count = 0;
      for (int64_t j = 0; j < a.slots.top_k; ++j) {
        const int64_t slot = token * a.slots.top_k + j;
        const int64_t row = a.slots.positions[slot];
        if (row >= a.slots.real) continue;
        kept[count++] = {row_of<T>(a.input, row), kWeighted ? probs[slot] : Acc<T>(1)};
      }
      T* out = output + token * a.size;
      int64_t c = 0;
      for (; c + kBlock <= a.size; c += kBlock) {
        sum_block<T, kWeighted, kUnroll>(kept.data(), count, c, stream, out);
      }
      for (; c + V::size() <= a.size; c += V::size()) {
        sum_block<T, kWeighted, 1>(kept.data(), count, c, stream, out);
      }
      if (c < a.size) {
        V sum(Acc<T>(0));
        for (int64_t s = 0; s < count; ++s) {
          const V value = load_vec(kept[s].row + c, a.size - c);
          sum = kWeighted ? at::vec::fmadd(V(kept[s].weight), value, sum) : sum + value;
        }
        store_vec(out + c, sum, a.size - c);
      }
    }
  });
}

// One slot: grad_row = weight * grad, and <row, grad>. Either of `row` and `grad_row` may be null.
template <typename T>
inline Acc<T> slot_backward(const T* grad, const T* row, Acc<T> weight, bool stream, T* grad_row,
                            int64_t size) {
  using V = Vec<T>;
  const V factor(weight);
  V sums[2] = {V(Acc<T>(0)), V(Acc<T>(0))};
  int64_t which = 0;
  for_each_vector<V::size()>(size, [&](int64_t c, int64_t count, auto full) {
    const V g = load_vec(grad + c, count, full);
    if (row != nullptr) {
      sums[which] = at::vec::fmadd(load_vec(row + c, count, full), g, sums[which]);
      which ^= 1;
    }
    if (grad_row != nullptr) {
      store_or_stream(stream, grad_row + c, factor * g, count, full);
    }
  });
  return sum_lanes(sums[0] + sums[1]);
}

template <typename T>
void combine_backward(const MoeCombineBackward& a) {
  const auto* probs = static_cast<const Acc<T>*>(a.probs);
  auto* grad_probs = static_cast<Acc<T>*>(a.grad_probs);
  auto* grad_input = static_cast<T*>(a.grad_input);
  const bool stream = should_stream(grad_input, a.slots.tokens * a.slots.top_k, a.size);
  const int64_t rows = (grad_probs != nullptr) + (grad_input != nullptr);
  const int64_t bytes = (rows * a.slots.top_k + 1) * a.size * sizeof(T);
  parallel_rows(a.slots.tokens, bytes, [&](int64_t begin, int64_t end) {
    for (int64_t slot = begin * a.slots.top_k; slot < end * a.slots.top_k; ++slot) {
      const int64_t row = a.slots.positions[slot];
      T* grad_row = grad_input != nullptr ? grad_input + row * a.size : nullptr;
      if (row >= a.slots.real) {
        if (grad_row != nullptr) write_row(stream, grad_row, nullptr, a.size * sizeof(T));
        if (grad_probs != nullptr) grad_probs[slot] = 0;
        continue;
      }
      const T* grad = row_of<T>(a.grad_output, slot / a.slots.top_k);
      const T* in = grad_probs != nullptr ? row_of<T>(a.input, row) : nullptr;
      const Acc<T> weight = probs != nullptr ? probs[slot] : Acc<T>(1);
      const Acc<T> dot = slot_backward(grad, in, weight, stream, grad_row, a.size);
      if (grad_probs != nullptr) grad_probs[slot] = dot;
    }
  });
}

}  // namespace

void moe_scatter(const MoeScatter& a) {
  const int64_t slots = a.slots.tokens * a.slots.top_k;
  auto* output = static_cast<char*>(a.output);
  const bool stream = should_stream(output, slots, a.row_bytes);
  parallel_rows(a.slots.tokens, (a.slots.top_k + 1) * a.row_bytes, [&](int64_t begin, int64_t end) {
    for (int64_t slot = begin * a.slots.top_k; slot < end * a.slots.top_k; ++slot) {
      const int64_t row = a.slots.positions[slot];
      const char* from = static_cast<const char*>(a.input) + slot / a.slots.top_k * a.input_stride;
      write_row(stream, output + row * a.row_bytes, row < a.slots.real ? from : nullptr,
                a.row_bytes);
    }
  });
}

void moe_gather(const MoeGather& a) {
  auto* output = static_cast<char*>(a.output);
  const bool stream = should_stream(output, a.rows, a.row_bytes);
  parallel_rows(a.rows, 2 * a.row_bytes, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const int64_t from = a.index[row];
      const void* source =
          from >= 0 ? static_cast<const char*>(a.input) + from * a.input_stride : nullptr;
      write_row(stream, output + row * a.row_bytes, source, a.row_bytes);
    }
  });
}

void moe_combine(const MoeCombine& a) {
  switch_dtype(a.dtype, [&](auto t) {
    using T = decltype(t);
    if (a.probs != nullptr)
      combine<T, true>(a);
    else
      combine<T, false>(a);
  });
}

void moe_combine_backward(const MoeCombineBackward& a) {
  switch_dtype(a.dtype, [&](auto t) { combine_backward<decltype(t)>(a); });
}

}  // namespace fusedops::CPU_CAPABILITY
