// Sequences of a cache that have left it for the host's memory.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include <tessera/core/types.hpp>

#include "statistics.hpp"

namespace serving {

/// One saved sequence in memory of the host.
class saved_bytes {
 public:
  template <class Cache>
  void save(Cache& cache, tessera::index_t id) {
    data_.clear();
    cache.save(id, [&](const void* data, std::size_t bytes) {
      const auto* first = static_cast<const std::byte*>(data);
      data_.insert(data_.end(), first, first + bytes);
    });
  }
  template <class Cache>
  tessera::index_t load(Cache& cache) const {
    std::size_t read = 0;
    return cache.load([&](void* data, std::size_t bytes) {
      const std::size_t count = std::min(bytes, data_.size() - read);
      std::memcpy(data, data_.data() + read, count);
      read += count;
      return count;
    });
  }
  std::size_t bytes() const { return data_.size(); }

 private:
  std::vector<std::byte> data_;
};

/// Where sequences go while others need their memory. The memory of those that came back is used again.
/// Cache    a queued_cache; its saved_type has save(cache, id), after which the sequence may be closed, load(cache) and
///          bytes().
template <class Cache>
class swap_space {
  using saved_type = typename Cache::saved_type;

 public:
  /// One sequence; null: none.
  using ticket = std::unique_ptr<saved_type>;

  explicit swap_space(Cache& cache) : cache_(cache) {}

  /// Saves a sequence and closes it.
  ticket leave(tessera::index_t id) {
    const auto begun = clock::now();
    ticket made = unused_.empty() ? std::make_unique<saved_type>() : std::move(unused_.back());
    if (!unused_.empty()) unused_.pop_back();
    made->save(cache_, id);
    cache_.close(id);
    statistics_.out += 1;
    statistics_.bytes += double(made->bytes());
    statistics_.out_seconds += seconds_since(begun);
    return made;
  }
  /// Opens it again.   Errors   those of the cache's `load`; the ticket then stays valid.
  tessera::index_t enter(ticket& saved) {
    const auto begun = clock::now();
    const tessera::index_t id = saved->load(cache_);
    unused_.push_back(std::exchange(saved, nullptr));
    statistics_.in += 1;
    statistics_.in_seconds += seconds_since(begun);
    return id;
  }
  const swap_statistics& counts() const { return statistics_; }

 private:
  using clock = std::chrono::steady_clock;
  static double seconds_since(clock::time_point begun) {
    return std::chrono::duration<double>(clock::now() - begun).count();
  }
  Cache& cache_;
  std::vector<ticket> unused_;
  swap_statistics statistics_;
};

}  // namespace serving
