// See known_calls.h.
#include "known_calls.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <mutex>

namespace fusedops {
namespace {

// Of one operator: then all are forgotten. Signatures of an optimizer have 10^4 numbers.
constexpr size_t kMostEntries = 4096, kMostNumbers = size_t{1} << 20;

// Tags of the parts of a signature: no argument may be taken for another.
enum Tag : int64_t { kNothing = -1, kTensor = -2, kInt = -3, kDouble = -4, kText = -5, kList = -6 };

}  // namespace

bool Signature::write(at::ArrayRef<c10::IValue> arguments, const std::vector<int64_t>& unread) {
  numbers_.clear();
  for (size_t place = 0; place < arguments.size(); ++place) {
    const auto& value = arguments[place];
    if (value.isTensor()) {
      write_tensor(value.toTensor());
    } else if (value.isNone()) {
      numbers_.push_back(kNothing);
    } else if (value.isInt() || value.isBool()) {
      numbers_.insert(numbers_.end(), {kInt, value.isInt() ? value.toInt() : value.toBool()});
    } else if (value.isDouble()) {
      if (std::find(unread.begin(), unread.end(), place) != unread.end()) continue;
      numbers_.insert(numbers_.end(), {kDouble, std::bit_cast<int64_t>(value.toDouble())});
    } else if (value.isString()) {
      const auto text = value.toStringView();
      numbers_.insert(numbers_.end(), {kText, static_cast<int64_t>(text.size())});
      for (size_t first = 0; first < text.size(); first += sizeof(int64_t)) {
        int64_t word = 0;
        std::memcpy(&word, text.data() + first, std::min(text.size() - first, sizeof word));
        numbers_.push_back(word);
      }
    } else if (!value.isList() || !write_list(value.toListRef())) {
      return false;
    }
  }
  return true;
}

// A contract reads the length of a list of floats, not the floats.
bool Signature::write_list(at::ArrayRef<c10::IValue> elements) {
  numbers_.insert(numbers_.end(), {kList, static_cast<int64_t>(elements.size())});
  for (const auto& element : elements) {
    if (element.isInt() || element.isBool()) {
      numbers_.push_back(element.isInt() ? element.toInt() : element.toBool());
    } else if (element.isTensor()) {
      write_tensor(element.toTensor());
    } else if (!element.isDouble()) {
      return false;
    }
  }
  return true;
}

void Signature::write_tensor(const at::Tensor& tensor) {
  if (!tensor.defined()) {
    numbers_.push_back(kNothing);
    return;
  }
  numbers_.insert(numbers_.end(), {kTensor, static_cast<int64_t>(tensor.scalar_type()),
                                   static_cast<int64_t>(tensor.device().type()),
                                   tensor.device().index(), tensor.dim()});
  numbers_.insert(numbers_.end(), tensor.sizes().begin(), tensor.sizes().end());
  numbers_.insert(numbers_.end(), tensor.strides().begin(), tensor.strides().end());
}

size_t Signature::hash() const {
  uint64_t hash = numbers_.size();
  for (const auto value : numbers_) {
    hash = (std::rotl(hash, 5) ^ static_cast<uint64_t>(value)) * 0x9E3779B97F4A7C15U;
  }
  return hash ^ hash >> 32;
}

bool KnownCalls::contains(const Signature& signature) {
  const std::shared_lock lock(mutex_);
  return signatures_.contains(signature);
}

void KnownCalls::add(const Signature& signature) {
  const std::unique_lock lock(mutex_);
  if (signatures_.size() >= kMostEntries || numbers_ + signature.size() > kMostNumbers) {
    signatures_.clear();
    numbers_ = 0;
  }
  if (signatures_.insert(signature).second) numbers_ += signature.size();
}

}  // namespace fusedops
