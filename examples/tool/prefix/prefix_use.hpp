// What it cost to read the prompts of questions about one document, and what was not read again.
#pragma once

#include <cstdint>
#include <set>
#include <string>

#include "tool/methods/method_cache.hpp"

namespace tool {

/// Parts of prompts that passed through the model, each for the methods that read together.
struct read_parts {
  std::int64_t count = 0, tokens = 0;
  double seconds = 0;

  void add(std::size_t more_tokens, double more_seconds) {
    count += 1, tokens += std::int64_t(more_tokens), seconds += more_seconds;
  }
  double mean_seconds() const { return count ? seconds / double(count) : 0; }
  double mean_tokens() const { return count ? double(tokens) / double(count) : 0; }
};

/// Of questions that share what their prompts begin with.
struct prefix_use {
  read_parts beginnings;         ///< what is shared, as often as it was read
  read_parts rest;               ///< what followed it there
  read_parts forks;              ///< of stored ones, whose tokens were not read again
  read_parts rest_of_fork;       ///< what followed these
  offset_t beginning_bytes = 0;  ///< of the longest shared beginning, for all methods that read together
  offset_t most_bytes = 0;       ///< of stored beginnings and the question under way, before it is compressed
  /// Who reads every prompt anew: methods that need its length before its first token, or store rows in another format; those that plan by the longest answer, where
  /// questions differ in it; and families whose prompts begin alike for too few tokens.
  std::set<std::string> need_length, need_answer_limit, dissimilar;
};

}  // namespace tool
