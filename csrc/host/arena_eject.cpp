// Search by ejection: an item that has no place takes the one at which it displaces the least, and
// what it displaces looks for another place. An item that is displaced often becomes heavier, so
// that the others arrange themselves around it.
#include <algorithm>
#include <numeric>
#include <random>

#include "arena.h"

namespace fusedops::arena {
namespace {

constexpr int64_t kLooksAtClock = 64;
constexpr double kGain = 0.05;  // of an item's weight, each time that it is displaced

class Ejection {
 public:
  Ejection(const std::vector<Item>& items, const Neighbours& neighbours, int64_t capacity,
           unsigned seed)
      : items_(items),
        neighbours_(neighbours),
        capacity_(capacity),
        random_(seed),
        offset_(items.size(), kFree),
        weight_(items.size()) {
    const double scale = 1.0 / double(capacity);
    for (size_t i = 0; i < items.size(); ++i) {
      // Large items and those with many neighbours are hard to place again.
      weight_[i] = 0.02 + double(items[i].size) * scale;
    }
  }

  bool run(Clock::time_point deadline, int64_t most_steps) {
    for (size_t i = 0; i < items_.size(); ++i) {
      if (items_[i].pinned != kFree) {
        offset_[i] = items_[i].pinned;
      } else {
        waiting_.push_back(int(i));
      }
    }
    std::sort(waiting_.begin(), waiting_.end(),
              [this](int a, int b) { return weight_[a] < weight_[b]; });
    for (int64_t step = 0; !waiting_.empty(); ++step) {
      if (step >= most_steps) return false;
      if (step % kLooksAtClock == 0 && Clock::now() >= deadline) return false;
      place_one();
    }
    return true;
  }

  const std::vector<int64_t>& offsets() const { return offset_; }

 private:
  struct Edge {
    int64_t at;
    double change;
  };

  void place_one() {
    // The heaviest of those that wait, more or less.
    size_t chosen = waiting_.size() - 1;
    for (int draw = 0; draw < 2; ++draw) {
      const size_t other = random_() % waiting_.size();
      if (weight_[waiting_[other]] > weight_[waiting_[chosen]]) chosen = other;
    }
    const int item = waiting_[chosen];
    waiting_[chosen] = waiting_.back();
    waiting_.pop_back();
    const int64_t at = best_offset(item);
    offset_[item] = at;
    const int64_t top = at + items_[item].size;
    for (const int* other = neighbours_.begin(item); other != neighbours_.end(item); ++other) {
      const int64_t from = offset_[*other];
      if (from == kFree || from >= top || from + items_[*other].size <= at) continue;
      offset_[*other] = kFree;
      weight_[*other] *= 1 + kGain;
      waiting_.push_back(*other);
    }
  }

  // The offset at which what overlaps weighs least.
  int64_t best_offset(int item) {
    const int64_t size = items_[item].size, last = capacity_ - size;
    edges_.clear();
    double now = 0.0;
    for (const int* other = neighbours_.begin(item); other != neighbours_.end(item); ++other) {
      const int64_t from = offset_[*other];
      if (from == kFree) continue;
      const double weight =
          items_[*other].pinned == kFree ? weight_[*other] : double(items_.size()) * 1e9;
      // Offsets in (from - size, to) overlap it.
      const int64_t begin = from - size + 1, end = from + items_[*other].size;
      if (begin <= 0) {
        now += weight;
      } else if (begin <= last) {
        edges_.push_back({begin, weight});
      }
      if (end <= last) edges_.push_back({end, -weight});
    }
    std::sort(edges_.begin(), edges_.end(),
              [](const Edge& a, const Edge& b) { return a.at < b.at; });
    // An offset is as good as all up to the next edge: the lowest and the highest of a range are
    // next to something.
    double best = now;
    int64_t found = 0;
    int ties = 1;
    int64_t from = 0;
    for (size_t i = 0; i <= edges_.size(); ++i) {
      if (i < edges_.size() && edges_[i].at == from) {
        now += edges_[i].change;
        continue;
      }
      const int64_t to = i < edges_.size() ? edges_[i].at - 1 : last;
      if (now < best - 1e-12) {
        best = now;
        ties = 0;
      }
      if (now <= best + 1e-12) {
        ++ties;
        if (int(random_() % ties) == 0) found = random_() % 2 == 0 ? from : to;
      }
      if (i < edges_.size()) {
        from = edges_[i].at;
        now += edges_[i].change;
      }
    }
    return found;
  }

  const std::vector<Item>& items_;
  const Neighbours& neighbours_;
  const int64_t capacity_;
  std::mt19937 random_;
  std::vector<int64_t> offset_;
  std::vector<double> weight_;
  std::vector<int> waiting_;
  std::vector<Edge> edges_;
};

}  // namespace

bool eject(const std::vector<Item>& items, const Neighbours& neighbours, int64_t capacity,
           int64_t most_steps, unsigned seed, Clock::time_point deadline,
           std::vector<int64_t>& offsets) {
  Ejection search(items, neighbours, capacity, seed);
  if (!search.run(deadline, most_steps)) return false;
  offsets = search.offsets();
  return true;
}

}  // namespace fusedops::arena
