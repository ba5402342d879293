// Calls of a cache in random order with random arguments, valid and not, written down as they are made.
#pragma once

#include "call_arguments.hpp"
#include "checked_calls.hpp"

namespace support {

/// Draws calls that suit the state of a cache, or nearly so, and makes them.
class random_cache_calls : public call_arguments {
 public:
  random_cache_calls(rng& random, const called_caches& caches, agreement* seen = nullptr)
      : call_arguments(random, caches.shape, caches.limits), cache_(caches, seen) {}

  /// All calls that were made so far, the one that failed among them.
  const std::vector<cache_call>& made() const { return made_; }

  void call() {
    switch (random_.between(0, limits_.on_device ? 15 : 18)) {
      case 0:
        return random_.chance(0.4) ? fork() : open();
      case 1:
        return close();
      case 2:
      case 3:
        return prefill_somewhere();
      case 4:
        return prefill_everywhere();
      case 5:
        return attend_prompt();
      case 6:
        return random_.chance(0.2) ? end_layer(some_layer(), some_id()) : end_prompt(some_id());
      case 7:
        return end_prompt(some_id());
      case 8:
      case 9:
        return step_everywhere();
      case 10:
        return decode_somewhere();
      case 11:
        return reserve();
      case 12:
        return truncate();
      case 13:
        return detour();
      case 14:
        return random_.chance(0.5) ? detour() : draft();
      case 16:
        return announced_prompt();
      case 17:
        return announce_somewhere();
      case 18:
        return read_again(some_id());
      default:
        return random_.chance(limits_.on_device ? 0.9 : 0.7) ? look() : change();
    }
  }

 private:
  bool make(cache_call call) {
    made_.push_back(std::move(call));  // first: it may throw
    const auto done = cache_.make(made_.back());
    if (done == checked_calls::outcome::passed_over) made_.pop_back();
    return done == checked_calls::outcome::carried_out;
  }
  bool make(cache_verb verb, index_t layer, index_t id, index_t tokens = 0) {
    cache_call call;
    call.verb = verb;
    call.layer = layer;
    call.id = id;
    call.tokens = tokens;
    return make(std::move(call));
  }

  index_t some_id() {
    return random_.chance(0.85) && cache_.ids() > 0 ? random_.between(0, cache_.ids() - 1) : random_.between(-2, 9);
  }
  called_cache::boundary_fault some_fault(bool looked_at) {
    using kind = called_cache::boundary_fault;
    if (!looked_at || !random_.chance(0.05)) return kind::none;
    return std::vector{kind::one_less, kind::one_more, kind::no_flag}[std::size_t(random_.between(0, 2))];
  }

  // --- sequences and prompts -----------------------------------------------------------------------------------------

  void open() {
    if (cache_.ids() > 4 && random_.chance(0.7)) return;
    cache_call call;
    call.verb = cache_verb::open;
    if (random_.chance(0.4)) call.options.budget = some_budget();
    if (random_.chance(0.2)) call.options.read_tokens = some_budget();
    make(std::move(call));
  }
  void fork() {
    if (cache_.ids() > 4 && !random_.chance(0.3)) return;
    cache_call call;
    call.verb = cache_verb::fork;
    call.id = some_id();
    // Sums of an answer's queries have a form of their own on each backend.
    call.first = random_.between(0, cache_.method().step_segments ? fork_kind::by_bytes : fork_kind::from_reference);
    const auto* held = cache_.known(call.id);
    if (held && !held->is_between_turns() && random_.chance(0.9)) call.first = fork_kind::plain;
    make(std::move(call));
  }
  void close() {
    const index_t id = some_id();
    const auto* held = cache_.known(id);
    // Mostly those that have grown long, or that no order of calls can bring to an end any more.
    if (held && held->next[0] < 60 && random_.chance(held->is_between_layers ? 0.2 : 0.8)) return;
    make(cache_verb::close, 0, id);
  }
  void truncate() {
    cache_call call;
    call.verb = cache_verb::truncate;
    call.id = some_id();
    const auto* held = cache_.known(call.id);
    const index_t next = held ? held->next[0] : 9;
    call.first = random_.chance(0.8) ? std::max(0, next - random_.between(0, 9)) : random_.between(-1, next + 1);
    if (held && held->turn[0] > 0 && random_.chance(0.5)) call.first = next - held->turn[0];
    make(std::move(call));
  }
  void detour() {
    cache_call call;
    call.verb = cache_verb::detour;
    call.ids = some_ids();
    call.first = random_.between(detour_kind::part_of_step, 3);
    call.tokens = random_.between(0, shape_.layers - 1);
    if (call.first == detour_kind::chunk || call.first == detour_kind::part_of_chunk) call.ids.resize(1, 0);
    give_rows(call, random_.chance(0.5) ? 1 : random_.between(1, 8));
    make(std::move(call));
  }
  void draft() {
    cache_call call;
    call.verb = cache_verb::draft;
    call.ids = some_ids();
    const bool is_chain = random_.chance(0.5);
    const index_t tokens = random_.between(1, is_chain ? 8 : 16);
    for (index_t t = 0; t < tokens; ++t) call.parents.push_back(is_chain ? t - 1 : random_.between(-1, t - 1));
    const bool alike = random_.chance(0.6);
    for (std::size_t b = 0; b < call.ids.size(); ++b)
      call.nodes.push_back(alike && b > 0 ? call.nodes[0] : path(call.parents));
    give_rows(call, tokens);
    make(std::move(call));
  }
  void reserve() {
    const index_t id = some_id(),
                  tokens = random_.chance(0.8) ? random_.between(0, 40) : random_.pick({-1, 1 << 20, 0x7fffffff});
    if (limits_.on_device) make(cache_verb::reserve, 0, id, tokens);
  }

  bool prefill(index_t layer, index_t id, index_t tokens, index_t queries, index_t kv_heads, index_t v_tokens) {
    cache_call call;
    call.verb = cache_verb::prefill;
    call.layer = layer;
    call.id = id;
    call.q = rows(queries, shape_.q_heads);
    call.k = rows(tokens, kv_heads);
    call.v = rows(v_tokens, kv_heads);
    if (random_.chance(0.05)) {
      random_.chance(0.4) && queries > 0 ? spoil(call.q) : spoil(random_.chance(0.5) ? call.k : call.v);
      // Fewer queries, or none, may be what the scorer needs.
      if (queries > 0 && (call.q.tokens != queries)) call.q.tokens = tokens + 1;
      call.is_wrong = true;
    }
    call.fault = some_fault(cache_.method().segments);
    return make(std::move(call));
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
    cache_call call;
    call.verb = cache_verb::prefill_attention;
    call.id = some_id();
    call.layer = some_layer();
    const index_t tokens = random_.between(0, 12);
    call.q = rows(tokens, shape_.q_heads);
    call.wanted = some_output(tokens, 1, 0.1, call.is_wrong);
    if (random_.chance(0.05) && !call.is_wrong) {  // queries and outputs of one more token would be right
      spoil(call.q);
      call.is_wrong = true;
    }
    make(std::move(call));
  }
  void end_layer(index_t layer, index_t id) { make(cache_verb::end_layer, layer, id); }
  void end_prompt(index_t id) { make(cache_verb::end_prefill, 0, id); }

  void announce_somewhere() {
    const index_t id = some_id();
    make(cache_verb::announce, 0, id,
         random_.chance(0.8) ? random_.between(1, 24) : random_.pick({0, -1, (1 << 24) + 1, 0x7fffffff}));
  }
  // A whole turn's prompt, in chunks of any size, layer after layer.
  void announced_prompt() {
    const index_t id = some_id(), tokens = random_.between(1, 24);
    if (!make(cache_verb::announce, 0, id, tokens)) return;
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

  void read_again(index_t id) {
    cache_call call;
    call.verb = cache_verb::reread;
    call.id = id;
    call.layer = some_layer();
    const index_t tokens = random_.between(0, 6);
    const auto* held = cache_.known(id);
    call.first = random_.between(-1, 40);
    call.tokens = random_.between(0, 40);
    if (held && is_layer(call.layer) && held->next[std::size_t(call.layer)] > 0 && random_.chance(0.8)) {
      call.first = random_.between(0, held->next[std::size_t(call.layer)] - 1);
      call.tokens = random_.between(1, held->next[std::size_t(call.layer)] - call.first);
    }
    call.q = rows(tokens, shape_.q_heads);
    call.k = rows(tokens, shape_.kv_heads);
    call.v = rows(tokens, shape_.kv_heads);
    call.wanted = some_output(tokens, 1, 0, call.is_wrong);
    call.wanted.lse = {};
    if (random_.chance(0.1)) {
      random_.chance(0.4) ? spoil(call.wanted.out)
                          : spoil(*std::vector{&call.q, &call.k, &call.v}[std::size_t(random_.between(0, 2))]);
      call.is_wrong = true;
    }
    make(std::move(call));
  }

  // --- steps ---------------------------------------------------------------------------------------------------------

  std::vector<index_t> some_ids() {
    std::vector<index_t> ids;
    for (index_t n = random_.between(random_.chance(0.05) ? 0 : 1, 3); n > 0; --n) {
      const index_t id = some_id();
      if (random_.chance(0.05) || std::find(ids.begin(), ids.end(), id) == ids.end()) ids.push_back(id);
    }
    return ids;
  }

  /// A step that was prepared, by the number of its call.
  struct prepared {
    int number = 0;
    tessera::batch now{};
  };

  void begin() {
    cache_call call;
    call.verb = cache_verb::begin_step;
    call.step = earlier_.back().number;
    if (limits_.on_device && random_.chance(0.1)) {
      cache_call wrong = call;
      wrong.is_altered = true;
      const tessera::batch& now = earlier_.back().now;
      wrong.ids.assign(now.ids.begin(), now.ids.end());
      wrong.tokens = now.tokens;
      random_.chance(0.3)   ? wrong.ids.clear()
      : random_.chance(0.5) ? wrong.ids.push_back(some_id())
                            : void(wrong.tokens += random_.pick({-1, 1}));
      make(std::move(wrong));
    }
    make(call);
    if (limits_.on_device && random_.chance(0.05)) make(call);
  }

  bool decode(index_t layer, cache_call call, index_t tokens, index_t sequences, index_t k_tokens, double wrong) {
    call.verb = cache_verb::decode;
    call.layer = layer;
    call.wanted = some_output(tokens, sequences, wrong / 2, call.is_wrong);
    call.q = rows(tokens, shape_.q_heads, sequences);
    call.k = rows(k_tokens, shape_.kv_heads, sequences);
    call.v = rows(k_tokens, shape_.kv_heads, sequences);
    if (wrong == 0 && !cache_.is_aligned(call.q)) call.q.data -= (call.q.data - call_inputs(true).data()) % 8;
    if (random_.chance(wrong / 2)) {
      spoil(*std::vector{&call.q, &call.k, &call.v}[std::size_t(random_.between(0, 2))]);
      call.is_wrong = true;
    }
    return make(std::move(call));
  }

  void step_everywhere() {
    cache_call prepare;
    prepare.verb = cache_verb::prepare_step;
    prepare.ids = some_ids();
    prepare.tokens = random_.chance(0.5)   ? 1
                     : random_.chance(0.9) ? random_.between(1, 8)
                                           : random_.pick({0, -1, 9, 1 << 30});
    if (random_.chance(0.3) && prepare.tokens > 1 && prepare.tokens <= 9) {
      for (std::size_t b = 0; b < prepare.ids.size(); ++b)
        prepare.lengths.push_back(random_.between(random_.chance(0.02) ? 0 : 1, prepare.tokens));
      if (!prepare.lengths.empty()) prepare.tokens = *std::max_element(prepare.lengths.begin(), prepare.lengths.end());
    }
    prepare.fault = some_fault(cache_.method().step_segments);
    prepare.step = ++steps_;
    if (!make(prepare)) return;
    earlier_.push_back({prepare.step, cache_.latest_step().now});
    if (earlier_.size() > 4) earlier_.erase(earlier_.begin());
    cache_call now;
    now.step = prepare.step;
    const index_t tokens = prepare.tokens, sequences = index_t(prepare.ids.size());
    begin();
    for (index_t layer = 0; layer < shape_.layers; ++layer) {
      bool done = false;
      while (!done && random_.chance(0.15)) done = decode(layer, now, tokens, sequences, tokens, 0.9);
      if (done) continue;
      if (layer > 0 && random_.chance(0.03)) return;
      // On a device a step that has begun must have gone through a layer before anything else may be refused.
      if ((layer > 0 || !limits_.on_device) && random_.chance(0.04)) between_layers();
      if (!decode(layer, now, tokens, sequences, tokens, 0)) return;
    }
  }

  void between_layers() {
    switch (random_.between(0, 6)) {
      case 6:
        return truncate();
      case 0:
        return prefill_somewhere();
      case 1:
        return close();
      case 2:
        return reserve();
      case 3:
        return change();
      case 4:
        return fork();
      default:
        return look();
    }
  }

  // An old step, one that nobody prepared, or a layer whose turn it is not.
  void decode_somewhere() {
    prepared step;
    if (!earlier_.empty()) step = earlier_[std::size_t(random_.between(0, index_t(earlier_.size()) - 1))];
    cache_call call;
    call.step = step.number;
    if (limits_.on_device && random_.chance(0.3)) {
      call.is_altered = true;
      call.ids = some_ids();
      call.tokens = random_.between(0, 9);
      step.now.ids = call.ids;
      step.now.tokens = call.tokens;
    }
    if (step.now.ids.empty()) return;
    const index_t layer = some_layer(), tokens = random_.chance(0.8) ? step.now.tokens : random_.between(0, 9);
    decode(layer, std::move(call), tokens, random_.chance(0.9) ? step.now.sequences() : random_.between(1, 4),
           random_.chance(0.9) ? tokens : random_.between(0, 9), 0.2);
  }

  // --- the rest ------------------------------------------------------------------------------------------------------

  void change() {
    make(cache_verb::set_budget, 0, 0,
         random_.chance(0.5) ? random_.between(16, 60) : random_.pick({0, -1, 3, 1 << 24, (1 << 24) + 1, 0x7fffffff}));
    if (random_.chance(0.2)) make(cache_verb::copy, 0, 0);
  }

  void look() {
    cache_call call;
    call.verb = cache_verb::look;
    call.id = some_id();
    call.layer = some_layer();
    call.head = some_head();
    make(std::move(call));
  }

  checked_calls cache_;
  std::vector<cache_call> made_;
  std::vector<prepared> earlier_;
  int steps_ = 0;
};

}  // namespace support
