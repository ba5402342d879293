// expect: tessera: a scorer that observes nothing needs float score(index_t position, index_t next_position) const; one that names what it reads scores what is stored
#include <tessera/concepts/scorer.hpp>

struct scoreless {
  static constexpr const char* name = "scoreless";
  static constexpr tessera::observes observed = tessera::observes::nothing;
  static constexpr bool comparable_across_heads = true;
  double score(tessera::index_t position, tessera::index_t) const { return position; }
  tessera::index_t protected_tail(tessera::index_t) const { return 0; }
  void check(tessera::index_t) const {}
};

static_assert(tessera::check_scorer<scoreless>());
