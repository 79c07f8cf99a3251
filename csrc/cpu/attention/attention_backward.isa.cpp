// The backward of attention: five products per block, none of whose operands leaves L2.
//
//   S^T = K Q^T          scores again, from the saved log-sum-exp to probabilities P
//   dP^T = V dO^T
//   dS^T = P^T (dP^T - delta),  delta = rowsum(dO O) - dlse
//   dV += P^T dO,  dK += dS^T Q,  dQ^T += K^T dS^T
//
// The tiles of S^T and dP^T stand as [keys][queries] (attention_tile.h). dQ^T takes dS^T as it
// stands; dV and dK take P^T and dS^T as left operands, which one transposition in registers makes
// of a tile.
//
// A task is one key head of one sequence: it packs keys and values once, and sums the gradients of
// the queries that read them in order. Keys are cut into chunks of kChunkKeys whatever the number
// of threads: a query's gradient is the sum over chunks, in order, of sums over blocks. With few
// key heads, chunks are tasks that leave partial gradients: the same sums in the same order.
#include <memory>

#include <ATen/Parallel.h>

#include "../../common/parallel.h"
#include "../common/workspace.h"
#include "attention.h"
#include "attention_tile.h"

namespace fusedops::CPU_CAPABILITY {
namespace {

constexpr int64_t kChunkBlocks = 8;

template <typename Policy>
class Backward {
  using T = typename Policy::T;
  using A = typename Policy::Sum;
  using Packed = typename Policy::Packed;
  static constexpr int n = kLanes<A>;
  static constexpr int W = kTileColumns<A>;
  static constexpr int R = Policy::kRows;
  static constexpr int64_t kKeys = kBlockKeys<Policy>;  // of a block
  static constexpr int64_t kChunkKeys = kChunkBlocks * kKeys;
  static constexpr int kQueries = 2 * W;  // queries at a time
  static constexpr bool kShort = kIsHalf<T>;

 public:
  explicit Backward(const AttentionCall& call)
      : call_(call),
        groups_(call.groups()),
        steps_(steps_of<Policy>(call.size)),
        value_steps_(steps_of<Policy>(call.value_size)),
        panels_((call.size + W - 1) / W),
        value_panels_((call.value_size + W - 1) / W),
        query_panels_((call.size + R - 1) / R) {}

  void run() {
    int64_t most_rows = 0, most_columns = 0;
    double work = 0;
    for (int64_t s = 0; s < call_.sequence_count; ++s) {
      const auto& sequence = call_.sequences[s];
      most_rows = std::max(most_rows, sequence.rows);
      most_columns = std::max(most_columns, sequence.columns);
      work += static_cast<double>(sequence.rows) * static_cast<double>(sequence.columns);
    }
    work *= static_cast<double>(call_.heads * (call_.size + call_.value_size));
    rows_ = most_rows;
    const int64_t units = call_.sequence_count * call_.key_heads;
    const int64_t threads = at::get_num_threads();
    chunks_ = std::max<int64_t>(1, (most_columns + kChunkKeys - 1) / kChunkKeys);
    const auto run_chunks = [&](int64_t unit, int64_t first, int64_t last, A* partial) {
      const auto& sequence = call_.sequences[unit / call_.key_heads];
      run_unit(sequence, unit % call_.key_heads, first, last, partial);
    };
    if (threads == 1 || work < 1e5) {
      const typename Policy::Scope scope;
      for (int64_t unit = 0; unit < units; ++unit) run_chunks(unit, 0, chunks_, nullptr);
      return;
    }
    if (units >= 2 * threads || chunks_ == 1) {
      share_tasks(units, [&](const auto& next) {
        const typename Policy::Scope scope;
        for (int64_t unit = next(); unit >= 0; unit = next()) run_chunks(unit, 0, chunks_, nullptr);
      });
      return;
    }
    const int64_t lines = units * groups_ * rows_;
    const std::unique_ptr<A[]> partials(new A[chunks_ * lines * call_.size]);
    share_tasks(units * chunks_, [&](const auto& next) {
      const typename Policy::Scope scope;
      for (int64_t task = next(); task >= 0; task = next()) {
        const int64_t unit = task / chunks_, chunk = task % chunks_;
        A* partial = partials.get() + (unit * chunks_ + chunk) * groups_ * rows_ * call_.size;
        run_chunks(unit, chunk, chunk + 1, partial);
      }
    });
    share_tasks(units * groups_, [&](const auto& next) {
      for (int64_t task = next(); task >= 0; task = next()) {
        add_partials(partials.get(), task / groups_, task % groups_);
      }
    });
  }

 private:
  struct Memory {
    Packed *keys, *values, *key_columns;   // panels of the left operands
    Packed *query, *grad;                  // panels over the head, right operands, two halves
    Packed *query_columns, *grad_columns;  // panels over the queries, right operands
    Packed *left_p, *left_ds, *right_ds;   // of one block of keys
    A *s, *dp, *tanh, *options[2], *statistics;
    A *grad_query, *chunk_query;  // [size][W] of each half
    A *grad_key, *grad_value;     // [tiles][panels][R][W]
  };

  Memory lend(int64_t keys, int64_t chunks) const {
    const int64_t tiles = (keys + R - 1) / R, blocks = (keys + kKeys - 1) / kKeys;
    Memory m{};
    const auto carve = [&](void* memory) {
      Carver c(memory);
      m.keys = c.take<Packed>(tiles * key_panel());
      m.values = c.take<Packed>(tiles * value_panel());
      m.key_columns = c.take<Packed>(blocks * query_panels_ * column_panel());
      m.query = c.take<Packed>(2 * right_panel(steps_));
      m.grad = c.take<Packed>(2 * right_panel(value_steps_));
      m.query_columns = c.take<Packed>(panels_ * queries_panel());
      m.grad_columns = c.take<Packed>(value_panels_ * queries_panel());
      m.left_p = c.take<Packed>(kBlockPanels<Policy> * left_panel());
      m.left_ds = c.take<Packed>(kBlockPanels<Policy> * left_panel());
      m.right_ds = c.take<Packed>(kKeys / Policy::kPair * W);
      m.s = c.take<A>((kKeys + 1) * W);
      m.dp = c.take<A>(R * W);
      m.tanh = c.take<A>(R * W);
      for (auto& options : m.options) options = c.take<A>(Scores<Policy>::kScratch);
      m.statistics = c.take<A>(3 * kQueries);
      m.grad_query = c.take<A>(2 * (query_panels_ * R + n) * W);
      m.chunk_query = c.take<A>(chunks > 1 ? 2 * (query_panels_ * R + n) * W : 1);
      m.grad_key = c.take<A>(tiles * panels_ * R * W);
      m.grad_value = c.take<A>(tiles * value_panels_ * R * W);
      return c.taken(memory);
    };
    const size_t bytes = carve(nullptr);
    carve(workspace(Workspace::attention, bytes));
    return m;
  }

  int64_t key_panel() const { return panel_elements<Policy, Operand::left>(steps_); }
  int64_t value_panel() const { return panel_elements<Policy, Operand::left>(value_steps_); }
  static int64_t column_panel() {
    return panel_elements<Policy, Operand::left>(kKeys / Policy::kPair);
  }
  static int64_t right_panel(int64_t steps) {
    return panel_elements<Policy, Operand::right>(steps);
  }
  static int64_t queries_panel() {
    return panel_elements<Policy, Operand::right>(kQueries / Policy::kPair);
  }
  static int64_t left_panel() {
    return panel_elements<Policy, Operand::left>(kQueries / Policy::kPair);
  }
  int64_t half_of_query() const { return (query_panels_ * R + n) * W; }

  // Chunks [first, last) of the keys of one key head. partial: [groups][rows][size] for the
  // gradients of queries, or null: into the sequence's own.
  void run_unit(const AttentionSequence& sequence, int64_t key_head, int64_t first, int64_t last,
                A* partial) const {
    const int64_t begin = std::min(first * kChunkKeys, sequence.columns);
    const int64_t end = std::min(last * kChunkKeys, sequence.columns);
    const Memory m = lend(end - begin, last - first);
    pack_unit(sequence, key_head, begin, end, m);
    const int64_t tiles = (end - begin + R - 1) / R;
    std::fill_n(m.grad_key, tiles * panels_ * R * W, A(0));
    std::fill_n(m.grad_value, tiles * value_panels_ * R * W, A(0));
    for (int64_t group = 0; group < groups_; ++group) {
      for (int64_t row = 0; row < sequence.rows; row += kQueries) {
        A* out = partial == nullptr ? nullptr : partial + (group * rows_ + row) * call_.size;
        run_queries(sequence, key_head * groups_ + group, row, begin, end, m, out);
      }
    }
    const auto rows_of = [&](void* data, const HeadsOf& heads) {
      return static_cast<T*>(data) + key_head * heads.head_stride + begin * heads.token_stride;
    };
    if (sequence.grad_key != nullptr) {
      store_keys(m.grad_key, panels_, end - begin, call_.size, static_cast<A>(call_.scale),
                 rows_of(sequence.grad_key, call_.grad_key), call_.grad_key.token_stride);
    }
    if (sequence.grad_value != nullptr) {
      store_keys(m.grad_value, value_panels_, end - begin, call_.value_size, A(1),
                 rows_of(sequence.grad_value, call_.grad_value), call_.grad_value.token_stride);
    }
  }

  void pack_unit(const AttentionSequence& sequence, int64_t key_head, int64_t begin, int64_t end,
                 const Memory& m) const {
    const int64_t stride = call_.key.token_stride, value_stride = call_.value.token_stride;
    const T* keys =
        static_cast<const T*>(sequence.key) + key_head * call_.key.head_stride + begin * stride;
    const T* values = static_cast<const T*>(sequence.value) + key_head * call_.value.head_stride +
                      begin * value_stride;
    pack_tokens<Policy, Operand::left>(keys, stride, end - begin, call_.size, m.keys, key_panel());
    pack_tokens<Policy, Operand::left>(values, value_stride, end - begin, call_.value_size,
                                       m.values, value_panel());
    if (sequence.grad_query == nullptr) return;
    for (int64_t key = 0; key < end - begin; key += kKeys) {
      const int64_t count = std::min(kKeys, end - begin - key);
      pack_elements<Policy, Operand::left>(
          keys + key * stride, stride, count, call_.size, begin + key + count < sequence.columns,
          m.key_columns + key / kKeys * query_panels_ * column_panel(), column_panel());
    }
  }

  // Queries [row, row + kQueries) of one head against keys [begin, end).
  void run_queries(const AttentionSequence& sequence, int64_t head, int64_t row, int64_t begin,
                   int64_t end, const Memory& m, A* partial) const {
    const int rows = static_cast<int>(std::min<int64_t>(kQueries, sequence.rows - row));
    pack_queries(sequence, head, row, rows, m);
    Scores<Policy> options[2] = {{call_, sequence, head}, {call_, sequence, head}};
    const int halves = rows > W ? 2 : 1;
    int64_t from = end, to = begin;
    for (int half = 0; half < halves; ++half) {
      options[half].lend(m.options[half]);
      const auto range = options[half].set_queries(row + half * W, std::min(W, rows - half * W));
      from = std::min(from, range.begin);
      to = std::max(to, range.end);
    }
    from = std::max(from, begin);
    to = std::min(to, end);
    std::fill_n(m.grad_query, halves * half_of_query(), A(0));
    bool chunk_is_empty = true;
    for (int64_t key = begin; key < to; key += kKeys) {
      if (partial == nullptr && key > begin && (key - begin) % kChunkKeys == 0) {
        close_chunk(m, halves, chunk_is_empty);
        chunk_is_empty = false;
      }
      const int64_t first = std::max<int64_t>(0, from - key) / R * R;
      const int64_t count = std::min(kKeys, to - key) - first;
      if (count <= 0) continue;
      run_block(sequence, head, row, rows, begin, key, first, count, options, m);
    }
    if (!chunk_is_empty) close_chunk(m, halves, false);
    const A* sums = chunk_is_empty ? m.grad_query : m.chunk_query;
    if (sequence.grad_query != nullptr) store_query(sequence, head, row, rows, sums, m, partial);
  }

  // Adds the sums of a chunk to those of the chunks before it.
  void close_chunk(const Memory& m, int halves, bool first) const {
    const int64_t count = halves * half_of_query();
    for (int64_t i = 0; i < count; i += n) {
      const V<A> sum = load(m.grad_query + i);
      store(m.chunk_query + i, first ? sum : load(m.chunk_query + i) + sum);
      store(m.grad_query + i, V<A>{});
    }
  }

  void pack_queries(const AttentionSequence& sequence, int64_t head, int64_t row, int rows,
                    const Memory& m) const {
    const int64_t stride = call_.query.token_stride, grad_stride = call_.output.token_stride;
    const T* query =
        static_cast<const T*>(sequence.query) + head * call_.query.head_stride + row * stride;
    const T* grad = static_cast<const T*>(sequence.output) + head * call_.output.head_stride +
                    row * grad_stride;
    for (int half = 0; half * W < rows; ++half) {
      const int here = std::min(W, rows - half * W);
      pack_tokens<Policy, Operand::right>(query + half * W * stride, stride, here, call_.size,
                                          m.query + half * right_panel(steps_), 0);
      pack_tokens<Policy, Operand::right>(grad + half * W * grad_stride, grad_stride, here,
                                          call_.value_size,
                                          m.grad + half * right_panel(value_steps_), 0);
    }
    const bool more = row + rows < sequence.rows;
    pack_elements<Policy, Operand::right>(query, stride, rows, call_.size, more, m.query_columns,
                                          queries_panel());
    pack_elements<Policy, Operand::right>(grad, grad_stride, rows, call_.value_size, more,
                                          m.grad_columns, queries_panel());
    const int64_t line = head * call_.lse_head_stride + row;
    const A* lse = static_cast<const A*>(sequence.lse) + line;
    const A* delta = static_cast<const A*>(sequence.delta) + line;
    const A* parts = static_cast<const A*>(sequence.lse_parts);
    if (parts != nullptr) parts += 2 * line;
    for (int i = 0; i < kQueries; ++i) {
      // Minus infinity: nothing was attended. Every probability is then exp2(-inf).
      const bool nothing = i >= rows || lse[i] == -std::numeric_limits<A>::infinity();
      A most = 0, sum = std::numeric_limits<A>::infinity();
      if (!nothing && parts == nullptr) sum = lse[i] * static_cast<A>(kLog2Of);
      if (!nothing && parts != nullptr) {
        most = parts[2 * i];
        sum = parts[2 * i + 1];
      }
      m.statistics[i] = sum;
      m.statistics[kQueries + i] = nothing ? A(0) : delta[i];
      m.statistics[2 * kQueries + i] = most;
    }
  }

  // Keys [key + first, key + first + count) of the block at `key`; all count from the sequence's.
  void run_block(const AttentionSequence& sequence, int64_t head, int64_t row, int rows,
                 int64_t begin, int64_t key, int64_t first, int64_t count,
                 Scores<Policy> (&options)[2], const Memory& m) const {
    const int64_t tile0 = (key + first - begin) / R, tiles = (count + R - 1) / R;
    const int halves = rows > W ? 2 : 1;
    bool some = false;
    for (int half = 0; half < halves; ++half) {
      const bool any = options[half].set_keys(key + first, count);
      some |= any;
      for (int64_t tile = 0; tile < tiles; ++tile) {
        const int here = static_cast<int>(std::min<int64_t>(R, count - tile * R));
        if (any) {
          run_tile(sequence, head, row, half, tile0 + tile, key + first, tile * R, here,
                   options[half], m);
        } else {
          const int64_t at = tile * left_panel() + half * W / Policy::kPair * R;
          std::fill_n(m.left_p + at, W / Policy::kPair * R, Packed(0));
          std::fill_n(m.left_ds + at, W / Policy::kPair * R, Packed(0));
        }
      }
      if (any && sequence.grad_query != nullptr) {
        multiply_query(m, (key - begin) / kKeys, first, count, half);
      }
    }
    if (!some) return;
    const int64_t steps = steps_of<Policy>(rows);
    for (int64_t tile = 0; tile < tiles; ++tile) {
      const int here = static_cast<int>(std::min<int64_t>(R, count - tile * R));
      if (sequence.grad_value != nullptr) {
        multiply_left(m.left_p + tile * left_panel(), m.grad_columns, steps, here, value_panels_,
                      m.grad_value + (tile0 + tile) * value_panels_ * R * W);
      }
      if (sequence.grad_key != nullptr) {
        multiply_left(m.left_ds + tile * left_panel(), m.query_columns, steps, here, panels_,
                      m.grad_key + (tile0 + tile) * panels_ * R * W);
      }
    }
  }

  // One tile of `here` keys, `offset` after the `first` of the block, and one half of the queries.
  void run_tile(const AttentionSequence& sequence, int64_t head, int64_t row, int half,
                int64_t tile, int64_t first, int64_t offset, int here,
                const Scores<Policy>& options, const Memory& m) const {
    A* s = m.s + offset * W;
    const Packed* keys = m.keys + tile * key_panel();
    const Packed* values = m.values + tile * value_panel();
    run_kernel<Policy>(here, steps_, keys, m.query + half * right_panel(steps_), s, false,
                       reinterpret_cast<const char*>(keys + key_panel()));
    run_kernel<Policy>(here, value_steps_, values, m.grad + half * right_panel(value_steps_), m.dp,
                       false, reinterpret_cast<const char*>(values + value_panel()));
    const bool capped = call_.softcap != 0.0;
    options.apply(s, capped ? m.tanh : nullptr, offset, here);
    const A factor = options.plain() ? options.factor() : A(1);
    // The log-sum-exp may be in two parts: at -1e9 one number has no place for the sum.
    const A* origins = m.statistics + 2 * kQueries + half * W;
    const A* keep = options.keep(offset);
    A* p = m.dp;  // P^T takes the place of dP^T, dS^T that of S^T
    for (int j = 0; j < here; ++j) {
      for (int part = 0; part < W; part += n) {
        const V<A> lse = load(m.statistics + half * W + part);
        const V<A> delta = load(m.statistics + kQueries + half * W + part);
        const V<A> score = as_rounded(load(s + j * W + part) * factor);
        V<A> weight = exp2_of<kShort>((score - load(origins + part)) - lse);
        V<A> grad = load(m.dp + j * W + part);
        V<A> kept = weight;
        if (keep != nullptr) {
          const V<A> factors = load(keep + j * W + part);
          grad = factors == 0 ? V<A>{} : grad * factors;
          kept = kept * factors;
        }
        V<A> ds = weight * (grad - delta);
        store(p + j * W + part, kept);
        store(s + j * W + part, ds);
      }
    }
    if (options.one_key()) remove_rounding(s, p, here, m.statistics + half * W);
    if (sequence.grad_scores != nullptr)
      store_scores(sequence, head, row, half, first + offset, here, s);
    if (capped) {
      for (int64_t i = 0; i < here * W; i += n) {
        const V<A> t = load(m.tanh + i);
        store(s + i, load(s + i) * (A(1) - t * t));
      }
    }
    if constexpr (Policy::kPair == 2) {
      // The zeros of steps that the last queries do not fill: 0 times what a key holds may be NaN.
      const int64_t lane = sequence.rows - row - half * W;
      const int64_t whole = steps_of<Policy>(lane) * Policy::kPair;
      for (int j = 0; lane < whole && lane < W && j < here; ++j) {
        std::fill(p + j * W + lane, p + j * W + whole, A(0));
        std::fill(s + j * W + lane, s + j * W + whole, A(0));
      }
    }
    const int64_t step = half * W / Policy::kPair;
    if (sequence.grad_value != nullptr) {
      pack_left_tile(p, here, m.left_p + offset / R * left_panel() + step * R);
    }
    if (sequence.grad_key != nullptr) {
      pack_left_tile(s, here, m.left_ds + offset / R * left_panel() + step * R);
    }
  }

  // The softmax of one score is constant: its gradient is 0, not what delta's rounding leaves. A
  // weight below 1 tells of keys that are not here, of which the log-sum-exp may be as well.
  void remove_rounding(A* s, const A* kept, int here, const A* statistics) const {
    const A one = static_cast<A>(call_.dropout.scale);
    const A slack = std::sqrt(std::numeric_limits<A>::epsilon()) / 8;
    for (int64_t i = 0; i < here * W; i += n) {
      const V<A> lse = load(statistics + i % W) + load(statistics + 2 * kQueries + i % W);
      const V<A> least = one - one * slack * (A(1) + larger(lse, -lse)), ds = load(s + i);
      store(s + i, load(kept + i) >= least ? ds * A(0) : ds);
    }
  }

  // grad_scores[row][key] of the tile.
  void store_scores(const AttentionSequence& sequence, int64_t head, int64_t row, int half,
                    int64_t key, int here, const A* ds) const {
    A* to = static_cast<A*>(sequence.grad_scores) + head * sequence.rows * sequence.columns;
    for (int lane = 0; lane < W && row + half * W + lane < sequence.rows; ++lane) {
      A* line = to + (row + half * W + lane) * sequence.columns + key;
      for (int j = 0; j < here; ++j) line[j] = ds[j * W + lane];
    }
  }

  // dQ^T += K^T dS^T over the block of keys, for one half of the queries.
  void multiply_query(const Memory& m, int64_t block, int64_t first, int64_t count,
                      int half) const {
    const Packed* right = reinterpret_cast<const Packed*>(m.s);
    if constexpr (Policy::kPair == 2) {
      pack_pairs_of_keys<Policy>(m.s, count, m.right_ds);
      right = m.right_ds;
    }
    for (int64_t panel = 0; panel < query_panels_; ++panel) {
      const Packed* left = m.key_columns + (block * query_panels_ + panel) * column_panel() +
                           first / Policy::kPair * R;
      run_kernel<Policy>(static_cast<int>(std::min<int64_t>(R, call_.size - panel * R)),
                         steps_of<Policy>(count), left, right,
                         m.grad_query + half * half_of_query() + panel * R * W, true,
                         reinterpret_cast<const char*>(left + column_panel()));
    }
  }

  // to[panel] += left * columns[panel], [R][W] each.
  void multiply_left(const Packed* left, const Packed* columns, int64_t steps, int here,
                     int64_t panels, A* to) const {
    for (int64_t panel = 0; panel < panels; ++panel) {
      run_kernel<Policy>(here, steps, left, columns + panel * queries_panel(), to + panel * R * W,
                         true, reinterpret_cast<const char*>(to + (panel + 1) * R * W));
    }
  }

  // tile [here][W] as a left operand over the queries: [W / pair][R].
  static void pack_left_tile(const A* tile, int here, Packed* to) {
    if constexpr (kTiled<Policy>) {
#if defined(CPU_CAPABILITY_AVX512)
      for (int j = 0; j < R; ++j, to += Policy::kWhole) {
        const V<Packed> row = j < here
                                  ? (V<Packed>)round_to_bf16(_mm512_loadu_ps(tile + j * W),
                                                             _mm512_loadu_ps(tile + j * W + 16))
                                  : V<Packed>{};
        store_vector(to, row);
      }
#endif
    } else if constexpr (Policy::kPair == 2) {
#if defined(CPU_CAPABILITY_AVX512)
      V<Packed> v[16];
      for (int j = 0; j < 16; ++j) {
        v[j] = j < here ? (V<Packed>)round_to_bf16(_mm512_loadu_ps(tile + j * W),
                                                   _mm512_loadu_ps(tile + j * W + 16))
                        : V<Packed>{};
      }
      transpose<16>(v);
      // Each store runs over the next place; the last into a spare end, or what is written later.
      for (int step = 0; step < 15; ++step) store_vector(to + step * R, v[step]);
      store_first<R>(to + 15 * R, v[15]);
#endif
    } else {
#if defined(CPU_CAPABILITY_AVX512) || defined(CPU_CAPABILITY_AVX2)
      for (int j0 = 0; j0 < R; j0 += n) {
        for (int part = 0; part < W; part += n) {
          V<A> v[n];
          for (int i = 0; i < n; ++i) {
            v[i] = j0 + i < here ? load(tile + (j0 + i) * W + part) : V<A>{};
          }
          transpose<n>(v);
          const size_t bytes = std::min(n, R - j0) * sizeof(A);
          for (int i = 0; i < n; ++i) std::memcpy(to + (part + i) * R + j0, &v[i], bytes);
        }
      }
#else
      for (int lane = 0; lane < W; ++lane) {
        for (int j = 0; j < R; ++j) to[lane * R + j] = j < here ? tile[j * W + lane] : A(0);
      }
#endif
    }
  }

  void store_keys(const A* sums, int64_t panels, int64_t keys, int64_t size, A scale, T* out,
                  int64_t token_stride) const {
    for (int64_t key = 0; key < keys; ++key) {
      const A* line = sums + key / R * panels * R * W + key % R * W;
      for (int64_t d = 0; d < size; d += n) {
        store_as<T, A>(out + key * token_stride + d, load(line + d / W * R * W + d % W) * scale,
                       static_cast<int>(std::min<int64_t>(n, size - d)));
      }
    }
  }

  void store_query(const AttentionSequence& sequence, int64_t head, int64_t row, int rows,
                   const A* sums, const Memory& m, A* partial) const {
    A scale[W];
    std::fill_n(scale, W, partial == nullptr ? static_cast<A>(call_.scale) : A(1));
    for (int half = 0; half * W < rows; ++half) {
      const int here = std::min(W, rows - half * W);
      const A* from = sums + half * half_of_query();
      if (partial != nullptr) {
        store_transposed<A, A>(from, scale, here, call_.size, partial + half * W * call_.size,
                               call_.size);
        continue;
      }
      T* out = static_cast<T*>(sequence.grad_query) + head * call_.grad_query.head_stride +
               (row + half * W) * call_.grad_query.token_stride;
      store_transposed<T, A>(from, scale, here, call_.size, out, call_.grad_query.token_stride);
    }
  }

  // Sums the partial gradients of the queries of one head over the chunks.
  void add_partials(const A* partials, int64_t unit, int64_t group) const {
    const auto& sequence = call_.sequences[unit / call_.key_heads];
    if (sequence.grad_query == nullptr) return;
    const int64_t head = unit % call_.key_heads * groups_ + group;
    const int64_t chunks = (sequence.columns + kChunkKeys - 1) / kChunkKeys;
    T* out = static_cast<T*>(sequence.grad_query) + head * call_.grad_query.head_stride;
    for (int64_t row = 0; row < sequence.rows; ++row) {
      for (int64_t d = 0; d < call_.size; d += n) {
        const int here = static_cast<int>(std::min<int64_t>(n, call_.size - d));
        V<A> sum{};
        for (int64_t chunk = 0; chunk < chunks; ++chunk) {
          const A* line =
              partials + (((unit * chunks_ + chunk) * groups_ + group) * rows_ + row) * call_.size;
          const V<A> part = load_as<A, A>(line + d, 1, here);
          sum = chunk == 0 ? part : sum + part;
        }
        store_as<T, A>(out + row * call_.grad_query.token_stride + d,
                       sum * static_cast<A>(call_.scale), here);
      }
    }
  }

  const AttentionCall& call_;
  const int64_t groups_;
  const int64_t steps_;
  const int64_t value_steps_;
  const int64_t panels_;  // of W elements of a head
  const int64_t value_panels_;
  const int64_t query_panels_;  // of R elements of a head
  int64_t rows_ = 0;
  int64_t chunks_ = 1;
};

template <typename T>
void delta(const AttentionDelta& a) {
  using A = Acc<T>;
  constexpr int n = kLanes<A>;
  parallel_rows(
      a.batch * a.heads * a.rows, 2 * a.size * sizeof(T), [&](int64_t begin, int64_t end) {
        for (int64_t line = begin; line < end; ++line) {
          const int64_t row = line % a.rows, head = line / a.rows % a.heads;
          const int64_t b = line / a.rows / a.heads;
          const auto at = [&](const void* data, const int64_t* strides) {
            return static_cast<const T*>(data) + b * strides[0] + head * strides[1] +
                   row * strides[2];
          };
          const T* output = at(a.output, a.output_strides);
          const T* grad = at(a.grad_output, a.grad_strides);
          const T* rest = a.remainder == nullptr ? nullptr : at(a.remainder, a.output_strides);
          V<A> sum{};
          for (int64_t d = 0; d < a.size; d += n) {
            V<A> wide = load_as<T, A>(output + d, 1, a.size - d);
            if (rest != nullptr) wide += load_as<T, A>(rest + d, 1, a.size - d);
            sum += wide * load_as<T, A>(grad + d, 1, a.size - d);
          }
          A total = sum_of<A>(sum);
          if (a.grad_lse != nullptr) total -= static_cast<const A*>(a.grad_lse)[line];
          static_cast<A*>(a.delta)[line] = total;
        }
      });
}

}  // namespace

void attention_backward(const AttentionCall& call) {
  with_policy(call.dtype, [&](auto policy) { Backward<decltype(policy)>(call).run(); });
}

void attention_delta(const AttentionDelta& call) {
  switch_dtype(call.dtype, [&](auto t) { delta<decltype(t)>(call); });
}

}  // namespace fusedops::CPU_CAPABILITY
