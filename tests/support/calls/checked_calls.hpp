// A cache whose calls are checked against a model of what it promises: any list of them can be made, in any order.
#pragma once

#include <array>
#include <map>

#include "draft_calls.hpp"

namespace support {

/// What caches are made of that get the same calls.
struct called_caches {
  tessera::model_shape shape;
  called_method method;
  called_limits limits;
  compared_caches::making make;            ///< throws as the cache does
  compared_caches::making make_reference;  ///< of another backend; empty: none
};

/// Caches that go on alike, and the model that tells which calls the contract allows.
class checked_calls : public draft_calls {
 public:
  enum class outcome { carried_out, refused, passed_over };

  explicit checked_calls(const called_caches& caches, agreement* seen = nullptr)
      : draft_calls(caches.shape, caches.method, caches.limits, caches.make,
                    caches.make_reference ? caches.make_reference() : nullptr, seen) {}

  /// Makes a call, or passes over one that nobody may make in this state. Throws broken_rule where it does not do what the contract says.
  outcome make(const cache_call& call) {
    if (!is_possible(call)) return outcome::passed_over;
    return carry_out(call) ? outcome::carried_out : outcome::refused;
  }
  const called_method& method() const { return method_; }

  static bool same(const tessera::batch& a, const tessera::batch& b) {
    return a.takes_as(b) && a.evicts_first == b.evicts_first && a.evicts_last == b.evicts_last;
  }

 private:
  bool carry_out(const cache_call& call) {
    switch (call.verb) {
      case cache_verb::open:
        return open(call.options);
      case cache_verb::fork:
        return fork(call.id, call.first);
      case cache_verb::truncate:
        return truncate(call.id, call.first);
      case cache_verb::detour:
        return detour(call);
      case cache_verb::draft:
        return draft(call);
      case cache_verb::close:
        return close(call.id);
      case cache_verb::reserve:
        return reserve(call.id, call.tokens);
      case cache_verb::prefill:
        return prefill(call);
      case cache_verb::prefill_attention:
        return attend_prompt(call);
      case cache_verb::end_layer:
        return end_layer(call.layer, call.id);
      case cache_verb::end_prefill:
        return end_prompt(call.id);
      case cache_verb::announce:
        return announce(call.id, call.tokens);
      case cache_verb::reread:
        return read_again(call);
      case cache_verb::prepare_step:
        return prepare(call);
      case cache_verb::begin_step:
        return begin(call);
      case cache_verb::decode:
        return decode(call);
      case cache_verb::set_budget:
        return set_budget(call.tokens);
      case cache_verb::copy:
        return copy();
      case cache_verb::look:
        return look(call);
    }
    return false;
  }

  /// Sequences stay short, and what a device's host does not see is never wrong: a step that is prepared must begin and go through a
  /// layer before anything else is called, and no layer is left out, as a graph that replays the step leaves none out.
  bool is_possible(const cache_call& call) const {
    const bool is_step = call.verb == cache_verb::begin_step || call.verb == cache_verb::decode;
    if (is_step && call.step > 0 && steps_.count(call.step) == 0) return false;
    if (limits_.on_device && !step_.is_stale) {
      if (!step_.has_begun && call.verb != cache_verb::begin_step) return false;
      if (step_.has_begun && step_.next_layer == 0 && !is_step) return false;
    }
    if (call.verb == cache_verb::end_layer && limits_.on_device && known(call.id) && known(call.id)->own.has_shares())
      return false;  // what a share comes to may be more than the device's memory was made for
    if (call.verb == cache_verb::prefill) {
      const sequence* held = known(call.id);
      return !held || held->next[0] <= 90;
    }
    if (call.verb == cache_verb::prepare_step) {
      return std::all_of(call.ids.begin(), call.ids.end(), [&](index_t id) {
        const sequence* held = known(id);
        return !held || held->next[0] <= 110;
      });
    }
    if (call.verb != cache_verb::decode) return true;
    if (limits_.on_device && call.layer > step_.next_layer) return false;
    const tessera::batch now = step_of(call, 0);
    return std::all_of(now.ids.begin(), now.ids.end(), [&](index_t id) {
      const sequence* held = known(id);
      return !held || *std::max_element(held->next.begin(), held->next.end()) <= 130;
    });
  }

  // --- steps ---------------------------------------------------------------------------------------------------------

  bool prepare(const cache_call& call) {
    const bool is_uneven =
        std::adjacent_find(call.lengths.begin(), call.lengths.end(), std::not_equal_to<>()) != call.lengths.end();
    bool allowed = call.tokens >= 1 && call.tokens <= limits_.step_tokens && !call.ids.empty() &&
                   (call.lengths.empty() || call.lengths.size() == call.ids.size());
    bool fits = !is_uneven || !limits_.on_device;  // on a device some methods refuse
    for (const index_t length : call.lengths) allowed = allowed && length >= 1;
    for (const index_t id : call.ids) {
      const sequence* held = known(id);
      allowed = allowed && held && std::count(call.ids.begin(), call.ids.end(), id) == 1 && !held->is_between_layers &&
                !held->is_cut && (!method_.exact || held->own.is_given() || method_.read >= call.tokens);
      // What a step reads may be less than its tokens.
      fits = fits && allowed && !(method_.exact && held->own.is_given()) && !held->own.read_tokens.is_given();
      for (index_t layer = 0; allowed && layer < shape_.layers; ++layer)
        allowed = held->turn[std::size_t(layer)] == 0 && held->next[std::size_t(layer)] == held->next[0];
      fits = fits && allowed && surely_fits(*held, call.tokens);
    }
    allowed = allowed && call.fault == called_cache::boundary_fault::none;
    const std::optional<bool> expected = allowed && !fits ? std::nullopt : std::optional<bool>(allowed);
    prepared_step made;
    if (!apply(expected, [&](called_cache& cache) {
          cache.fault = call.fault;
          made[std::size_t(turn_)] = call.lengths.empty() ? cache.prepare_step(call.ids, call.tokens)
                                                          : cache.prepare_uneven(call.ids, call.lengths);
        }))
      return false;
    must(made[0].ids == call.ids && made[0].tokens == call.tokens,
         "a step is of the sequences and tokens that were asked for");
    steps_[call.step] = made;
    step_ = step{made[0], false, false, false, 0};
    for (index_t b = 0; b < index_t(call.ids.size()); ++b) {
      sequence& held = *changed(call.ids[std::size_t(b)]);
      held.step_tokens = made[0].tokens_of(b);
      held.has_prepared = !limits_.on_device;
      if (!limits_.on_device) continue;
      for (index_t& next : held.next) next += held.step_tokens;  // which each layer's decode does elsewhere
    }
    return true;
  }

  bool begin(const cache_call& call) {
    const bool allowed = !limits_.on_device || (!call.is_altered && !step_.has_begun);
    if (!apply(allowed, [&](called_cache& cache) { cache.begin_step(step_of(call, turn_)); })) return false;
    step_.has_begun = true;
    return true;
  }

  /// A step as the cache, its twin or the reference has prepared it.
  tessera::batch step_of(const cache_call& call, int turn) const {
    const auto prepared = steps_.find(call.step);
    tessera::batch now = prepared == steps_.end() ? tessera::batch{} : prepared->second[std::size_t(turn)];
    if (!call.is_altered) return now;
    now.ids = call.ids;
    now.tokens = call.tokens;
    now.lengths.clear();
    return now;
  }

  std::optional<bool> expected_of(index_t layer, const tessera::batch& now, index_t tokens) {
    if (!is_layer(layer) || tokens != now.tokens) return false;
    const auto at = std::size_t(layer);
    for (index_t b = 0; b < now.sequences(); ++b) {
      const sequence* held = known(now.ids[std::size_t(b)]);
      if (!held || held->step_tokens != now.tokens_of(b) || held->turn[at] != 0) return false;
    }
    const bool latest = !step_.is_stale && now.number == step_.now.number && same(now, step_.now);
    if (limits_.on_device) return latest && step_.has_begun && layer == step_.next_layer;
    for (index_t b = 0; b < now.sequences(); ++b) {
      const auto& next = known(now.ids[std::size_t(b)])->next;
      if (next[at] != (layer > 0 ? next[0] - now.tokens_of(b) : next.back())) return false;
    }
    if (latest && !step_.is_disturbed && layer == step_.next_layer) return true;
    return std::nullopt;
  }

  bool decode(const cache_call& call) {
    const tessera::batch now = step_of(call, 0);
    const index_t tokens = call.q.tokens;
    const bool right = !call.is_wrong && tokens == call.k.tokens && call.q.sequences == now.sequences();
    const std::optional<bool> expected =
        right && is_aligned(call.q) && tokens >= 1 ? expected_of(call.layer, now, tokens) : false;
    if (!apply(expected, [&](called_cache& cache) {
          const auto [out, lse] = take(call.wanted);
          cache.decode(call.layer, step_of(call, turn_), call.q, call.k, call.v, out, lse);
        }))
      return false;
    if (now.number == step_.now.number && same(now, step_.now)) step_.next_layer = call.layer + 1;
    for (index_t b = 0; b < now.sequences(); ++b) {
      sequence& held = *changed(now.ids[std::size_t(b)]);
      if (limits_.on_device) {
        held.is_between_layers = call.layer + 1 < shape_.layers;
      } else {
        held.next[std::size_t(call.layer)] += now.tokens_of(b);
        held.has_prepared = held.has_prepared && call.layer > 0;
      }
    }
    compare_attended(call.layer, now);
    compare_outputs();
    if (call.layer % 2 == 0 && !now.evicts_last) attend_alike(call);
    for (const index_t id : now.ids) {
      if (call.layer + 1 == shape_.layers) compare_stored(id);
    }
    return true;
  }

  /// The queries of a layer that was decoded give its outputs once more, which only the cache is asked for: from then on
  /// its twin must still go on alike, to the bit.
  void attend_alike(const cache_call& call) {
    std::vector<float> out, lse;
    const std::string said = compared_caches::outcome(*cache_, [&](called_cache& cache) {
      const auto [to, sums] = written(call.wanted, out, lse);
      cache.attend(call.layer, step_of(call, 0), call.q, to, sums);
    });
    if (said.find("one whose steps only read") != std::string::npos) return;
    must(said.empty(), "a layer that was decoded can be attended", said);
    for (const index_t id : step_of(call, 0).ids) {
      if (cache_->settled(id) == cache_->next_position(id)) return;  // the step has dropped, or packed, what it read
    }
    must(same_bits(out, outputs_[0].out), "queries of a step that are attended twice give the same bits");
    must(same_bits(lse, outputs_[0].lse), "and the same log-sum-exps");
  }

  // --- the rest ------------------------------------------------------------------------------------------------------

  bool set_budget(index_t tokens) {
    std::optional<bool> allowed;  // window, sinks and the like have a say
    if (method_.has_budget && (tokens < 1 || tokens > 1 << 24)) allowed = false;
    for (const auto& held : model_) {
      if (held && method_.by_layer && has_ended_layers(*held)) allowed = false;
    }
    if (!apply(allowed, [&](called_cache& cache) { cache.set_budget(tokens); })) return false;
    if (!method_.has_two) method_.read = tokens;
    step_.is_disturbed = true;
    step_.is_stale = step_.is_stale || (limits_.on_device && step_.has_begun);
    return true;
  }

  bool copy() {
    cache_ = cache_->copy();
    twin_ = twin_->copy();  // a copy may hold less memory
    return true;
  }

  bool look(const cache_call& call) {
    const sequence* held = known(call.id);
    std::vector<offset_t> seen[3];
    if (!apply(held && is_layer(call.layer) && is_head(call.head), [&](called_cache& cache) {
          cache.positions(call.layer, call.id, call.head);
          cache.readable(call.layer, call.id, call.head);
          for (index_t head = 0; head < shape_.kv_heads; ++head) {
            for (const auto& part :
                 {cache.positions(call.layer, call.id, head), cache.readable(call.layer, call.id, head)}) {
              seen[turn_].push_back(offset_t(part.size()));
              seen[turn_].insert(seen[turn_].end(), part.begin(), part.end());
            }
          }
          const tessera::stage_plan plan = cache.plan(call.id);
          seen[turn_].insert(seen[turn_].end(), {plan.capacity, plan.retained, plan.read, offset_t(plan.ratio * 4096)});
          // A detour leaves memory behind, and the bytes of its last step.
          const offset_t bytes = cache.bytes(call.id), bytes_read = cache.bytes_read(call.id);
          if (!has_detoured_) seen[turn_].insert(seen[turn_].end(), {bytes, bytes_read});
          const index_t next = cache.next_position(call.id);
          must(next == held->next[0], "the next position follows the tokens so far", "got ", next, ", expected ",
               held->next[0]);
        }))
      return false;
    if (has_ended_layers(*held)) return true;  // a twin chooses when the prompt ends
    if (held->is_between_layers) return true;  // layers that the step has not reached have room for its rows, unwritten
    must(seen[0] == seen[1], "a twin stores what the cache stores",
         "by head: positions, readable; plan; bytes: ", listed(seen[0]), ", of the twin ", listed(seen[1]));
    return true;
  }

  using prepared_step = std::array<tessera::batch, 3>;
  std::map<int, prepared_step> steps_;  // that were prepared, by the number of the call
};

}  // namespace support
