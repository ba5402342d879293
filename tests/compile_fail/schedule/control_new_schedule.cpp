// Compiles: the schedule of docs/how_to/add_a_schedule.md.
#include <tessera/attention/dense_decode.hpp>
#include <tessera/budget/uniform.hpp>
#include <tessera/cache.hpp>
#include <tessera/layout/dense.hpp>
#include <tessera/recipe.hpp>
#include <tessera/scorer/accumulated_attention.hpp>
#include <tessera/selector/top_tokens.hpp>

using namespace tessera;

// [schedule]
/// Chooses when a turn's prompt ends, and again after every 16th decode step of the turn.
struct every_16_steps {
  static constexpr const char* name = "every_16_steps";

  /// Known when compiling: at a moment that can never come, no code is made for it.
  static constexpr bool fires_at(moment at) { return at == moment::prompt_end || at == moment::step_end; }

  /// Asked on the host before the moment comes.
  bool due(moment now, const turn_clock& clock) const {
    return now == moment::prompt_end || (now == moment::step_end && clock.steps % 16 == 0);
  }
};

static_assert(check_schedule<every_16_steps>());
// [schedule]

using thinned = recipe<retain<accumulated_attention, uniform, top_tokens>, dense<bf16, 64>, retrieve_all, dense_decode,
                       every_16_steps>;
tessera::cache<thinned> kv({.layers = 4, .q_heads = 4, .kv_heads = 2}, thinned{}, std::make_shared<cpu::executor>(1));
