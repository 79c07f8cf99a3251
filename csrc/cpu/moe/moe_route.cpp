// Binding of moe_route on the CPU: fusedops_cpp::moe_route and its backward, and what a capacity
// drops. Arguments were checked by fusedops/ops/moe_route.py.
#include "moe_route.h"

#include <algorithm>
#include <array>
#include <vector>

#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "../../common/binding.h"
#include "../../common/parallel.h"

namespace fusedops {
namespace {

using Optional = std::optional<at::Tensor>;

struct Slots {
  int32_t* ids;  // [tokens, top_k]
  bool* kept;
  int64_t tokens;
  int64_t top_k;
  int64_t experts;
  int64_t capacity;
};

// A drop counts by expert: choices that were handed in are looked through.
void check_chosen(const at::Tensor& chosen, int64_t experts) {
  const auto* id = chosen.const_data_ptr<int32_t>();
  for (int64_t slot = 0; slot < chosen.numel(); ++slot) {
    TORCH_CHECK_VALUE(id[slot] >= 0 && id[slot] < experts, "moe_route: chosen must be in [0, ",
                      experts, "), got ", id[slot], " at slot ", slot);
  }
}

// Keeps the first slots of each expert, the first choices of all tokens before any second one. One
// pass over the slots, on one thread: a nanosecond a slot. With `repeat` a token whose choice was
// dropped makes the same one in every later round.
void drop_by_position(const Slots& s, bool repeat) {
  std::vector<int64_t> taken(s.experts, 0);
  for (int64_t j = 0; j < s.top_k; ++j) {
    for (int64_t slot = j; slot < s.tokens * s.top_k; slot += s.top_k) {
      if (repeat && j > 0 && !s.kept[slot - 1]) {
        s.ids[slot] = s.ids[slot - 1];
        s.kept[slot] = false;
      } else {
        s.kept[slot] = taken[s.ids[slot]]++ < s.capacity;
      }
    }
  }
}

// Keeps the slots of largest weight of each expert; of equal ones the first.
template <typename A>
void drop_by_probability(const Slots& s, const A* probs) {
  const int64_t slots = s.tokens * s.top_k;
  std::vector<int64_t> begin(s.experts + 1, 0);
  for (int64_t slot = 0; slot < slots; ++slot) ++begin[s.ids[slot] + 1];
  for (int64_t e = 0; e < s.experts; ++e) begin[e + 1] += begin[e];
  std::vector<int64_t> of_expert(slots), next(begin.begin(), begin.end() - 1);
  for (int64_t slot = 0; slot < slots; ++slot) of_expert[next[s.ids[slot]]++] = slot;
  const auto better = [probs](int64_t p, int64_t q) {
    return probs[p] > probs[q] || (probs[p] == probs[q] && p < q);
  };
  parallel_rows(s.experts, 64 * (slots / std::max<int64_t>(1, s.experts)),
                [&](int64_t first, int64_t last) {
                  for (int64_t e = first; e < last; ++e) {
                    const auto from = of_expert.begin() + begin[e];
                    const auto to = of_expert.begin() + begin[e + 1];
                    const auto kept = from + std::min(s.capacity, begin[e + 1] - begin[e]);
                    std::nth_element(from, kept, to, better);
                    for (auto slot = from; slot != to; ++slot) s.kept[*slot] = slot < kept;
                  }
                });
}

void drop(const Slots& slots, const at::Tensor& probs, std::string_view policy) {
  if (policy == "position" || policy == "rounds") {
    return drop_by_position(slots, policy == "rounds");
  }
  with_statistics(probs, [&](const auto* values) { drop_by_probability(slots, values); });
}

MoeRouteOptions options_of(const at::Tensor& logits, const at::Tensor& seed, int64_t slots,
                           std::string_view score, bool normalize, double scaling,
                           int64_t num_groups, int64_t topk_groups, std::string_view group_score,
                           double jitter, std::string_view drop_policy) {
  return {logits.size(0),
          logits.size(1),
          slots,
          score == "sigmoid",
          normalize,
          scaling,
          num_groups,
          topk_groups,
          group_score == "top2_sum",
          drop_policy == "expert_choice",
          seed.defined() ? seed.const_data_ptr<int64_t>() : nullptr,
          jitter,
          dtype_of(logits)};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> forward(
    const at::Tensor& logits, const Optional& bias, const Optional& seed, const Optional& chosen,
    const Optional& chosen_kept, int64_t top_k, std::string_view score, bool normalize,
    double scaling, int64_t num_groups, int64_t topk_groups, std::string_view group_score,
    double jitter, int64_t capacity, std::string_view drop_policy) {
  const auto x = logits.contiguous();
  const auto wide = statistics_type(x);
  const auto added = bias.has_value() ? bias->to(wide).contiguous() : at::Tensor();
  const auto pair = dense(seed), given = dense(chosen);
  const int64_t tokens = x.size(0), experts = x.size(1);
  const bool drops = capacity >= 0 && !chosen_kept.has_value();
  if (drops && given.defined()) check_chosen(given, experts);
  const int64_t slots = drop_policy == "expert_choice" ? experts : top_k;
  auto ids = at::empty({tokens, slots}, x.options().dtype(at::kInt));
  auto probs = at::empty({tokens, slots}, x.options().dtype(wide));
  auto kept = at::empty({capacity < 0 ? 0 : tokens, slots}, x.options().dtype(at::kBool));
  const MoeRouteForward arguments{data(x),
                                  data(added),
                                  given.defined() ? given.const_data_ptr<int32_t>() : nullptr,
                                  ids.mutable_data_ptr<int32_t>(),
                                  mutable_data(probs),
                                  options_of(x, pair, slots, score, normalize, scaling, num_groups,
                                             topk_groups, group_score, jitter, drop_policy)};
  FUSEDOPS_CALL_ISA(moe_route_forward, arguments);
  if (capacity < 0) return {probs, ids, kept};
  auto* mask = kept.mutable_data_ptr<bool>();
  if (drops) {
    drop({ids.mutable_data_ptr<int32_t>(), mask, tokens, slots, experts, capacity}, probs,
         drop_policy);
  } else {
    kept.copy_(*chosen_kept);
  }
  with_statistics(probs, [&](auto* values) {
    for (int64_t i = 0; i < kept.numel(); ++i) {
      if (!mask[i]) values[i] = 0;
    }
  });
  return {probs, ids, kept};
}

at::Tensor backward(const Optional& grad_probs, const at::Tensor& logits, const Optional& seed,
                    const at::Tensor& expert_ids, const at::Tensor& kept, int64_t /*top_k*/,
                    std::string_view score, bool normalize, double scaling, int64_t num_groups,
                    int64_t topk_groups, std::string_view group_score, double jitter,
                    int64_t capacity, std::string_view drop_policy,
                    std::array<bool, 1> output_mask) {
  if (!output_mask[0]) return {};
  const auto x = logits.contiguous();
  const auto grad = grad_probs->to(statistics_type(x)).contiguous();
  const auto ids = expert_ids.contiguous(), mask = kept.contiguous(), pair = dense(seed);
  auto grad_logits = at::empty(x.sizes(), x.options());
  const MoeRouteBackward arguments{
      data(grad),
      data(x),
      ids.const_data_ptr<int32_t>(),
      capacity < 0 ? nullptr : mask.const_data_ptr<bool>(),
      mutable_data(grad_logits),
      options_of(x, pair, ids.size(1), score, normalize, scaling, num_groups, topk_groups,
                 group_score, jitter, drop_policy)};
  FUSEDOPS_CALL_ISA(moe_route_backward, arguments);
  return grad_logits;
}

}  // namespace

TORCH_LIBRARY_IMPL(fusedops_cpp, CPU, m) {
  m.impl("moe_route", forward);
  m.impl("moe_route_backward", backward);
}

}  // namespace fusedops
