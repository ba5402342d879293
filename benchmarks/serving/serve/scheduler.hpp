// A small scheduler of a serving engine: continuous batching of prompts' chunks and steps over one cache.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include <tessera/core/error.hpp>
#include <tessera/core/host/host_vector.hpp>
#include <tessera/runtime/turn/mixed_batch.hpp>

#include "residents.hpp"

namespace serving {

/// Serves conversations. Each pass through the model takes a token of every answer, and chunks of the prompts that were
/// admitted, oldest first. `residents` says who has memory. Once a running sequence had to leave, nobody is admitted until a
/// turn has ended.
/// Cache    a queued_cache.
/// Model    pass(cache, work, tokens, rows): one pass; returns the next token after each of these rows.
/// Clock    now(), in seconds, and wait_until(seconds).
template <class Cache, class Model, class Clock>
class scheduler {
  using sequence = typename residents<Cache>::sequence;

 public:
  scheduler(Cache& cache, Model& model, Clock& clock, const scheduler_options& options)
      : cache_(cache), model_(model), clock_(clock), options_(options), residents_(cache, options) {}

  /// Serves all of them, or what there is time for, once. `show(statistics, running, waiting)` is called behind each pass.
  /// Errors   a conversation that the empty cache has no memory for; those of the cache and the model: tessera::error.
  template <class Show>
  serving_statistics run(const std::vector<conversation>& conversations, const Show& show) {
    residents_.expect(conversations);
    unfinished_ = conversations.size();
    begun_ = clock_.now();
    while (unfinished_ > 0 && (options_.limit <= 0 || now() < options_.limit)) {
      arrive();
      admit();
      if (!pass()) wait_or_force();
      const auto waiting = std::count_if(residents_.all.begin(), residents_.all.end(),
                                         [](const sequence& entry) { return entry.state == stage::waiting; });
      show(statistics_, int(residents_.running.size()), int(waiting));
    }
    statistics_.seconds = now();
    statistics_.unfinished = int(unfinished_);
    residents_.clear();
    statistics_.preemptions = residents_.preemptions();
    statistics_.rewritten = residents_.rewritten();
    statistics_.swaps = residents_.swaps();
    return statistics_;
  }
  /// Prompts and answers of a conversation that was served.
  const std::vector<token_t>& text(std::size_t conversation) const { return residents_.all[conversation].text; }

 private:
  double now() const { return clock_.now() - begun_; }

  // --- admission -----------------------------------------------------------------------------------------------------

  void arrive() {
    for (sequence& entry : residents_.all) {
      if (entry.state == stage::coming && entry.due <= now()) entry.arrive(), is_blocked_ = false;
    }
  }
  void admit() {
    while (!is_blocked_ && !holds_back_) {
      sequence* next = next_waiting();
      const bool has_enough = pending_tokens() >= std::size_t(options_.chunk);
      if (!next || (has_enough && !next->is_within_answer())) return;
      is_blocked_ = !start(*next);
    }
  }
  bool start(sequence& next) {
    const bool begins = !next.has_cache();
    if (!residents_.start(next)) return false;
    if (begins && next.written > 0) {
      statistics_.prefix_hits += 1;
      statistics_.prefix_tokens += std::int64_t(next.written);
    }
    return true;
  }
  /// Those that were put back come first, then those whose earlier turns are stored, then by arrival.
  static bool comes_before(const sequence& a, const sequence& b) {
    if (a.is_preempted != b.is_preempted) return a.is_preempted;
    if (a.has_cache() != b.has_cache()) return a.has_cache();
    return a.due != b.due ? a.due < b.due : a.number < b.number;
  }
  sequence* next_waiting() {
    sequence* next = nullptr;
    for (sequence& entry : residents_.all) {
      if (entry.state != stage::waiting || (next && !comes_before(entry, *next))) continue;
      if (!residents_.has_document_under_way(entry)) next = &entry;
    }
    return next;
  }
  /// Tokens of prompts that have been admitted.
  std::size_t pending_tokens() const {
    std::size_t total = 0;
    for (const sequence* entry : residents_.running)
      total += entry->state == stage::filling ? entry->prompt_end - entry->written : 0;
    return total;
  }
  /// Nothing runs: waits for the next arrival, or makes the one that waits run.
  void wait_or_force() {
    is_blocked_ = holds_back_ = false;
    if (sequence* next = next_waiting()) {
      while (!start(*next)) {
        tessera::require(
            residents_.relieve(next), "memory of a conversation of " + std::to_string(next->text.size()) + " tokens",
            "more than there is", std::to_string(residents_.units()) + " pages or bytes at most", "raise --memory");
      }
      return;
    }
    double due = -1;
    for (const sequence& entry : residents_.all) {
      if (entry.state == stage::coming && (due < 0 || entry.due < due)) due = entry.due;
    }
    if (due >= 0) clock_.wait_until(begun_ + due);
  }

  // --- a pass --------------------------------------------------------------------------------------------------------

  struct planned_pass {
    tessera::host_vector<tessera::batch_item> items;
    std::vector<sequence*> sequences;  ///< by item
    bool has_chunk = false;
    offset_t largest = 0;  ///< units that it takes at most; 0: `prepare` sets them aside
  };
  /// Chunks come first: rows whose next tokens are wanted then lie at the end.
  planned_pass plan() const {
    planned_pass made;
    bool counts = false;
    const auto add = [&](sequence* entry, std::size_t tokens, bool is_prompt) {
      made.items.push_back({entry->id, index_t(tokens), is_prompt});
      made.sequences.push_back(entry);
      const bool is_set_aside = is_prompt && cache_.sets_aside(entry->id);
      if (!is_set_aside) made.largest += std::max(is_prompt ? entry->promised : 0, cache_.growth(offset_t(tokens)));
      counts = counts || (is_prompt && !is_set_aside);
    };
    std::size_t left = std::size_t(options_.chunk);
    for (sequence* entry : residents_.running) {
      if (entry->state != stage::filling) continue;
      const std::size_t piece = entry->piece(std::size_t(options_.chunk));
      if (piece > left) break;
      left -= piece;
      add(entry, piece, true);
    }
    made.has_chunk = !made.items.empty();
    for (sequence* entry : residents_.running) {
      if (entry->state == stage::answering) add(entry, 1, false);
    }
    if (!counts || Cache::reserves_chunks) made.largest = 0;
    return made;
  }
  /// Somebody makes room; false: nobody can.
  bool relieve(const sequence* kept) {
    const int before = residents_.preemptions();
    if (!residents_.relieve(kept)) return false;
    is_blocked_ = false;
    holds_back_ = holds_back_ || residents_.preemptions() > before;
    return true;
  }
  /// One pass through the model; false: nothing runs.
  bool pass() {
    planned_pass next = plan();
    tessera::mixed_batch work;
    for (;; next = plan()) {
      if (next.items.empty()) return false;
      if (next.largest > cache_.available() && relieve(nullptr)) continue;
      try {
        work = cache_.prepare(next.items);
        break;
      } catch (const tessera::error&) {
        if (!relieve(nullptr)) throw;
      }
    }
    std::vector<token_t> tokens;
    std::vector<std::int32_t> wanted;
    for (std::size_t i = 0; i < next.sequences.size(); ++i) {
      const sequence& entry = *next.sequences[i];
      const auto first = entry.text.begin() + std::ptrdiff_t(entry.written);
      tokens.insert(tokens.end(), first, first + next.items[i].tokens);
      if (entry.written + std::size_t(next.items[i].tokens) == entry.text.size())
        wanted.push_back(work.indptr[i + 1] - 1);
    }
    const double begun = now();
    const std::vector<token_t> outputs = model_.pass(cache_, work, tokens, wanted);
    statistics_.add_pass(now() - begun, next.has_chunk);
    statistics_.peak_units = std::max(statistics_.peak_units, residents_.used_units());
    end_pass(next, outputs);
    return true;
  }
  void end_pass(const planned_pass& done, const std::vector<token_t>& outputs) {
    std::vector<std::pair<sequence*, token_t>> ended;  // prompts
    std::size_t output = 0;
    int batch = 0;
    for (std::size_t i = 0; i < done.sequences.size(); ++i) {
      sequence& entry = *done.sequences[i];
      const tessera::batch_item& item = done.items[i];
      entry.written += std::size_t(item.tokens);
      (item.is_prompt ? statistics_.prompt_tokens : statistics_.step_tokens) += item.tokens;
      batch += item.is_prompt ? 0 : 1;
      if (!item.is_prompt) {
        append_token(entry, outputs[output++]);
      } else if (entry.written == entry.text.size()) {
        ended.push_back({&entry, outputs[output++]});
      } else {
        residents_.store_document(entry);
      }
    }
    statistics_.largest_batch = std::max(statistics_.largest_batch, batch);
    for (const auto& [entry, token] : ended) {
      if (!entry->is_running()) continue;  // the end of the prompt before it needed its memory
      end_prompt(*entry);
      append_token(*entry, token);
    }
  }
  void end_prompt(sequence& entry) {
    for (;;) {
      try {
        cache_.end_prefill(entry.id);
        break;
      } catch (const tessera::error&) {
        if (!relieve(&entry)) throw;
      }
    }
    entry.state = stage::answering;
  }
  void append_token(sequence& entry, token_t token) {
    entry.text.push_back(token);
    entry.answered += 1;
    if (entry.answered == 1) entry.times.first_token = now();
    if (entry.answered < entry.now().answer) return;
    entry.times.last_token = now();
    statistics_.turns.push_back(entry.times);
    std::erase(residents_.running, &entry);
    is_blocked_ = holds_back_ = false;
    entry.answered = 0;
    entry.turn += 1;
    entry.state = stage::coming;
    entry.due = now() + entry.request->pause;
    if (entry.turn < entry.request->turns.size()) return;
    entry.state = stage::done;
    residents_.close(entry);
    unfinished_ -= 1;
  }

  Cache& cache_;
  Model& model_;
  Clock& clock_;
  scheduler_options options_;
  residents<Cache> residents_;
  std::size_t unfinished_ = 0;
  double begun_ = 0;
  bool is_blocked_ = false;  // who comes next has been refused, and nothing has changed since
  bool holds_back_ = false;  // a running sequence had to leave, and no turn has ended since
  serving_statistics statistics_;
};

}  // namespace serving
