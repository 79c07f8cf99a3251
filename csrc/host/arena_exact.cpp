// The complete search. A placement in which no buffer can move down is found by placing buffers in
// the order of their offsets, each on top of what is placed below it: it is enough to look at those
// ("canonical" placements). Four things keep the search small:
//
// - An item whose place lies entirely above another one that could be placed now need not be next:
//   the other one could move below it ("dominance").
// - In each section of time what is left must fit between the lowest place that any of it can have
//   and the capacity.
// - Where no item that is left crosses a moment, the items before and after it are independent.
// - A failure names the placed items that are its reason, and the search goes back to the last of
//   these: others may stay where they are ("conflict-directed backjumping").
#include <algorithm>
#include <numeric>
#include <unordered_set>

#include "arena.h"

namespace fusedops::arena {
namespace {

constexpr int64_t kLooksAtClock = 256;

// A set of placed items, by the number of items that were placed before them.
class Reasons {
 public:
  explicit Reasons(size_t count) : words_((count + 63) / 64, 0) {}

  void add(int depth) { words_[depth / 64] |= uint64_t{1} << (depth % 64); }
  void remove(int depth) { words_[depth / 64] &= ~(uint64_t{1} << (depth % 64)); }
  bool has(int depth) const { return words_[depth / 64] >> (depth % 64) & 1; }
  void clear() { std::fill(words_.begin(), words_.end(), 0); }
  void add(const Reasons& other) {
    for (size_t i = 0; i < words_.size(); ++i) words_[i] |= other.words_[i];
  }

 private:
  std::vector<uint64_t> words_;
};

class Search {
 public:
  Search(const std::vector<Item>& items, const Neighbours& neighbours,
         const std::vector<int>& order, int64_t capacity, int64_t most_nodes,
         Clock::time_point deadline)
      : items_(items),
        neighbours_(neighbours),
        capacity_(capacity),
        most_nodes_(most_nodes),
        deadline_(deadline),
        rank_(items.size()),
        offset_(items.size(), 0),
        depth_(items.size(), kNotPlaced),
        open_(items.size()),
        first_(items.size()),
        last_(items.size()) {
    for (size_t place = 0; place < order.size(); ++place) rank_[order[place]] = int(place);
    make_sections();
    for (size_t item = 0; item < items.size(); ++item) {
      open_[item] = int(neighbours.end(int(item)) - neighbours.begin(int(item)));
    }
  }

  Answer run(std::vector<int64_t>& offsets) {
    std::vector<int> all(items_.size());
    std::iota(all.begin(), all.end(), 0);
    std::sort(all.begin(), all.end(), [this](int a, int b) { return first_[a] < first_[b]; });
    Reasons why(items_.size());
    if (solve(all, why)) {
      offsets = offset_;
      return Answer::kFits;
    }
    return stopped_ ? Answer::kUnknown : Answer::kDoesNotFit;
  }

 private:
  static constexpr int kNotPlaced = -1;

  struct Lift {
    int item;
    int64_t before;
  };
  struct Put {
    int item;
    size_t lifts;  // how many there were before it
  };

  // Sections are the times between two begins or ends.
  void make_sections() {
    std::vector<int64_t> times;
    for (const Item& item : items_) {
      times.push_back(item.begin);
      times.push_back(item.end);
    }
    std::sort(times.begin(), times.end());
    times.erase(std::unique(times.begin(), times.end()), times.end());
    const auto index = [&times](int64_t time) {
      return int(std::lower_bound(times.begin(), times.end(), time) - times.begin());
    };
    rest_.assign(times.size(), 0);
    floor_.assign(times.size(), 0);
    for (size_t i = 0; i < items_.size(); ++i) {
      first_[i] = index(items_[i].begin);
      last_[i] = index(items_[i].end);
      for (int s = first_[i]; s < last_[i]; ++s) rest_[s] += items_[i].size;
    }
  }

  bool stop() {
    if (++nodes_ > most_nodes_) stopped_ = true;
    if (nodes_ % kLooksAtClock == 0 && Clock::now() >= deadline_) stopped_ = true;
    return stopped_;
  }

  // The item that was placed last before what is left of this part; nothing lies lower than it.
  int64_t lowest() const { return path_.empty() ? 0 : offset_[path_.back()]; }

  // Whether an item cannot be placed where it is now, because items come in the order of offsets.
  bool passed(int item) const { return !path_.empty() && comes_before(item, path_.back()); }

  bool comes_before(int item, int placed) const {
    return offset_[item] != offset_[placed] ? offset_[item] < offset_[placed]
                                            : rank_[item] < rank_[placed];
  }

  // Places items, which are sorted by their begins. If they do not fit, `why` gets the reasons.
  bool solve(const std::vector<int>& items, Reasons& why) {
    std::vector<std::vector<int>> parts;
    int end = -1;
    for (int item : items) {
      if (first_[item] >= end) parts.emplace_back();
      parts.back().push_back(item);
      end = std::max(end, last_[item]);
    }
    // A small part that does not fit is found quickly.
    std::sort(parts.begin(), parts.end(),
              [](const auto& a, const auto& b) { return a.size() < b.size(); });
    const size_t before = puts_.size();
    for (const std::vector<int>& part : parts) {
      if (!branch(part, why)) {
        take_back(before);
        return false;
      }
    }
    return true;
  }

  bool branch(const std::vector<int>& items, Reasons& why) {
    if (stop()) return false;
    const uint64_t state = state_of(items);
    if (failed_.count(state) > 0) {  // what lies no lower than it did then fails again
      for (int item : items) {
        if (passed(item)) {
          explain_passed(item, why);
        } else {
          explain_offset(item, offset_[item], why);
        }
      }
      return false;
    }
    if (has_room(items, why) && place_one(items, why)) return true;
    if (!stopped_) failed_.insert(state);
    return false;
  }

  // A number for what is left and where it can be.
  uint64_t state_of(const std::vector<int>& items) const {
    uint64_t state = 0;
    for (int item : items) {
      const uint64_t at = passed(item) ? ~uint64_t{0} : uint64_t(offset_[item]);
      uint64_t mixed = at * 0x9E3779B97F4A7C15u ^ (uint64_t(item) + 1) * 0xC2B2AE3D27D4EB4Fu;
      mixed = (mixed ^ (mixed >> 31)) * 0x94D049BB133111EBu;
      state += mixed ^ (mixed >> 29);
    }
    return state;
  }

  // Tries each item that may be the next one.
  bool place_one(const std::vector<int>& items, Reasons& why) {
    int64_t lowest_top = capacity_ + 1;
    std::vector<int> candidates;
    for (int item : items) {
      if (passed(item)) {
        if (open_[item] == 0) {  // nothing is left that it could lie on
          explain_passed(item, why);
          for (const int* at = neighbours_.begin(item); at != neighbours_.end(item); ++at) {
            why.add(depth_[*at]);
          }
          return false;
        }
        continue;
      }
      if (lifts_nothing(item)) return keep(item, items, why);
      candidates.push_back(item);
      lowest_top = std::min(lowest_top, offset_[item] + items_[item].size);
    }
    std::sort(candidates.begin(), candidates.end(), [this](int a, int b) {
      return offset_[a] != offset_[b] ? offset_[a] < offset_[b] : rank_[a] < rank_[b];
    });
    Reasons all(items_.size()), one(items_.size());
    for (size_t place = 0; place < candidates.size(); ++place) {
      const int item = candidates[place];
      if (offset_[item] >= lowest_top) break;
      if (has_twin_before(candidates, place)) continue;
      const int depth = int(puts_.size());
      one.clear();
      if (put(item)) {
        path_.push_back(item);
        const bool found = solve(without(items, item), one);
        path_.pop_back();
        if (found) return true;
      } else {
        one.add(depth);
      }
      take_back(size_t(depth));
      if (stopped_) return false;
      if (!one.has(depth)) {  // it fails in the same way wherever this item is
        why.add(one);
        return false;
      }
      one.remove(depth);
      all.add(one);
      explain_offset(item, offset_[item], all);
    }
    for (int item : items) {
      if (passed(item)) explain_passed(item, all);
    }
    why.add(all);
    return false;
  }

  // Whether what overlaps an item lies above it anyway.
  bool lifts_nothing(int item) const {
    const int64_t top = offset_[item] + items_[item].size;
    for (const int* at = neighbours_.begin(item); at != neighbours_.end(item); ++at) {
      if (depth_[*at] == kNotPlaced && offset_[*at] < top) return false;
    }
    return true;
  }

  // Places an item that lifts nothing: no other place of it can be better.
  bool keep(int item, const std::vector<int>& items, Reasons& why) {
    const int depth = int(puts_.size());
    Reasons one(items_.size());
    put(item);
    if (solve(without(items, item), one)) return true;
    take_back(size_t(depth));
    if (one.has(depth)) {
      one.remove(depth);
      explain_offset(item, offset_[item], one);
      const int64_t top = offset_[item] + items_[item].size;
      for (const int* at = neighbours_.begin(item); at != neighbours_.end(item); ++at) {
        if (depth_[*at] == kNotPlaced) explain_offset(*at, top, one);
      }
    }
    why.add(one);
    return false;
  }

  // Whether every section has room for what is left in it.
  bool has_room(const std::vector<int>& items, Reasons& why) {
    int begin = first_[items.front()], end = begin;
    for (int item : items) end = std::max(end, last_[item]);
    std::fill(floor_.begin() + begin, floor_.begin() + end, capacity_ + 1);
    const int64_t least = lowest();
    for (int item : items) {
      const int64_t at = std::max(offset_[item], least);
      int64_t* floors = floor_.data();
      for (int s = first_[item], to = last_[item]; s < to; ++s) {
        floors[s] = std::min(floors[s], at);
      }
    }
    for (int s = begin; s < end; ++s) {
      if (rest_[s] > 0 && floor_[s] + rest_[s] > capacity_) {
        explain_section(s, items, why);
        return false;
      }
    }
    return true;
  }

  // Why a section is too full: what is placed in it, and what keeps the rest of it up.
  void explain_section(int section, const std::vector<int>& items, Reasons& why) const {
    // Any floor above this one is too high.
    const int64_t needed = capacity_ - rest_[section] + 1;
    for (const Put& put : puts_) {
      if (first_[put.item] <= section && section < last_[put.item]) why.add(depth_[put.item]);
    }
    for (int item : items) {
      if (first_[item] <= section && section < last_[item]) explain_offset(item, needed, why);
    }
  }

  // Why an item cannot lie below `needed`: the first placed item that keeps it up, by lying under
  // it or by the order of offsets.
  void explain_offset(int item, int64_t needed, Reasons& why) const {
    if (needed <= 0) return;
    int found = int(puts_.size());
    for (const int* at = neighbours_.begin(item); at != neighbours_.end(item); ++at) {
      if (depth_[*at] != kNotPlaced && depth_[*at] < found &&
          offset_[*at] + items_[*at].size >= needed) {
        found = depth_[*at];
      }
    }
    if (found == int(puts_.size())) {
      for (int placed : path_) {
        if (offset_[placed] >= needed) {
          found = depth_[placed];
          break;
        }
      }
    }
    if (found < int(puts_.size())) why.add(found);
  }

  // Why an item was passed over: the first item that was placed instead, further up.
  void explain_passed(int item, Reasons& why) const {
    for (int placed : path_) {
      if (comes_before(item, placed)) {
        why.add(depth_[placed]);
        return;
      }
    }
  }

  static std::vector<int> without(const std::vector<int>& items, int item) {
    std::vector<int> rest;
    rest.reserve(items.size());
    for (int other : items) {
      if (other != item) rest.push_back(other);
    }
    return rest;
  }

  // Whether an item of the same lifetime and size comes earlier: they can be exchanged.
  bool has_twin_before(const std::vector<int>& candidates, size_t place) const {
    const int item = candidates[place];
    while (place-- > 0 && offset_[candidates[place]] == offset_[item]) {
      const int other = candidates[place];
      if (first_[other] == first_[item] && last_[other] == last_[item] &&
          items_[other].size == items_[item].size) {
        return true;
      }
    }
    return false;
  }

  // Puts an item on what is below it, and lifts those that overlap it. False if one has no room.
  bool put(int item) {
    depth_[item] = int(puts_.size());
    puts_.push_back({item, lifts_.size()});
    const int64_t top = offset_[item] + items_[item].size;
    bool has_room = top <= capacity_;
    for (const int* at = neighbours_.begin(item); at != neighbours_.end(item); ++at) {
      if (depth_[*at] != kNotPlaced) continue;
      --open_[*at];
      if (offset_[*at] < top) {
        lifts_.push_back({*at, offset_[*at]});
        offset_[*at] = top;
        has_room = has_room && top + items_[*at].size <= capacity_;
      }
    }
    for (int s = first_[item]; s < last_[item]; ++s) rest_[s] -= items_[item].size;
    return has_room;
  }

  // Takes back what was put, down to so many.
  void take_back(size_t puts) {
    for (; puts_.size() > puts; puts_.pop_back()) {
      const auto [item, lifts] = puts_.back();
      for (int s = first_[item]; s < last_[item]; ++s) rest_[s] += items_[item].size;
      for (; lifts_.size() > lifts; lifts_.pop_back()) {
        offset_[lifts_.back().item] = lifts_.back().before;
      }
      for (const int* at = neighbours_.begin(item); at != neighbours_.end(item); ++at) {
        if (depth_[*at] == kNotPlaced) ++open_[*at];
      }
      depth_[item] = kNotPlaced;
    }
  }

  const std::vector<Item>& items_;
  const Neighbours& neighbours_;
  const int64_t capacity_, most_nodes_;
  const Clock::time_point deadline_;
  std::vector<int> rank_;
  std::vector<int64_t> offset_;    // of a placed item; of another the lowest that it can have
  std::vector<int> depth_;         // how many were placed before an item
  std::vector<int> open_;          // neighbours that are not placed
  std::vector<int> first_, last_;  // sections of an item
  std::vector<int64_t> rest_;      // bytes of a section that are not placed
  std::vector<int64_t> floor_;
  std::vector<int> path_;  // placed items of this part, in the order of their offsets
  std::unordered_set<uint64_t> failed_;
  std::vector<Put> puts_;
  std::vector<Lift> lifts_;
  int64_t nodes_ = 0;
  bool stopped_ = false;
};

}  // namespace

Answer fits(const std::vector<Item>& items, const Neighbours& neighbours,
            const std::vector<int>& order, int64_t capacity, int64_t most_nodes,
            Clock::time_point deadline, std::vector<int64_t>& offsets) {
  return Search(items, neighbours, order, capacity, most_nodes, deadline).run(offsets);
}

}  // namespace fusedops::arena
