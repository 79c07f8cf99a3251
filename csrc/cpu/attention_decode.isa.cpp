// Attention of a few queries over many keys: generation with a cache. It is bound by reading the
// cache, so nothing is packed: each key and value is read once, where it lies, for all queries of
// the heads that share it.
//
// The keys of a sequence are cut into chunks of kChunk whatever the number of threads; each gives a
// maximum, a sum and an output of its own, and these are joined in order.

#include <ATen/Parallel.h>

#include "../common/parallel.h"
#include "attention.h"
#include "attention_tile.h"
#include "scratch.h"
#include "workspace.h"

namespace fusedops::CPU_CAPABILITY {
namespace {

constexpr int64_t kChunk = 512;

template <typename T>
class FewQueries {
  using A = Acc<T>;
  static constexpr int n = kLanes<A>;

 public:
  explicit FewQueries(const AttentionCall& call)
      : call_(call), groups_(call.heads / call.key_heads), stride_(rounded_up(call.value_size, n)) {
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
    const double bytes = static_cast<double>(tasks) * kChunk * sizeof(T) *
                         static_cast<double>(call_.size + call_.value_size);
    const auto one = [&](int64_t task) { run_chunk(task / chunks_, task % chunks_); };
    if (bytes < static_cast<double>(kBytesPerTask) || at::get_num_threads() == 1) {
      for (int64_t task = 0; task < tasks; ++task) one(task);
    } else {
      share_tasks(tasks, [&](const auto& next) {
        for (int64_t task = next(); task >= 0; task = next()) one(task);
      });
    }
    for (int64_t unit = 0; unit < units; ++unit) join(unit);
  }

 private:
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
    for (int64_t key = begin; key < end; ++key) {
      const T* k = keys + key * call_.key.token_stride;
      // The lines of four queries share a load of the key.
      int64_t line = 0;
      for (; line + 4 <= lines_; line += 4)
        multiply<4>(k, query + line * wide, wide, scores + line * kChunk + key - begin);
      for (; line < lines_; ++line)
        multiply<1>(k, query + line * wide, wide, scores + line * kChunk + key - begin);
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

  template <int kQueries>
  void multiply(const T* key, const A* query, int64_t wide, A* to) const {
    V<A> sum[kQueries] = {};
    for (int64_t d = 0; d < call_.size; d += n) {
      const V<A> k = load_as<T, A>(key + d, 1, call_.size - d);
      for (int i = 0; i < kQueries; ++i) sum[i] += k * load(query + i * wide + d);
    }
    for (int i = 0; i < kQueries; ++i) {
      to[i * kChunk] = sum_of<A>(sum[i]);
    }
  }

  // Scores of keys [begin, end) to probabilities relative to their maximum; starts the partial.
  void soften(const AttentionSequence& sequence, int64_t head, int64_t row, int64_t begin,
              int64_t end, A* s, A* part) const {
    const A forbidden = -std::numeric_limits<A>::infinity();
    const A slope =
        sequence.slopes == nullptr ? A(0) : static_cast<const A*>(sequence.slopes)[head];
    const int64_t place = row + sequence.offset;
    A top = forbidden;
    for (int64_t key = begin; key < end; ++key) {
      A x = s[key - begin] * static_cast<A>(call_.scale);
      if (call_.softcap != 0) {
        const A cap = static_cast<A>(call_.softcap);
        x = cap * std::tanh(x / cap);
      }
      const int64_t distance = key - place;
      x -= slope * static_cast<A>(std::abs(distance));
      const bool late = call_.window_right >= 0 && distance > call_.window_right;
      const bool early = call_.window_left >= 0 && -distance > call_.window_left;
      x = late || early || row >= sequence.rows ? forbidden : x * static_cast<A>(kLog2Of);
      s[key - begin] = x;
      top = x > top ? x : top;
    }
    const A origin = top == forbidden ? A(0) : top;
    A total = 0;
    for (int64_t key = begin; key < end; key += n) {
      const int here = static_cast<int>(std::min<int64_t>(n, end - key));
      V<A> x = all(forbidden);
      for (int i = 0; i < here; ++i) x[i] = s[key - begin + i];
      const V<A> p = exp2_of<false>(x - origin);
      for (int i = 0; i < here; ++i) {
        s[key - begin + i] = p[i];
        total += p[i];
      }
    }
    part[0] = top;
    part[1] = total;
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
      static_cast<A*>(sequence.lse)[head * call_.lse_head_stride + row] =
          total == 0 ? forbidden : static_cast<A>(kLn2) * (top + std::log2(total));
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
