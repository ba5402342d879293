// Calls of a cache in random order with random arguments, valid and not, against a model of what it promises.
#pragma once

#include "prompt_calls.hpp"

namespace support {

/// Calls of caches that go on alike, and the model that tells which ones the contract allows.
class random_cache_calls : public prompt_calls {
 public:
  random_cache_calls(rng& random, const tessera::model_shape& shape, const called_method& method,
                     const called_limits& limits, const making& make, std::unique_ptr<called_cache> reference = nullptr,
                     agreement* seen = nullptr)
      : prompt_calls(random, shape, method, limits, make, std::move(reference), seen) {}

  void call() {
    switch (random_.between(0, limits_.on_device ? 12 : 15)) {
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
        return random_.chance(0.2) ? end_layer(some_layer(), some_id()) : end_prompt();
      case 7:
        return end_prompt();
      case 8:
      case 9:
        return step_everywhere();
      case 10:
        return decode_somewhere();
      case 11:
        return reserve();
      case 13:
        return announced_prompt();
      case 14:
        return announce_somewhere();
      case 15:
        return read_again(some_id());
      default:
        return random_.chance(limits_.on_device ? 0.9 : 0.7) ? look() : change();
    }
  }

 private:
  // --- steps ---------------------------------------------------------------------------------------------------------

  std::vector<index_t> some_ids() {
    std::vector<index_t> ids;
    for (index_t n = random_.between(random_.chance(0.05) ? 0 : 1, 3); n > 0; --n) {
      const index_t id = some_id();
      if (random_.chance(0.05) || std::find(ids.begin(), ids.end(), id) == ids.end()) ids.push_back(id);
    }
    return ids;
  }

  bool prepare(const std::vector<index_t>& ids, index_t tokens) {
    bool allowed =
        tokens >= 1 && tokens <= limits_.step_tokens && !ids.empty() && (!method_.exact || method_.read >= tokens);
    bool fits = true;
    for (const index_t id : ids) {
      const sequence* held = known(id);
      if (held && held->next[0] > 110) return false;
      allowed = allowed && held && std::count(ids.begin(), ids.end(), id) == 1 && !held->is_between_layers;
      for (index_t layer = 0; allowed && layer < shape_.layers; ++layer)
        allowed = held->turn[std::size_t(layer)] == 0 && held->next[std::size_t(layer)] == held->next[0];
      fits = fits && allowed && surely_fits(*held, tokens);
    }
    const auto fault = some_fault(method_.step_segments);
    allowed = allowed && fault == called_cache::boundary_fault::none;
    const std::optional<bool> expected = allowed && !fits ? std::nullopt : std::optional<bool>(allowed);
    tessera::batch made;
    if (!apply("prepare_step", expected, [&](called_cache& cache) {
          cache.fault = fault;
          made = cache.prepare_step(ids, tokens);
        }))
      return false;
    REQUIRE((made.ids == ids && made.tokens == tokens));
    earlier_.push_back(made);
    if (earlier_.size() > 4) earlier_.erase(earlier_.begin());
    step_ = step{made, false, false, false, 0};
    for (const index_t id : ids) {
      sequence& held = *known(id);
      held.step_tokens = tokens;
      held.has_prepared = !limits_.on_device;
      if (!limits_.on_device) continue;
      for (index_t& next : held.next) next += tokens;  // which each layer's decode does elsewhere
    }
    return true;
  }

  void begin() {
    const auto begins = [&](const tessera::batch& one, bool allowed) {
      apply("begin_step", allowed, [&](called_cache& cache) { cache.begin_step(one); });
    };
    if (limits_.on_device && random_.chance(0.1)) {
      tessera::batch wrong = step_.now;
      random_.chance(0.3)   ? wrong.ids.clear()
      : random_.chance(0.5) ? wrong.ids.push_back(some_id())
                            : void(wrong.tokens += random_.pick({-1, 1}));
      begins(wrong, false);
    }
    begins(step_.now, true);
    step_.has_begun = true;
    if (limits_.on_device && random_.chance(0.05)) begins(step_.now, false);
  }

  static bool same(const tessera::batch& a, const tessera::batch& b) {
    return a.ids == b.ids && a.tokens == b.tokens && a.evicts_first == b.evicts_first && a.evicts_last == b.evicts_last;
  }
  std::optional<bool> expected_of(index_t layer, const tessera::batch& now, index_t tokens) {
    if (!is_layer(layer) || tokens != now.tokens) return false;
    const auto at = std::size_t(layer);
    for (const index_t id : now.ids) {
      const sequence* held = known(id);
      if (!held || held->step_tokens != tokens || held->turn[at] != 0) return false;
    }
    const bool latest = !step_.is_stale && same(now, step_.now);
    if (limits_.on_device) return latest && step_.has_begun && layer == step_.next_layer;
    for (const index_t id : now.ids) {
      const auto& next = known(id)->next;
      if (next[at] != (layer > 0 ? next[0] - now.tokens : next.back())) return false;
    }
    if (latest && !step_.is_disturbed && layer == step_.next_layer) return true;
    return std::nullopt;
  }

  bool decode(index_t layer, const tessera::batch& now, index_t tokens, index_t sequences, index_t k_tokens,
              double wrong) {
    for (const index_t id : now.ids) {
      const sequence* held = known(id);
      if (held && *std::max_element(held->next.begin(), held->next.end()) > 130) return false;
    }
    bool right = tokens == k_tokens && sequences == now.sequences();
    const auto wanted = some_output(tokens, sequences, wrong / 2, right);
    auto q = rows(tokens, shape_.q_heads, sequences), k = rows(k_tokens, shape_.kv_heads, sequences),
         v = rows(k_tokens, shape_.kv_heads, sequences);
    if (wrong == 0 && !is_aligned(q)) q.data -= (q.data - inputs(true).data()) % 8;
    if (random_.chance(wrong / 2)) {
      spoil(*std::vector{&q, &k, &v}[std::size_t(random_.between(0, 2))]);
      right = false;
    }
    const std::optional<bool> expected =
        right && is_aligned(q) && tokens >= 1 ? expected_of(layer, now, tokens) : false;
    CAPTURE(layer, now.ids, now.tokens, tokens, sequences, k_tokens, right, q.tokens, k.tokens, v.tokens);
    CAPTURE(wanted.out.tokens, wanted.out.heads, wanted.out.sequences, wanted.out.dim, wanted.lse.tokens);
    if (!apply("decode", expected, [&](called_cache& cache) {
          const auto [out, lse] = take(wanted);
          cache.decode(layer, now, q, k, v, out, lse);
        }))
      return false;
    if (same(now, step_.now)) step_.next_layer = layer + 1;
    for (const index_t id : now.ids) {
      sequence& held = *known(id);
      if (limits_.on_device) {
        held.is_between_layers = layer + 1 < shape_.layers;
      } else {
        held.next[std::size_t(layer)] += tokens;
        held.has_prepared = held.has_prepared && layer > 0;
      }
    }
    compare_attended(layer, now);
    compare_outputs();
    for (const index_t id : now.ids) {
      if (layer + 1 == shape_.layers) compare_stored(id);
    }
    return true;
  }

  void step_everywhere() {
    const auto ids = some_ids();
    const index_t tokens = random_.chance(0.5)   ? 1
                           : random_.chance(0.9) ? random_.between(1, 8)
                                                 : random_.pick({0, -1, 9, 1 << 30});
    if (!prepare(ids, tokens)) return;
    const tessera::batch now = step_.now;
    begin();
    for (index_t layer = 0; layer < shape_.layers; ++layer) {
      bool done = false;
      while (!done && random_.chance(0.15)) done = decode(layer, now, tokens, now.sequences(), tokens, 0.9);
      if (done) continue;
      if (layer > 0 && random_.chance(0.03)) return;
      // On a device a step that has begun must have gone through a layer before anything else may be refused.
      if ((layer > 0 || !limits_.on_device) && random_.chance(0.04)) between_layers();
      if (!decode(layer, now, tokens, now.sequences(), tokens, 0)) return;
    }
  }

  void between_layers() {
    switch (random_.between(0, 5)) {
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

  // A step of long ago, one that nobody prepared, or a layer whose turn it is not.
  void decode_somewhere() {
    tessera::batch now;
    if (!earlier_.empty()) now = earlier_[std::size_t(random_.between(0, index_t(earlier_.size()) - 1))];
    if (limits_.on_device && random_.chance(0.3)) {
      now.ids = some_ids();
      now.tokens = random_.between(0, 9);
    }
    if (now.ids.empty()) return;
    const index_t layer = some_layer(), tokens = random_.chance(0.8) ? now.tokens : random_.between(0, 9);
    // A layer that is left out: what a graph replays the host does not see, and the device goes on.
    if (limits_.on_device && layer > step_.next_layer) return;
    decode(layer, now, tokens, random_.chance(0.9) ? now.sequences() : random_.between(1, 4),
           random_.chance(0.9) ? tokens : random_.between(0, 9), 0.2);
  }

  // --- the rest ------------------------------------------------------------------------------------------------------

  void change() {
    const index_t tokens =
        random_.chance(0.5) ? random_.between(16, 60) : random_.pick({0, -1, 3, 1 << 24, (1 << 24) + 1, 0x7fffffff});
    std::optional<bool> allowed;  // window, sinks and the like have a say
    if (method_.has_budget && (tokens < 1 || tokens > 1 << 24)) allowed = false;
    if (apply("set_budget", allowed, [&](called_cache& cache) { cache.set_budget(tokens); })) {
      if (!method_.has_two) method_.read = tokens;
      step_.is_disturbed = true;
      step_.is_stale = step_.is_stale || (limits_.on_device && step_.has_begun);
    }
    if (!random_.chance(0.2)) return;
    cache_ = cache_->copy();
    twin_ = twin_->copy();  // a copy may hold less memory
  }

  void look() {
    const index_t id = some_id(), layer = some_layer(), one = some_head();
    const sequence* held = known(id);
    std::vector<offset_t> seen[3];
    apply("look", held && is_layer(layer) && is_head(one), [&](called_cache& cache) {
      cache.positions(layer, id, one);
      cache.readable(layer, id, one);
      for (index_t head = 0; head < shape_.kv_heads; ++head) {
        for (const auto& part : {cache.positions(layer, id, head), cache.readable(layer, id, head)}) {
          seen[turn_].push_back(offset_t(part.size()));
          seen[turn_].insert(seen[turn_].end(), part.begin(), part.end());
        }
      }
      const tessera::stage_plan plan = cache.plan(id);
      seen[turn_].insert(seen[turn_].end(), {plan.capacity, plan.retained, plan.read, offset_t(plan.ratio * 4096),
                                             cache.bytes(id), cache.bytes_read(id)});
      REQUIRE(cache.next_position(id) == held->next[0]);
    });
    if (!seen[1].empty()) REQUIRE(seen[0] == seen[1]);
  }

  std::vector<tessera::batch> earlier_;  // steps that were prepared
};

}  // namespace support
