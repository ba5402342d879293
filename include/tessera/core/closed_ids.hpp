// Ids of closed sequences, which are opened again.
#pragma once

#include <algorithm>
#include <cstddef>
#include <functional>

#include "host/host_vector.hpp"
#include "types.hpp"

TESSERA_NAMESPACE_BEGIN

/// A heap, the lowest id first, with room for every id that there is: adding one needs no memory, in a copy neither.
class closed_ids {
 public:
  bool empty() const { return count_ == 0; }
  index_t lowest() const { return heap_.front(); }
  void make_room(std::size_t ids) { heap_.resize(ids); }
  void add(index_t id) {
    heap_[std::size_t(count_++)] = id;
    std::push_heap(heap_.begin(), heap_.begin() + count_, std::greater<>());
  }
  void take_lowest() { std::pop_heap(heap_.begin(), heap_.begin() + count_--, std::greater<>()); }

 private:
  host_vector<index_t> heap_;
  std::ptrdiff_t count_ = 0;
};

TESSERA_NAMESPACE_END
