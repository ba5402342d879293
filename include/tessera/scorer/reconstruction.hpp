// KVzip's scorer: what a model looks at when it writes the text once more.
#pragma once

#include "../concepts/scorer.hpp"
#include "../core/parameters.hpp"
#include "../math/exp.hpp"

TESSERA_NAMESPACE_BEGIN

/// Scores a token by the largest probability that a query gives it while the model reads the text once more: the
/// maximum over these queries and over the query heads of the group. The engine passes the text through the model part
/// by part (`cache::reread`). The softmax of a part's queries runs over the first `sinks` tokens, the part and the
/// queries' own tokens.
///
/// The first `sinks` slots come before all others. Tokens that were not read again (decoded ones) have score 0 and are
/// dropped first.
/// Shapes   scores [kv_heads, tokens], fp32, stored beside the tokens.   Unit: token. No newest token is kept in any
///          case.
/// Errors   sinks out of range: tessera::error.
/// Cost     another pass of the prompt through the model; two passes over the keys of each part.
/// Paper    KVzip, arXiv:2505.23416, as kvpress 0.5.5 has it.
struct reconstruction {
  static constexpr const char* name = "reconstruction";
  static constexpr observes observed = observes::rereading;
  static constexpr row_join rows = row_join::maximum;
  static constexpr bool comparable_across_heads = true;

  index_t sinks = 4;

  TESSERA_HD float weigh(float logit, float lse) const { return fast_exp(logit - lse); }
  TESSERA_HD float finish_at(const float* in, index_t, index_t i) const {
    return i < sinks && in[i] == in[i] ? infinity : in[i];
  }

  index_t protected_tail(index_t) const { return 0; }
  void check(index_t) const { check_parameters(*this); }

  template <class Self, class Visit>
  static void parameters(Self& self, Visit&& visit) {
    visit("sinks", self.sinks, value_range{0, max_tokens}, "first tokens that are always kept");
  }
};

static_assert(check_scorer<reconstruction>());

TESSERA_NAMESPACE_END
