// The forward of attention: one pass over the keys with a running maximum and sum (online softmax).
//
// A task is one key head of one sequence: its keys and values are packed once into panels that stay
// in L2, then every block of kTileColumns queries of every query head that reads them goes over the
// blocks of keys: scores [keys][queries] by the kernel of the matrix products, softmax on vectors
// of queries, probabilities as the right operand of the second product, whose result
// [value size][queries] is rescaled where the maximum grew. Blocks of keys that no query of the
// block may attend are not touched. Traffic: inputs once, output once.
//
// A row's bits depend on its own query, the keys and the machine's instruction set only.
#include "attention.h"

#include <ATen/Parallel.h>

#include "../../common/parallel.h"
#include "../common/workspace.h"
#include "attention_tile.h"

namespace fusedops::CPU_CAPABILITY {
namespace {

template <typename Policy>
class Forward {
  using T = typename Policy::T;
  using A = typename Policy::Sum;
  using Packed = typename Policy::Packed;
  static constexpr int n = kLanes<A>;
  static constexpr int W = kTileColumns<A>;
  static constexpr int R = Policy::kRows;
  static constexpr int64_t kKeys = kBlockKeys<Policy>;  // of a block
  static constexpr bool kShort = kIsHalf<T>;

 public:
  explicit Forward(const AttentionCall& call)
      : call_(call),
        steps_(steps_of<Policy>(call.size)),
        key_panel_(panel_elements<Policy, Operand::left>(steps_)),
        value_panel_(panel_elements<Policy, Operand::left>(kKeys / Policy::kPair)),
        value_panels_((call.value_size + R - 1) / R),
        groups_(call.groups()) {}

  void run() const {
    const int64_t units = call_.sequence_count * call_.key_heads;
    int64_t most_rows = 0;
    double work = 0;
    for (int64_t s = 0; s < call_.sequence_count; ++s) {
      const auto& sequence = call_.sequences[s];
      most_rows = std::max(most_rows, sequence.rows);
      work += static_cast<double>(sequence.rows) * static_cast<double>(sequence.columns);
    }
    work *= static_cast<double>(call_.heads * (call_.size + call_.value_size));
    const int64_t threads = at::get_num_threads();
    // Parts of a unit pack the same keys: only where there are too few units.
    const int64_t blocks = (most_rows + W - 1) / W;
    int64_t parts = 1;
    if (units < 4 * threads) {
      parts = std::max<int64_t>(
          1, std::min((blocks + 3) / 4, (4 * threads + units - 1) / std::max<int64_t>(1, units)));
    }
    const auto one = [&](int64_t task) {
      run_unit(call_.sequences[task / parts / call_.key_heads], task / parts % call_.key_heads,
               task % parts, parts);
    };
    if (threads == 1 || work < 2e5) {  // about 10 us
      parts = 1;
      const typename Policy::Scope scope;
      for (int64_t task = 0; task < units; ++task) one(task);
      return;
    }
    share_tasks(units * parts, [&](const auto& next) {
      const typename Policy::Scope scope;
      for (int64_t task = next(); task >= 0; task = next()) one(task);
    });
  }

 private:
  struct Memory {
    Packed* keys;
    Packed* values;
    Packed* query;
    Packed* probabilities;  // for pairs of bfloat16
    A* scores;
    A* output;
    A* options;
  };

  Memory lend(int64_t columns) const {
    const int64_t key_panels = (columns + R - 1) / R;
    const int64_t blocks = (columns + kKeys - 1) / kKeys;
    Memory m{};
    const auto carve = [&](void* memory) {
      Carver carver(memory);
      m.keys = carver.take<Packed>(key_panels * key_panel_);
      m.values = carver.take<Packed>(blocks * value_panels_ * value_panel_);
      m.query = carver.take<Packed>(panel_elements<Policy, Operand::right>(steps_));
      m.probabilities = carver.take<Packed>(kKeys / Policy::kPair * W);
      m.scores = carver.take<A>((kKeys + 1) * W);
      m.output = carver.take<A>((value_panels_ * R + n) * W);
      m.options = carver.take<A>(Scores<Policy>::kScratch);
      return carver.taken(memory);
    };
    const size_t bytes = carve(nullptr);
    carve(workspace(Workspace::attention, bytes));
    return m;
  }

  // The blocks of queries part, part + parts, ... of the query heads that read `key_head`.
  void run_unit(const AttentionSequence& sequence, int64_t key_head, int64_t part,
                int64_t parts) const {
    if (sequence.rows == 0) return;
    const Memory m = lend(sequence.columns);
    const T* keys = static_cast<const T*>(sequence.key) + key_head * call_.key.head_stride;
    const T* values = static_cast<const T*>(sequence.value) + key_head * call_.value.head_stride;
    pack_tokens<Policy, Operand::left>(keys, call_.key.token_stride, sequence.columns, call_.size,
                                       m.keys, key_panel_);
    for (int64_t key = 0; key < sequence.columns; key += kKeys) {
      const int64_t count = std::min(kKeys, sequence.columns - key);
      pack_elements<Policy, Operand::left>(
          values + key * call_.value.token_stride, call_.value.token_stride, count,
          call_.value_size, key + count < sequence.columns,
          m.values + key / kKeys * value_panels_ * value_panel_, value_panel_);
    }
    for (int64_t group = 0; group < groups_; ++group) {
      const int64_t head = key_head * groups_ + group;
      for (int64_t row = part * W; row < sequence.rows; row += parts * W) {
        run_queries(sequence, head, row, m);
      }
    }
  }

  void run_queries(const AttentionSequence& sequence, int64_t head, int64_t row,
                   const Memory& m) const {
    const int rows = static_cast<int>(std::min<int64_t>(W, sequence.rows - row));
    const T* query = static_cast<const T*>(sequence.query) + head * call_.query.head_stride +
                     row * call_.query.token_stride;
    pack_tokens<Policy, Operand::right>(query, call_.query.token_stride, rows, call_.size, m.query,
                                        0);
    Scores<Policy> options(call_, sequence, head);
    options.lend(m.options);
    const auto range = options.set_queries(row, rows);
    V<A> top[2], sum[2];
    for (int half = 0; half < 2; ++half) {
      const bool sink = call_.sinks != nullptr;
      top[half] = all(sink ? static_cast<const A*>(call_.sinks)[head] * static_cast<A>(kLog2Of)
                           : -std::numeric_limits<A>::infinity());
      sum[half] = all(sink ? A(1) : A(0));
    }
    bool first = true;
    for (int64_t key = range.begin / kKeys * kKeys; key < range.end; key += kKeys) {
      const int64_t from = std::max<int64_t>(0, range.begin - key) / R * R;
      const int64_t count = std::min(kKeys, range.end - key) - from;
      if (count <= 0 || !options.set_keys(key + from, count)) continue;
      multiply_keys(m, (key + from) / R, count);
      options.apply(m.scores, nullptr, 0, count);
      const A factor = options.plain() ? options.factor() : A(1);
      soften(m, options.keep(0), count, factor, first, top, sum);
      const Packed* values =
          m.values + key / kKeys * value_panels_ * value_panel_ + from / Policy::kPair * R;
      multiply_values(m, values, steps_of<Policy>(count), first);
      first = false;
    }
    finish(sequence, head, row, rows, m, first, top, sum);
  }

  void multiply_keys(const Memory& m, int64_t panel, int64_t count) const {
    for (int64_t tile = 0; tile * R < count; ++tile) {
      const Packed* keys = m.keys + (panel + tile) * key_panel_;
      run_kernel<Policy>(static_cast<int>(std::min<int64_t>(R, count - tile * R)), steps_, keys,
                         m.query, m.scores + tile * R * W, false,
                         reinterpret_cast<const char*>(keys + key_panel_));
    }
  }

  void multiply_values(const Memory& m, const Packed* values, int64_t steps, bool first) const {
    const Packed* probabilities =
        Policy::kPair == 2 ? m.probabilities : reinterpret_cast<const Packed*>(m.scores);
    for (int64_t panel = 0; panel < value_panels_; ++panel) {
      const Packed* left = values + panel * value_panel_;
      run_kernel<Policy>(static_cast<int>(std::min<int64_t>(R, call_.value_size - panel * R)),
                         steps, left, probabilities, m.output + panel * R * W, !first,
                         reinterpret_cast<const char*>(left + value_panel_));
    }
  }

  // Scores to probabilities; the sums so far are rescaled to the new maximum.
  void soften(const Memory& m, const A* keep, int64_t count, A factor, bool first, V<A> (&top)[2],
              V<A> (&sum)[2]) const {
    V<A> rescale[2];
    bool moved = false;
    for (int half = 0; half < 2; ++half) {
      A* s = m.scores + half * n;
      V<A> most = load(s) * factor, other = most;
      int64_t j = 1;
      for (; j + 2 <= count; j += 2) {
        most = larger(most, load(s + j * W) * factor);
        other = larger(other, load(s + (j + 1) * W) * factor);
      }
      if (j < count) most = larger(most, load(s + j * W) * factor);
      most = larger(larger(most, other), top[half]);
      const V<A> nothing = all(-std::numeric_limits<A>::infinity());
      const V<A> origin = most == nothing ? V<A>{} : most;
      rescale[half] = exp2_of<kShort>(top[half] - origin);
      top[half] = most;
      V<A> total{}, more{};
      const auto at = [&](int64_t i) {
        return exp2_of<kShort>(as_rounded(load(s + i * W) * factor) - origin);
      };
      for (j = 0; j + 2 <= count; j += 2) {
        const V<A> p0 = at(j), p1 = at(j + 1);
        total += p0;
        more += p1;
        store(s + j * W, p0);
        store(s + (j + 1) * W, p1);
      }
      if (j < count) {
        const V<A> p = at(j);
        total += p;
        store(s + j * W, p);
      }
      sum[half] = sum[half] * rescale[half] + (total + more);
      if (first) continue;
      for (int i = 0; i < n; ++i) moved |= rescale[half][i] != A(1);
    }
    if (keep != nullptr) {
      for (int64_t i = 0; i < count * W; i += n) {
        // A dropped probability is 0 also where it is not finite, as torch's dropout has it.
        const V<A> kept = load(keep + i);
        store(m.scores + i, kept == 0 ? V<A>{} : load(m.scores + i) * kept);
      }
    }
    if constexpr (Policy::kPair == 2) pack_pairs_of_keys<Policy>(m.scores, count, m.probabilities);
    if (first || !moved) return;
    for (int64_t d = 0; d < call_.value_size; ++d) {
      for (int half = 0; half < 2; ++half) {
        A* o = m.output + d * W + half * n;
        store(o, load(o) * rescale[half]);
      }
    }
  }

  void finish(const AttentionSequence& sequence, int64_t head, int64_t row, int rows,
              const Memory& m, bool nothing, const V<A> (&top)[2], const V<A> (&sum)[2]) const {
    if (nothing) std::fill_n(m.output, call_.value_size * W, A(0));
    alignas(64) A scale[W], most[W], rest[W];
    const V<A> none{}, lowest = all(-std::numeric_limits<A>::infinity());
    for (int half = 0; half < 2; ++half) {
      const V<A> total = sum[half];
      store(scale + half * n, total == none ? none : A(1) / total);
      store(most + half * n, total == none ? lowest : top[half]);
      store(rest + half * n, total == none ? none : log2_of<A>(total));
    }
    const int64_t line = head * call_.lse_head_stride + row;
    A* lse = static_cast<A*>(sequence.lse) + line;
    for (int i = 0; i < rows; ++i) lse[i] = static_cast<A>(kLn2) * (most[i] + rest[i]);
    if (A* parts = static_cast<A*>(sequence.lse_parts); parts != nullptr) {
      for (int i = 0; i < rows; ++i) {
        parts[2 * (line + i)] = most[i];
        parts[2 * (line + i) + 1] = rest[i];
      }
    }
    T* output = static_cast<T*>(sequence.output) + head * call_.output.head_stride +
                row * call_.output.token_stride;
    T* remainder = sequence.remainder == nullptr ? nullptr
                                                 : static_cast<T*>(sequence.remainder) +
                                                       (output - static_cast<T*>(sequence.output));
    store_transposed<T, A>(m.output, scale, rows, call_.value_size, output,
                           call_.output.token_stride, remainder);
  }

  const AttentionCall& call_;
  const int64_t steps_;
  const int64_t key_panel_;
  const int64_t value_panel_;
  const int64_t value_panels_;
  const int64_t groups_;
};

}  // namespace

void attention_forward(const AttentionCall& call) {
  with_policy(call.dtype, [&](auto policy) { Forward<decltype(policy)>(call).run(); });
}

}  // namespace fusedops::CPU_CAPABILITY
