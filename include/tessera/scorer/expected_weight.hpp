// Expected Attention's scorer: what queries like those of the prompt will give a key, on average.
#pragma once

#include "../concepts/scorer.hpp"
#include "../core/parameters.hpp"

TESSERA_NAMESPACE_BEGIN

/// Assumes that the queries of the next `future` tokens are Gaussian: with the mean and the covariance of the prompt's
/// queries (without those of the first `sinks` positions), turned by RoPE's mean rotation over the next `future`
/// positions. A key's logits then have a mean and a variance, and its weight is exp(mean + variance / 2); with
/// `covariance` 0 it is exp(mean). A score is the weight divided by the sum over the stored tokens behind the sinks,
/// averaged over the group.
///
/// The first `sinks` positions stay before all others. Statistics are those of one turn's prompt; where it brings no
/// query behind the sinks, all keys weigh the same. Soft cap and sliding window of the model are not looked at.
/// Shapes   scores [kv_heads, tokens].   Unit: token. No newest token is kept whatever its score.
/// Errors   parameters out of range; a model that does not say its rope_frequencies: tessera::error.
/// Cost     k_dim squared products a prompt token and query head, twice; [q_heads, k_dim, k_dim] doubles a layer until
///          the prompt ends.
/// Paper    Expected Attention, arXiv:2510.00636, as kvpress 0.5.5 has it. Differs: queries come after RoPE and are
///          turned back; of a later turn's prompt, only its own queries count.
struct expected_weight {
  static constexpr const char* name = "expected_weight";
  static constexpr observes observed = observes::statistics;
  static constexpr bool comparable_across_heads = true;

  index_t sinks = 4;
  index_t future = 512;
  index_t covariance = 1;

  TESSERA_HD float expect(float mean, float variance) const { return covariance ? mean + variance / 2 : mean; }

  index_t protected_tail(index_t) const { return 0; }
  void check(index_t) const { check_parameters(*this); }

  template <class Self, class Visit>
  static void parameters(Self& self, Visit&& visit) {
    visit("sinks", self.sinks, value_range{0, max_tokens}, "first tokens that are always kept");
    visit("future", self.future, value_range{1, 1 << 16}, "positions to come that RoPE is averaged over");
    visit("covariance", self.covariance, value_range{0, 1}, "1: variances of logits count; 0: their means alone");
  }
};

static_assert(check_scorer<expected_weight>() && statistical_scorer<expected_weight>);

TESSERA_NAMESPACE_END
