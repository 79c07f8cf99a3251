// AdamW on the CPU, one pass over all tensors of a call:
//
//   g = grad * grad_factor                       (unscale and clip, or maximize)
//   m = beta1 m + (1 - beta1) g
//   v = beta2 v + (1 - beta2) g^2
//   p = copy                                     (where the copy is not p, rounded)
//   p = p - (decay p + step_size m / (sqrt(v) inverse_root + eps))
//   copy = p, rounded
//
// Traffic: each of grad, p, m and v once in, p, m and v once out, the copy once out (around the
// cache). All arithmetic is float32 (float64 for float64 parameters); p is rounded once. The decay
// is subtracted together with the step: p * (1 - lr * weight_decay) would round the factor, and
// with lr * weight_decay = 1e-6 decay 3 % too much or too little at every step.
//
// Which dtype a stream has is asked per vector, so that one loop serves all mixtures; the usual
// ones have a loop that knows. Multiply-adds are written out, so that the compiler has none left to
// contract and an element's bits do not depend on where the vectors begin.
#include "adamw.h"

#include <cstring>

#include "../common/vec.h"
#include "adamw_rounding.h"

namespace fusedops::CPU_CAPABILITY {
namespace {

template <typename A>
using V = at::vec::Vectorized<A>;

constexpr int64_t kTile = 1024;  // elements that draw random words at a time

template <typename A, typename Full>
inline V<A> read(DType dtype, const void* from, int64_t i, int64_t count, Full full) {
  if constexpr (std::is_same_v<A, double>) {
    return load_vec(static_cast<const double*>(from) + i, count, full);
  } else {
    if (dtype == DType::f32) return load_vec(static_cast<const float*>(from) + i, count, full);
    if (dtype == DType::bf16)
      return load_vec(static_cast<const c10::BFloat16*>(from) + i, count, full);
    return load_vec(static_cast<const c10::Half*>(from) + i, count, full);
  }
}

template <typename A, typename Full>
inline void write(bool stream, DType dtype, void* to, int64_t i, const V<A>& value, int64_t count,
                  Full full) {
  if constexpr (std::is_same_v<A, double>) {
    store_or_stream(stream, static_cast<double*>(to) + i, value, count, full);
  } else if (dtype == DType::f32) {
    store_or_stream(stream, static_cast<float*>(to) + i, value, count, full);
  } else if (dtype == DType::bf16) {
    store_or_stream(stream, static_cast<c10::BFloat16*>(to) + i, value, count, full);
  } else {
    store_or_stream(stream, static_cast<c10::Half*>(to) + i, value, count, full);
  }
}

// What a vector is after it was written to memory of a dtype and read again.
template <typename T>
inline V<float> rounded_to(const V<float>& value) {
  T memory[V<float>::size()];
  store_vec(memory, value);
  return load_vec(static_cast<const T*>(memory));
}

template <typename A>
inline V<A> rounded(DType dtype, const V<A>& value) {
  if constexpr (std::is_same_v<A, float>) {
    if (dtype == DType::bf16) return rounded_to<c10::BFloat16>(value);
    if (dtype == DType::f16) return rounded_to<c10::Half>(value);
  }
  return value;
}

// As `write`, but bfloat16 is rounded by random words where there are any.
template <int kShift, typename A, typename Full>
inline void write_rounded(bool stream, DType dtype, void* to, int64_t i, const V<A>& value,
                          int64_t count, Full full, const uint32_t* words) {
  if constexpr (std::is_same_v<A, float>) {
    if (words != nullptr && dtype == DType::bf16) {
      return store_stochastically<kShift>(static_cast<c10::BFloat16*>(to) + i, value, words, count);
    }
  }
  write(stream, dtype, to, i, value, count, full);
}

// Only where a vector is a cache line: half of one would wait for the other half, between the many
// other lines of this loop, in a buffer that may be taken from it.
template <typename A>
bool may_stream(const AdamWCall& call, const Updated& tensor, DType dtype) {
  return call.stream && tensor.from != tensor.to && !is_half(dtype) &&
         sizeof(A) * V<A>::size() == 64 && reinterpret_cast<uintptr_t>(tensor.to) % 64 == 0;
}

// Writes a tile of half precision around the cache, whole lines at a time.
void stream_tile(void* to, const void* tile, int64_t bytes) {
  auto* target = static_cast<char*>(to);
  const auto* source = static_cast<const char*>(tile);
  int64_t i = 0;
#if defined(CPU_CAPABILITY_AVX512)
  for (; i + 64 <= bytes; i += 64) {
    _mm512_stream_si512(reinterpret_cast<__m512i*>(target + i), _mm512_load_si512(source + i));
  }
#elif defined(CPU_CAPABILITY_AVX2)
  for (; i + 32 <= bytes; i += 32) {
    _mm256_stream_si256(reinterpret_cast<__m256i*>(target + i),
                        _mm256_load_si256(reinterpret_cast<const __m256i*>(source + i)));
  }
#endif
  std::memcpy(target + i, source + i, bytes - i);
}

template <DType kDType>
using Known = std::integral_constant<DType, kDType>;

// kInPlace: neither amsgrad, nor random words, nor a shadow. The dtypes are DType or Known<...>.
template <typename A, bool kInPlace, typename P, typename G, typename S>
void update(const AdamWCall& call, const AdamWTensor& t, int64_t begin, int64_t end, P param_dtype,
            G grad_dtype, S state_dtype) {
  const V<A> factor(static_cast<A>(call.grad_factor));
  const V<A> beta1(static_cast<A>(call.beta1)), rest1(static_cast<A>(1.0 - call.beta1));
  const V<A> beta2(static_cast<A>(call.beta2)), rest2(static_cast<A>(1.0 - call.beta2));
  const V<A> eps(static_cast<A>(call.eps)), inverse_root(static_cast<A>(t.inverse_root));
  const V<A> step_size(static_cast<A>(t.step_size)), decay(static_cast<A>(t.decay));
  const bool amsgrad = !kInPlace && t.max_exp_avg_sq.from != nullptr;
  const bool stream_copy = may_stream<A>(call, t.copy, t.copy_dtype);
  const bool stream_param = !kInPlace && may_stream<A>(call, t.param, param_dtype);
  const bool stream_first = !kInPlace && may_stream<A>(call, t.exp_avg, state_dtype);
  const bool stream_second = !kInPlace && may_stream<A>(call, t.exp_avg_sq, state_dtype);
  const bool stream_max = !kInPlace && may_stream<A>(call, t.max_exp_avg_sq, state_dtype);
  const bool stage_copy = call.stream && t.copy.to != nullptr && is_half(t.copy_dtype) &&
                          reinterpret_cast<uintptr_t>(t.copy.to) % 64 == 0;
  const bool draws = !kInPlace && call.stochastic && state_dtype == DType::bf16;
  const bool draws_more =
      !kInPlace && call.stochastic && (param_dtype == DType::bf16 || (draws && amsgrad));
  alignas(64) uint32_t words[kTile], more_words[kTile];
  alignas(64) uint16_t staged[kTile];
  for (int64_t tile = begin; tile < end; tile += kTile) {
    const int64_t size = std::min(kTile, end - tile);
    if (draws) draw_elements(t, t.offset, tile, size, words);
    if (draws_more) draw_elements(t, t.offset + 1, tile, size, more_words);
    for_each_vector<V<A>::size()>(size, [&](int64_t c, int64_t count, auto full) {
      const int64_t i = tile + c;
      const uint32_t* drawn = draws ? words + c : nullptr;
      const uint32_t* drawn_more = draws_more ? more_words + c : nullptr;
      const V<A> g = read<A>(grad_dtype, t.grad, i, count, full) * factor;
      const V<A> m =
          at::vec::fmadd(beta1, read<A>(state_dtype, t.exp_avg.from, i, count, full), rest1 * g);
      const V<A> v = at::vec::fmadd(beta2, read<A>(state_dtype, t.exp_avg_sq.from, i, count, full),
                                    rest2 * g * g);
      write_rounded<0>(stream_first, state_dtype, t.exp_avg.to, i, m, count, full, drawn);
      write_rounded<16>(stream_second, state_dtype, t.exp_avg_sq.to, i, v, count, full, drawn);
      V<A> largest = v;
      if (amsgrad) {
        largest = at::vec::maximum(v, read<A>(state_dtype, t.max_exp_avg_sq.from, i, count, full));
        write_rounded<16>(stream_max, state_dtype, t.max_exp_avg_sq.to, i, largest, count, full,
                          draws ? drawn_more : nullptr);
      }
      const V<A> denominator = at::vec::fmadd(largest.sqrt(), inverse_root, eps);
      V<A> p = read<A>(param_dtype, t.param.from, i, count, full);
      if (t.copy.from != nullptr) {
        const V<A> copy = read<A>(t.copy_dtype, t.copy.from, i, count, full);
        p = V<A>::blendv(p, copy, rounded<A>(t.copy_dtype, p) != copy);
      }
      p = p - at::vec::fmadd(decay, p, step_size * (m / denominator));
      write_rounded<0>(stream_param, param_dtype, t.param.to, i, p, count, full, drawn_more);
      if (stage_copy) {
        write(false, t.copy_dtype, staged, c, p, count, full);
      } else if (t.copy.to != nullptr) {
        write(stream_copy, t.copy_dtype, t.copy.to, i, p, count, full);
      }
    });
    if (stage_copy) stream_tile(static_cast<uint16_t*>(t.copy.to) + tile, staged, 2 * size);
  }
}

// The step of float32 parameters and states alone, which is most of what there is, with its dtypes
// known: on one Zen 4 core asking per vector took 3 % more time, with bfloat16 gradients and copies
// 15 %.
void update_float(const AdamWCall& call, const AdamWTensor& t, int64_t begin, int64_t end) {
  using F32 = Known<DType::f32>;
  const bool in_place = t.param.from == t.param.to && t.max_exp_avg_sq.from == nullptr;
  const bool usual =
      in_place && !call.stochastic && t.param_dtype == DType::f32 && t.state_dtype == DType::f32;
  if (!usual) {
    update<float, false>(call, t, begin, end, t.param_dtype, t.grad_dtype, t.state_dtype);
  } else if (t.grad_dtype == DType::f32) {
    update<float, true>(call, t, begin, end, F32(), F32(), F32());
  } else if (t.grad_dtype == DType::bf16) {
    update<float, true>(call, t, begin, end, F32(), Known<DType::bf16>(), F32());
  } else {
    update<float, true>(call, t, begin, end, F32(), t.grad_dtype, F32());
  }
}

#if defined(CPU_CAPABILITY_AVX512)
inline V<double> lower_half(const V<float>& x) {
  return _mm512_cvtps_pd(_mm512_castps512_ps256(x));
}
inline V<double> upper_half(const V<float>& x) {
  return _mm512_cvtps_pd(_mm512_extractf32x8_ps(x, 1));
}
#elif defined(CPU_CAPABILITY_AVX2)
inline V<double> lower_half(const V<float>& x) {
  return _mm256_cvtps_pd(_mm256_castps256_ps128(x));
}
inline V<double> upper_half(const V<float>& x) {
  return _mm256_cvtps_pd(_mm256_extractf128_ps(x, 1));
}
#else
inline V<double> half(const V<float>& x, int first) {
  float values[V<float>::size()];
  double wide[V<double>::size()];
  x.store(values);
  for (int i = 0; i < V<double>::size(); ++i) wide[i] = values[first + i];
  return V<double>::loadu(wide);
}
inline V<double> lower_half(const V<float>& x) {
  return half(x, 0);
}
inline V<double> upper_half(const V<float>& x) {
  return half(x, V<double>::size());
}
#endif

// In float64: the squares of float32 are exact there, and none overflows.
template <typename T>
double square_sum(const T* data, int64_t numel) {
  V<double> sums[4] = {V<double>(0.0), V<double>(0.0), V<double>(0.0), V<double>(0.0)};
  if constexpr (std::is_same_v<T, double>) {
    for_each_vector<V<double>::size()>(numel, [&](int64_t i, int64_t count, auto full) {
      const V<double> x = load_vec(data + i, count, full);
      const int64_t which = i / V<double>::size() % 4;
      sums[which] = at::vec::fmadd(x, x, sums[which]);
    });
  } else {
    constexpr int kWidth = V<float>::size();
    for_each_vector<2 * kWidth>(numel, [&](int64_t i, int64_t count, auto full) {
      const V<float> x = load_vec(data + i, std::min<int64_t>(count, kWidth), full);
      V<float> y(0.0F);
      if (full || count > kWidth) y = load_vec(data + i + kWidth, count - kWidth, full);
      const V<double> parts[] = {lower_half(x), upper_half(x), lower_half(y), upper_half(y)};
      for (int k = 0; k < 4; ++k) sums[k] = at::vec::fmadd(parts[k], parts[k], sums[k]);
    });
  }
  return sum_lanes<double>((sums[0] + sums[1]) + (sums[2] + sums[3]));
}

// Calls f(tensor, begin, end) for the chunks first .. last - 1.
template <typename Call, typename F>
void for_each_chunk(const Call& call, int64_t first, int64_t last, const F& f) {
  const int64_t* found =
      std::upper_bound(call.first_chunks, call.first_chunks + call.count + 1, first) - 1;
  for (int64_t chunk = first; chunk < last; ++chunk) {
    while (chunk >= found[1]) ++found;  // a tensor without elements has no chunk
    const auto& tensor = call.tensors[found - call.first_chunks];
    const int64_t begin = (chunk - *found) * kUpdateChunk;
    f(tensor, begin, std::min(begin + kUpdateChunk, tensor.numel), chunk);
  }
}

}  // namespace

void adamw_chunks(const AdamWCall& call, int64_t first, int64_t last) {
  for_each_chunk(call, first, last, [&](const AdamWTensor& t, int64_t begin, int64_t end, int64_t) {
    if (t.param_dtype == DType::f64) {
      using F64 = Known<DType::f64>;
      update<double, false>(call, t, begin, end, F64(), F64(), F64());
    } else {
      update_float(call, t, begin, end);
    }
  });
}

void square_sums_chunks(const SquareSumsCall& call, int64_t first, int64_t last) {
  for_each_chunk(call, first, last,
                 [&](const SquareSumsTensor& t, int64_t begin, int64_t end, int64_t chunk) {
                   switch_dtype(t.dtype, [&](auto zero) {
                     using T = decltype(zero);
                     const T* data = static_cast<const T*>(t.data);
                     call.partials[chunk] = square_sum(data + begin, end - begin);
                   });
                 });
}

}  // namespace fusedops::CPU_CAPABILITY
