// A budget's plan for one conversation: how many tokens each stage handles, and how much an estimate may read.
#pragma once

#include "../config.hpp"
#include "../types.hpp"

TESSERA_NAMESPACE_BEGIN

/// Token counts per kv_head, made when a turn's prompt ends. The host knows all of them. The device's
/// lengths only cap them: a head of n tokens has ceil(n / page) pages and reads at most n.
struct stage_plan {
  index_t capacity = 0;  ///< upper bound of a head's stored tokens (or candidates); counts the budget's `max_new`
  index_t retained = 0;  ///< tokens that the first stage retains, or makes candidates, when a prompt ends
  index_t read = 0;      ///< tokens that a step attends: the second stage's k
  double ratio = 1;    ///< capacity over the token budget, at least 1: how much less than all keys an estimate may read
  index_t prompt = 0;  ///< tokens that the conversation had taken until then; 0: not known
};

/// What the second stage needs of one sequence. Kernels read it from device memory, as they read lengths: sequences of
/// one launch differ, and a recorded graph follows when the array changes.
struct alignas(16) read_plan {
  index_t read = 0;      ///< tokens that a step attends; a head of no more is read whole, without an estimate
  index_t page = 1;      ///< slots that are estimated together
  index_t channels = 0;  ///< of each key that an estimate reads
  index_t tail = 0;      ///< newest tokens that are always read

  read_plan() = default;
  explicit read_plan(index_t read_, index_t page_ = 1, index_t channels_ = 0, index_t tail_ = 0)
      : read(read_), page(page_), channels(channels_), tail(tail_) {
    int log = 0;
    while ((std::int64_t(1) << log) < page) ++log;
    page_shift = 31 + log;
    page_factor = std::uint32_t(((std::uint64_t(1) << page_shift) + std::uint64_t(page) - 1) / std::uint64_t(page));
  }
  /// The plan of a fitted scorer of pages.
  template <class Scorer>
  static read_plan fitted_to(const Scorer& scorer, index_t read) {
    return read_plan(read, scorer.page, scorer.channels, scorer.protected_tail(read));
  }

  bool operator==(const read_plan&) const = default;

  /// floor(x / page) for x >= 0.
  TESSERA_HD index_t page_of(index_t x) const { return index_t((std::uint64_t(x) * page_factor) >> page_shift); }
  /// Pages that x >= 0 slots fill, the last one perhaps in part.
  TESSERA_HD index_t pages_of(index_t x) const {
    const index_t full = page_of(x);
    return full + (x > full * page);
  }

 private:
  // ceil(2^shift / page), shift = 31 + ceil(log2(page)). A division by a run-time number takes the device some twenty
  // instructions, which were a tenth of a short choice (H200, CUDA 13.0).
  std::uint32_t page_factor = std::uint32_t(1) << 31;
  std::int32_t page_shift = 31;
};
static_assert(sizeof(read_plan) == 32, "tessera: the device reads a plan in two loads of 16 bytes");

TESSERA_NAMESPACE_END
