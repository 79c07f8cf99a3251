// Attention of a few queries over many keys: generation with a cache. It is bound by reading the
// cache, so nothing is packed: each key and value is read once, where it lies, for all queries of
// the heads that share it.
//
// The keys of a sequence are cut into chunks of kChunk whatever the number of threads; each gives a
// maximum, a sum and an output of its own, and these are joined in order.

#include <ATen/Parallel.h>

#include "../../common/parallel.h"
#include "../common/scratch.h"
#include "../common/workspace.h"
#include "attention.h"
#include "attention_tile.h"

namespace fusedops::CPU_CAPABILITY {
namespace {

constexpr int64_t kChunk = 512;
// Multiply-adds below which one thread is as fast as several.
constexpr double kWorkPerTask = 65536;

template <typename T>
class FewQueries {
  using A = Acc<T>;
  static constexpr int n = kLanes<A>;

 public:
  explicit FewQueries(const AttentionCall& call)
      : call_(call), groups_(call.groups()), stride_(rounded_up(call.value_size, n)) {
    for (int64_t s = 0; s < call.sequence_count; ++s) {
      rows_ = std::max(rows_, call.sequences[s].rows);
      chunks_ = std::max(chunks_, (call.sequences[s].columns + kChunk - 1) / kChunk);
    }
    lines_ = groups_ * rows_;
  }

  void run() {
    if (rows_ == 0) return;
    const int64_t units = call_.sequence_count * call_.key_heads;
    // Per line (query of a head): maximum, sum, output.
    Scratch<A> partials(units * chunks_ * lines_ * (stride_ + n));
    partials_ = partials.data();
    const int64_t tasks = units * chunks_;
    const auto one = [&](int64_t task) { run_chunk(task / chunks_, task % chunks_); };
    if (work() < kWorkPerTask || at::get_num_threads() == 1) {
      for (int64_t task = 0; task < tasks; ++task) one(task);
    } else {
      share_tasks(tasks, [&](const auto& next) {
        for (int64_t task = next(); task >= 0; task = next()) one(task);
      });
    }
    for (int64_t unit = 0; unit < units; ++unit) join(unit);
  }

 private:
  // Multiply-adds of the call.
  double work() const {
    double keys = 0;
    for (int64_t s = 0; s < call_.sequence_count; ++s) {
      keys += static_cast<double>(call_.sequences[s].columns);
    }
    const int64_t of_key = call_.key_heads * lines_ * (call_.size + call_.value_size);
    return keys * static_cast<double>(of_key);
  }

  A* partial(int64_t unit, int64_t chunk, int64_t line) const {
    return partials_ + ((unit * chunks_ + chunk) * lines_ + line) * (stride_ + n);
  }

  void run_chunk(int64_t unit, int64_t chunk) const {
    const auto& sequence = call_.sequences[unit / call_.key_heads];
    const int64_t key_head = unit % call_.key_heads;
    const int64_t begin = chunk * kChunk;
    const int64_t end = std::min(begin + kChunk, sequence.columns);
    const T* keys = static_cast<const T*>(sequence.key) + key_head * call_.key.head_stride;
    const T* values = static_cast<const T*>(sequence.value) + key_head * call_.value.head_stride;
    const int64_t wide = rounded_up(call_.size, n);
    Carver carver(workspace(Workspace::attention,
                            sizeof(A) * static_cast<size_t>(lines_ * (wide + kChunk)) + 256));
    A* query = carver.take<A>(lines_ * wide);
    A* scores = carver.take<A>(lines_ * kChunk);
    for (int64_t line = 0; line < lines_; ++line)
      widen_query(sequence, key_head, line, query + line * wide);
    for (int64_t key = begin; key < end; key += n) {
      const T* k = keys + key * call_.key.token_stride;
      const auto count = static_cast<int>(std::min<int64_t>(n, end - key));
      // The lines of four queries share a load of the key.
      int64_t line = 0;
      for (; line + 4 <= lines_; line += 4)
        multiply<4>(k, count, query + line * wide, wide, scores + line * kChunk + key - begin);
      for (; line < lines_; ++line)
        multiply<1>(k, count, query + line * wide, wide, scores + line * kChunk + key - begin);
    }
    for (int64_t line = 0; line < lines_; ++line) {
      const int64_t head = key_head * groups_ + line / rows_, row = line % rows_;
      soften(sequence, head, row, begin, end, scores + line * kChunk, partial(unit, chunk, line));
    }
    int64_t line = 0;
    for (; line + 4 <= lines_; line += 4) {
      add_values<4>(values, begin, end, scores + line * kChunk, unit, chunk, line);
    }
    for (; line < lines_; ++line) {
      add_values<1>(values, begin, end, scores + line * kChunk, unit, chunk, line);
    }
  }

  // Output of kLines lines: sums in registers, kVectors vectors of the head at a time, so that a
  // value is widened once for all of them.
  template <int kLines>
  void add_values(const T* values, int64_t begin, int64_t end, const A* weights, int64_t unit,
                  int64_t chunk, int64_t line) const {
    constexpr int kVectors = 4;
    const int64_t size = call_.value_size, stride = call_.value.token_stride;
    int64_t d = 0;
    for (; d + kVectors * n <= size; d += kVectors * n) {
      V<A> sum[kLines][kVectors] = {};
      for (int64_t key = begin; key < end; ++key) {
        const T* from = values + key * stride + d;
        V<A> v[kVectors];
#pragma GCC unroll 4
        for (int i = 0; i < kVectors; ++i) v[i] = load_as<T, A>(from + i * n, 1, n);
#pragma GCC unroll 4
        for (int j = 0; j < kLines; ++j) {
          const V<A> weight = all(weights[j * kChunk + key - begin]);
#pragma GCC unroll 4
          for (int i = 0; i < kVectors; ++i) sum[j][i] += weight * v[i];
        }
      }
      for (int j = 0; j < kLines; ++j) {
        for (int i = 0; i < kVectors; ++i) {
          store(partial(unit, chunk, line + j) + n + d + i * n, sum[j][i]);
        }
      }
    }
    for (; d < size; d += n) {
      for (int j = 0; j < kLines; ++j) {
        V<A> sum{};
        for (int64_t key = begin; key < end; ++key) {
          sum += all(weights[j * kChunk + key - begin]) *
                 load_as<T, A>(values + key * stride + d, 1, size - d);
        }
        store(partial(unit, chunk, line + j) + n + d, sum);
      }
    }
  }

  void widen_query(const AttentionSequence& sequence, int64_t key_head, int64_t line, A* to) const {
    const int64_t head = key_head * groups_ + line / rows_, row = line % rows_;
    const bool exists = row < sequence.rows;
    const T* from = static_cast<const T*>(sequence.query) + head * call_.query.head_stride +
                    (exists ? row : 0) * call_.query.token_stride;
    for (int64_t d = 0; d < call_.size; d += n) {
      store(to + d, exists ? load_as<T, A>(from + d, 1, call_.size - d) : V<A>{});
    }
  }

  // Products of `count` keys and kQueries queries; a vector of scores is written for each query.
  // The sums of n keys are transposed, which costs half of summing the lanes of each.
  template <int kQueries>
  void multiply(const T* keys, int count, const A* query, int64_t wide, A* to) const {
    V<A> sums[kQueries][n] = {};
    for (int j = 0; j < count; ++j) {
      const T* key = keys + j * call_.key.token_stride;
      V<A> sum[kQueries] = {};
      for (int64_t d = 0; d < call_.size; d += n) {
        const V<A> k = load_as<T, A>(key + d, 1, call_.size - d);
        for (int i = 0; i < kQueries; ++i) sum[i] += k * load(query + i * wide + d);
      }
      for (int i = 0; i < kQueries; ++i) sums[i][j] = sum[i];
    }
    for (int i = 0; i < kQueries; ++i) {
      transpose<n>(sums[i]);
      for (int step = n / 2; step > 0; step /= 2) {
        for (int j = 0; j < step; ++j) sums[i][j] += sums[i][j + step];
      }
      store(to + i * kChunk, sums[i][0]);
    }
  }

  // Scores of keys [begin, end) to probabilities relative to their maximum; starts the partial.
  void soften(const AttentionSequence& sequence, int64_t head, int64_t row, int64_t begin,
              int64_t end, A* s, A* part) const {
    const V<A> forbidden = all(-std::numeric_limits<A>::infinity());
    const A slope = sequence.slopes == nullptr
                        ? A(0)
                        : static_cast<const A*>(sequence.slopes)[head] * static_cast<A>(kLog2Of);
    const A cap = static_cast<A>(call_.softcap), scale = static_cast<A>(call_.scale);
    const int64_t place = row + sequence.offset;
    // Keys after these are too late or too early.
    const int64_t last =
        call_.window_right < 0 ? end : std::min(end, place + call_.window_right + 1);
    const int64_t first = call_.window_left < 0 ? begin : place - call_.window_left;
    V<A> top = forbidden;
    for (int64_t key = begin; key < end; key += n) {
      V<A> x = load(s + key - begin);
      if (cap != 0) {
        x = tanh_of<A>(x * (scale / cap)) * (cap * static_cast<A>(kLog2Of));
      } else {
        x = x * static_cast<A>(call_.scale * kLog2Of);
      }
      if (slope != 0) {
        const V<A> distance = iota<A>() + static_cast<A>(key - place);
        x = x - slope * larger(distance, -distance);
      }
      if (call_.mask_kind != MaskKind::none) x = masked(x, sequence, head, row, key, end - key);
      if (key < first || key + n > last) {
        const auto low = static_cast<A>(std::clamp<int64_t>(first - key, 0, n));
        const auto high = static_cast<A>(std::clamp<int64_t>(last - key, 0, n));
        x = iota<A>() < low ? forbidden : x;
        x = iota<A>() >= high ? forbidden : x;
      }
      if (row >= sequence.rows) x = forbidden;
      x = as_rounded(x);
      store(s + key - begin, x);
      top = larger(x, top);
    }
    A most = -std::numeric_limits<A>::infinity();
    for (int i = 0; i < n; ++i) most = top[i] > most ? top[i] : most;
    const A origin = std::isinf(most) && most < 0 ? A(0) : most;
    V<A> total{};
    for (int64_t key = begin; key < end; key += n) {
      const V<A> p = exp2_of<false>(load(s + key - begin) - origin);
      store(s + key - begin, p);
      total += p;
    }
    part[0] = most;
    part[1] = sum_of<A>(total);
  }

  // Scores of `count` keys with the mask of a query: added, or minus infinity where it is false.
  V<A> masked(const V<A>& x, const AttentionSequence& sequence, int64_t head, int64_t row,
              int64_t key, int64_t count) const {
    const int64_t stride = call_.mask_column_stride;
    const int64_t at = head * call_.mask_head_stride + row * call_.mask_row_stride + key * stride;
    switch (call_.mask_kind) {
      case MaskKind::data:
        return x + mask_in_bits<A>(
                       load_as<T, A>(static_cast<const T*>(sequence.mask) + at, stride, count));
      case MaskKind::wide:
        return x + mask_in_bits<A>(
                       load_as<A, A>(static_cast<const A*>(sequence.mask) + at, stride, count));
      default:
        break;
    }
    const bool* mask = static_cast<const bool*>(sequence.mask) + at;
    alignas(64) A allowed[n] = {};
    for (int i = 0; i < std::min<int64_t>(n, count); ++i) allowed[i] = mask[i * stride] ? 1 : 0;
    return load(allowed) != A(0) ? x : all(-std::numeric_limits<A>::infinity());
  }

  void join(int64_t unit) const {
    const auto& sequence = call_.sequences[unit / call_.key_heads];
    const int64_t key_head = unit % call_.key_heads;
    const int64_t chunks = (sequence.columns + kChunk - 1) / kChunk;
    const A forbidden = -std::numeric_limits<A>::infinity();
    for (int64_t line = 0; line < lines_; ++line) {
      const int64_t head = key_head * groups_ + line / rows_, row = line % rows_;
      if (row >= sequence.rows) continue;
      const bool sink = call_.sinks != nullptr;
      const A bond =
          sink ? static_cast<const A*>(call_.sinks)[head] * static_cast<A>(kLog2Of) : forbidden;
      A top = bond;
      for (int64_t c = 0; c < chunks; ++c) top = std::max(top, partial(unit, c, line)[0]);
      const A origin = top == forbidden ? A(0) : top;
      A total = sink ? std::exp2(bond - origin) : A(0);
      Scratch<A> sum(stride_, A(0));
      for (int64_t c = 0; c < chunks; ++c) {
        const A* part = partial(unit, c, line);
        const A weight = std::exp2(part[0] - origin);
        total += weight * part[1];
        for (int64_t d = 0; d < stride_; d += n) {
          store(sum.data() + d, load(sum.data() + d) + weight * load(part + n + d));
        }
      }
      const A scale = total == 0 ? A(0) : A(1) / total;
      T* output = static_cast<T*>(sequence.output) + head * call_.output.head_stride +
                  row * call_.output.token_stride;
      T* remainder = static_cast<T*>(sequence.remainder);
      if (remainder != nullptr) remainder += output - static_cast<T*>(sequence.output);
      for (int64_t d = 0; d < call_.value_size; ++d) {
        const A wide = sum[d] * scale;
        output[d] = static_cast<T>(wide);
        if (remainder != nullptr) {
          remainder[d] = static_cast<T>(wide - static_cast<A>(output[d]));
        }
      }
      const A most = total == 0 ? forbidden : top, rest = total == 0 ? A(0) : std::log2(total);
      const int64_t at = head * call_.lse_head_stride + row;
      static_cast<A*>(sequence.lse)[at] = static_cast<A>(kLn2) * (most + rest);
      if (A* parts = static_cast<A*>(sequence.lse_parts); parts != nullptr) {
        parts[2 * at] = most;
        parts[2 * at + 1] = rest;
      }
    }
  }

  const AttentionCall& call_;
  const int64_t groups_;
  const int64_t stride_;
  int64_t rows_ = 0;
  int64_t chunks_ = 0;
  int64_t lines_ = 0;
  A* partials_ = nullptr;
};

}  // namespace

void attention_few_queries(const AttentionCall& call) {
  switch_dtype(call.dtype, [&](auto t) { FewQueries<decltype(t)>(call).run(); });
}

}  // namespace fusedops::CPU_CAPABILITY
