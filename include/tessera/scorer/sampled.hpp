// Another scorer, which observes a random sample of the queries.
#pragma once

#include "../concepts/scorer.hpp"
#include "../core/parameters.hpp"
#include "random_score.hpp"

TESSERA_NAMESPACE_BEGIN

/// Observes a random sample of all queries, the share `sample` of them on average, and scores as `S` does by these
/// alone: sampled<accumulated_attention>. Whether a query is in the sample follows from its position and `sample_seed`,
/// so that chunks, layers and turns do not matter.
/// Shapes   as `S`.   Unit: token. Scores are 0 while no query has been taken.
/// Errors   sample or sample_seed out of range, and whatever `S` refuses: tessera::error.
/// Cost     `sample` of the passes over K that `S` takes.
template <scorer S>
struct sampled : S {
  static_assert(S::observed == observes::every_query, "tessera: a sample is one of every query; take a scorer of them");
  static constexpr const char* name = "sampled";
  static constexpr bool host_only = true;

  float sample = 0.1f;
  index_t sample_seed = 0;

  bool takes(index_t position) const { return random_score{sample_seed}.score(position, position) < sample; }

  void check(index_t budget) const {
    S::check(budget);
    check_parameters(*this);
  }

  template <class Self, class Visit>
  static void parameters(Self& self, Visit&& visit) {
    S::parameters(self, visit);
    visit("sample", self.sample, value_range{0.0f, 1.0f}, "part of the queries that are observed");
    visit("sample_seed", self.sample_seed, value_range{0, max_tokens}, "another seed, other queries");
  }
};

TESSERA_NAMESPACE_END
