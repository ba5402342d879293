// Policies that exist only in the tests: each says what it does once, and every backend runs it.
#pragma once

#include <tessera/concepts/budget.hpp>
#include <tessera/concepts/schedule.hpp>
#include <tessera/concepts/scorer.hpp>
#include <tessera/concepts/selector.hpp>
#include <tessera/core/error.hpp>
#include <tessera/math/exp.hpp>
#include <tessera/selector/top_blocks.hpp>

namespace support {
using namespace tessera;

/// Half of a better neighbour's score counts: exact in fp32, so that the backends agree to the bit. NaN stays and counts for
/// nobody.
TESSERA_HD inline float half_of_neighbours(const float* in, index_t n, index_t i) {
  float best = in[i];
  if (i > 0 && 0.5f * in[i - 1] > best) best = 0.5f * in[i - 1];
  if (i + 1 < n && 0.5f * in[i + 1] > best) best = 0.5f * in[i + 1];
  return best;
}

struct spread_window {
  static constexpr const char* name = "spread_window";
  static constexpr observes observed = observes::window;
  static constexpr bool comparable_across_heads = true;
  index_t window = 8;
  TESSERA_HD float weigh(float logit, float lse) const { return fast_exp(logit - lse); }
  TESSERA_HD float finish_at(const float* in, index_t n, index_t i) const { return half_of_neighbours(in, n, i); }
  index_t protected_tail(index_t) const { return window; }
  void check(index_t) const {}
  template <class Self, class Visit>
  static void parameters(Self&, Visit&&) {}
};
static_assert(device_scorer<spread_window>);

struct spread_accumulated {
  static constexpr const char* name = "spread_accumulated";
  static constexpr observes observed = observes::every_query;
  static constexpr bool comparable_across_heads = true;
  TESSERA_HD float weigh(float logit, float lse) const { return fast_exp(logit - lse); }
  TESSERA_HD float finish_at(const float* in, index_t n, index_t i) const { return half_of_neighbours(in, n, i); }
  index_t protected_tail(index_t) const { return 3; }
  void check(index_t) const {}
  template <class Self, class Visit>
  static void parameters(Self&, Visit&&) {}
};
static_assert(device_scorer<spread_accumulated>);

/// Every other head keeps all, as retrieval heads do; the budget's tokens bound only the others.
struct every_other_head {
  static constexpr const char* name = "every_other_head";
  static constexpr bool compares_heads = false;
  index_t tokens = 1024;
  TESSERA_HD index_t share(const head_extent& head) const {
    return head.head % 2 == 0 || head.stored < tokens ? head.stored : tokens;
  }
  token_bound upper_bound(const layer_extent& layer) const {
    const offset_t whole = (layer.kv_heads + 1) / 2, bound = std::max(tokens, layer.protected_tail);
    return {layer.longest, whole * layer.longest + (layer.kv_heads - whole) * bound};
  }
  void check() const {}
  template <class Self, class Visit>
  static void parameters(Self&, Visit&&) {}
};
static_assert(check_device_budget<every_other_head>());

/// Half of what a head wins, half of its even share.
struct half_won {
  static constexpr const char* name = "half_won";
  static constexpr bool compares_heads = true;
  index_t tokens = 1024;
  TESSERA_HD index_t share_won(index_t won, index_t base, index_t tail) const { return tail + (won + base) / 2; }
  void check() const {}
  template <class Self, class Visit>
  static void parameters(Self&, Visit&&) {}
};
static_assert(check_device_budget<half_won>());

/// Evenly spaced slots, whatever their scores.
struct spaced {
  static constexpr const char* name = "spaced";
  using unit = token_unit;
  TESSERA_HD index_t choose(const float*, index_t n, index_t tail, index_t keep, index_t* out) const {
    keep = keep < 0 ? 0 : (keep < n ? keep : n);
    tail = tail < 0 ? 0 : (tail < keep ? tail : keep);
    for (index_t i = 0; i < keep - tail; ++i) out[i] = index_t(offset_t(i) * (n - tail) / (keep - tail));
    for (index_t i = keep - tail; i < keep; ++i) out[i] = n - keep + i;
    return keep;
  }
  void check() const {}
  template <class Self, class Visit>
  static void parameters(Self&, Visit&&) {}
};
static_assert(check_device_selector<spaced>());

/// Neighbours in pairs: the device's search for blocks, under a name of its own.
struct pairs {
  static constexpr const char* name = "pairs";
  using unit = block_unit;
  index_t select(const float* scores, index_t n, index_t tail, index_t keep, index_t* out,
                 top_k_scratch& scratch) const {
    return top_blocks{2}.select(scores, n, tail, keep, out, scratch);
  }
  index_t unit_slots() const { return 2; }
  void check() const {}
  template <class Self, class Visit>
  static void parameters(Self&, Visit&&) {}
};
static_assert(check_device_selector<pairs>());

/// When a prompt ends, and after every `steps` decode steps.
struct every_few_steps {
  static constexpr const char* name = "every_few_steps";
  index_t steps = 4;
  static constexpr bool fires_at(moment now) { return now == moment::prompt_end || now == moment::step_end; }
  bool due(moment now, const turn_clock& at) const {
    return now == moment::prompt_end || (now == moment::step_end && at.steps % steps == 0);
  }
};
static_assert(check_schedule<every_few_steps>());

/// When the first turn's prompt ends, the third one's, and so on.
struct every_other_turn {
  static constexpr const char* name = "every_other_turn";
  static constexpr bool fires_at(moment now) { return now == moment::prompt_end; }
  bool due(moment now, const turn_clock& at) const { return fires_at(now) && at.turn % 2 == 1; }
};
static_assert(check_schedule<every_other_turn>());

}  // namespace support
