// What the forward and the backward of attention share: blocks, and the options of the scores.
//
// Scores stand transposed, [keys][queries]: a vector holds one key and kLanes queries. Maximum, sum
// and rescaling of a row are then vertical, and the probabilities are the right operand of the
// second product as they stand. Scores are in units of log 2 from `apply` on: exp2 is cheaper.
//
// Include from *.isa.cpp only.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <type_traits>

#include "../common/vec.h"
#include "../elementwise/activation.h"
#include "../elementwise/dropout.h"
#include "../gemm/gemm_pack.h"
#include "attention.h"
#include "attention_vectors.h"

namespace fusedops::CPU_CAPABILITY {
namespace {

// Keys of a block: whole panels of the kernel, an even number.
template <typename Policy>
constexpr int kBlockPanels = Policy::kRows == 32   ? 4
                             : Policy::kRows == 14 ? 8
                                                   : 16;
template <typename Policy>
constexpr int64_t kBlockKeys = kBlockPanels<Policy> * Policy::kRows;

// The sum of the lanes, in a fixed order.
template <typename A>
inline A sum_of(const V<A>& v) {
#if defined(CPU_CAPABILITY_AVX512) || defined(CPU_CAPABILITY_AVX2)
  at::vec::Vectorized<A> wide;
  std::memcpy(static_cast<void*>(&wide), &v, sizeof(v));
  return sum_lanes<A>(wide);
#else
  A total = v[0];
  for (int i = 1; i < kLanes<A>; ++i) total += v[i];
  return total;
#endif
}

// The first `count` lanes, rounded to T.
template <typename T, typename A>
inline void store_as(T* to, const V<A>& v, int count = kLanes<A>) {
#if defined(CPU_CAPABILITY_AVX512) || defined(CPU_CAPABILITY_AVX2)
  if (count >= kLanes<A>) {
    Vec<T> wide;
    std::memcpy(static_cast<void*>(&wide), &v, sizeof(v));
    return store_vec(to, wide);
  }
#endif
  for (int i = 0; i < std::min(count, kLanes<A>); ++i) to[i] = static_cast<T>(v[i]);
}

// `count` consecutive elements widened, zeros after them.
template <typename T, typename A>
inline V<A> load_as(const T* from, int64_t stride, int64_t count) {
  constexpr int n = kLanes<A>;
#if defined(CPU_CAPABILITY_AVX512) || defined(CPU_CAPABILITY_AVX2)
  if (stride == 1 && count >= n) {
    const Vec<T> wide = load_vec(from);
    V<A> v;
    std::memcpy(&v, static_cast<const void*>(&wide), sizeof(v));
    return v;
  }
#endif
  V<A> v{};
  for (int i = 0; i < std::min<int64_t>(count, n); ++i) v[i] = static_cast<A>(from[i * stride]);
  return v;
}

// Bit j: whether from[j * stride] is true, for j < count <= 32.
inline uint32_t allowed_bits(const bool* from, int64_t stride, int64_t count) {
#if defined(CPU_CAPABILITY_AVX512)
  if (stride == 1) {
    const auto some = static_cast<__mmask32>((uint64_t{1} << count) - 1);
    const __m256i bytes = _mm256_maskz_loadu_epi8(some, from);
    return _mm256_test_epi8_mask(bytes, bytes);
  }
#elif defined(CPU_CAPABILITY_AVX2)
  if (stride == 1 && count == 32) {
    const __m256i bytes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
    return ~static_cast<uint32_t>(
        _mm256_movemask_epi8(_mm256_cmpeq_epi8(bytes, _mm256_setzero_si256())));
  }
#endif
  uint32_t bits = 0;
  for (int64_t j = 0; j < count; ++j) bits |= uint32_t{from[j * stride]} << j;
  return bits;
}

// The options of the scores of up to kTileColumns queries of one head.
template <typename Policy>
class Scores {
  using T = typename Policy::T;
  using A = typename Policy::Sum;

 public:
  static constexpr int n = kLanes<A>;
  static constexpr int W = kTileColumns<A>;

  Scores(const AttentionCall& call, const AttentionSequence& sequence, int64_t head)
      : call_(call),
        sequence_(sequence),
        head_(head),
        left_(call.window_left < 0 ? kFar : call.window_left),
        right_(call.window_right < 0 ? kFar : call.window_right),
        slope_(sequence.slopes == nullptr
                   ? A(0)
                   : static_cast<const A*>(sequence.slopes)[head] * static_cast<A>(kLog2Of)) {}

  // Elements of A that the caller lends for mask and dropout of one block of keys.
  static constexpr int64_t kScratch = (2 * (kBlockKeys<Policy> + n)) * W + kBlockKeys<Policy> + n;

  void lend(A* scratch) {
    bias_ = scratch;
    keep_ = bias_ + (kBlockKeys<Policy> + n) * W;
    key_bias_ = keep_ + (kBlockKeys<Policy> + n) * W;
  }

  // The queries that the next calls are about; returns the range of keys that they may attend.
  struct Range {
    int64_t begin, end;
  };
  Range set_queries(int64_t first, int rows) {
    first_ = first;
    rows_ = rows;
    const int64_t place = first + sequence_.offset;
    return {std::clamp<int64_t>(place - left_, 0, sequence_.columns),
            std::clamp<int64_t>(place + rows + right_, 0, sequence_.columns)};
  }

  // Whether the gradients of scores are 0: no query may attend more than one key, there are no
  // sinks, and nothing but the output has a gradient.
  bool one_key() const {
    return !call_.lse_has_gradient && call_.sinks == nullptr &&
           (sequence_.columns == 1 || (left_ == 0 && right_ == 0));
  }

  // The keys [key, key + count), count <= kBlockKeys. False if none may be attended.
  bool set_keys(int64_t key, int64_t count) {
    key_ = key;
    const int64_t place = first_ + sequence_.offset;
    windowed_ = key + count - 1 > place + right_ || key < place + rows_ - 1 - left_;
    per_key_ = per_pair_ = per_bit_ = false;
    if (call_.mask_kind != MaskKind::none && !load_mask(count)) return false;
    if (call_.dropout.active()) load_keep(count);
    return true;
  }

  // Whether scores are nothing but products times the scale, or forbidden. `apply` then leaves the
  // scale to the caller, who multiplies by factor(): a row has the same bits whether forbidden keys
  // are there or not.
  bool plain() const {
    return !windowed_ && !per_key_ && !per_pair_ && slope_ == 0 && call_.softcap == 0.0 &&
           (!per_bit_ || factor() > 0);
  }

  // Turns the products s [count][W] of keys [key, key + count) of the block into scores, in units
  // of log 2; tanh [count][W] or null receives the soft-cap's hyperbolic tangent.
  void apply(A* s, A* tanh, int64_t key, int64_t count) const {
    if (plain()) {
      for (int64_t j = 0; j < (per_bit_ ? count : 0); ++j) {
        for (int half = 0; half < W; half += n) {
          A* at = s + j * W + half;
          store(at, where_allowed(load(at), key + j, half));
        }
      }
      return;
    }
    const A scale = static_cast<A>(call_.scale);
    const A cap = static_cast<A>(call_.softcap);
    const auto into_bits = static_cast<A>(kLog2Of);
    const int64_t origin = key_ + key - first_ - sequence_.offset;  // distance of query lane 0
    for (int64_t j = 0; j < count; ++j) {
      const A distance = static_cast<A>(std::clamp<int64_t>(origin + j, -kFar, kFar));
      const A low = static_cast<A>(std::clamp<int64_t>(origin + j - right_, -kFar, kFar));
      const A high = static_cast<A>(std::clamp<int64_t>(origin + j + left_, -kFar, kFar));
      for (int half = 0; half < W; half += n) {
        const V<A> lane = iota<A>() + static_cast<A>(half);
        V<A> x = load(s + j * W + half);
        if (cap != 0) {
          const V<A> t = tanh_of<A>(x * (scale / cap));
          if (tanh != nullptr) store(tanh + j * W + half, t);
          x = t * (cap * into_bits);
        } else {
          x = x * factor();
        }
        if (slope_ != 0) {
          const V<A> far = distance - lane;
          x = x - slope_ * larger(far, -far);
        }
        if (per_key_) x = x + key_bias_[key + j];
        if (per_pair_) x = x + load(bias_ + (key + j) * W + half);
        if (per_bit_) x = where_allowed(x, key + j, half);
        if (windowed_) {
          const V<A> forbidden = all(-std::numeric_limits<A>::infinity());
          x = lane < low ? forbidden : x;
          x = lane > high ? forbidden : x;
        }
        store(s + j * W + half, x);
      }
    }
  }

  // What to multiply plain scores by.
  A factor() const { return static_cast<A>(call_.scale * kLog2Of); }

  // Dropout's factors [count][W] from key `key` of the block on, or null.
  const A* keep(int64_t key) const { return call_.dropout.active() ? keep_ + key * W : nullptr; }

 private:
  static constexpr int64_t kFar = int64_t{1} << 40;
  // A lane of bits: whether its query may attend each of 32 keys.
  using Bits = std::conditional_t<sizeof(A) == 8, uint64_t, uint32_t>;
  static_assert(std::is_floating_point_v<A> && sizeof(Bits) == sizeof(A));

  V<A> where_allowed(const V<A>& x, int64_t key, int half) const {
    const auto bits = load(reinterpret_cast<const Bits*>(bias_) + key / 32 * W + half);
    return (bits & (Bits{1} << key % 32)) != 0 ? x : all(-std::numeric_limits<A>::infinity());
  }

  // to[(j) * W + lane] = at(lane, j) for the keys j of the block, by blocks of n x n.
  template <typename At>
  void fill(int64_t count, A* to, const At& at) const {
    for (int64_t j = 0; j < count; j += n) {
      for (int half = 0; half < W; half += n) {
        V<A> v[n];
        for (int i = 0; i < n; ++i) {
          v[i] = half + i < rows_ ? at(half + i, j, std::min<int64_t>(n, count - j)) : V<A>{};
        }
        transpose<n>(v);
        for (int i = 0; i < n; ++i) store(to + (j + i) * W + half, v[i]);
      }
    }
  }

  bool load_mask(int64_t count) {
    switch (call_.mask_kind) {
      case MaskKind::boolean:
        return load_bits(count);
      case MaskKind::data:
        return load_mask_of<T>(count);
      default:
        return load_mask_of<A>(count);
    }
  }

  template <typename M>
  bool load_mask_of(int64_t count) {
    const int64_t stride = call_.mask_column_stride;
    const M* mask = static_cast<const M*>(sequence_.mask) + head_ * call_.mask_head_stride +
                    first_ * call_.mask_row_stride + key_ * stride;
    const auto at = [&](int64_t row, int64_t j, int64_t valid) {
      return mask_in_bits<A>(
          load_as<M, A>(mask + row * call_.mask_row_stride + j * stride, stride, valid));
    };
    if (call_.mask_row_stride != 0) {
      per_pair_ = true;
      fill(count, bias_, at);
      return true;
    }
    bool some = false;
    for (int64_t j = 0; j < count; j += n) {
      const V<A> v = at(0, j, std::min<int64_t>(n, count - j));
      store(key_bias_ + j, v);
      for (int i = 0; i < std::min<int64_t>(n, count - j); ++i) {
        per_key_ |= v[i] != 0;
        some |= v[i] != -std::numeric_limits<A>::infinity();
      }
    }
    return some;
  }

  // A boolean mask stays bits: testing one costs less than adding a bias, and 32 keys of a query
  // are loaded at once. Lanes without a query may attend all.
  bool load_bits(int64_t count) {
    const int64_t stride = call_.mask_column_stride, row_stride = call_.mask_row_stride;
    const bool* mask = static_cast<const bool*>(sequence_.mask) + head_ * call_.mask_head_stride +
                       first_ * row_stride + key_ * stride;
    auto* to = reinterpret_cast<Bits*>(bias_);
    uint32_t some = 0, forbidden = 0;
    for (int64_t j = 0; j < count; j += 32, to += W) {
      const int64_t here = std::min<int64_t>(32, count - j);
      const auto valid = static_cast<uint32_t>((uint64_t{1} << here) - 1);
      const int rows = row_stride == 0 ? 1 : rows_;
      for (int lane = 0; lane < rows; ++lane) {
        const uint32_t bits = allowed_bits(mask + lane * row_stride + j * stride, stride, here);
        some |= bits;
        forbidden |= bits ^ valid;
        to[lane] = bits;
      }
      std::fill(to + rows, to + W, row_stride == 0 ? to[0] : Bits{valid});
    }
    per_bit_ = forbidden != 0;
    return some != 0;
  }

  void load_keep(int64_t count) {
    const int64_t* columns = sequence_.dropout_columns;
    for (int64_t begin = 0; begin < count;) {
      int64_t end = columns == nullptr ? count : begin + 1;
      while (end < count && columns[key_ + end] - columns[key_ + begin] == end - begin) ++end;
      load_keep_of(begin, end, columns == nullptr ? key_ : columns[key_ + begin]);
      begin = end;
    }
    for (int64_t j = 0; j < count; ++j) {
      for (int lane = rows_; lane < W; ++lane) keep_[j * W + lane] = A(0);
    }
  }

  // Loads the keys begin .. end - 1 of the block, which dropout counts from `column` on.
  void load_keep_of(int64_t begin, int64_t end, int64_t column) {
    const int64_t* rows = sequence_.dropout_rows;
    const int64_t head = sequence_.dropout_first + head_ * call_.dropout_head_stride;
    for (int lane = 0; lane < rows_; ++lane) {
      const int64_t i = first_ + lane;
      const int64_t row = rows == nullptr ? i * call_.dropout_row_stride : rows[i];
      const KeepMask kept(call_.dropout, head + row + column, end - begin);
      for (int64_t j = begin; j < end; ++j) {
        const bool keep = kept.bits(j - begin) & 1;
        keep_[j * W + lane] = keep ? static_cast<A>(call_.dropout.scale) : A(0);
      }
    }
  }

  const AttentionCall& call_;
  const AttentionSequence& sequence_;
  const int64_t head_;
  const int64_t left_;
  const int64_t right_;
  const A slope_;
  A* bias_ = nullptr;
  A* keep_ = nullptr;
  A* key_bias_ = nullptr;
  int64_t first_ = 0;
  int rows_ = 0;
  int64_t key_ = 0;
  bool windowed_ = false;
  bool per_key_ = false;
  bool per_pair_ = false;
  bool per_bit_ = false;
};

#if defined(CPU_CAPABILITY_AVX512)
// 32 floats as bfloat16: lanes of `low`, then of `high`.
inline __m512i round_to_bf16(__m512 low, __m512 high) {
  __m512i rounded;
  asm("vcvtne2ps2bf16 %2, %1, %0" : "=v"(rounded) : "v"(high), "v"(low));
  return rounded;
}
#endif

// Scratch memory carved into parts of 64-byte alignment.
class Carver {
 public:
  explicit Carver(void* memory) : next_(static_cast<char*>(memory)) {}
  template <typename X>
  X* take(int64_t count) {
    X* part = reinterpret_cast<X*>(next_);
    next_ += (count * sizeof(X) + 127) / 64 * 64;
    return part;
  }
  size_t taken(const void* memory) const { return next_ - static_cast<const char*>(memory); }

 private:
  char* next_;
};

inline int64_t rounded_up(int64_t count, int64_t unit) {
  return (count + unit - 1) / unit * unit;
}

// Operands of the kernel: panels of Policy::kRows lines, or of kTileColumns.
enum class Operand { left, right };

template <typename Policy, Operand kOperand>
constexpr int kOperandLines =
    kOperand == Operand::left ? Policy::kRows : kTileColumns<typename Policy::Sum>;

template <typename Policy, Operand kOperand>
inline void pack_operand(const Lines<typename Policy::T>& source, int64_t lines, int64_t readable,
                         int64_t count, typename Policy::Packed* to, int64_t panel_stride) {
  if constexpr (kOperand == Operand::left) {
    pack_left<Policy>(source, lines, readable, count, to, panel_stride);
  } else {
    pack<Policy, kOperandLines<Policy, kOperand>>(source, lines, readable, count, to, panel_stride);
  }
}

// Packs the vectors of `count` tokens (lines) as panels of tokens along the head.
template <typename Policy, Operand kOperand>
inline void pack_tokens(const typename Policy::T* from, int64_t token_stride, int64_t count,
                        int64_t size, typename Policy::Packed* to, int64_t panel_stride) {
  pack_operand<Policy, kOperand>({from, token_stride, 1}, count, count, size, to, panel_stride);
}

// Packs the elements of the heads (lines) of `count` tokens as panels of elements along the tokens.
// `more`: there is memory after the last token's vector.
template <typename Policy, Operand kOperand>
inline void pack_elements(const typename Policy::T* from, int64_t token_stride, int64_t count,
                          int64_t size, bool more, typename Policy::Packed* to,
                          int64_t panel_stride) {
  // A head's neighbour is read over, never used: panels of the left operand may hold anything
  // beyond their lines.
  const int64_t readable = more && token_stride >= 16 ? size + 16 : size;
  pack_operand<Policy, kOperand>({from, 1, token_stride}, size, readable, count, to, panel_stride);
}

// Elements of a panel of `steps` steps, with room for the last vector's end.
template <typename Policy, Operand kOperand>
constexpr int64_t panel_elements(int64_t steps) {
  return rounded_up(steps * kOperandLines<Policy, kOperand> + 16, 16);
}

// Steps of a panel of `count` elements along k, zeros at its end included.
template <typename Policy>
constexpr int64_t steps_of(int64_t count) {
  return rounded_up(ceil_div(count, Policy::kPair), Policy::kWhole);
}

// The right operand of a product over keys: `count` rows of values [keys][W] as a panel of pairs.
// Rows of zeros are written after them, up to whole steps.
template <typename Policy>
inline void pack_pairs_of_keys(typename Policy::Sum* values, int64_t count,
                               typename Policy::Packed* to) {
#if defined(CPU_CAPABILITY_AVX512)
  constexpr int W = kTileColumns<typename Policy::Sum>;
  const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24,
                                         8, 23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  const int64_t whole = steps_of<Policy>(count) * Policy::kPair;
  std::fill(values + count * W, values + whole * W, typename Policy::Sum(0));
  for (int64_t j = 0; j < whole; j += 2, to += W) {
    const float *even = values + j * W, *odd = even + W;
    for (int half = 0; half < W; half += 16) {
      const __m512i both = round_to_bf16(_mm512_loadu_ps(even + half), _mm512_loadu_ps(odd + half));
      _mm512_storeu_si512(to + half, _mm512_permutexvar_epi16(order, both));
    }
  }
#endif
}

// out[row][d] = at[d][row] * scale[row] for rows < `rows` and d < `size`; at is [size rounded][W].
// `remainder`, or null, receives what the rounding took.
template <typename T, typename A>
inline void store_transposed(const A* at, const A* scale, int rows, int64_t size, T* out,
                             int64_t token_stride, T* remainder = nullptr) {
  constexpr int n = kLanes<A>;
  constexpr int W = kTileColumns<A>;
  for (int64_t d = 0; d < size; d += n) {
    const int here = static_cast<int>(std::min<int64_t>(n, size - d));
    for (int half = 0; half < W && half < rows; half += n) {
      const V<A> factor = load(scale + half);
      V<A> v[n];
      for (int i = 0; i < n; ++i) v[i] = i < here ? load(at + (d + i) * W + half) * factor : V<A>{};
      transpose<n>(v);
      for (int i = 0; i < n && half + i < rows; ++i) {
        T* to = out + (half + i) * token_stride + d;
        store_as<T, A>(to, v[i], here);
        if (remainder != nullptr) {
          const V<A> kept = load_as<T, A>(to, 1, here);
          store_as<T, A>(remainder + (half + i) * token_stride + d, v[i] - kept, here);
        }
      }
    }
  }
}

}  // namespace
}  // namespace fusedops::CPU_CAPABILITY
