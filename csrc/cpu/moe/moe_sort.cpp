// moe_sort on the CPU: a stable counting sort of slots by expert. fusedops_cpp::moe_sort; shapes
// were checked by fusedops/ops/moe_sort.py, ids are checked here, in the pass that counts them.
//
// The slots are cut into parts, one per thread. Each part counts its ids; a pass over
// experts x parts turns the counts into the row where each part of each expert begins; each part
// then hands out rows in order. Ids are read twice (the second time from the cache), permutation
// and positions are written once. A stable sort has one result, however the slots are cut.
//
// Integers and scattered stores: nothing here depends on the instruction set.
#include <algorithm>
#include <atomic>
#include <limits>
#include <vector>

#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "../../common/binding.h"
#include "../../common/parallel.h"

namespace fusedops {
namespace {

// Slots of a part at least: below, counting and a barrier cost more than they save.
constexpr int64_t kSlotsPerPart = 16384;

// Sorts `slots` ids. `permutation` and `positions` have `slots` elements, the others num_experts.
// Returns a slot whose id is not in [0, num_experts], or -1; then the rest is not written.
template <typename Id>
int64_t sort_slots(const Id* ids, const bool* kept, int64_t slots, int64_t num_experts,
                   int32_t* permutation, int32_t* positions, int32_t* tokens_per_expert,
                   int32_t* offsets) {
  const int64_t buckets = num_experts + 1;  // the last one: dropped
  const int64_t parts = std::clamp<int64_t>(slots / kSlotsPerPart, 1, at::get_num_threads());
  const int64_t slots_per_part = (slots + parts - 1) / parts;
  // Per part, padded so that parts do not share a line.
  const int64_t stride = (buckets + 15) / 16 * 16;
  std::vector<int32_t> rows(parts * stride, 0);
  std::atomic<int64_t> wrong{std::numeric_limits<int64_t>::max()};

  const auto for_each_part = [&](const auto& body) {
    at::parallel_for(0, parts, 1, [&](int64_t begin, int64_t end) {
      for (int64_t part = begin; part < end; ++part) {
        const int64_t first = part * slots_per_part;
        body(rows.data() + part * stride, first, std::min(slots, first + slots_per_part));
      }
    });
  };
  for_each_part([&](int32_t* counts, int64_t first, int64_t last) {
    for (int64_t slot = first; slot < last; ++slot) {
      const Id id = ids[slot];
      if (id < 0 || id > num_experts) {
        int64_t before = wrong.load();
        while (slot < before && !wrong.compare_exchange_weak(before, slot)) {
        }
        return;
      }
      ++counts[kept == nullptr || kept[slot] ? id : num_experts];
    }
  });
  if (wrong.load() < slots) return wrong.load();

  int32_t row = 0;
  for (int64_t bucket = 0; bucket < buckets; ++bucket) {
    const int32_t begin = row;
    for (int64_t part = 0; part < parts; ++part) {
      const int32_t count = rows[part * stride + bucket];
      rows[part * stride + bucket] = row;
      row += count;
    }
    if (bucket < num_experts) {
      tokens_per_expert[bucket] = row - begin;
      offsets[bucket] = row;
    }
  }
  for_each_part([&](int32_t* next, int64_t first, int64_t last) {
    for (int64_t slot = first; slot < last; ++slot) {
      const int64_t bucket = kept == nullptr || kept[slot] ? ids[slot] : num_experts;
      const int32_t place = next[bucket]++;
      positions[slot] = place;
      permutation[place] = static_cast<int32_t>(slot);
    }
  });
  return -1;
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> moe_sort(
    const at::Tensor& expert_ids, const std::optional<at::Tensor>& kept, int64_t num_experts) {
  const auto ids = expert_ids.contiguous();
  const auto mask = dense(kept);
  const auto options = ids.options().dtype(at::kInt);
  const int64_t slots = ids.numel();
  auto permutation = at::empty({slots}, options);
  auto positions = at::empty(ids.sizes(), options);
  auto tokens_per_expert = at::empty({num_experts}, options);
  auto offsets = at::empty({num_experts}, options);
  const auto sort = [&](const auto* from) {
    return sort_slots(
        from, static_cast<const bool*>(data(mask)), slots, num_experts,
        permutation.mutable_data_ptr<int32_t>(), positions.mutable_data_ptr<int32_t>(),
        tokens_per_expert.mutable_data_ptr<int32_t>(), offsets.mutable_data_ptr<int32_t>());
  };
  const bool wide = ids.scalar_type() == at::kLong;
  const int64_t wrong =
      wide ? sort(ids.const_data_ptr<int64_t>()) : sort(ids.const_data_ptr<int32_t>());
  if (wrong >= 0) {
    const int64_t id =
        wide ? ids.const_data_ptr<int64_t>()[wrong] : ids.const_data_ptr<int32_t>()[wrong];
    const int64_t top_k = ids.size(1);
    TORCH_CHECK_VALUE(false, "moe_sort: expert_ids must be in [0, ", num_experts, "), or ",
                      num_experts, " for nobody, got ", id, " at token ", wrong / top_k,
                      ", choice ", wrong % top_k);
  }
  return {permutation, positions, tokens_per_expert, offsets};
}

}  // namespace

TORCH_LIBRARY_IMPL(fusedops_cpp, CPU, m) {
  m.impl("moe_sort", moe_sort);
}

}  // namespace fusedops
