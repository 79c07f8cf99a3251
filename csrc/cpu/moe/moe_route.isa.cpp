// moe_route on the CPU: the choice and the weights of each token, and their gradient.
//
// Tokens are taken in blocks, one per lane of 64-byte vectors: the logits of a block are transposed
// in the cache, so that softmax, comparison and choice go down the experts without a horizontal
// step. A list of the best top_k is kept per lane and each expert is inserted into it; five
// instructions per expert and place, for all tokens of the block. Values are compared as integers
// whose order is theirs: one of them is left below all values for an expert that may not be chosen,
// and a later expert takes the place of an earlier one only if it is better: ties go to the lower
// index. Traffic: the logits in, ids and weights out.
//
// The weights are computed for the chosen alone where the denominator allows it: a softmax that is
// normalised over the chosen is the softmax over the chosen. The backward then reads the chosen
// logits only.
#include "moe_route.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <vector>

#include "../../common/parallel.h"
#include "../../common/philox.h"
#include "../common/vec.h"
#include "moe_route_lanes.h"

namespace fusedops::CPU_CAPABILITY {
namespace {

// Choices from which sorting is cheaper than insertion.
constexpr int64_t kSortFrom = 32;
// The logits of a block of tokens and what is made of them. T is the type of the logits.
template <typename T>
class Block {
 public:
  using A = Acc<T>;
  using I = IntegerOf<A>;
  static constexpr int64_t L = kLanes<A>;

  Block(const MoeRouteOptions& options, const A* bias)
      : o_(options),
        bias_(bias),
        width_(padded(options.experts)),
        rows_(L * width_, -kInfinity<A>),
        columns_(L * width_),
        keys_(L * width_),
        group_keys_(L * options.num_groups),
        best_(L * std::max<int64_t>(2, std::max(options.top_k, options.topk_groups))),
        ids_(best_.size()),
        chosen_(L * options.top_k) {
    if (o_.seed != nullptr) factors_.resize(width_, A(1));
  }

  // Loads a row as row `lane`: NaN becomes -inf, +inf the largest finite number; jitter.
  void load_row(const T* from, int64_t token, int64_t lane) {
    using V = Vec<T>;
    const V none(-kInfinity<A>), most(std::numeric_limits<A>::max());
    A* to = rows_.data() + lane * width_;
    if (o_.seed != nullptr) draw(token);
    for_each_vector<V::size()>(o_.experts, [&](int64_t c, int64_t count, auto full) {
      V x = load_vec(from + c, count, full);
      x = V::blendv(x, none, x.isnan());
      if (o_.seed != nullptr) x = x * V::loadu(factors_.data() + c);
      store_vec(to + c, at::vec::minimum(x, most), count, full);
    });
  }

  // Ids and weights of tokens `first` .. `first + count - 1`, whose rows were loaded.
  void route(const MoeRouteForward& a, int64_t first, int64_t count) {
    const bool sums = grouped() && o_.top2_sum;
    const bool scored = bias_ != nullptr || sums;
    const bool whole = !o_.sigmoid && !o_.normalize;
    const bool chooses = a.chosen == nullptr && !o_.expert_choice;
    if (chooses || whole) transpose();
    if (chooses && scored) {
      scores_.resize(columns_.size());
      score();
      make_keys(scores_.data());
    } else if (chooses) {
      make_keys(columns_.data());
    }
    if (chooses) {
      if (grouped()) close_groups();
      choose();
    } else {
      for (int64_t lane = 0; lane < count; ++lane) {
        for (int64_t j = 0; j < o_.top_k; ++j) {
          const int32_t given = a.chosen != nullptr ? a.chosen[(first + lane) * o_.top_k + j]
                                                    : static_cast<int32_t>(j);
          ids_[j * L + lane] = given;
        }
      }
    }
    for (int64_t j = 0; j < o_.top_k; ++j) {
      for (int64_t lane = 0; lane < L; ++lane) {
        const int64_t id = lane < count ? ids_[j * L + lane] : 0;
        const bool exists = id >= 0 && id < o_.experts;
        chosen_[j * L + lane] = exists ? rows_[lane * width_ + id] : -kInfinity<A>;
      }
    }
    weigh(whole);
    const A scaling = static_cast<A>(o_.scaling);
    A* probs = static_cast<A*>(a.probs) + first * o_.top_k;
    int32_t* ids = a.expert_ids + first * o_.top_k;
    for (int64_t lane = 0; lane < count; ++lane) {
      for (int64_t j = 0; j < o_.top_k; ++j) {
        *ids++ = static_cast<int32_t>(ids_[j * L + lane]);
        *probs++ = chosen_[j * L + lane] * scaling;
      }
    }
  }

 private:
  bool grouped() const { return o_.topk_groups < o_.num_groups; }

  void draw(int64_t token) {
    PhiloxWords words{};
    const Dropout generator(o_.seed, 0.0);
    for (int64_t e = 0; e < o_.experts; ++e) {
      const uint64_t element = static_cast<uint64_t>(token) * o_.experts + e;
      if (e == 0 || element % 4 == 0) words = generator.words(element / 4);
      factors_[e] = jitter_factor<A>(words.word[element % 4], o_.jitter);
    }
  }

  void transpose() {
    const A* from = rows_.data();
    A* to = columns_.data();
#if defined(CPU_CAPABILITY_AVX512) || defined(CPU_CAPABILITY_AVX2)
    if constexpr (std::is_same_v<A, float>) {
      constexpr int kTile = at::vec::Vectorized<float>::size();
      for (int64_t c = 0; c < width_; c += kTile) {
        for (int64_t lane = 0; lane < L; lane += kTile) {
          at::vec::transpose_mxn<float, kTile, kTile>(from + lane * width_ + c, width_,
                                                      to + c * L + lane, L);
        }
      }
      return;
    }
#endif
    for (int64_t lane = 0; lane < L; ++lane) {
      for (int64_t c = 0; c < o_.experts; ++c) to[c * L + lane] = from[lane * width_ + c];
    }
  }

  void score() {
    if (!o_.sigmoid) {
      const A* x = columns_.data();
      return ColumnSoftmax<A>(x, o_.experts).apply(x, scores_.data(), o_.experts);
    }
    std::copy_n(columns_.data(), o_.experts * L, scores_.data());
    column_sigmoid(scores_.data(), o_.experts, false);
  }

  void make_keys(const A* values) {
    for (int64_t e = 0; e < o_.experts; ++e) {
      const A shift = bias_ != nullptr ? bias_[e] : A(0);
      store<I>(keys_.data() + e * L, keys_of<A>(load(values + e * L) + shift));
    }
  }

  // Takes the experts of all but the best groups out of the choice.
  void close_groups() {
    const int64_t groups = o_.num_groups, size = o_.experts / groups;
    for (int64_t g = 0; g < groups; ++g) {
      insert_all(keys_.data() + g * size * L, size, o_.top2_sum ? 2 : 1, best_.data(), ids_.data());
      Lanes<I> key = load(best_.data());
      if (o_.top2_sum) {
        key = keys_of<A>(values_of<A>(key) + values_of<A>(load(best_.data() + L)));
      }
      store<I>(group_keys_.data() + g * L, key);
    }
    insert_all(group_keys_.data(), groups, o_.topk_groups, best_.data(), ids_.data());
    const Lanes<I> last = load(best_.data() + (o_.topk_groups - 1) * L);
    const Lanes<I> last_id = load(ids_.data() + (o_.topk_groups - 1) * L);
    for (int64_t g = 0; g < groups; ++g) {
      const Lanes<I> group = load(group_keys_.data() + g * L);
      const auto open = (group > last) | ((group == last) & (last_id >= static_cast<I>(g)));
      for (int64_t e = g * size; e < (g + 1) * size; ++e) {
        const Lanes<I> key = load(keys_.data() + e * L);
        store<I>(keys_.data() + e * L, open ? key : all(kNothing<A>));
      }
    }
  }

  void choose() {
    if (o_.top_k < kSortFrom) {
      insert_all(keys_.data(), o_.experts, o_.top_k, best_.data(), ids_.data());
      return;
    }
    order_.resize(o_.experts);
    for (int64_t lane = 0; lane < L; ++lane) {
      const I* keys = keys_.data() + lane;
      std::iota(order_.begin(), order_.end(), 0);
      std::partial_sort(order_.begin(), order_.begin() + o_.top_k, order_.end(),
                        [keys](int32_t p, int32_t q) {
                          const I a = keys[p * L], b = keys[q * L];
                          return a > b || (a == b && p < q);
                        });
      for (int64_t j = 0; j < o_.top_k; ++j) ids_[j * L + lane] = order_[j];
    }
  }

  // The chosen logits become weights.
  void weigh(bool whole) {
    A* x = chosen_.data();
    const int64_t slots = o_.top_k;
    if (!o_.sigmoid) {
      const A* over = whole ? columns_.data() : x;
      ColumnSoftmax<A>(over, whole ? o_.experts : slots).apply(x, x, slots);
      return;
    }
    column_sigmoid(x, slots, o_.normalize);
  }

  const MoeRouteOptions& o_;
  const A* bias_;
  const int64_t width_;
  std::vector<A> rows_;         // [L, width]
  std::vector<A> columns_;      // [width, L]
  std::vector<A> scores_;       // [width, L]
  std::vector<I> keys_;         // [width, L]
  std::vector<I> group_keys_;   // [groups, L]
  std::vector<I> best_;         // [places, L]
  std::vector<I> ids_;          // [places, L]
  std::vector<A> chosen_;       // [top_k, L]
  std::vector<A> factors_;      // [width]
  std::vector<int32_t> order_;  // [experts]
};

// What a token costs, as bytes of streaming: tasks of about 10 us.
inline int64_t cost_of(const MoeRouteOptions& o) {
  return 4 * (padded(o.experts) + 8) * (4 + std::min<int64_t>(o.top_k, kSortFrom));
}

template <typename T>
void forward(const MoeRouteForward& a) {
  using A = Acc<T>;
  constexpr int64_t L = kLanes<A>;
  const MoeRouteOptions& o = a.options;
  parallel_rows((o.tokens + L - 1) / L, L * cost_of(o), [&](int64_t begin, int64_t end) {
    Block<T> block(o, static_cast<const A*>(a.bias));
    for (int64_t b = begin; b < end; ++b) {
      const int64_t first = b * L, count = std::min(L, o.tokens - first);
      for (int64_t lane = 0; lane < count; ++lane) {
        block.load_row(static_cast<const T*>(a.logits) + (first + lane) * o.experts, first + lane,
                       lane);
      }
      block.route(a, first, count);
    }
  });
}

// The incoming gradient of a slot, scaled; 0 where it was dropped.
template <typename A>
inline A incoming(const MoeRouteBackward& a, int64_t slot) {
  const bool kept = a.kept == nullptr || a.kept[slot];
  return kept ? static_cast<const A*>(a.grad_probs)[slot] * static_cast<A>(a.options.scaling)
              : A(0);
}

// One logit as Block::load_row has it, and the factor that jitter put on it.
template <typename T>
inline Acc<T> load_one(const MoeRouteOptions& o, const T* logits, int64_t element, Acc<T>* factor) {
  using A = Acc<T>;
  A x = static_cast<A>(logits[element]);
  if (x != x) x = -kInfinity<A>;
  if (o.seed != nullptr) {
    const auto words = Dropout(o.seed, 0.0).words(static_cast<uint64_t>(element) / 4);
    *factor = jitter_factor<A>(words.word[element % 4], o.jitter);
    x *= *factor;
  }
  return std::min(x, std::numeric_limits<A>::max());
}

// Weights of the chosen alone: only their logits are read, and the other gradients are 0. The
// formulae are those of `gradient` in fusedops/ops/_route_math.py.
template <typename T>
class ChosenBackward {
 public:
  using A = Acc<T>;
  static constexpr int64_t L = kLanes<A>;

  explicit ChosenBackward(const MoeRouteBackward& a)
      : a_(a), x_(L * a.options.top_k), g_(x_), falling_(x_.size(), A(1)), factors_(falling_) {}

  void operator()(int64_t first, int64_t count) {
    const MoeRouteOptions& o = a_.options;
    const int64_t slots = o.top_k;
    std::fill(x_.begin(), x_.end(), -kInfinity<A>);
    const auto* logits = static_cast<const T*>(a_.logits);
    for (int64_t lane = 0; lane < count; ++lane) {
      for (int64_t j = 0; j < slots; ++j) {
        const int64_t slot = (first + lane) * slots + j, id = a_.expert_ids[slot];
        g_[j * L + lane] = incoming<A>(a_, slot);
        if (id < 0 || id >= o.experts) continue;
        x_[j * L + lane] =
            load_one(o, logits, (first + lane) * o.experts + id, &factors_[j * L + lane]);
      }
    }
    differentiate();
    T* out = static_cast<T*>(a_.grad_logits);
    std::fill(out + first * o.experts, out + (first + count) * o.experts, T(0));
    for (int64_t lane = 0; lane < count; ++lane) {
      for (int64_t j = 0; j < slots; ++j) {
        const int64_t slot = (first + lane) * slots + j, id = a_.expert_ids[slot];
        if (id < 0 || id >= o.experts) continue;
        // Its gradient is 0, and in "rounds" it may name the expert of a kept slot.
        if (!o.normalize && a_.kept != nullptr && !a_.kept[slot]) continue;
        out[(first + lane) * o.experts + id] =
            static_cast<T>(x_[j * L + lane] * factors_[j * L + lane]);
      }
    }
  }

 private:
  // Logits become their gradients. (Inlined, GCC 12 fails in its SLP pass.)
  [[gnu::noinline]] void differentiate() {
    const MoeRouteOptions& o = a_.options;
    const int64_t slots = o.top_k;
    A* x = x_.data();
    const A* g = g_.data();
    if (o.sigmoid) {
      column_sigmoid(x, slots, o.normalize, falling_.data());
    } else {
      ColumnSoftmax<A>(x, slots).apply(x, x, slots);
    }
    Lanes<A> along{};
    if (o.normalize) {
      for (int64_t j = 0; j < slots; ++j) along += load(g + j * L) * load(x + j * L);
    }
    for (int64_t j = 0; j < slots; ++j) {
      const Lanes<A> s = load(x + j * L);
      store<A>(x + j * L, s * load(falling_.data() + j * L) * (load(g + j * L) - along));
    }
  }

  const MoeRouteBackward& a_;
  // [top_k, L]; of a softmax `falling_` stays 1.
  std::vector<A> x_, g_, falling_, factors_;
};

// Softmax over all experts: every logit has a gradient.
template <typename T>
class WholeBackward {
 public:
  using A = Acc<T>;
  using V = Vec<T>;
  static constexpr int64_t W = V::size();

  explicit WholeBackward(const MoeRouteBackward& a)
      : a_(a), s_(padded(a.options.experts)), factors_(s_.size(), A(1)) {}

  void operator()(int64_t token) {
    const MoeRouteOptions& o = a_.options;
    const A none = -kInfinity<A>;
    const T* logits = static_cast<const T*>(a_.logits);
    T* out = static_cast<T*>(a_.grad_logits) + token * o.experts;
    const int64_t experts = o.experts, width = padded(experts), row = token * experts;
    if (o.seed != nullptr) {
      for (int64_t e = 0; e < experts; ++e) s_[e] = load_one(o, logits, row + e, &factors_[e]);
    } else {
      for_each_vector<W>(experts, [&](int64_t c, int64_t count, auto full) {
        V x = load_vec(logits + row + c, count, full);
        x = V::blendv(x, V(none), x.isnan());
        store_vec(s_.data() + c, at::vec::minimum(x, V(std::numeric_limits<A>::max())), count,
                  full);
      });
    }
    std::fill(s_.begin() + experts, s_.end(), none);
    V peaks(std::numeric_limits<A>::lowest());
    for (int64_t c = 0; c < width; c += W) {
      peaks = at::vec::maximum(peaks, V::loadu(s_.data() + c));
    }
    const V peak(at::vec::vec_reduce_all<A>(
        [](const V& p, const V& q) { return at::vec::maximum(p, q); }, peaks));
    V sums(A(0));
    for (int64_t c = 0; c < width; c += W) {
      const V e = exp_of<A>(V::loadu(s_.data() + c) - peak);
      e.store(s_.data() + c);
      sums = sums + e;
    }
    const A sum = sum_lanes(sums), inverse = sum == A(0) ? A(0) : A(1) / sum;
    A along(0);
    for (int64_t j = 0; j < o.top_k; ++j) {
      const int64_t id = a_.expert_ids[token * o.top_k + j];
      if (id >= 0 && id < experts) along += incoming<A>(a_, token * o.top_k + j) * s_[id];
    }
    along *= inverse;
    for_each_vector<W>(experts, [&](int64_t c, int64_t count, auto full) {
      const V factor = V::loadu(factors_.data() + c) * V(-along * inverse);
      store_vec(out + c, V::loadu(s_.data() + c) * factor, count, full);
    });
    for (int64_t j = 0; j < o.top_k; ++j) {
      const int64_t slot = token * o.top_k + j, id = a_.expert_ids[slot];
      if (id < 0 || id >= experts || (a_.kept != nullptr && !a_.kept[slot])) continue;
      const A grad = incoming<A>(a_, slot) - along;
      out[id] = static_cast<T>(s_[id] * inverse * grad * factors_[id]);
    }
  }

 private:
  const MoeRouteBackward& a_;
  std::vector<A> s_, factors_;  // [experts, padded]
};

template <typename T>
void backward(const MoeRouteBackward& a) {
  constexpr int64_t L = kLanes<Acc<T>>;
  const MoeRouteOptions& o = a.options;
  if (!o.sigmoid && !o.normalize) {
    parallel_rows(o.tokens, cost_of(o), [&](int64_t begin, int64_t end) {
      WholeBackward<T> run(a);
      for (int64_t token = begin; token < end; ++token) run(token);
    });
    return;
  }
  parallel_rows((o.tokens + L - 1) / L, L * cost_of(o), [&](int64_t begin, int64_t end) {
    ChosenBackward<T> run(a);
    for (int64_t b = begin; b < end; ++b) run(b * L, std::min(L, o.tokens - b * L));
  });
}

}  // namespace

void moe_route_forward(const MoeRouteForward& a) {
  switch_dtype(a.options.dtype, [&](auto t) { forward<decltype(t)>(a); });
}

void moe_route_backward(const MoeRouteBackward& a) {
  switch_dtype(a.options.dtype, [&](auto t) { backward<decltype(t)>(a); });
}

}  // namespace fusedops::CPU_CAPABILITY
