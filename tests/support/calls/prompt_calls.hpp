// Calls that open and close sequences and bring in prompts, against a model of what a cache promises.
#pragma once

#include "compared_caches.hpp"

namespace support {

/// Sequences, prompts, announcements and texts that are read again. Each function makes the call that it is given, and returns whether
/// it was carried out.
class prompt_calls : public compared_caches {
 public:
  /// What the contract says of one sequence.
  struct sequence {
    std::vector<index_t> next, turn;  // by layer: tokens seen, and those of the prompt that has not ended
    std::vector<bool> ended;          // by layer: of the prompt
    index_t step_tokens = 0;          // of the step that was prepared last
    index_t announced = 0;            // tokens of the turn's prompt; 0: nobody has said
    bool is_between_layers = false;   // of a step, on a device
    bool has_prepared = false;        // a step that layer 0 has not decoded, elsewhere
    index_t answer = 0;               // the position behind the last prompt
    bool is_cut = false;              // before that position
    tessera::sequence_options own{};  // what it was opened with
    bool is_even() const {
      const auto alike = [](const std::vector<index_t>& of) {
        return std::count(of.begin(), of.end(), of.front()) == index_t(of.size());
      };
      return alike(next) && alike(turn);
    }
    /// Whether it can be forked; saved between turns only. A prompt that has begun replaces a step that was prepared.
    bool is_between_calls() const {
      return is_even() && !is_between_layers && (!has_prepared || turn[0] > 0) &&
             std::count(ended.begin(), ended.end(), true) == 0;
    }
    bool is_between_turns() const { return is_between_calls() && turn[0] == 0 && announced == 0; }
  };
  /// And of the step that was prepared last.
  struct step {
    tessera::batch now;
    bool has_begun = false;
    bool is_stale = true;       // must not go on
    bool is_disturbed = false;  // the budget has changed
    index_t next_layer = 0;
  };

  /// Ids that have been open, from 0.
  index_t ids() const { return index_t(model_.size()); }
  const sequence* known(index_t id) const {
    return id >= 0 && id < ids() && model_[std::size_t(id)] ? &*model_[std::size_t(id)] : nullptr;
  }
  const step& latest_step() const { return step_; }
  bool is_aligned(const called_cache::rows& rows) const {
    return !limits_.on_device || (rows.data - call_inputs(true).data()) % 8 == 0;
  }
  bool is_layer(index_t layer) const { return layer >= 0 && layer < shape_.layers; }
  bool is_head(index_t head) const { return head >= 0 && head < shape_.kv_heads; }

 protected:
  prompt_calls(const tessera::model_shape& shape, const called_method& method, const called_limits& limits,
               const making& make, std::unique_ptr<called_cache> reference, agreement* seen)
      : compared_caches(shape, limits, make, std::move(reference), seen), method_(method) {}

  sequence* changed(index_t id) {
    return id >= 0 && id < ids() && model_[std::size_t(id)] ? &*model_[std::size_t(id)] : nullptr;
  }
  bool is_of_step(index_t id) const { return std::count(step_.now.ids.begin(), step_.now.ids.end(), id) > 0; }
  /// Whether so many more tokens fit for certain; a method that drops some has room for more.
  bool surely_fits(const sequence& held, index_t tokens) const {
    const index_t most = *std::max_element(held.next.begin(), held.next.end());
    if (limits_.on_device && held.own.has_shares()) return false;  // they may come to more than the recipe's budget
    return !limits_.is_tight && (limits_.tokens == 0 || offset_t(most) + tokens <= limits_.tokens);
  }

  // --- sequences -----------------------------------------------------------------------------------------------------

  bool open(const tessera::sequence_options& options) {
    const index_t free = free_id();
    std::optional<bool> allowed = limits_.sequences == 0 || free < limits_.sequences;
    const auto is_wrong = [](const tessera::token_budget& given) {
      return given.tokens < 0 || given.share < 0 || given.share > 1 || (given.tokens != 0 && given.share != 0);
    };
    if (is_wrong(options.budget) || is_wrong(options.read_tokens)) allowed = false;
    if (*allowed && options.is_given()) allowed.reset();  // the method has a say
    if (!apply(allowed, [&](called_cache& cache) {
          const index_t id = cache.open(options);
          must(id == free, "the lowest id that is free is opened", "got ", id, ", free is ", free);
        }))
      return false;
    const auto layers = std::size_t(shape_.layers);
    entry(free) =
        sequence{std::vector<index_t>(layers, 0), std::vector<index_t>(layers, 0), std::vector<bool>(layers, false)};
    entry(free)->own = options;
    return true;
  }

  bool fork(index_t id, index_t kind) {
    const sequence* held = known(id);
    const index_t free = free_id();
    if (held && kind != fork_kind::plain && held->is_between_calls() && !held->is_between_turns()) return false;
    std::optional<bool> allowed =
        held && held->is_between_calls() && !is_under_way() && (limits_.sequences == 0 || free < limits_.sequences);
    if (*allowed && !surely_fits(*held, 0)) allowed.reset();
    std::vector<unsigned char> passed;  // from one backend to the other
    if (allowed && *allowed && reference_ && kind >= fork_kind::to_reference)
      passed = (kind == fork_kind::to_reference ? *cache_ : *reference_).saved_bytes(id);
    if (!apply(allowed, [&](called_cache& cache) {
          const bool takes = !passed.empty() && (kind == fork_kind::to_reference) == (turn_ == 2);
          const index_t forked = takes                                       ? cache.load_bytes(passed)
                                 : kind == fork_kind::by_bytes && turn_ == 0 ? cache.fork_by_bytes(id)
                                                                             : cache.fork(id);
          must(forked == free, "a fork gets the lowest id that is free", "got ", forked, ", free is ", free);
        }))
      return false;
    sequence copy = *known(id);
    copy.step_tokens = 0;
    has_detoured_ = has_detoured_ || kind != fork_kind::plain;  // a loaded sequence has memory of its own size
    entry(free) = std::move(copy);
    return true;
  }

  // `settled` is the cache's own word; what a detour leaves behind says whether it is true.
  bool truncate(index_t id, index_t position) {
    sequence* held = changed(id);
    std::optional<bool> allowed = held && !held->is_between_layers && held->is_even();
    if (*allowed) {
      const index_t settled = cache_->settled(id), next = held->next[0], began = next - held->turn[0];
      must(settled >= 0 && settled <= next, "a settled position is one of the sequence's", settled, " of ", next);
      if (!has_ended_layers(*held)) {
        const index_t other = twin_->settled(id);
        const bool has_packed = method_.packs && has_detoured_ && settled > other;  // in a chunk that was taken back
        must(settled == other || has_packed, "a twin has settled what the cache has", settled, ", the twin ", other);
        if (position < settled && position >= other) return false;
      }
      allowed = position >= settled && position <= next && (position >= began || began == next);
      // Of a prompt that is being written all tokens, or some if its queries are not observed.
      if (*allowed && position > began && position < next) allowed.reset();
      if (allowed.value_or(true) && reference_ && reference_->settled(id) > position) reference_.reset();
    }
    if (!apply(allowed, [&](called_cache& cache) { cache.truncate(id, position); })) return false;
    take_back(*held, position);
    return true;
  }
  void take_back(sequence& held, index_t position) const {
    const index_t tokens = held.next[0] - position, of_prompt = held.turn[0];
    if (tokens == 0) return;
    held.is_cut = held.is_cut || (of_prompt > 0 ? method_.filters : position < held.answer);
    for (index_t& next : held.next) next -= tokens;
    for (index_t& turn : held.turn) turn -= of_prompt > 0 ? tokens : 0;
    if (held.turn[0] == 0) held.announced = 0;
    held.step_tokens = 0;
    held.has_prepared = false;
  }

  bool close(index_t id) {
    if (!apply(known(id) != nullptr, [&](called_cache& cache) { cache.close(id); })) return false;
    model_[std::size_t(id)].reset();
    step_.is_stale = step_.is_stale || is_of_step(id);
    return true;
  }

  bool reserve(index_t id, index_t tokens) {
    const sequence* held = known(id);
    if (held && has_ended_layers(*held)) return false;  // a twin, whose layers have not ended, holds more
    std::optional<bool> allowed = held && !held->is_between_layers && tokens >= 0 && tokens <= limits_.tokens;
    if (*allowed && !surely_fits(*held, tokens)) allowed.reset();
    if (!apply(allowed, [&](called_cache& cache) { cache.reserve(id, tokens); })) return false;
    step_.is_stale = step_.is_stale || (step_.has_begun && is_of_step(id));
    return true;
  }

  // --- prompts -------------------------------------------------------------------------------------------------------

  bool prefill(const cache_call& call) {
    const index_t tokens = call.k.tokens, queries = call.q.tokens;
    sequence* held = changed(call.id);
    const bool shapes =
        call.k.heads == shape_.kv_heads && tokens == call.v.tokens && tokens >= 1 && queries >= 0 && queries <= tokens;
    std::optional<bool> allowed =
        held && is_layer(call.layer) && shapes && !held->is_between_layers && !has_ended(*held, call.layer);
    if (*allowed && queries < tokens) allowed.reset();  // as the scorer needs
    if (held && is_layer(call.layer) && is_amid_step(*held, call.layer)) allowed = false;
    if (held && limits_.tokens > 0 && tokens > limits_.tokens) allowed = false;
    if (allowed.value_or(true) && held->announced > 0 && held->turn[std::size_t(call.layer)] + tokens > held->announced)
      allowed = false;
    if (call.is_wrong || call.fault != called_cache::boundary_fault::none) allowed = false;
    if (allowed.value_or(true) && method_.accumulates && queries > 0 && !is_aligned(call.q)) allowed = false;
    if (allowed.value_or(false) && !surely_fits(*held, tokens)) allowed.reset();
    if (!apply(allowed, [&](called_cache& cache) {
          cache.fault = call.fault;
          cache.prefill(call.layer, call.id, call.q, call.k, call.v);
        }))
      return false;
    held->next[std::size_t(call.layer)] += tokens;
    held->turn[std::size_t(call.layer)] += tokens;
    return true;
  }

  /// Whether a prompt would begin in a layer while some layers have a step that others have not.
  static bool is_amid_step(const sequence& held, index_t layer) {
    const auto own = std::size_t(layer);
    for (std::size_t l = 0; held.turn[own] == 0 && l < held.next.size(); ++l)
      if (held.turn[l] == 0 && held.next[l] != held.next[own]) return true;
    return false;
  }

  bool attend_prompt(const cache_call& call) {
    const sequence* held = known(call.id);
    std::optional<bool> allowed = !call.is_wrong && held && is_layer(call.layer) && !has_ended(*held, call.layer) &&
                                  call.q.tokens >= 1 && call.q.tokens <= held->turn[std::size_t(call.layer)];
    if (*allowed && !is_aligned(call.q)) {  // packed rows, which a first prompt may have, take any queries
      allowed = false;
      if (held->answer > 0 || method_.packs) allowed.reset();
    }
    if (!apply(allowed, [&](called_cache& cache) {
          const auto [out, lse] = take(call.wanted);
          cache.prefill_attention(call.layer, call.id, call.q, out, lse);
        }))
      return false;
    compare_outputs();
    return true;
  }

  bool end_layer(index_t layer, index_t id) {
    sequence* held = changed(id);
    const index_t turn = held && is_layer(layer) ? held->turn[std::size_t(layer)] : 0;
    const bool allowed =
        turn >= 1 && !is_under_way() && !has_ended(*held, layer) && (held->announced == 0 || held->announced == turn);
    // The call changes no output: a twin goes without it, but for pools where it frees the room that a twin needs.
    const auto call = [&](called_cache& cache) {
      if (turn_ != 1 || limits_.is_tight) cache.end_layer(layer, id);
    };
    std::optional<bool> expected = allowed;
    if (allowed && limits_.is_tight) expected.reset();  // rows that a fork shares are copied
    const auto refused = [&](called_cache& cache) { cache.end_layer(layer, id); };
    if (allowed ? !apply(expected, call) : !apply(expected, refused)) return false;
    held->ended[std::size_t(layer)] = true;
    has_detoured_ = true;
    return true;
  }
  /// On a device: a step that has begun.
  bool is_under_way() const {
    return limits_.on_device && step_.has_begun && !step_.is_stale && step_.next_layer < shape_.layers;
  }
  static bool has_ended(const sequence& held, index_t layer) { return held.ended[std::size_t(layer)]; }
  static bool has_ended_layers(const sequence& held) {
    return std::count(held.ended.begin(), held.ended.end(), true) > 0;
  }

  bool end_prompt(index_t id) {
    sequence* held = changed(id);
    bool even = held && held->turn[0] >= 1 && (held->announced == 0 || held->announced == held->turn[0]);
    for (index_t layer = 0; even && layer < shape_.layers; ++layer)
      even = held->next[std::size_t(layer)] == held->next[0];
    // A plan may have no room for the window.
    const std::optional<bool> allowed = even ? std::nullopt : std::optional<bool>(false);
    if (!apply(allowed, [&](called_cache& cache) { cache.end_prefill(id); })) return false;
    std::fill(held->turn.begin(), held->turn.end(), 0);
    held->ended.assign(held->ended.size(), false);
    held->step_tokens = held->announced = 0;
    held->has_prepared = held->is_cut = false;
    held->answer = held->next[0];
    compare_stored(id);
    return true;
  }

  bool announce(index_t id, index_t tokens) {
    sequence* held = changed(id);
    bool allowed = held && tokens >= 1 && tokens <= tessera::max_tokens;
    for (index_t layer = 0; allowed && layer < shape_.layers; ++layer) allowed = held->turn[std::size_t(layer)] == 0;
    // A plan may have no room for the window.
    const std::optional<bool> expected = allowed ? std::nullopt : std::optional<bool>(false);
    if (!apply(expected, [&](called_cache& cache) { cache.announce(id, tokens); })) return false;
    held->announced = tokens;
    return true;
  }

  // Tokens that pass through a layer once more and are forgotten.
  bool read_again(const cache_call& call) {
    const sequence* held = known(call.id);
    const bool allowed = !call.is_wrong && held && is_layer(call.layer) && !has_ended(*held, call.layer) &&
                         call.q.tokens >= 1 && held->turn[std::size_t(call.layer)] >= 1 && call.first >= 0 &&
                         call.tokens >= 1 && call.first + call.tokens <= held->next[std::size_t(call.layer)];
    if (!apply(allowed, [&](called_cache& cache) {
          cache.reread(call.layer, call.id, call.first, call.tokens, call.q, call.k, call.v, take(call.wanted).first);
        }))
      return false;
    compare_outputs();
    return true;
  }

  called_method method_;
  std::vector<std::optional<sequence>> model_;
  step step_;
  bool has_detoured_ = false;  // the cache alone made calls that change nothing but memory

 private:
  index_t free_id() const { return index_t(std::find(model_.begin(), model_.end(), std::nullopt) - model_.begin()); }
  std::optional<sequence>& entry(index_t id) {
    if (id == ids()) model_.emplace_back();
    return model_[std::size_t(id)];
  }
};

}  // namespace support
