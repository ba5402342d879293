// Which conversations have sequences in the cache, and who leaves when memory runs short.
#pragma once

#include <algorithm>
#include <span>
#include <utility>
#include <vector>

#include <tessera/core/error.hpp>

#include "engine/prefix/prefix_cache.hpp"
#include "served_sequence.hpp"
#include "swap_space.hpp"

namespace serving {

struct scheduler_options {
  index_t chunk = 2048;         ///< tokens of prompts in one pass
  index_t sequences = 64;       ///< upper bound of the sequences in the cache at a time, stored documents included
  bool shares_prefixes = true;  ///< whether documents are stored for those who ask about them later
  double answer_share = 0;      ///< of an answer, counted when its prompt is admitted; 0: as if nobody knew its length
  double spare = 0.01;          ///< share of the memory that an admission leaves free
  double limit = 0;             ///< seconds after which serving ends; 0: when all conversations have ended
};

/// The conversations of a scheduler, and the memory of their sequences. A prompt gets memory when the bound of what it takes
/// fits beside what the prompts under way may still take. Where memory runs short, sequences between two turns leave first,
/// then stored documents, then the running sequence that came last. Who leaves is saved or, where the cache cannot save,
/// written once more later.
/// Cache    a queued_cache.
template <class Cache>
class residents {
  using swap_type = swap_space<Cache>;

 public:
  using sequence = served_sequence<typename swap_type::ticket>;

  residents(Cache& cache, const scheduler_options& options)
      : cache_(cache),
        options_(options),
        swap_(cache),
        prefixes_(cache, Cache::cuts_prompts),
        all_units_(cache.available()) {}

  void expect(const std::vector<conversation>& conversations) {
    all.clear();
    for (std::size_t i = 0; i < conversations.size(); ++i) {
      all.emplace_back();
      all.back().request = &conversations[i], all.back().number = i, all.back().due = conversations[i].arrival;
    }
  }

  std::vector<sequence> all;       ///< by conversation
  std::vector<sequence*> running;  ///< in the order of their admission

  bool shares(const sequence& entry) const { return options_.shares_prefixes && entry.request->shared > 0; }
  offset_t units() const { return all_units_; }
  offset_t used_units() const { return all_units_ - cache_.available(); }
  const auto& swaps() const { return swap_.counts(); }
  int preemptions() const { return preemptions_; }
  int rewritten() const { return rewritten_; }
  /// Whether somebody writes the document that this one begins with.
  bool has_document_under_way(const sequence& entry) const {
    if (!shares(entry) || entry.has_cache()) return false;
    return std::any_of(running.begin(), running.end(), [&](const sequence* other) {
      return other->request->document == entry.request->document && other->written < other->request->shared;
    });
  }

  // --- memory for those who come -------------------------------------------------------------------------------------

  /// Begins to run a sequence that waits; false: there is no memory for it now, and it waits on.
  bool start(sequence& next) {
    const bool goes_on = next.has_cache();
    if (goes_on ? !resume(next) : !open(next)) return false;
    next.state = next.is_within_answer() ? stage::answering : stage::filling;
    next.is_preempted = false;
    next.prompt_begin = goes_on ? next.written : 0;
    next.filled_from = next.written, next.prompt_end = next.text.size();
    running.push_back(&next);
    return true;
  }
  /// Stores the document that a sequence has written, for others.
  void store_document(const sequence& entry) {
    if (!shares(entry) || entry.turn > 0 || entry.written != entry.request->shared || !make_slot(entry)) return;
    prefixes_.insert(std::span<const token_t>(entry.text).first(entry.written), entry.id);
  }
  void close(sequence& entry) {
    cache_.close(entry.id);
    entry.forget();
  }
  void clear() { prefixes_.clear(); }

  // --- memory for those who run --------------------------------------------------------------------------------------

  /// Makes some room; false: there is nobody to make it. `kept` stays.
  bool relieve(const sequence* kept) {
    if (cache_.can_save() && evict_parked(kept)) return true;
    if (prefixes_.evict() || evict_parked(kept)) return true;
    for (auto newest = running.rbegin(); running.size() > 1 && newest != running.rend(); ++newest) {
      if (*newest == kept) continue;
      preempt(**newest);
      return true;
    }
    return false;
  }

 private:
  /// What those who run may still take: of their prompts, and of their answers as far as these count.
  offset_t outstanding() const {
    offset_t total = 0;
    for (const sequence* entry : running) {
      total += (cache_.sets_aside(entry->id) ? 0 : entry->outstanding()) + of_answer(*entry);
    }
    return total;
  }
  offset_t of_answer(const sequence& entry) const {
    const auto tokens = offset_t(options_.answer_share * entry.now().answer) - entry.answered;
    return tokens > 0 ? cache_.growth(tokens) : 0;
  }
  bool has_room(offset_t needed) const {
    const auto margin = offset_t(running.empty() ? 0 : options_.spare * double(all_units_));
    return needed + outstanding() + margin <= cache_.available();
  }
  bool has_slot() const {
    const auto open = std::count_if(all.begin(), all.end(), [](const sequence& entry) { return entry.id >= 0; });
    return std::size_t(open) + prefixes_.size() < std::size_t(options_.sequences);
  }
  /// Makes room by those who do not run.
  template <class Enough>
  bool make_until(const sequence& newcomer, const Enough& enough) {
    while (!enough()) {
      if (!(cache_.can_save() && evict_parked(&newcomer)) && !prefixes_.evict()) return false;
    }
    return true;
  }
  bool make_room(offset_t needed, const sequence& newcomer) {
    return make_until(newcomer, [&] { return has_room(needed); });
  }
  bool make_slot(const sequence& newcomer) {
    return make_until(newcomer, [&] { return has_slot(); });
  }

  /// A sequence of which earlier turns are stored, in the cache or outside.
  bool resume(sequence& next) {
    next.promised = cache_.growth(offset_t(next.text.size() - next.written));
    if (next.saved) {
      const offset_t saved = cache_.units_of(offset_t(next.saved->bytes()));
      if (!make_slot(next) || !make_room(saved + next.promised + of_answer(next), next)) return false;
      try {
        next.id = swap_.enter(next.saved);
      } catch (const tessera::error&) {  // it shared pages when it left, and would have its own now
        return false;
      }
      return true;
    }
    return make_room(next.promised + of_answer(next), next);
  }
  bool open(sequence& next) {
    if (!make_slot(next)) return false;
    const auto prompt = std::span<const token_t>(next.text);
    typename engine::prefix_cache<Cache>::match begins;
    if (shares(next)) begins = prefixes_.fork(prompt);
    next.id = begins.id >= 0 ? begins.id : cache_.open();
    next.written = begins.tokens;
    next.promised = cache_.need(index_t(prompt.size()), options_.chunk, index_t(begins.tokens));
    if (make_room(next.promised + of_answer(next), next) && announce(next)) return true;
    close(next);
    return false;
  }
  /// Tells the cache of a first prompt; false where its pool has too few pages. Others may go on with one that begins with
  /// a document: its length is not announced.
  bool announce(const sequence& next) {
    if (shares(next)) return true;
    try {
      cache_.announce(next.id, index_t(next.text.size()));
    } catch (const tessera::error&) {
      return false;
    }
    return true;
  }

  /// Of the sequences between two turns the one that will be served last leaves.
  bool evict_parked(const sequence* kept) {
    sequence* last = nullptr;
    const auto order = [](const sequence& entry) { return std::pair(entry.state == stage::coming, entry.due); };
    for (sequence& entry : all) {
      if (!entry.is_parked() || &entry == kept) continue;
      if (!last || order(entry) > order(*last)) last = &entry;
    }
    if (last) evict(*last);
    return last != nullptr;
  }
  void preempt(sequence& entry) {
    preemptions_ += 1;
    std::erase(running, &entry);
    const bool is_filling = entry.state == stage::filling;
    entry.state = stage::waiting;
    entry.is_preempted = true;
    if (is_filling) {  // a prompt under way is not saved: it begins once more
      if (entry.prompt_begin == 0 || cache_.settled(entry.id) > index_t(entry.prompt_begin)) return discard(entry);
      cache_.truncate(entry.id, index_t(entry.prompt_begin));
      entry.written = entry.prompt_begin;
    }
    evict(entry);
  }
  void evict(sequence& entry) {
    if (cache_.can_save()) {
      entry.saved = swap_.leave(entry.id);
      entry.id = -1;
    } else {
      discard(entry);
    }
  }
  /// What it had stored is to be written once more.
  void discard(sequence& entry) {
    if (entry.written > 0) rewritten_ += 1;
    close(entry);
  }

  Cache& cache_;
  scheduler_options options_;
  swap_type swap_;
  engine::prefix_cache<Cache> prefixes_;
  offset_t all_units_;
  int preemptions_ = 0, rewritten_ = 0;
};

}  // namespace serving
