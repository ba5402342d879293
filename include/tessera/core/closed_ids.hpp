// Ids of closed sequences, which later sequences get.
#pragma once

#include <algorithm>
#include <cstddef>
#include <functional>

#include "host/host_vector.hpp"
#include "types.hpp"

TESSERA_NAMESPACE_BEGIN

/// A heap with the lowest id first. It has memory for every id that exists, so that `add` allocates nothing, also in a
/// copy.
class closed_ids {
 public:
  bool empty() const { return count_ == 0; }
  index_t lowest() const { return heap_.front(); }
  void reserve(std::size_t ids) { heap_.resize(ids); }
  void add(index_t id) {
    heap_[std::size_t(count_++)] = id;
    std::push_heap(heap_.begin(), heap_.begin() + count_, std::greater<>());
  }
  void pop_lowest() { std::pop_heap(heap_.begin(), heap_.begin() + count_--, std::greater<>()); }

 private:
  host_vector<index_t> heap_;
  std::ptrdiff_t count_ = 0;
};

TESSERA_NAMESPACE_END
