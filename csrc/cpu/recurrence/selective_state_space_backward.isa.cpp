// The backward of selective_state_space on the CPU (formulae of the forward: state_space_chunk.h).
//
// A task is that of the forward. It computes the states before all chunks once more, and then goes
// through the chunks from the last to the first with the gradients of its states. With dS of the
// state after the chunk, dY of the outputs, M of the scores and r = exp(total), l = exp(total[last]
// - total):
//   E = lower(dY @ (step * x).T) * M
//   d(step * x) = M.T @ dY + l * (B @ dS),  dG = lower(dY @ (step * x).T) * decays
//   dC = dG @ B + (r * dY) @ S,  dB = dG.T @ C + (l * step * x) @ dS
//   d(step * A)[i] = sum of E[k, j] over j < i <= k, of (l * step * x) . (B @ dS) over tokens
//   before
//     i, and of C . ((r * dY) @ S) over tokens from i on, and dS . (exp(total[last]) * S)
// whose terms do not cancel, as the difference of what rows and columns get would where decays are
// strong. The parts of dB and dC of each task are added in the
// order of the tasks of a group.
#include <algorithm>

#include "../../common/parallel.h"
#include "../elementwise/gelu_vec.h"
#include "selective_state_space.h"
#include "state_space_chunk.h"

namespace fusedops::CPU_CAPABILITY {
namespace {

template <typename T>
class Backward {
  using A = Acc<T>;
  using V = Vec<T>;
  static constexpr int64_t L = kChunkTokens;

 public:
  explicit Backward(const StateSpaceBackward& f)
      : f_(f),
        a_(f.call),
        chunk_(f.call),
        layout_(f.call.head_dim, f.call.state_dim),
        width_(chunk_.width),
        depth_(chunk_.depth),
        memory_(L * (5 * width_ + 3 * depth_ + 2 * L + 3) + 2 * size() + width_ * L),
        grad_states_(a_.heads_per_task() * size()) {
    A* next = memory_.data();
    const auto take = [&](int64_t count) { return std::exchange(next, next + count); };
    grad_ = take(L * width_);
    grad_rise_ = take(L * width_);
    outputs_ = take(L * width_);
    grad_x_ = take(L * width_);
    from_state_ = take(L * width_);
    grad_b_ = take(L * depth_);
    grad_c_ = take(L * depth_);
    c_share_ = take(L * depth_);
    grad_scores_ = take(L * L);
    grad_products_ = take(L * L);
    grad_exponents_ = take(L);
    of_states_ = take(L);
    columns_ = take(L);
    state_rows_ = take(size());
    grad_state_rows_ = take(size());
    x_columns_ = take(width_ * L);
  }

  void run(int64_t sequence, int64_t first_head, int64_t num_heads, int64_t part) {
    const int64_t begin = a_.starts[sequence], end = a_.starts[sequence + 1];
    const int64_t place = (sequence * a_.heads + first_head) * a_.state_size();
    group_ = first_head / (a_.heads / a_.groups);
    for (int64_t h = 0; h < num_heads; ++h) {
      of_a(sequence, first_head + h) = of_d(sequence, first_head + h) = A(0);
      const A* from = static_cast<const A*>(f_.grad_state);
      if (from != nullptr) from += place + h * a_.state_size();
      layout_.load(from, a_.head_dim, state_rows_, grad_state(h));
    }
    const int64_t chunks = (end - begin + L - 1) / L;
    compute_states(begin, chunks, first_head, num_heads, place);
    for (int64_t number = chunks - 1; number >= 0; --number) {
      const int64_t row = begin + number * L;
      chunk_.load_group(row, std::min(L, end - row), group_);
      for (A* buffer : {grad_b_, grad_c_}) std::fill_n(buffer, L * depth_, A(0));
      std::fill_n(grad_products_, L * L, A(0));
      for (int64_t h = 0; h < num_heads; ++h) {
        const bool has_state = number > 0 || a_.initial_state != nullptr;
        const A* before = has_state ? state(number, h, num_heads) : nullptr;
        run_head(sequence, first_head + h, before, grad_state(h));
      }
      finish_group(part);
    }
    if (f_.grad_initial_state == nullptr) return;
    for (int64_t h = 0; h < num_heads; ++h) {
      A* to = static_cast<A*>(f_.grad_initial_state) + place + h * a_.state_size();
      layout_.store(grad_state(h), a_.head_dim, state_rows_, to);
    }
  }

 private:
  int64_t size() const { return layout_.size(); }
  A* grad_state(int64_t h) { return grad_states_.data() + h * size(); }
  A* state(int64_t chunk, int64_t h, int64_t num_heads) {
    return states_.data() + (chunk * num_heads + h) * size();
  }
  A& of_a(int64_t sequence, int64_t head) {
    return static_cast<A*>(f_.sequence_a)[sequence * a_.heads + head];
  }
  A& of_d(int64_t sequence, int64_t head) {
    return static_cast<A*>(f_.sequence_d)[sequence * a_.heads + head];
  }

  template <typename Pointer>
  static auto at(Pointer data, int64_t offset) {
    using To = std::conditional_t<std::is_const_v<std::remove_pointer_t<Pointer>>, const T*, T*>;
    return data == nullptr ? nullptr : static_cast<To>(data) + offset;
  }

  // The states before the chunks, as the forward had them.
  void compute_states(int64_t begin, int64_t chunks, int64_t first_head, int64_t num_heads,
                      int64_t place) {
    states_.resize(std::max<size_t>(states_.size(), chunks * num_heads * size()));
    const auto* initial = static_cast<const A*>(a_.initial_state);
    for (int64_t h = 0; chunks > 0 && initial != nullptr && h < num_heads; ++h) {
      layout_.load(initial + place + h * a_.state_size(), a_.head_dim, state_rows_,
                   state(0, h, num_heads));
    }
    for (int64_t number = 0; number + 1 < chunks; ++number) {
      chunk_.load_b(begin + number * L, L, group_);
      for (int64_t h = 0; h < num_heads; ++h) {
        const bool has_state = number > 0 || initial != nullptr;
        A* after = state(number + 1, h, num_heads);
        if (has_state) std::copy_n(state(number, h, num_heads), size(), after);
        chunk_.load_head(first_head + h);
        chunk_.accumulate(chunk_.b, chunk_.x_left, after, has_state);
      }
    }
  }

  // One head in one chunk; `state` is before it or null, `grad_state` after it and then before it.
  void run_head(int64_t sequence, int64_t head, const A* state, A* grad_state) {
    const int64_t count = chunk_.count;
    chunk_.load_head(head);
    chunk_.load_scores();
    const A d = a_.d == nullptr ? A(0) : static_cast<const A*>(a_.d)[head];
    load_gradients(head, state, d);
    for (int64_t i = 0; i < count; ++i) {
      of_d(sequence, head) += dot_row(grad_ + i * width_, chunk_.x + i * width_, a_.head_dim);
    }
    grad_within();
    A last = grad_from_states(state, grad_state);
    const A rate = static_cast<const A*>(a_.a)[head];
    A* steps = static_cast<A*>(f_.grad_steps) + chunk_.first * a_.heads + head;
    for (int64_t i = count - 1; i >= 0; --i) {
      last += of_states_[i];
      const A grad_exponent = last + grad_exponents_[i];
      const A* grad = grad_x_ + i * width_;
      of_a(sequence, head) += grad_exponent * chunk_.step[i];
      steps[i * a_.heads] =
          rate * grad_exponent + dot_row(chunk_.x + i * width_, grad, a_.head_dim);
      T* to = at(f_.grad_input, place(chunk_.first + i, head));
      for_each_vector<V::size()>(a_.head_dim, [&](int64_t p, int64_t lanes, auto full) {
        const V direct = V(d) * load_vec(grad_ + i * width_ + p, lanes, full);
        const V value = load_vec(grad + p, lanes, full);
        store_vec(to + p, at::vec::fmadd(V(chunk_.step[i]), value, direct), lanes, full);
      });
    }
    chunk_.accumulate(chunk_.c, grad_rise_, grad_state, true);
  }

  int64_t place(int64_t row, int64_t head) const { return (row * a_.heads + head) * a_.head_dim; }

  // dY, and the gradient of z, for which the outputs are computed once more.
  void load_gradients(int64_t head, const A* state, A d) {
    if (a_.z.data != nullptr) chunk_.outputs(state, outputs_);
    for (int64_t i = 0; i < chunk_.rows; ++i) {
      A* grad = grad_ + i * width_;
      const int64_t row = chunk_.first + i, column = head * a_.head_dim;
      if (i >= chunk_.count || f_.grad_output.data == nullptr) {
        std::fill_n(grad, width_, A(0));
      } else {
        load_row(at(f_.grad_output.data, row * f_.grad_output.stride + column), a_.head_dim, grad);
      }
      if (i < chunk_.count && a_.z.data != nullptr) {
        const T* z = at(a_.z.data, row * a_.z.stride + column);
        T* grad_z = at(f_.grad_z, place(row, head));
        for_each_vector<V::size()>(a_.head_dim, [&](int64_t p, int64_t lanes, auto full) {
          const V gate = load_vec(z + p, lanes, full), g = load_vec(grad + p, lanes, full);
          const V x = load_vec(chunk_.x + i * width_ + p, lanes, full);
          const V y = at::vec::fmadd(V(d), x, load_vec(outputs_ + i * width_ + p, lanes, full));
          const V slope = gelu_slope<T, Activation::silu>(gate);
          if (grad_z != nullptr) store_vec(grad_z + p, g * y * slope, lanes, full);
          store_vec(grad + p, g * gelu_value<T, Activation::silu>(gate), lanes, full);
        });
      }
      scale_row(i < chunk_.count ? chunk_.rise[i] : A(0), grad, width_, grad_rise_ + i * width_);
    }
  }

  // The part of dG, and of d(step * x) and d(step * A) what is from other tokens of the chunk.
  void grad_within() {
    const int64_t count = chunk_.count, across = padded_size(count);
    transpose_small(chunk_.x_step, width_, across, width_, x_columns_, L);
    multiply_small(SmallProduct<A>{.a = {grad_, width_, 1},
                                   .b = x_columns_,
                                   .b_stride = L,
                                   .c = grad_scores_,
                                   .c_stride = L,
                                   .rows = chunk_.rows,
                                   .columns = across,
                                   .depth = a_.head_dim,
                                   .lower_triangle = true});
    // Of E the sums of columns from row i on.
    std::fill_n(columns_, L, A(0));
    for (int64_t i = count - 1; i >= 0; --i) {
      V sum(A(0));
      for (int64_t j = 0; j <= i; j += V::size()) {
        const int64_t at = i * L + j, lanes = std::min<int64_t>(V::size(), i + 1 - j);
        const V grad = V::set(V(A(0)), V::loadu(grad_scores_ + at), lanes);
        const V product = grad * V::loadu(chunk_.decays + at);
        (V::loadu(grad_products_ + at) + product).store(grad_products_ + at);
        const V column = at::vec::fmadd(grad, V::loadu(chunk_.scores + at), V::loadu(columns_ + j));
        column.store(columns_ + j);
        sum = sum + V::set(V(A(0)), column, std::min<int64_t>(V::size(), i - j));
      }
      // The diagonal has no decay; NaN in it is NaN here too.
      const int64_t diagonal = i * L + i;
      grad_exponents_[i] = sum_lanes(sum) + 0 * (grad_scores_[diagonal] * chunk_.scores[diagonal]);
    }
    multiply_small<Shape::upper>(SmallProduct<A>{.a = {chunk_.scores, 1, L},
                                                 .b = grad_,
                                                 .b_stride = width_,
                                                 .c = grad_x_,
                                                 .c_stride = width_,
                                                 .rows = chunk_.rows,
                                                 .columns = width_,
                                                 .depth = count});
  }

  // What is from the states before and after the chunk. Returns what all exponents get of the state
  // that passes through it.
  A grad_from_states(const A* state, const A* grad_state) {
    A written = 0;
    SmallProduct<A> product{.a = {chunk_.b, depth_, 1},
                            .b = grad_state,
                            .b_stride = width_,
                            .c = from_state_,
                            .c_stride = width_,
                            .rows = chunk_.rows,
                            .columns = width_,
                            .depth = a_.state_dim};
    multiply_small(product);
    for (int64_t i = 0; i < chunk_.count; ++i) {
      const A* from = from_state_ + i * width_;
      grad_exponents_[i] += written;
      written += dot_row(chunk_.x_left + i * width_, from, a_.head_dim);
      A* grad = grad_x_ + i * width_;
      for (int64_t p = 0; p < width_; p += V::size()) {
        at::vec::fmadd(V(chunk_.left[i]), V::loadu(from + p), V::loadu(grad + p)).store(grad + p);
      }
    }
    transpose_small(grad_state, width_, depth_, width_, grad_state_rows_, depth_);
    product = {.a = {chunk_.x_left, width_, 1},
               .b = grad_state_rows_,
               .b_stride = depth_,
               .c = grad_b_,
               .c_stride = depth_,
               .rows = chunk_.rows,
               .columns = depth_,
               .depth = a_.head_dim,
               .start = Start::add};
    multiply_small(product);
    std::fill_n(of_states_, L, A(0));
    if (state == nullptr) return A(0);
    transpose_small(state, width_, depth_, width_, state_rows_, depth_);
    product.a = {grad_rise_, width_, 1};
    product.b = state_rows_;
    product.c = c_share_;
    product.start = Start::zero;
    multiply_small(product);
    for (int64_t i = 0; i < chunk_.count; ++i) {
      const A* share = c_share_ + i * depth_;
      of_states_[i] = dot_row(chunk_.c + i * depth_, share, a_.state_dim);
      A* sum = grad_c_ + i * depth_;
      for (int64_t n = 0; n < depth_; n += V::size()) {
        (V::loadu(sum + n) + V::loadu(share + n)).store(sum + n);
      }
    }
    A after = 0;
    for (int64_t n = 0; n < a_.state_dim; ++n) {
      after += dot_row(grad_state + n * width_, state + n * width_, a_.head_dim);
    }
    return chunk_.decay() * after;
  }

  // dB and dC of the chunk, the part of these heads.
  void finish_group(int64_t part) {
    SmallProduct<A> product{.a = {grad_products_, L, 1},
                            .b = chunk_.b,
                            .b_stride = depth_,
                            .c = grad_c_,
                            .c_stride = depth_,
                            .rows = chunk_.rows,
                            .columns = depth_,
                            .depth = chunk_.count,
                            .start = Start::add};
    multiply_small<Shape::lower>(product);
    product.a = {grad_products_, 1, L};
    product.b = chunk_.c;
    product.c = grad_b_;
    multiply_small<Shape::upper>(product);
    const int64_t columns = a_.groups * a_.state_dim, all = a_.tokens() * columns;
    A* to =
        static_cast<A*>(f_.shares) + part * all + chunk_.first * columns + group_ * a_.state_dim;
    for (const A* from : {grad_b_, grad_c_}) {
      for (int64_t i = 0; i < chunk_.count; ++i) {
        std::copy_n(from + i * depth_, a_.state_dim, to + i * columns);
      }
      to += a_.tasks_per_group() * all;
    }
  }

  const StateSpaceBackward& f_;
  const StateSpace& a_;
  StateSpaceChunk<T> chunk_;
  const StateLayout<A> layout_;
  const int64_t width_, depth_;
  int64_t group_ = 0;
  Scratch<A> memory_, grad_states_, states_;
  A *grad_, *grad_rise_, *outputs_, *grad_x_, *from_state_, *grad_b_, *grad_c_, *c_share_;
  A *grad_scores_, *grad_products_, *grad_exponents_, *of_states_, *columns_;
  A *state_rows_, *grad_state_rows_, *x_columns_;
};

}  // namespace

void selective_state_space_backward(const StateSpaceBackward& f) {
  switch_dtype(f.call.dtype, [&](auto t) {
    using T = decltype(t);
    share_tasks(f.call.num_tasks(), [&](const auto& next) {
      Backward<T> backward(f);
      for (int64_t task; (task = next()) >= 0;) {
        f.call.for_task(task, [&](auto... where) { backward.run(where...); });
      }
    });
    add_parts<T>(f, f.call.heads);
  });
}

}  // namespace fusedops::CPU_CAPABILITY
