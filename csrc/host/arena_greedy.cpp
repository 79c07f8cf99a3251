// Placements by order: each buffer goes to the lowest gap between those that are placed already and
// live at the same time. Good orders are found by rules, and improved by moving forward what stands
// highest.
#include <algorithm>
#include <numeric>
#include <random>
#include <tuple>

#include "arena.h"

namespace fusedops::arena {
namespace {

constexpr size_t kLooksAtClock = 64;

using Interval = std::pair<int64_t, int64_t>;

// Finds the placed items that overlap a lifetime where neighbours are not listed: a tree over the
// items by their begins, with the latest end of the placed ones below each node.
class PlacedTree {
 public:
  explicit PlacedTree(const std::vector<Item>& items) : items_(items), order_(items.size()) {
    std::iota(order_.begin(), order_.end(), 0);
    std::sort(order_.begin(), order_.end(),
              [&items](int a, int b) { return items[a].begin < items[b].begin; });
    place_.resize(items.size());
    for (size_t i = 0; i < order_.size(); ++i) {
      place_[order_[i]] = i;
      begins_.push_back(items[order_[i]].begin);
    }
    while (leaves_ < order_.size()) leaves_ *= 2;
    latest_.assign(2 * leaves_, kNever);
  }

  void clear() { std::fill(latest_.begin(), latest_.end(), kNever); }

  void insert(int item) {
    for (size_t node = leaves_ + place_[item]; node > 0; node /= 2) {
      latest_[node] = std::max(latest_[node], items_[item].end);
    }
  }

  template <typename Visit>
  void visit(const Item& item, Visit&& look) const {
    const size_t count =
        std::lower_bound(begins_.begin(), begins_.end(), item.end) - begins_.begin();
    descend(1, 0, leaves_, count, item.begin, look);
  }

 private:
  static constexpr int64_t kNever = INT64_MIN;

  template <typename Visit>
  void descend(size_t node, size_t from, size_t to, size_t count, int64_t begin,
               Visit& look) const {
    if (from >= count || latest_[node] <= begin) return;
    if (to - from == 1) {
      look(order_[from]);
      return;
    }
    const size_t middle = (from + to) / 2;
    descend(2 * node, from, middle, count, begin, look);
    descend(2 * node + 1, middle, to, count, begin, look);
  }

  const std::vector<Item>& items_;
  std::vector<int> order_;
  std::vector<size_t> place_;
  std::vector<int64_t> begins_;
  size_t leaves_ = 1;
  std::vector<int64_t> latest_;
};

// The height at each moment: places an item on top of all that was placed during its life, in the
// logarithm of the number of items. Gaps below stay empty: with nested lifetimes there are none.
class Skyline {
 public:
  explicit Skyline(const std::vector<Item>& items) : items_(items) {
    for (const Item& item : items) {
      times_.push_back(item.begin);
      times_.push_back(item.end);
    }
    std::sort(times_.begin(), times_.end());
    times_.erase(std::unique(times_.begin(), times_.end()), times_.end());
    while (leaves_ < times_.size()) leaves_ *= 2;
    for (const Item& item : items) {
      first_.push_back(index(item.begin));
      last_.push_back(index(item.end));
    }
  }

  int64_t run(const std::vector<int>& order, std::vector<int64_t>& offsets) {
    highest_.assign(2 * leaves_, 0);
    flat_.assign(2 * leaves_, 0);
    offsets.assign(items_.size(), 0);
    for (int item : order) {
      const int64_t at = read(1, 0, leaves_, first_[item], last_[item]);
      offsets[item] = at;
      raise(1, 0, leaves_, first_[item], last_[item], at + items_[item].size);
    }
    return highest_[1];
  }

 private:
  size_t index(int64_t time) const {
    return size_t(std::lower_bound(times_.begin(), times_.end(), time) - times_.begin());
  }

  // A node's `flat_` is a height that all moments below it have at least.
  int64_t read(size_t node, size_t from, size_t to, size_t first, size_t last) const {
    if (last <= from || to <= first) return 0;
    if (first <= from && to <= last) return highest_[node];
    const size_t middle = (from + to) / 2;
    return std::max({flat_[node], read(2 * node, from, middle, first, last),
                     read(2 * node + 1, middle, to, first, last)});
  }

  void raise(size_t node, size_t from, size_t to, size_t first, size_t last, int64_t height) {
    if (last <= from || to <= first) return;
    highest_[node] = std::max(highest_[node], height);
    if (first <= from && to <= last) {
      flat_[node] = std::max(flat_[node], height);
      return;
    }
    const size_t middle = (from + to) / 2;
    raise(2 * node, from, middle, first, last, height);
    raise(2 * node + 1, middle, to, first, last, height);
  }

  const std::vector<Item>& items_;
  std::vector<int64_t> times_;
  std::vector<size_t> first_, last_;
  size_t leaves_ = 1;
  std::vector<int64_t> highest_, flat_;
};

class Placer {
 public:
  Placer(const std::vector<Item>& items, const Neighbours& neighbours)
      : items_(items), neighbours_(neighbours), offsets_(items.size(), kFree) {
    if (!neighbours.listed()) tree_.emplace_back(items);
  }

  // Places the items in this order, from the place `from` on; those before it stay. Pinned ones are
  // placed first. Gives up above `most` and returns a height above it. With `tight` an item goes to
  // the smallest gap that holds it instead of the lowest. After the deadline it gives up as well.
  int64_t run(const std::vector<int>& order, int64_t most, bool tight, Clock::time_point deadline,
              size_t from = 0) {
    if (!tree_.empty()) {
      from = 0;  // a tree does not forget
      tree_[0].clear();
    }
    for (size_t place = from; place < order.size(); ++place) offsets_[order[place]] = kFree;
    int64_t height = 0;
    for (size_t item = 0; item < items_.size(); ++item) {
      if (items_[item].pinned != kFree) {
        put(int(item), items_[item].pinned);
        height = std::max(height, items_[item].pinned + items_[item].size);
      }
    }
    for (size_t place = 0; place < from; ++place) {
      height = std::max(height, offsets_[order[place]] + items_[order[place]].size);
    }
    for (size_t place = from; place < order.size(); ++place) {
      const int item = order[place];
      if (items_[item].pinned != kFree) continue;
      const int64_t offset = gap_for(item, tight);
      put(item, offset);
      height = std::max(height, offset + items_[item].size);
      if (height > most) return height;
      if (place % kLooksAtClock == 0 && Clock::now() >= deadline) return INT64_MAX;
    }
    return height;
  }

  std::vector<int64_t>& offsets() { return offsets_; }

 private:
  void put(int item, int64_t offset) {
    offsets_[item] = offset;
    if (!tree_.empty()) tree_[0].insert(item);
  }

  int64_t gap_for(int item, bool tight) {
    occupied_.clear();
    const auto look = [this](int other) {
      if (offsets_[other] != kFree) {
        occupied_.emplace_back(offsets_[other], offsets_[other] + items_[other].size);
      }
    };
    if (tree_.empty()) {
      for (const int* at = neighbours_.begin(item); at != neighbours_.end(item); ++at) look(*at);
    } else {
      tree_[0].visit(items_[item], look);
    }
    std::sort(occupied_.begin(), occupied_.end());
    const int64_t size = items_[item].size;
    int64_t top = 0, best = kFree, smallest = INT64_MAX;
    for (const auto& [from, to] : occupied_) {
      const int64_t gap = from - top;
      if (gap >= size) {
        if (!tight) return top;
        if (gap < smallest) {
          smallest = gap;
          best = top;
        }
      }
      top = std::max(top, to);
    }
    return best == kFree ? top : best;
  }

  const std::vector<Item>& items_;
  const Neighbours& neighbours_;
  std::vector<int64_t> offsets_;
  std::vector<Interval> occupied_;
  std::vector<PlacedTree> tree_;  // one, or none where neighbours are listed
};

// For each item the largest sum of sizes that are alive together at some moment of its life.
std::vector<int64_t> crowds(const std::vector<Item>& items) {
  std::vector<int64_t> times;
  for (const Item& item : items) {
    times.push_back(item.begin);
    times.push_back(item.end);
  }
  std::sort(times.begin(), times.end());
  times.erase(std::unique(times.begin(), times.end()), times.end());
  const auto index = [&times](int64_t time) {
    return size_t(std::lower_bound(times.begin(), times.end(), time) - times.begin());
  };
  std::vector<int64_t> sums(times.size() + 1, 0);
  for (const Item& item : items) {
    sums[index(item.begin)] += item.size;
    sums[index(item.end)] -= item.size;
  }
  std::partial_sum(sums.begin(), sums.end(), sums.begin());
  // The maximum of any range: rows of powers of two.
  std::vector<std::vector<int64_t>> largest{sums};
  for (size_t width = 1; 2 * width <= sums.size(); width *= 2) {
    const std::vector<int64_t>& row = largest.back();
    std::vector<int64_t> next(row.size() - width);
    for (size_t i = 0; i < next.size(); ++i) next[i] = std::max(row[i], row[i + width]);
    largest.push_back(std::move(next));
  }
  std::vector<int64_t> result;
  for (const Item& item : items) {
    const size_t from = index(item.begin), to = index(item.end);
    size_t row = 0;
    while ((size_t{2} << row) <= to - from) ++row;
    const size_t width = size_t{1} << row;
    result.push_back(std::max(largest[row][from], largest[row][to - width]));
  }
  return result;
}

// The items whose tops are at the height of the placement.
std::vector<int> tallest(const std::vector<Item>& items, const std::vector<int64_t>& offsets,
                         int64_t height) {
  std::vector<int> result;
  for (size_t item = 0; item < items.size(); ++item) {
    if (offsets[item] + items[item].size == height) result.push_back(int(item));
  }
  return result;
}

}  // namespace

Neighbours::Neighbours(const std::vector<Item>& items, int64_t most_pairs) {
  const size_t count = items.size();
  std::vector<int> order(count);
  std::iota(order.begin(), order.end(), 0);
  std::sort(order.begin(), order.end(),
            [&items](int a, int b) { return items[a].begin < items[b].begin; });
  std::vector<std::pair<int, int>> pairs;
  std::vector<int> alive;
  for (int item : order) {
    alive.erase(std::remove_if(alive.begin(), alive.end(),
                               [&](int other) { return items[other].end <= items[item].begin; }),
                alive.end());
    if (int64_t(pairs.size() + alive.size()) > most_pairs) return;
    for (int other : alive) pairs.emplace_back(item, other);
    alive.push_back(item);
  }
  start_.assign(count + 1, 0);
  for (const auto& [a, b] : pairs) {
    ++start_[a + 1];
    ++start_[b + 1];
  }
  std::partial_sum(start_.begin(), start_.end(), start_.begin());
  list_.resize(2 * pairs.size());
  std::vector<int64_t> next(start_.begin(), start_.end() - 1);
  for (const auto& [a, b] : pairs) {
    list_[next[a]++] = b;
    list_[next[b]++] = a;
  }
  listed_ = true;
}

std::vector<std::vector<int>> heuristic_orders(const std::vector<Item>& items) {
  const std::vector<int64_t> crowd = crowds(items);
  const auto area = [&items](int i) { return double(items[i].size) * double(items[i].length()); };
  using Key = std::tuple<double, double, double>;
  const auto by = [&items](auto&& key) {
    std::vector<int> order(items.size());
    std::iota(order.begin(), order.end(), 0);
    std::vector<Key> keys;
    keys.reserve(items.size());
    for (int i : order) keys.push_back(key(i));
    std::stable_sort(order.begin(), order.end(),
                     [&keys](int a, int b) { return keys[a] > keys[b]; });
    return order;
  };
  const auto size = [&items](int i) { return double(items[i].size); };
  const auto length = [&items](int i) { return double(items[i].length()); };
  const auto crowded = [&crowd](int i) { return double(crowd[i]); };
  const auto begin = [&items](int i) { return double(items[i].begin); };
  const auto end = [&items](int i) { return double(items[i].end); };
  return {
      by([&](int i) { return Key{area(i), crowded(i), length(i)}; }),
      by([&](int i) { return Key{crowded(i), length(i), area(i)}; }),
      by([&](int i) { return Key{length(i), area(i), crowded(i)}; }),
      by([&](int i) { return Key{crowded(i), area(i), length(i)}; }),
      by([&](int i) { return Key{size(i), length(i), crowded(i)}; }),
      by([&](int i) { return Key{-begin(i), end(i), size(i)}; }),
      by([&](int i) { return Key{-begin(i), size(i), length(i)}; }),
      by([&](int i) { return Key{end(i), -begin(i), size(i)}; }),
      by([&](int i) { return Key{-end(i), size(i), length(i)}; }),
      by([&](int i) { return Key{size(i), -begin(i), 0.0}; }),
  };
}

void try_orders(const std::vector<Item>& items, const Neighbours& neighbours, int64_t target,
                Clock::time_point deadline, std::vector<int64_t>& best, int64_t& height) {
  const std::vector<std::vector<int>> orders = heuristic_orders(items);
  const auto keep = [&best, &height](int64_t found, const std::vector<int64_t>& offsets) {
    if (best.empty() || found < height) {
      best = offsets;
      height = found;
    }
  };
  const bool pinned = std::any_of(items.begin(), items.end(),
                                  [](const Item& item) { return item.pinned != kFree; });
  if (!pinned) {
    Skyline skyline(items);
    std::vector<int64_t> offsets;
    for (const std::vector<int>& order : orders) {
      keep(skyline.run(order, offsets), offsets);
      if (height <= target) return;
    }
  }
  Placer placer(items, neighbours);
  for (bool tight : {false, true}) {
    for (const std::vector<int>& order : orders) {
      const int64_t most = best.empty() ? INT64_MAX : height - 1;
      const int64_t found =
          placer.run(order, most, tight, best.empty() ? Clock::time_point::max() : deadline);
      if (found <= most) keep(found, placer.offsets());
      if (height <= target || Clock::now() >= deadline) return;
    }
  }
}

void search_orders(const std::vector<Item>& items, const Neighbours& neighbours, int64_t target,
                   Clock::time_point deadline, std::vector<int64_t>& best, int64_t& height) {
  constexpr int kPatience = 400;  // rounds without a lower placement, before another start
  Placer placer(items, neighbours);
  std::mt19937 random(0);
  const std::vector<std::vector<int>> orders = heuristic_orders(items);
  std::vector<size_t> place(items.size());
  for (size_t start = 0; Clock::now() < deadline; ++start) {
    std::vector<int> order = orders[start % orders.size()];
    if (start >= orders.size()) {  // seen before: disturbed
      for (size_t i = 0; i < order.size() / 8; ++i) {
        std::swap(order[random() % order.size()], order[random() % order.size()]);
      }
    }
    int64_t current = placer.run(order, INT64_MAX, false, deadline);
    if (current == INT64_MAX) return;
    for (int round = 0; round < kPatience && Clock::now() < deadline; ++round) {
      if (current < height) {
        best = placer.offsets();
        height = current;
        round = 0;
      }
      if (height <= target) return;
      for (size_t i = 0; i < order.size(); ++i) place[order[i]] = i;
      // One of the highest moves before one of those below it that came earlier.
      const std::vector<int> highest = tallest(items, placer.offsets(), current);
      const int item = highest[random() % highest.size()];
      if (items[item].pinned != kFree || place[item] == 0) break;
      size_t to = random() % place[item];
      if (neighbours.listed()) {
        std::vector<size_t> earlier;
        for (const int* at = neighbours.begin(item); at != neighbours.end(item); ++at) {
          if (place[*at] < place[item]) earlier.push_back(place[*at]);
        }
        if (earlier.empty()) break;
        to = earlier[random() % earlier.size()];
      }
      const std::vector<int> before = order;
      std::rotate(order.begin() + to, order.begin() + place[item], order.begin() + place[item] + 1);
      // A slightly higher placement is taken at times, so that the search can leave a valley.
      const int64_t most = random() % 16 == 0 ? current + current / 64 : current;
      const std::vector<int64_t> offsets = placer.offsets();
      const int64_t found = placer.run(order, most, false, deadline, to);
      if (found <= most) {
        current = found;
      } else {
        order = before;
        placer.offsets() = offsets;
      }
    }
  }
}

}  // namespace fusedops::arena
