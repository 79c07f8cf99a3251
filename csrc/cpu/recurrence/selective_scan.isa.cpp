// selective_scan on the CPU. Per channel and element of its state
//   h[t] = exp(step * A) * h[t - 1] + step * x * B,  y = (sum of h * C + D * x) * silu(z)
//
// Channels are heads of size 1. A task is 128 of a sequence, whose state, [state_dim, channels],
// stays in the cache. A vector holds one element of the state of as many channels. Tokens go in
// chunks, of which each vector of channels does all tokens, so that rows of B and C are read from
// L1.
//
// The backward first computes the states before all chunks. Of a chunk it then keeps all states and
// decays of a vector, 32 KiB for state_dim 16, and goes from the last token to the first with g,
// the gradient of the state:
//   g = g + dy * C,  dC = dy * h[t],  dB = g * step * x,  d(step * x) = sum of g * B
//   d(step * A) = g * h[t - 1] * exp(step * A),  g = g * exp(step * A)
// dB and dC are sums over channels: lanes are added up once all vectors of a task have been, and
// tasks in their order.
#include "selective_state_space.h"

#include <algorithm>

#include "../../common/parallel.h"
#include "../common/exp2_vec.h"
#include "../common/scratch.h"
#include "../elementwise/gelu_vec.h"
#include "scan_rows.h"

namespace fusedops::CPU_CAPABILITY {
namespace {

constexpr int64_t kScanTokens = 16;  // of a chunk

// What forward and backward share: the channels [first, first + count) of a sequence.
template <typename T>
class Scan {
 protected:
  using A = Acc<T>;
  using V = Vec<T>;
  static constexpr int64_t W = V::size();

  explicit Scan(const StateSpace& call)
      : call_(call),
        layout_(call.heads_per_task(), call.state_dim),
        rates_(layout_.size()),
        state_(layout_.size()),
        buffer_(layout_.size()),
        b_(kScanTokens * layout_.depth),
        c_(kScanTokens * layout_.depth) {}

  void set_channels(int64_t sequence, int64_t first, int64_t count) {
    sequence_ = sequence;
    first_ = first;
    count_ = count;
    begin_ = call_.starts[sequence];
    end_ = call_.starts[sequence + 1];
    const auto* rates = static_cast<const A*>(call_.a) + first * call_.state_dim;
    layout_.load(rates, count, buffer_.data(), rates_.data());
    load_state(call_.initial_state, state_.data());
  }

  // Offset of the channels in states of memory.
  int64_t place() const { return (sequence_ * call_.heads + first_) * call_.state_dim; }

  void load_state(const void* states, A* to) {
    const auto* from = static_cast<const A*>(states);
    layout_.load(from == nullptr ? nullptr : from + place(), count_, buffer_.data(), to);
  }

  // Reads B and C of a chunk.
  void set_tokens(int64_t row, int64_t tokens) {
    row_ = row;
    tokens_ = tokens;
    for (int64_t t = 0; t < tokens; ++t) {
      load_row(static_cast<const T*>(call_.b.data) + (row + t) * call_.b.stride, call_.state_dim,
               b_.data() + t * layout_.depth);
      load_row(static_cast<const T*>(call_.c.data) + (row + t) * call_.c.stride, call_.state_dim,
               c_.data() + t * layout_.depth);
    }
  }

  template <typename F>
  void for_each_channels(const F& body) {
    for_each_vector<W>(count_, body);
  }

  // Elements of a row of tokens, where there are any.
  template <typename Full>
  V row_of(const TokenRows& rows, int64_t t, int64_t column, int64_t lanes, Full full) const {
    return load_vec(static_cast<const T*>(rows.data) + (row_ + t) * rows.stride + first_ + column,
                    lanes, full);
  }

  template <typename Full>
  V step_of(int64_t t, int64_t column, int64_t lanes, Full full) const {
    const A* steps = static_cast<const A*>(call_.steps) + dense(t, column);
    return load_vec(steps, lanes, full);
  }

  template <typename Full>
  V d_of(int64_t column, int64_t lanes, Full full) const {
    if (call_.d == nullptr) return V(A(0));
    return load_vec(static_cast<const A*>(call_.d) + first_ + column, lanes, full);
  }

  int64_t dense(int64_t t, int64_t column) const {
    return (row_ + t) * call_.heads + first_ + column;
  }

  // Goes one token on in the states of one vector of channels: body(n, decay, state after it),
  // while the state before it is still in its place.
  template <typename F>
  inline void advance(int64_t t, int64_t column, const V& step, const V& x, A* state,
                      const F& body) const {
    const V added = step * x;
    const A *rates = rates_.data() + column, *b = b_.data() + t * layout_.depth;
    for (int64_t n = 0; n < call_.state_dim; ++n) {
      A* at = state + n * layout_.width + column;
      const V decay = exp_of<A>(step * V::loadu(rates + n * layout_.width));
      const V after = at::vec::fmadd(decay, V::loadu(at), added * V(b[n]));
      body(n, decay, after);
      after.store(at);
    }
  }

  const StateSpace& call_;
  const StateLayout<A> layout_;
  Scratch<A> rates_, state_, buffer_, b_, c_;
  int64_t sequence_ = 0, first_ = 0, count_ = 0, begin_ = 0, end_ = 0, row_ = 0, tokens_ = 0;
};

template <typename T>
class ScanForward : Scan<T> {
  using Base = Scan<T>;
  using typename Base::A;
  using typename Base::V;

 public:
  explicit ScanForward(const StateSpaceForward& f) : Base(f.call), f_(f) {}

  void run(int64_t sequence, int64_t first, int64_t count, int64_t) {
    this->set_channels(sequence, first, count);
    for (int64_t row = this->begin_; row < this->end_; row += kScanTokens) {
      this->set_tokens(row, std::min(kScanTokens, this->end_ - row));
      this->for_each_channels([&](int64_t column, int64_t lanes, auto full) {
        for (int64_t t = 0; t < this->tokens_; ++t) run_token(t, column, lanes, full);
      });
    }
    A* to = static_cast<A*>(f_.state) + this->place();
    this->layout_.store(this->state_.data(), count, this->buffer_.data(), to);
  }

 private:
  template <typename Full>
  void run_token(int64_t t, int64_t column, int64_t lanes, Full full) {
    const StateSpace& a = f_.call;
    const V x = this->row_of(a.input, t, column, lanes, full);
    const A* c = this->c_.data() + t * this->layout_.depth;
    V y(A(0));
    this->advance(
        t, column, this->step_of(t, column, lanes, full), x, this->state_.data(),
        [&](int64_t n, const V&, const V& after) { y = at::vec::fmadd(after, V(c[n]), y); });
    y = at::vec::fmadd(this->d_of(column, lanes, full), x, y);
    if (a.z.data != nullptr) {
      y = y * gelu_value<T, Activation::silu>(this->row_of(a.z, t, column, lanes, full));
    }
    store_vec(static_cast<T*>(f_.output) + this->dense(t, column), y, lanes, full);
  }

  const StateSpaceForward& f_;
};

template <typename T>
class ScanBackward : Scan<T> {
  using Base = Scan<T>;
  using Base::W;
  using typename Base::A;
  using typename Base::V;

 public:
  explicit ScanBackward(const StateSpaceBackward& f)
      : Base(f.call),
        f_(f),
        grad_state_(size()),
        grad_a_(size()),
        grad_d_(this->layout_.width),
        states_(kept()),
        decays_(kept()),
        outputs_(kScanTokens * W),
        grad_b_(kept()),
        grad_c_(kept()) {}

  void run(int64_t sequence, int64_t first, int64_t count, int64_t task) {
    this->set_channels(sequence, first, count);
    this->load_state(f_.grad_state, grad_state_.data());
    std::fill(grad_a_.begin(), grad_a_.end(), A(0));
    std::fill(grad_d_.begin(), grad_d_.end(), A(0));
    const int64_t begin = this->begin_, end = this->end_;
    const int64_t chunks = (end - begin + kScanTokens - 1) / kScanTokens;
    before_.resize(std::max<size_t>(before_.size(), chunks * size()));
    for (int64_t number = 0; number < chunks; ++number) {
      std::copy_n(this->state_.data(), size(), before_.data() + number * size());
      if (number + 1 == chunks) break;
      this->set_tokens(begin + number * kScanTokens, kScanTokens);
      this->for_each_channels([&](int64_t column, int64_t lanes, auto full) {
        for (int64_t t = 0; t < this->tokens_; ++t) {
          const V x = this->row_of(f_.call.input, t, column, lanes, full);
          this->advance(t, column, this->step_of(t, column, lanes, full), x, this->state_.data(),
                        [](int64_t, const V&, const V&) {});
        }
      });
    }
    for (int64_t number = chunks - 1; number >= 0; --number) {
      const int64_t row = begin + number * kScanTokens;
      this->set_tokens(row, std::min(kScanTokens, end - row));
      std::fill(grad_b_.begin(), grad_b_.end(), A(0));
      std::fill(grad_c_.begin(), grad_c_.end(), A(0));
      this->for_each_channels([&](int64_t column, int64_t lanes, auto full) {
        repeat(before_.data() + number * size(), column, lanes, full);
        for (int64_t t = this->tokens_ - 1; t >= 0; --t) run_token(t, column, lanes, full);
      });
      add_lanes(task);
    }
    const auto store = [&](const A* from, void* to) {
      this->layout_.store(from, count, this->buffer_.data(), static_cast<A*>(to) + this->place());
    };
    if (f_.grad_initial_state != nullptr) store(grad_state_.data(), f_.grad_initial_state);
    store(grad_a_.data(), f_.sequence_a);
    std::copy_n(grad_d_.data(), count,
                static_cast<A*>(f_.sequence_d) + sequence * f_.call.heads + first);
  }

 private:
  int64_t size() const { return this->layout_.size(); }
  int64_t kept() const { return kScanTokens * f_.call.state_dim * W; }
  int64_t at(int64_t t, int64_t n) const { return (t * f_.call.state_dim + n) * W; }

  // Keeps the states before the tokens of a chunk, the decays and the outputs without D.
  template <typename Full>
  void repeat(A* state, int64_t column, int64_t lanes, Full full) {
    for (int64_t t = 0; t < this->tokens_; ++t) {
      const V x = this->row_of(f_.call.input, t, column, lanes, full);
      const A* c = this->c_.data() + t * this->layout_.depth;
      V y(A(0));
      const auto keep = [&](int64_t n, const V& decay, const V& after) {
        decay.store(decays_.data() + at(t, n));
        // The state before the token is still there.
        V::loadu(state + n * this->layout_.width + column).store(states_.data() + at(t, n));
        y = at::vec::fmadd(after, V(c[n]), y);
      };
      this->advance(t, column, this->step_of(t, column, lanes, full), x, state, keep);
      y.store(outputs_.data() + t * W);
    }
  }

  template <typename Full>
  void run_token(int64_t t, int64_t column, int64_t lanes, Full full) {
    const StateSpace& a = f_.call;
    const int64_t width = this->layout_.width, dense = this->dense(t, column);
    const A* b = this->b_.data() + t * this->layout_.depth;
    const A* c = this->c_.data() + t * this->layout_.depth;
    const V x = this->row_of(a.input, t, column, lanes, full);
    const V step = this->step_of(t, column, lanes, full), d = this->d_of(column, lanes, full);
    V grad(A(0));
    if (f_.grad_output.data != nullptr) {
      grad = this->row_of(f_.grad_output, t, column, lanes, full);
    }
    if (a.z.data != nullptr) {
      const V z = this->row_of(a.z, t, column, lanes, full);
      if (f_.grad_z != nullptr) {
        const V y = at::vec::fmadd(d, x, V::loadu(outputs_.data() + t * W));
        store_vec(static_cast<T*>(f_.grad_z) + dense, grad * y * gelu_slope<T, Activation::silu>(z),
                  lanes, full);
      }
      grad = grad * gelu_value<T, Activation::silu>(z);
    }
    const V added = step * x, zero(A(0));
    V of_added = zero, of_step = zero;
    for (int64_t n = 0; n < a.state_dim; ++n) {
      const int64_t kept = at(t, n), place = n * width + column;
      const V before = V::loadu(states_.data() + kept), decay = V::loadu(decays_.data() + kept);
      const V after = at::vec::fmadd(decay, before, added * V(b[n]));
      const V of_state = at::vec::fmadd(grad, V(c[n]), V::loadu(grad_state_.data() + place));
      V of_b = of_state * added, of_c = grad * after;
      if constexpr (!Full::value) {
        of_b = V::set(zero, of_b, lanes);
        of_c = V::set(zero, of_c, lanes);
      }
      A *sum_b = grad_b_.data() + kept, *sum_c = grad_c_.data() + kept;
      (V::loadu(sum_b) + of_b).store(sum_b);
      (V::loadu(sum_c) + of_c).store(sum_c);
      of_added = at::vec::fmadd(of_state, V(b[n]), of_added);
      const V left = of_state * decay, exponent = left * before;
      of_step = at::vec::fmadd(exponent, V::loadu(this->rates_.data() + place), of_step);
      A* sum_a = grad_a_.data() + place;
      at::vec::fmadd(exponent, step, V::loadu(sum_a)).store(sum_a);
      left.store(grad_state_.data() + place);
    }
    A* sum_d = grad_d_.data() + column;
    at::vec::fmadd(grad, x, V::loadu(sum_d)).store(sum_d);
    store_vec(static_cast<T*>(f_.grad_input) + dense, at::vec::fmadd(of_added, step, d * grad),
              lanes, full);
    store_vec(static_cast<A*>(f_.grad_steps) + dense, at::vec::fmadd(of_added, x, of_step), lanes,
              full);
  }

  // The part of dB and dC of these channels.
  void add_lanes(int64_t task) {
    const StateSpace& a = f_.call;
    A* to = static_cast<A*>(f_.shares) + (task * a.tokens() + this->row_) * a.state_dim;
    for (const auto* from : {&grad_b_, &grad_c_}) {
      for (int64_t i = 0; i < this->tokens_ * a.state_dim; ++i) {
        to[i] = sum_lanes(V::loadu(from->data() + i * W));
      }
      to += a.tasks_per_group() * a.tokens() * a.state_dim;
    }
  }

  const StateSpaceBackward& f_;
  Scratch<A> grad_state_, grad_a_, grad_d_, states_, decays_, outputs_, grad_b_, grad_c_, before_;
};

// Runs all tasks by objects of class Run, of which each thread has one.
template <typename Run, typename Call>
void run_scan(const Call& f) {
  share_tasks(f.call.num_tasks(), [&](const auto& next) {
    Run run(f);
    for (int64_t task; (task = next()) >= 0;) {
      f.call.for_task(task, [&](auto... where) { run.run(where...); });
    }
  });
}

}  // namespace

void selective_scan_forward(const StateSpaceForward& f) {
  switch_dtype(f.call.dtype, [&](auto t) { run_scan<ScanForward<decltype(t)>>(f); });
}

void selective_scan_backward(const StateSpaceBackward& f) {
  switch_dtype(f.call.dtype, [&](auto t) {
    using T = decltype(t);
    run_scan<ScanBackward<T>>(f);
    add_parts<T>(f, f.call.heads * f.call.state_dim);
  });
}

}  // namespace fusedops::CPU_CAPABILITY
