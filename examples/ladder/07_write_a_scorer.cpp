// Rung 7: a scorer of your own, and a method made of it. docs/how_to/add_a_scorer.md goes on from here.
#include <memory>

#include <tessera/attention/dense_decode.hpp>
#include <tessera/budget/uniform.hpp>
#include <tessera/layout/dense.hpp>
#include <tessera/math/exp.hpp>
#include <tessera/methods/snapkv.hpp>
#include <tessera/schedule/once.hpp>
#include <tessera/selector/top_tokens.hpp>
#include <tessera/tessera.hpp>

#include "support/ladder.hpp"

namespace {
using namespace tessera;

// [scorer]
/// Scores a token by the window's probabilities for it, each raised to `power` before they are summed.
///
/// Below 1, a token that many queries look at a little wins over one that a single query stares at.
/// Shapes   scores [kv_heads, tokens].   Unit: token.
/// Errors   window or power out of range, window above the budget: tessera::error.
/// Cost     two passes over K with window * group rows.
struct tempered_attention {
  static constexpr const char* name = "tempered_attention";
  static constexpr observes observed = observes::window;
  static constexpr bool comparable_across_heads = true;

  index_t window = 32;
  float power = 0.5f;

  /// A masked key has the logit -infinity and gets 0; NaN stays NaN and ranks last.
  TESSERA_HD float weigh(float logit, float lse) const { return fast_exp(power * (logit - lse)); }

  index_t protected_tail(index_t) const { return window; }

  void check(index_t budget) const {
    check_parameters(*this);
    require(window <= budget, "window", window, "at most the budget, which is " + std::to_string(budget),
            "lower the window or raise the budget");
  }

  template <class Self, class Visit>
  static void parameters(Self& self, Visit&& visit) {
    visit("window", self.window, value_range{1, 1024},
          "last prompt queries that are observed; their tokens are always kept");
    visit("power", self.power, value_range{0.01f, 100.0f},
          "exponent of each probability; below 1 favours tokens that many queries see");
  }
};

static_assert(check_scorer<tempered_attention>());
// [scorer]

/// A method is a recipe with a name.
template <element T, int D>
struct tempered
    : recipe<retain<tempered_attention, uniform, top_tokens>, dense<T, D>, retrieve_all, dense_decode, once> {
  static constexpr const char* name = "tempered";
};

/// Positions that head 0 keeps of the prompt.
template <class Method>
std::vector<index_t> kept_by(const Method& policy, const ladder::tensors& model) {
  cache<Method> kv({1, model.q_heads, model.kv_heads}, policy, std::make_shared<cpu::executor>());
  const index_t id = kv.open();
  kv.prefill(0, id, model.queries(0, model.tokens), model.keys(0, model.tokens), model.values(0, model.tokens));
  kv.end_prefill(id);
  return kv.positions(0, id, 0);
}

}  // namespace

int main() {
  const ladder::tensors model(1024, 8, 2, 64);
  ladder::checks check;
  tempered<fp32, 64> mine;
  snapkv<fp32, 64> published;
  mine.set_budget(128);
  published.set_budget(128);
  published.retain.scorer.pool = 1;
  const auto with_half = kept_by(mine, model);
  check(with_half.size() == 128 && with_half.back() == 1023, "the new scorer keeps its budget and its window");
  mine.retain.scorer.power = 1;
  const auto with_one = kept_by(mine, model);
  check(with_one == kept_by(published, model), "with power 1 it is SnapKV without pooling");
  check(with_one != with_half, "with power 0.5 it keeps other tokens");
  return check.exit_code();
}
