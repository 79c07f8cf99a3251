// Products with a packed weight of 4 or 8 bits (interface and layout: quantized_linear.h).
//
// Few rows (decoding): the lanes of a vector are outputs. Each 64-byte line is read once, its codes
// become float in registers (quantized_codes.h) and are multiplied by broadcast activations. The
// sums of a group are multiplied by its scale once. A thread reads one block of outputs after the
// other, which is one stream of memory. With activations of bfloat16 the codes of 4 bits become
// pairs of bfloat16 for vdpbf16ps, where the processor has it: two k an instruction.
//
// Many rows: a strip of the weight is dequantised into a buffer that stays in the cache, in the
// dtype of the activations, and the matrix engine (../gemm) multiplies by it.
#include "quantized_linear.h"

#include <algorithm>

#include "../../common/parallel.h"
#include "../common/vec.h"
#include "../common/workspace.h"
#include "../gemm/epilogue.h"
#include "../gemm/gemm_kernel.h"
#include "quantized_codes.h"

namespace fusedops::CPU_CAPABILITY {
namespace {

// Packed bytes that are worth a thread: some 10 us of reading.
constexpr int64_t kBytesPerThread = int64_t{96} << 10;
constexpr int64_t kPrefetchBytes = 1024;
// Of the buffer for a strip of dequantised weight.
constexpr int64_t kStripBytes = int64_t{2} << 20;

// Scales of the outputs of part `part` of a block.
inline Floats scales_of(const QuantizedWeight& w, int64_t block, int64_t group, int part) {
  const int64_t at = (block * w.groups + group) * kBlockOutputs + part * Floats::size();
  if (w.scale_dtype == DType::bf16) {
    return load_vec(static_cast<const c10::BFloat16*>(w.scales) + at);
  }
  return load_vec(static_cast<const float*>(w.scales) + at);
}

// How a line is multiplied by activations of float32.
template <WeightFormat F>
struct FloatLines {
  using X = float;
  static constexpr int kSteps = static_cast<int>(line_depth(F));
  Decoder<F> decoder;

  Floats decode(const uint8_t* line, int part, int step) const {
    return decoder.decode(line, part, step);
  }
  static Floats multiply_add(const Floats& weights, const X* x, int step, const Floats& sums) {
    return at::vec::fmadd(weights, Floats(x[depth_of_step<F>(step)]), sums);
  }
};

#if defined(CPU_CAPABILITY_AVX512)
// The same of bfloat16: a step has two k.
template <WeightFormat F>
struct PairLines {
  using X = c10::BFloat16;
  static constexpr int kSteps = 4;
  __m512i table;

  PairLines() {
    const __m512i values = _mm512_castsi256_si512(round_to_bf16(_mm512_loadu_ps(kValues<F>)));
    // The permutation reads 5 bits, the highest of which belongs to the next code.
    table = _mm512_shuffle_i64x2(values, values, 0x44);
  }
  __m512i decode(const uint8_t* line, int /*part*/, int step) const {
    const __m512i halves = _mm512_loadu_si512(line);
    return _mm512_permutexvar_epi16(_mm512_srli_epi16(halves, 4 * step), table);
  }
  static Floats multiply_add(__m512i weights, const X* x, int step, const Floats& sums) {
    using Pair = uint32_t __attribute__((may_alias));
    __m512 sum = sums;
    asm("vdpbf16ps %2%{1to16%}, %1, %0"
        : "+v"(sum)
        : "v"(weights), "m"(*reinterpret_cast<const Pair*>(x + 2 * step)));
    return sum;
  }
};
#endif

// sums[row][16] of one block of outputs. Few rows have several chains of sums, so that one waits
// less for the multiply-add before. All loops over the chains are unrolled, else g++ stores each
// chain after each step.
template <typename Lines, int kRows>
void multiply_block(const Lines& lines, const QuantizedWeight& w, int64_t block,
                    const typename Lines::X* x, int64_t stride, float* sums) {
  constexpr int kChains = kRows == 1 ? 4 : kRows <= 4 ? 2 : 1;
  const int64_t depth = line_depth(w.format), lines_of_group = w.group / depth;
  const uint8_t* codes = w.codes + block * w.lines * kLineBytes;
  Floats totals[kParts][kRows];  // on the stack: read once a group
  for (auto& part : totals) std::fill(part, part + kRows, Floats(0.0f));
  for (int64_t group = 0; group < w.groups; ++group) {
    const int64_t first = group * lines_of_group;
    const int64_t last = std::min(w.lines, first + lines_of_group);
    for (int part = 0; part < kParts; ++part) {
      Floats chains[kRows * kChains];
#pragma GCC unroll 8
      for (Floats& chain : chains) chain = Floats(0.0f);
      for (int64_t line = first; line < last; ++line) {
        const uint8_t* from = codes + line * kLineBytes;
        if (part == 0) __builtin_prefetch(from + kPrefetchBytes);
#pragma GCC unroll 8
        for (int step = 0; step < Lines::kSteps; ++step) {
          const auto weights = lines.decode(from, part, step);
#pragma GCC unroll 8
          for (int row = 0; row < kRows; ++row) {
            Floats& chain = chains[row * kChains + step % kChains];
            chain = Lines::multiply_add(weights, x + row * stride + line * depth, step, chain);
          }
        }
      }
      const Floats scale = scales_of(w, block, group, part);
#pragma GCC unroll 8
      for (int row = 0; row < kRows; ++row) {
        Floats sum = chains[row * kChains];
#pragma GCC unroll 4
        for (int chain = 1; chain < kChains; ++chain) sum = sum + chains[row * kChains + chain];
        totals[part][row] = at::vec::fmadd(sum, scale, totals[part][row]);
      }
    }
  }
  for (int row = 0; row < kRows; ++row) {
    for (int part = 0; part < kParts; ++part) {
      totals[part][row].store(sums + row * kBlockOutputs + part * Floats::size());
    }
  }
}

// Rows of sums of a block, at most eight; those past `rows` are zeros that nobody reads.
template <typename Lines>
void multiply_rows(const Lines& lines, const QuantizedWeight& w, int64_t block,
                   const typename Lines::X* x, int64_t stride, int64_t rows, float* sums) {
  if (rows == 1) return multiply_block<Lines, 1>(lines, w, block, x, stride, sums);
  if (rows == 2) return multiply_block<Lines, 2>(lines, w, block, x, stride, sums);
  if (rows <= 4) return multiply_block<Lines, 4>(lines, w, block, x, stride, sums);
  multiply_block<Lines, 8>(lines, w, block, x, stride, sums);
}

// The activations as rows of X, with zeros past the last k and, up to a multiple of eight, past
// the last row.
template <typename T, typename X>
const X* dense_activations(const QuantizedForward& a, int64_t stride) {
  const int64_t rows = ceil_div(a.rows, 8) * 8;
  auto* to = static_cast<X*>(workspace(Workspace::activations, rows * stride * sizeof(X)));
  const auto* from = static_cast<const T*>(a.input.data);
  std::fill(to, to + rows * stride, X(0.0f));
  for (int64_t row = 0; row < a.rows; ++row) {
    const T* x = from + row * a.input.row_stride;
    for (int64_t k = 0; k < a.weight.in_features; ++k) {
      to[row * stride + k] = static_cast<X>(x[k * a.input.column_stride]);
    }
  }
  return to;
}

template <typename T, typename Lines>
void multiply_decoded(const QuantizedForward& a) {
  using X = typename Lines::X;
  const QuantizedWeight& w = a.weight;
  const int64_t stride = w.lines * line_depth(w.format), blocks = ceil_div(w.out_features, 16);
  const X* x = dense_activations<T, X>(a, stride);
  const int64_t block_bytes = std::max<int64_t>(1, w.lines * kLineBytes);
  const Lines lines;
  at::parallel_for(0, blocks, std::max<int64_t>(1, kBytesPerThread / block_bytes),
                   [&](int64_t begin, int64_t end) {
                     alignas(64) float sums[8 * kBlockOutputs];
                     for (int64_t block = begin; block < end; ++block) {
                       const int64_t column = block * kBlockOutputs;
                       const int64_t columns = std::min(kBlockOutputs, w.out_features - column);
                       const T* bias = at<T>(a.bias, 0, 0, column);
                       for (int64_t row = 0; row < a.rows; row += 8) {
                         const int64_t rows = std::min<int64_t>(8, a.rows - row);
                         multiply_rows(lines, w, block, x + row * stride, stride, rows, sums);
                         for (int64_t i = 0; i < rows; ++i) {
                           T* to = at<T>(a.output, row + i, w.out_features, column);
                           const float* from = sums + i * kBlockOutputs;
                           for_each_vector<Vec<T>::size()>(
                               columns, [&](int64_t c, int64_t count, auto full) {
                                 auto sum = load_vec(from + c, count, full);
                                 if (bias != nullptr) sum = sum + load_vec(bias + c, count, full);
                                 store_vec(to + c, sum, count, full);
                               });
                         }
                       }
                     }
                   });
}

// Lines [first, last) of a block, dequantised: to[k * stride + output].
template <typename T, WeightFormat F>
void dequantize_block(const QuantizedWeight& w, int64_t block, int64_t first, int64_t last, T* to,
                      int64_t stride) {
  constexpr int64_t kDepth = line_depth(F);
  const Decoder<F> decoder;
  const uint8_t* codes = w.codes + block * w.lines * kLineBytes;
  for (int64_t line = first; line < last; ++line, to += kDepth * stride) {
    const int64_t group = line * kDepth / w.group;
    for (int part = 0; part < kParts; ++part) {
      for (int step = 0; step < kDepth; ++step) {
        const Floats values = decoder.decode(codes + line * kLineBytes, part, step);
        T* at = to + depth_of_step<F>(step) * stride + part * Floats::size();
        if constexpr (std::is_same_v<T, double>) {
          float numbers[Floats::size()];
          values.store(numbers);
          const auto* scales = static_cast<const double*>(w.scales) +
                               (block * w.groups + group) * kBlockOutputs + part * Floats::size();
          for (int i = 0; i < Floats::size(); ++i) at[i] = numbers[i] * scales[i];
        } else {
          const Floats scaled = values * scales_of(w, block, group, part);
          for_each_vector<Vec<T>::size()>(Floats::size(), [&](int64_t, int64_t count, auto full) {
            store_vec(at, scaled, count, full);
          });
        }
      }
    }
  }
}

// Blocks [first, last) of all threads, whole lines of each.
template <typename T>
void dequantize(const QuantizedWeight& w, int64_t first_block, int64_t last_block,
                int64_t first_line, int64_t last_line, T* to, int64_t stride) {
  const int64_t bytes = kBlockOutputs * (last_line - first_line) * 8 * sizeof(T);
  with_format(w.format, [&](auto format) {
    parallel_rows(last_block - first_block, bytes, [&](int64_t begin, int64_t end) {
      for (int64_t block = begin; block < end; ++block) {
        dequantize_block<T, decltype(format)::value>(w, first_block + block, first_line, last_line,
                                                     to + block * kBlockOutputs, stride);
      }
    });
  });
}

// Where a product with a strip writes: columns of a wider dense matrix.
struct StripOutput {
  void* output;
  int64_t stride;
  int64_t column;
  const void* bias;
};

template <typename T>
void store_strip(const void* context, const Tile& tile) {
  const auto& a = *static_cast<const StripOutput*>(context);
  const T* bias = at<T>(a.bias, 0, 0, a.column + tile.column);
  for (int i = 0; i < tile.rows; ++i) {
    const auto* sums = static_cast<const Acc<T>*>(tile.sums) + i * tile.stride;
    T* output = at<T>(a.output, tile.row + i, a.stride, a.column + tile.column);
    for_each_vector<Vec<T>::size()>(tile.columns, [&](int64_t c, int64_t count, auto full) {
      Vec<T> sum = load_vec(sums + c, count, full);
      if (bias != nullptr) sum = sum + load_vec(bias + c, count, full);
      store_vec(output + c, sum, count, full);
    });
  }
}

// Columns of a strip with `depth` values in each: a multiple of `unit`.
template <typename T>
int64_t strip_columns(int64_t columns, int64_t depth, int64_t unit) {
  const int64_t fitting = kStripBytes / std::max<int64_t>(1, depth * sizeof(T));
  return std::min(ceil_div(columns, unit), std::max<int64_t>(1, fitting / unit)) * unit;
}

template <typename T>
T* strip_buffer(int64_t elements) {
  return static_cast<T*>(workspace(Workspace::dequantized, elements * sizeof(T)));
}

// Rows of a strip lie this much further apart: else they would share few sets of the L1 cache.
template <typename T>
constexpr int64_t kGap = 64 / sizeof(T);

template <typename T>
void multiply_strips(const QuantizedForward& a) {
  const QuantizedWeight& w = a.weight;
  const int64_t depth = w.lines * line_depth(w.format);
  const int64_t columns = strip_columns<T>(w.out_features, depth, 64);
  const int64_t stride = columns + kGap<T>;
  T* strip = strip_buffer<T>(depth * stride);
  for (int64_t column = 0; column < w.out_features; column += columns) {
    const int64_t count = std::min(columns, w.out_features - column);
    dequantize(w, column / kBlockOutputs, ceil_div(column + count, kBlockOutputs), 0, w.lines,
               strip, stride);
    const StripOutput output{a.output, w.out_features, column, a.bias};
    GemmCall call{a.rows, count, w.in_features, a.input, {strip, stride, 1}, a.dtype};
    call.store = store_strip<T>;
    call.context = &output;
    gemm(call);
  }
}

template <typename T>
void gradient_strips(const QuantizedGradient& a) {
  const QuantizedWeight& w = a.weight;
  const int64_t depth = line_depth(w.format), outputs = ceil_div(w.out_features, 16) * 16;
  const int64_t columns = strip_columns<T>(w.in_features, outputs, 64);
  const int64_t stride = outputs + kGap<T>;
  T* strip = strip_buffer<T>(columns * stride);
  for (int64_t column = 0; column < w.in_features; column += columns) {
    const int64_t count = std::min(columns, w.in_features - column);
    dequantize(w, 0, outputs / kBlockOutputs, column / depth, ceil_div(column + count, depth),
               strip, stride);
    const StripOutput output{a.grad_input, w.in_features, column, nullptr};
    GemmCall call{
        a.rows, count, w.out_features, {a.grad_output, w.out_features, 1}, {strip, 1, stride},
        a.dtype};
    call.store = store_strip<T>;
    call.context = &output;
    gemm(call);
  }
}

template <typename T>
void multiply_few_rows(const QuantizedForward& a) {
  with_format(a.weight.format, [&](auto format) {
    constexpr WeightFormat F = decltype(format)::value;
#if defined(CPU_CAPABILITY_AVX512)
    if constexpr (std::is_same_v<T, c10::BFloat16> && F != WeightFormat::int8) {
      if (kHasAvx512Bf16) return multiply_decoded<T, PairLines<F>>(a);
    }
#endif
    multiply_decoded<T, FloatLines<F>>(a);
  });
}

}  // namespace

void quantized_linear_forward(const QuantizedForward& a) {
  if (a.rows == 0 || a.weight.out_features == 0) return;
  switch_dtype(a.dtype, [&](auto t) {
    using T = decltype(t);
    if constexpr (!std::is_same_v<T, double>) {
      if (a.rows <= kMostDecodedRows) return multiply_few_rows<T>(a);
    }
    multiply_strips<T>(a);
  });
}

void quantized_linear_gradient(const QuantizedGradient& a) {
  if (a.rows == 0 || a.weight.in_features == 0) return;
  switch_dtype(a.dtype, [&](auto t) { gradient_strips<decltype(t)>(a); });
}

}  // namespace fusedops::CPU_CAPABILITY
