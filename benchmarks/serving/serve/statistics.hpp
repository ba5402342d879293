// What serving took: times of every turn, and what the scheduler did.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include <tessera/core/types.hpp>

namespace serving {

/// One turn that was answered; seconds since serving began.
struct served_turn {
  std::size_t conversation = 0, number = 0;
  double arrived = 0, first_token = 0, last_token = 0;
  tessera::index_t prompt = 0, answer = 0;  ///< tokens

  double wait() const { return first_token - arrived; }
  /// Seconds from token to token of the answer.
  double token_time() const { return answer > 1 ? (last_token - first_token) / (answer - 1) : 0; }
};

/// Of sequences that left the cache for the host's memory, and came back.
struct swap_statistics {
  int out = 0, in = 0;
  double out_seconds = 0, in_seconds = 0;
  double bytes = 0;  ///< that left
};

struct serving_statistics {
  std::vector<served_turn> turns;
  double seconds = 0;
  int unfinished = 0;                                           ///< conversations that had not ended when time was up
  std::int64_t passes = 0, prompt_tokens = 0, step_tokens = 0;  ///< that went through the model
  double pass_seconds = 0, step_pass_seconds = 0;               ///< of all passes, and of those without a chunk
  std::int64_t step_passes = 0;
  int preemptions = 0;  ///< of sequences that were running
  int rewritten = 0;    ///< sequences that lost what they had stored, and wrote it once more
  int largest_batch = 0;
  tessera::offset_t peak_units = 0;
  std::int64_t prefix_hits = 0, prefix_tokens = 0;
  swap_statistics swaps{};

  void add_pass(double taken, bool has_chunk) {
    passes += 1, pass_seconds += taken;
    if (!has_chunk) step_passes += 1, step_pass_seconds += taken;
  }
  double turns_per_second() const { return seconds > 0 ? double(turns.size()) / seconds : 0; }
  double mean_batch() const { return passes > 0 ? double(step_tokens) / double(passes) : 0; }
};

/// The value below which a share of all lies; 0 of none.
inline double percentile(std::vector<double> all, double share) {
  if (all.empty()) return 0;
  std::sort(all.begin(), all.end());
  return all[std::min(all.size() - 1, std::size_t(share * double(all.size())))];
}
inline double mean(const std::vector<double>& all) {
  double total = 0;
  for (const double entry : all) total += entry;
  return all.empty() ? 0 : total / double(all.size());
}
template <class Of>
std::vector<double> values(const serving_statistics& counts, const Of& value) {
  std::vector<double> all;
  for (const served_turn& entry : counts.turns) all.push_back(value(entry));
  return all;
}

}  // namespace serving
