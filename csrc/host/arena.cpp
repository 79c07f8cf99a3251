// Splits the problem into parts that share no moment, and gives each part the quickest search that
// reaches the target: orders by rules, then the complete search and the improvement of orders in
// rounds of growing length.
#include "arena.h"

#include <algorithm>
#include <numeric>

namespace fusedops::arena {
namespace {

constexpr int64_t kMostPairs = 60'000'000;  // of neighbours, 8 bytes each
constexpr size_t kMostExact = 4000;         // items of a complete search
constexpr int64_t kFirstNodes = 2500;       // of a complete search in the first round
constexpr int64_t kGrowth = 9;              // of that from round to round
constexpr size_t kLaterOrders = 4;          // orders that are tried again in later rounds
constexpr double kFirstSeconds = 0.01;      // of the improvement of orders in the first round

Clock::time_point after(double seconds) {
  return Clock::now() + std::chrono::duration_cast<Clock::duration>(
                            std::chrono::duration<double>(std::min(seconds, 1e6)));
}

int64_t lower_bound_of(const std::vector<Item>& items) {
  std::vector<std::pair<int64_t, int64_t>> changes;
  int64_t bound = 0;
  for (const Item& item : items) {
    changes.emplace_back(item.begin, item.size);
    changes.emplace_back(item.end, -item.size);
    if (item.pinned != kFree) bound = std::max(bound, item.pinned + item.size);
  }
  std::sort(changes.begin(), changes.end());  // at the same moment frees come first
  int64_t alive = 0;
  for (const auto& [time, change] : changes) {
    alive += change;
    bound = std::max(bound, alive);
  }
  return bound;
}

// One part: items that are connected by their lifetimes.
class Part {
 public:
  explicit Part(std::vector<Item> items)
      : items_(std::move(items)), neighbours_(items_, kMostPairs), bound_(lower_bound_of(items_)) {
    exact_ = neighbours_.listed() && items_.size() <= kMostExact &&
             std::all_of(items_.begin(), items_.end(),
                         [](const Item& item) { return item.pinned == kFree; });
  }

  int64_t bound() const { return bound_; }
  int64_t height() const { return height_; }
  const std::vector<int64_t>& offsets() const { return best_; }

  // The first placements, by rules. There is one afterwards, whatever the deadline.
  void start(int64_t target, Clock::time_point deadline) {
    try_orders(items_, neighbours_, target, deadline, best_, height_);
  }

  // Searches for a placement of at most `target`: in rounds, because with the right order a search
  // ends after a few thousand nodes, and with another one never.
  void improve(int64_t target, Clock::time_point deadline) {
    if (height_ <= target || bound_ > target) return;
    const std::vector<std::vector<int>> orders = heuristic_orders(items_);
    int64_t most_nodes = kFirstNodes;
    double seconds = kFirstSeconds;
    for (size_t round = 0; height_ > target && Clock::now() < deadline; ++round) {
      const size_t count = !exact_ ? 0 : round == 0 ? orders.size() : kLaterOrders;
      for (size_t i = 0; i < count && Clock::now() < deadline; ++i) {
        std::vector<int64_t> offsets;
        const Answer answer =
            fits(items_, neighbours_, orders[i], target, most_nodes, deadline, offsets);
        if (answer == Answer::kFits) take(std::move(offsets));
        if (answer == Answer::kDoesNotFit) bound_ = std::max(bound_, target + 1);
        if (answer != Answer::kUnknown) return;
      }
      search_orders(items_, neighbours_, target, std::min(deadline, after(seconds)), best_,
                    height_);
      most_nodes *= kGrowth;
      seconds *= 3;
    }
  }

 private:
  void take(std::vector<int64_t> offsets) {
    best_ = std::move(offsets);
    height_ = 0;
    for (size_t i = 0; i < items_.size(); ++i) {
      height_ = std::max(height_, best_[i] + items_[i].size);
    }
  }

  std::vector<Item> items_;
  Neighbours neighbours_;
  int64_t bound_;
  bool exact_;
  std::vector<int64_t> best_;
  int64_t height_ = INT64_MAX;
};

// Lists of the buffers that are connected by their lifetimes.
std::vector<std::vector<int>> connected(const std::vector<Buffer>& buffers) {
  std::vector<int> order;
  for (size_t i = 0; i < buffers.size(); ++i) {
    if (buffers[i].size > 0 && buffers[i].lower < buffers[i].upper) order.push_back(int(i));
  }
  std::sort(order.begin(), order.end(),
            [&buffers](int a, int b) { return buffers[a].lower < buffers[b].lower; });
  std::vector<std::vector<int>> parts;
  int64_t end = INT64_MIN;
  for (int i : order) {
    if (buffers[i].lower >= end) parts.emplace_back();
    parts.back().push_back(i);
    end = std::max(end, buffers[i].upper);
  }
  return parts;
}

// The unit of all sizes and pinned offsets.
int64_t unit_of(const std::vector<Buffer>& buffers) {
  int64_t unit = 0;
  for (const Buffer& buffer : buffers) {
    unit = std::gcd(unit, buffer.size);
    if (buffer.pinned > 0) unit = std::gcd(unit, buffer.pinned);
  }
  return std::max<int64_t>(unit, 1);
}

}  // namespace

Placement place(const std::vector<Buffer>& buffers, int64_t capacity, double seconds) {
  const Clock::time_point deadline = after(seconds);
  const int64_t unit = unit_of(buffers);
  const std::vector<std::vector<int>> lists = connected(buffers);
  std::vector<Part> parts;
  parts.reserve(lists.size());
  int64_t bound = 0;
  for (const std::vector<int>& list : lists) {
    std::vector<Item> items;
    for (int i : list) {
      const Buffer& buffer = buffers[i];
      items.push_back({buffer.lower, buffer.upper, buffer.size / unit,
                       buffer.pinned == kFree ? kFree : buffer.pinned / unit});
    }
    parts.emplace_back(std::move(items));
    bound = std::max(bound, parts.back().bound());
  }
  // A capacity below the bound cannot be met: then the lowest placement is as good as any.
  const int64_t wanted = capacity == kFree ? bound : std::max(bound, capacity / unit);
  for (Part& part : parts) part.start(wanted, deadline);
  // Parts with more slack than others come last.
  std::vector<Part*> order;
  for (Part& part : parts) order.push_back(&part);
  std::sort(order.begin(), order.end(),
            [](const Part* a, const Part* b) { return a->bound() > b->bound(); });
  const auto height_of = [&parts] {
    int64_t height = 0;
    for (const Part& part : parts) height = std::max(height, part.height());
    return height;
  };
  const auto bound_of = [&parts] {
    int64_t bound = 0;
    for (const Part& part : parts) bound = std::max(bound, part.bound());
    return bound;
  };
  // First the target itself. Where that cannot be had, and no capacity is given, halfway between it
  // and what is known, and so on.
  int64_t low = wanted;
  for (bool first = true; height_of() > low; first = false) {
    const double left = std::chrono::duration<double>(deadline - Clock::now()).count();
    if (left < 1e-3) break;
    const int64_t target = first ? low : low + (height_of() - 1 - low) / 2;
    const double share = capacity != kFree ? 1.0 : first ? 0.5 : 0.4;
    const Clock::time_point until = after(share * left);
    for (Part* part : order) part->improve(target, until);
    if (height_of() > target) low = std::max(target + 1, bound_of());
  }
  Placement result;
  result.offsets.assign(buffers.size(), 0);
  for (size_t i = 0; i < buffers.size(); ++i) {
    if (buffers[i].pinned != kFree) result.offsets[i] = buffers[i].pinned;
  }
  for (size_t p = 0; p < parts.size(); ++p) {
    for (size_t i = 0; i < lists[p].size(); ++i) {
      result.offsets[lists[p][i]] = parts[p].offsets()[i] * unit;
    }
  }
  result.height = parts.empty() ? 0 : height_of() * unit;
  result.bound = bound_of() * unit;
  return result;
}

}  // namespace fusedops::arena
