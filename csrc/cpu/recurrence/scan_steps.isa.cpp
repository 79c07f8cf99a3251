// The steps of state space models on the CPU: one pass over dt, whose size is a small part of the
// input's.
#include "scan_steps.h"

#include <algorithm>

#include "../../common/parallel.h"
#include "../common/vec.h"

namespace fusedops::CPU_CAPABILITY {
namespace {

constexpr double kSoftplusLimit = 20.0;  // torch's: softplus is the identity above it

template <typename A>
struct Steps {
  using V = Vec<A>;

  explicit Steps(const ScanSteps& call) : call(call) {}

  template <typename Full>
  V raw(int64_t row, int64_t column, int64_t count, Full full) const {
    const V dt =
        load_vec(static_cast<const A*>(call.dt) + row * call.columns + column, count, full);
    if (call.bias == nullptr) return dt;
    return dt + load_vec(static_cast<const A*>(call.bias) + column, count, full);
  }

  V positive(const V& raw) const {
    if (!call.softplus) return raw;
    const V limit(static_cast<A>(kSoftplusLimit));
    return V::blendv(at::vec::minimum(raw, limit).exp().log1p(), raw, raw > limit);
  }

  V step(const V& raw) const {
    const V least(static_cast<A>(call.least)), most(static_cast<A>(call.most));
    return at::vec::minimum(at::vec::maximum(positive(raw), least), most);  // NaN stays
  }

  V gradient(const V& raw, const V& grad) const {
    const V value = positive(raw), zero(A(0)), one(A(1));
    const V least(static_cast<A>(call.least)), most(static_cast<A>(call.most));
    const V passed = V::blendv(zero, grad, (value >= least) & (value <= most));
    if (!call.softplus) return passed;
    const V slope = one / (one + raw.neg().exp());
    return passed * V::blendv(slope, one, raw > V(static_cast<A>(kSoftplusLimit)));
  }

  const ScanSteps& call;
};

template <typename F>
void with_type(DType dtype, const F& f) {
  dtype == DType::f64 ? f(double()) : f(float());
}

}  // namespace

void scan_steps_forward(const ScanSteps& call, void* steps) {
  with_type(call.dtype, [&](auto a) {
    using A = decltype(a);
    const Steps<A> of(call);
    parallel_rows(call.rows, 8 * call.columns * sizeof(A), [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        A* to = static_cast<A*>(steps) + row * call.columns;
        for_each_vector<Vec<A>::size()>(call.columns, [&](int64_t c, int64_t count, auto full) {
          store_vec(to + c, of.step(of.raw(row, c, count, full)), count, full);
        });
      }
    });
  });
}

void scan_steps_backward(const ScanSteps& call, void* grads, void* partials, void* grad_bias) {
  with_type(call.dtype, [&](auto a) {
    using A = decltype(a);
    const Steps<A> of(call);
    const Chunks chunks(call.rows);
    const int64_t bytes = 8 * call.columns * sizeof(A) * std::min(call.rows, chunks.rows_per_chunk);
    parallel_rows(chunks.count, bytes, [&](int64_t first, int64_t last) {
      for (int64_t chunk = first; chunk < last; ++chunk) {
        A* sums = partials == nullptr ? nullptr : static_cast<A*>(partials) + chunk * call.columns;
        if (sums != nullptr) std::fill_n(sums, call.columns, A(0));
        for (int64_t row = chunks.begin(chunk); row < chunks.end(chunk); ++row) {
          A* to = static_cast<A*>(grads) + row * call.columns;
          for_each_vector<Vec<A>::size()>(call.columns, [&](int64_t c, int64_t count, auto full) {
            const auto raw = of.raw(row, c, count, full);
            const auto grad = of.gradient(raw, load_vec(to + c, count, full));
            store_vec(to + c, grad, count, full);
            if (sums != nullptr) {
              store_vec(sums + c, load_vec(sums + c, count, full) + grad, count, full);
            }
          });
        }
      }
    });
    if (grad_bias != nullptr) {
      sum_partials(static_cast<const A*>(partials), chunks.count, call.columns, call.columns,
                   static_cast<A*>(grad_bias));
    }
  });
}

}  // namespace fusedops::CPU_CAPABILITY
