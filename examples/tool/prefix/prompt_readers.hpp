// Sequences of several caches that read the same prompts.
#pragma once

#include <algorithm>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include <tessera/core/error.hpp>

#include "engine/prefix/prefix_cache.hpp"
#include "tool/methods/method_cache.hpp"

namespace tool {

/// Conversations of several caches, one of each, under one number: a prompt passes through the model once for all of them, so a
/// prefix cache stores and forks them together. It is the cache that engine::prefix_cache asks for.
/// Errors   those of method_cache::fork; then nothing has changed.
class prompt_readers {
 public:
  using conversations = std::vector<std::unique_ptr<method_cache>>;

  index_t add(conversations together) {
    const index_t id = next_++;
    open_.emplace(id, std::move(together));
    return id;
  }
  /// Those of a number, which is no longer theirs.
  conversations take(index_t id) { return std::move(open_.extract(id).mapped()); }
  const conversations& at(index_t id) const { return open_.at(id); }

  index_t fork(index_t id) {
    conversations copies;
    for (const auto& one : at(id)) copies.push_back(one->fork());
    return add(std::move(copies));
  }
  index_t fork(index_t id, index_t position) {
    tessera::require(position == next_position(id), "position of a fork", position,
                     "where the prompt stands, which is " + std::to_string(next_position(id)),
                     "store the beginning of a prompt where others leave it");
    return fork(id);
  }
  void close(index_t id) { open_.erase(id); }

  /// Of all numbers together.
  offset_t bytes() const {
    offset_t all = 0;
    for (const auto& [id, together] : open_) all += bytes_of(together);
    return all;
  }
  static offset_t bytes_of(const conversations& together) {
    offset_t all = 0;
    for (const auto& one : together) all += one->bytes();
    return all;
  }

  index_t next_position(index_t id) const { return index_t(at(id).front()->next_position()); }
  index_t settled(index_t id) const { return next_position(id); }
  index_t prompt_tokens(index_t id) const {
    index_t least = next_position(id);
    for (const auto& one : at(id)) least = std::min(least, one->prompt_tokens());
    return least;
  }
  index_t announced(index_t id) const {
    index_t most = 0;
    for (const auto& one : at(id)) most = std::max(most, one->announced());
    return most;
  }

 private:
  std::map<index_t, conversations> open_;
  index_t next_ = 0;
};

}  // namespace tool
