// moe_router_loss on the CPU: for each token sum(w p) + z lse^2, added over the tokens, and the
// gradient. A row is widened into a scratch row that stays in the cache. Traffic: the logits in
// (and their gradient out). Token sums are added in chunks fixed by the number of tokens, in
// double.
#include "moe_router_loss.h"

#include <cmath>
#include <limits>

#include "../../common/parallel.h"
#include "../common/exp2_vec.h"
#include "../common/scratch.h"
#include "../common/vec.h"

namespace fusedops::CPU_CAPABILITY {
namespace {

template <typename T>
class Row {
 public:
  using A = Acc<T>;
  using V = Vec<T>;
  static constexpr int64_t W = V::size();

  explicit Row(const MoeRouterLossInput& input)
      : in_(input),
        width_((input.experts + W - 1) / W * W),
        x_(width_, -std::numeric_limits<A>::infinity()),
        e_(width_),
        s_(width_, A(0)),
        falling_(width_) {}

  // Returns the loss of a token and keeps what its gradient needs.
  A loss(int64_t token) {
    const T* logits = static_cast<const T*>(in_.logits) + token * in_.experts;
    w_ = in_.weights == nullptr
             ? nullptr
             : static_cast<const A*>(in_.weights) + token / in_.tokens_per_weight * in_.experts;
    V peaks(-std::numeric_limits<A>::infinity());
    for_each_vector<W>(in_.experts, [&](int64_t c, int64_t count, auto full) {
      store_vec(x_.data() + c, load_vec(logits + c, count, full), count, full);
      peaks = at::vec::maximum(peaks, V::loadu(x_.data() + c));
    });
    A peak = at::vec::vec_reduce_all<A>(
        [](const V& p, const V& q) { return at::vec::maximum(p, q); }, peaks);
    if (std::isinf(peak)) peak = A(0);  // as torch's logsumexp: its logarithm is then infinite
    V sums(A(0));
    for (int64_t c = 0; c < width_; c += W) {
      const V e = exp_of<A>(V::loadu(x_.data() + c) - V(peak));
      e.store(e_.data() + c);
      sums = sums + e;
    }
    const A sum = sum_lanes(sums);
    inverse_ = A(1) / sum;
    lse_ = peak + std::log(sum);
    A result = static_cast<A>(in_.z_weight) * lse_ * lse_;
    if (in_.z_weight == 0.0) result = A(0);
    if (w_ == nullptr) return result;
    const A* scores = e_.data();
    A total = sum;
    if (in_.sigmoid) {
      scores = s_.data();
      total = logistic(std::min(peak, A(0)));
    }
    inverse_sum_ = A(1) / total;
    V products(A(0));
    for_each_vector<W>(in_.experts, [&](int64_t c, int64_t count, auto full) {
      products = at::vec::fmadd(V::loadu(scores + c), load_vec(w_ + c, count, full), products);
    });
    // Divided, not multiplied by the inverse: equal weights give exactly that weight.
    along_ = sum_lanes(products) / total;
    return result + along_;
  }

  // The gradient of the token that loss() was called for, times `grad`.
  void differentiate(A grad, T* to) const {
    const V balance(grad * inverse_sum_), along(along_);
    const V z(A(2) * static_cast<A>(in_.z_weight) * lse_ * grad * inverse_);
    for_each_vector<W>(in_.experts, [&](int64_t c, int64_t count, auto full) {
      const V e = V::loadu(e_.data() + c);
      V value = in_.z_weight != 0.0 ? e * z : V(A(0));
      if (w_ != nullptr) {
        const V s = V::loadu(s_.data() + c);
        const V slope = in_.sigmoid ? s * V::loadu(falling_.data() + c) : e;
        const V w = load_vec(w_ + c, count, full);
        value = at::vec::fmadd(slope * balance, w - along, value);
      }
      store_vec(to + c, value, count, full);
    });
  }

 private:
  // Sigmoids into s_, relative to exp(reference), and those of -x into falling_; returns the sum of
  // the first. The reference is 0, or the largest x where all are negative: their quotients do not
  // underflow. Lanes behind the last are 0: their logits are -inf.
  A logistic(A reference) {
    const V scale(std::exp(reference));
    V sums(A(0));
    for (int64_t c = 0; c < width_; c += W) {
      const V x = V::loadu(x_.data() + c);
      const V e = exp_of<A>(x.abs().neg() - V(reference));
      const V t = e * scale;
      const V large = V(A(1)) / (V(A(1)) + t);
      const V negative = x < V(A(0));
      const V s = V::blendv(large, e * large, negative);
      s.store(s_.data() + c);
      V::blendv(t * large, large, negative).store(falling_.data() + c);
      sums = sums + s;
    }
    return sum_lanes(sums);
  }

  const MoeRouterLossInput& in_;
  const int64_t width_;
  Scratch<A> x_, e_, s_, falling_;  // [experts, padded]
  const A* w_ = nullptr;
  A inverse_ = 0, inverse_sum_ = 0, lse_ = 0, along_ = 0;
};

inline int64_t cost_of(const MoeRouterLossInput& in) {
  return 32 * (in.experts + 32);
}

template <typename T>
void forward(const MoeRouterLossForward& a) {
  const MoeRouterLossInput& in = a.input;
  const Chunks chunks(in.tokens);
  parallel_rows(chunks.count, cost_of(in) * chunks.rows_per_chunk, [&](int64_t begin, int64_t end) {
    Row<T> row(in);
    for (int64_t chunk = begin; chunk < end; ++chunk) {
      double sum = 0.0;
      for (int64_t t = chunks.begin(chunk); t < chunks.end(chunk); ++t) {
        if (in.mask == nullptr || in.mask[t]) sum += row.loss(t);
      }
      a.partials[chunk] = sum;
    }
  });
}

template <typename T>
void backward(const MoeRouterLossBackward& a) {
  const MoeRouterLossInput& in = a.input;
  parallel_rows(in.tokens, cost_of(in), [&](int64_t begin, int64_t end) {
    Row<T> row(in);
    for (int64_t t = begin; t < end; ++t) {
      T* to = static_cast<T*>(a.grad_logits) + t * in.experts;
      if (in.mask != nullptr && !in.mask[t]) {
        std::fill(to, to + in.experts, T(0));
        continue;
      }
      row.loss(t);
      row.differentiate(static_cast<Acc<T>>(a.grad_loss), to);
    }
  });
}

}  // namespace

void moe_router_loss_forward(const MoeRouterLossForward& a) {
  switch_dtype(a.input.dtype, [&](auto t) { forward<decltype(t)>(a); });
}

void moe_router_loss_backward(const MoeRouterLossBackward& a) {
  switch_dtype(a.input.dtype, [&](auto t) { backward<decltype(t)>(a); });
}

}  // namespace fusedops::CPU_CAPABILITY
