// Calls that open and close sequences and bring in prompts, in random order, against a model of what a cache promises.
#pragma once

#include "compared_caches.hpp"

namespace support {

/// Sequences, prompts, announcements and texts that are read again.
class prompt_calls : public compared_caches {
 protected:
  prompt_calls(rng& random, const tessera::model_shape& shape, const called_method& method, const called_limits& limits,
               const making& make, std::unique_ptr<called_cache> reference, agreement* seen)
      : compared_caches(random, shape, limits, make, std::move(reference), seen), method_(method) {}

  /// What the contract says of one sequence.
  struct sequence {
    std::vector<index_t> next, turn;  // by layer: tokens seen, and those of the prompt that has not ended
    std::vector<bool> ended;          // by layer: of the prompt
    index_t step_tokens = 0;          // of the step that was prepared last
    index_t announced = 0;            // tokens of the turn's prompt; 0: nobody has said
    bool is_between_layers = false;   // of a step, on a device
    bool has_prepared = false;        // a step that layer 0 has not decoded, elsewhere
  };
  /// And of the step that was prepared last.
  struct step {
    tessera::batch now;
    bool has_begun = false;
    bool is_stale = true;       // must not go on
    bool is_disturbed = false;  // the budget has changed
    index_t next_layer = 0;
  };

  index_t some_id() {
    return random_.chance(0.85) && !model_.empty() ? random_.between(0, index_t(model_.size()) - 1)
                                                   : random_.between(-2, 9);
  }
  sequence* known(index_t id) {
    return id >= 0 && id < index_t(model_.size()) && model_[std::size_t(id)] ? &*model_[std::size_t(id)] : nullptr;
  }
  called_cache::boundary_fault some_fault(bool looked_at) {
    using kind = called_cache::boundary_fault;
    if (!looked_at || !random_.chance(0.05)) return kind::none;
    return std::vector{kind::one_less, kind::one_more, kind::no_flag}[std::size_t(random_.between(0, 2))];
  }
  bool is_of_step(index_t id) const { return std::count(step_.now.ids.begin(), step_.now.ids.end(), id) > 0; }
  /// Whether so many more tokens fit for certain; a method that drops some has room for more.
  bool surely_fits(const sequence& held, index_t tokens) const {
    const index_t most = *std::max_element(held.next.begin(), held.next.end());
    return !limits_.is_tight && (limits_.tokens == 0 || offset_t(most) + tokens <= limits_.tokens);
  }

  // --- sequences and prompts -----------------------------------------------------------------------------------------

  void open() {
    if (model_.size() > 4 && random_.chance(0.7)) return;
    const index_t free = index_t(std::find(model_.begin(), model_.end(), std::nullopt) - model_.begin());
    if (!apply("open", limits_.sequences == 0 || free < limits_.sequences, [&](called_cache& cache) {
          const index_t id = cache.open();  // a refusal must leave REQUIRE alone
          REQUIRE(id == free);
        }))
      return;
    if (std::size_t(free) == model_.size()) model_.emplace_back();
    const auto layers = std::size_t(shape_.layers);
    model_[std::size_t(free)] =
        sequence{std::vector<index_t>(layers, 0), std::vector<index_t>(layers, 0), std::vector<bool>(layers, false)};
  }

  void fork() {
    if (model_.size() > 4 && random_.chance(0.7)) return;
    const index_t id = some_id();
    const sequence* held = known(id);
    const index_t free = index_t(std::find(model_.begin(), model_.end(), std::nullopt) - model_.begin());
    const auto is_even = [&](const std::vector<index_t>& of) {
      return std::count(of.begin(), of.end(), of.front()) == index_t(of.size());
    };
    const bool between_turns = held && !held->is_between_layers && !held->has_prepared && held->announced == 0 &&
                               is_even(held->next) &&
                               std::count(held->turn.begin(), held->turn.end(), 0) == shape_.layers;
    std::optional<bool> allowed =
        between_turns && !is_under_way() && (limits_.sequences == 0 || free < limits_.sequences);
    if (*allowed && !surely_fits(*held, 0)) allowed.reset();
    if (!apply("fork", allowed, [&](called_cache& cache) {
          const index_t fresh = cache.fork(id);  // a refusal must leave REQUIRE alone
          REQUIRE(fresh == free);
        }))
      return;
    if (std::size_t(free) == model_.size()) model_.emplace_back();
    model_[std::size_t(free)] = model_[std::size_t(id)];
    model_[std::size_t(free)]->step_tokens = 0;
  }

  void close() {
    const index_t id = some_id();
    sequence* held = known(id);
    // Mostly those that have grown long, or that no order of calls can bring to an end any more.
    if (held && held->next[0] < 60 && random_.chance(held->is_between_layers ? 0.2 : 0.8)) return;
    if (!apply("close", held != nullptr, [&](called_cache& cache) { cache.close(id); })) return;
    model_[std::size_t(id)].reset();
    step_.is_stale = step_.is_stale || is_of_step(id);
  }

  void reserve() {
    const index_t id = some_id(),
                  tokens = random_.chance(0.8) ? random_.between(0, 40) : random_.pick({-1, 1 << 20, 0x7fffffff});
    if (!limits_.on_device) return;
    const sequence* held = known(id);
    std::optional<bool> allowed = held && !held->is_between_layers && tokens >= 0 && tokens <= limits_.tokens;
    if (*allowed && !surely_fits(*held, tokens)) allowed.reset();
    if (apply("reserve", allowed, [&](called_cache& cache) { cache.reserve(id, tokens); }))
      step_.is_stale = step_.is_stale || (step_.has_begun && is_of_step(id));
  }

  bool prefill(index_t layer, index_t id, index_t tokens, index_t queries, index_t kv_heads, index_t v_tokens) {
    sequence* held = known(id);
    if (held && held->next[0] > 90) return false;
    const bool shapes =
        kv_heads == shape_.kv_heads && tokens == v_tokens && tokens >= 1 && queries >= 0 && queries <= tokens;
    std::optional<bool> allowed =
        held && is_layer(layer) && shapes && !held->is_between_layers && !has_ended(*held, layer);
    if (*allowed && queries < tokens) allowed.reset();  // as the scorer needs
    if (held && limits_.tokens > 0 && tokens > limits_.tokens) allowed = false;
    if (*allowed && held->announced > 0 && held->turn[std::size_t(layer)] + tokens > held->announced) allowed = false;
    auto q = rows(queries, shape_.q_heads), k = rows(tokens, kv_heads), v = rows(v_tokens, kv_heads);
    if (random_.chance(0.05)) {
      random_.chance(0.4) && queries > 0 ? spoil(q) : spoil(random_.chance(0.5) ? k : v);
      // Fewer queries, or none, may be what the scorer needs.
      if (queries > 0 && (q.tokens != queries)) q.tokens = tokens + 1;
      allowed = false;
    }
    const auto fault = some_fault(method_.segments);
    if (fault != called_cache::boundary_fault::none) allowed = false;
    if (allowed.value_or(true) && method_.accumulates && queries > 0 && !is_aligned(q)) allowed = false;
    if (allowed.value_or(false) && !surely_fits(*held, tokens)) allowed.reset();
    if (!apply("prefill", allowed, [&](called_cache& cache) {
          cache.fault = fault;
          cache.prefill(layer, id, q, k, v);
        }))
      return false;
    held->next[std::size_t(layer)] += tokens;
    held->turn[std::size_t(layer)] += tokens;
    return true;
  }

  void prefill_somewhere() {
    index_t tokens = random_.between(random_.chance(0.1) ? -1 : 1, 9);
    if (limits_.on_device && random_.chance(0.03)) tokens = random_.pick({1 << 16, 1 << 30, 0x7fffffff});
    prefill(some_layer(), some_id(), tokens, random_.chance(0.7) ? tokens : random_.between(-1, 10),
            random_.chance(0.95) ? shape_.kv_heads : random_.between(0, 3),
            random_.chance(0.95) ? tokens : random_.between(0, 9));
  }

  void prefill_everywhere() {
    const index_t id = some_id(), tokens = random_.between(1, limits_.on_device && random_.chance(0.2) ? 60 : 12);
    const bool ends = random_.chance(0.2);
    for (index_t layer = 0; layer < shape_.layers; ++layer) {
      if (!prefill(layer, id, tokens, tokens, shape_.kv_heads, tokens)) return;
      if (ends) end_layer(layer, id);
    }
  }

  void attend_prompt() {
    const index_t id = some_id(), layer = some_layer(), tokens = random_.between(0, 12);
    const sequence* held = known(id);
    auto q = rows(tokens, shape_.q_heads);
    bool allowed = held && is_layer(layer) && !has_ended(*held, layer) && tokens >= 1 &&
                   tokens <= held->turn[std::size_t(layer)] && is_aligned(q);
    const auto wanted = some_output(tokens, 1, 0.1, allowed);
    if (random_.chance(0.05)) spoil(q), allowed = false;
    if (!apply("prefill_attention", allowed, [&](called_cache& cache) {
          const auto [out, lse] = take(wanted);
          cache.prefill_attention(layer, id, q, out, lse);
        }))
      return;
    compare_outputs();
  }

  void end_layer(index_t layer, index_t id) {
    sequence* held = known(id);
    const index_t turn = held && is_layer(layer) ? held->turn[std::size_t(layer)] : 0;
    const bool allowed =
        turn >= 1 && !is_under_way() && !has_ended(*held, layer) && (held->announced == 0 || held->announced == turn);
    if (apply("end_layer", allowed, [&](called_cache& cache) { cache.end_layer(layer, id); }))
      held->ended[std::size_t(layer)] = true;
  }
  /// On a device: a step that has begun.
  bool is_under_way() const {
    return limits_.on_device && step_.has_begun && !step_.is_stale && step_.next_layer < shape_.layers;
  }
  static bool has_ended(const sequence& held, index_t layer) { return held.ended[std::size_t(layer)]; }

  void end_prompt() { end_prompt(some_id()); }
  void end_prompt(index_t id) {
    sequence* held = known(id);
    bool even = held && held->turn[0] >= 1 && (held->announced == 0 || held->announced == held->turn[0]);
    for (index_t layer = 0; even && layer < shape_.layers; ++layer)
      even = held->next[std::size_t(layer)] == held->next[0];
    // A plan may have no room for the window.
    const std::optional<bool> allowed = even ? std::nullopt : std::optional<bool>(false);
    if (!apply("end_prefill", allowed, [&](called_cache& cache) { cache.end_prefill(id); })) return;
    std::fill(held->turn.begin(), held->turn.end(), 0);
    held->ended.assign(held->ended.size(), false);
    held->step_tokens = held->announced = 0;
    held->has_prepared = false;
    compare_stored(id);
  }

  bool announce(index_t id, index_t tokens) {
    sequence* held = known(id);
    bool allowed = held && tokens >= 1 && tokens <= tessera::max_tokens;
    for (index_t layer = 0; allowed && layer < shape_.layers; ++layer) allowed = held->turn[std::size_t(layer)] == 0;
    // A plan may have no room for the window.
    const std::optional<bool> expected = allowed ? std::nullopt : std::optional<bool>(false);
    if (!apply("announce", expected, [&](called_cache& cache) { cache.announce(id, tokens); })) return false;
    held->announced = tokens;
    return true;
  }
  void announce_somewhere() {
    announce(some_id(),
             random_.chance(0.8) ? random_.between(1, 24) : random_.pick({0, -1, (1 << 24) + 1, 0x7fffffff}));
  }
  // A whole turn's prompt, in chunks of any size, layer after layer.
  void announced_prompt() {
    const index_t id = some_id(), tokens = random_.between(1, 24);
    if (!announce(id, tokens)) return;
    for (index_t layer = 0; layer < shape_.layers; ++layer) {
      for (index_t done = 0, tries = 0; done < tokens; ++tries) {
        const index_t chunk = random_.between(1, tokens - done);
        if (tries > 60) return;
        if (prefill(layer, id, chunk, chunk, shape_.kv_heads, chunk)) done += chunk;
      }
      if (random_.chance(0.2)) end_layer(layer, id);
    }
    while (random_.chance(0.5)) read_again(id);
    end_prompt(id);
  }

  // Tokens that pass through a layer once more and are forgotten.
  void read_again(index_t id) {
    const index_t layer = some_layer(), tokens = random_.between(0, 6);
    const sequence* held = known(id);
    index_t first = random_.between(-1, 40), count = random_.between(0, 40);
    if (held && is_layer(layer) && held->next[std::size_t(layer)] > 0 && random_.chance(0.8)) {
      first = random_.between(0, held->next[std::size_t(layer)] - 1);
      count = random_.between(1, held->next[std::size_t(layer)] - first);
    }
    bool allowed = held && is_layer(layer) && !has_ended(*held, layer) && tokens >= 1 &&
                   held->turn[std::size_t(layer)] >= 1 && first >= 0 && count >= 1 &&
                   first + count <= held->next[std::size_t(layer)];
    auto q = rows(tokens, shape_.q_heads), k = rows(tokens, shape_.kv_heads), v = rows(tokens, shape_.kv_heads);
    bool right = true;
    auto wanted = some_output(tokens, 1, 0, right);
    wanted.lse = {};
    if (random_.chance(0.1)) {
      random_.chance(0.4) ? spoil(wanted.out) : spoil(*std::vector{&q, &k, &v}[std::size_t(random_.between(0, 2))]);
      allowed = false;
    }
    if (!apply("reread", allowed,
               [&](called_cache& cache) { cache.reread(layer, id, first, count, q, k, v, take(wanted).first); }))
      return;
    compare_outputs();
  }

  called_method method_;
  std::vector<std::optional<sequence>> model_;
  step step_;
};

}  // namespace support
