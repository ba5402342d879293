// The scorer by contents of docs/how_to/add_a_scorer.md.
#include <tessera/attention/dense_decode.hpp>
#include <tessera/budget/uniform.hpp>
#include <tessera/layout/dense.hpp>
#include <tessera/recipe.hpp>
#include <tessera/schedule/once.hpp>
#include <tessera/selector/top_tokens.hpp>

TESSERA_NAMESPACE_BEGIN

// [contents]
/// Scores a token by how far its value lies from the mean value of the head.
/// Shapes   scores [kv_heads, tokens].   Unit: token.   Cost  two reads of V when a prompt ends.
struct value_distance {
  static constexpr const char* name = "value_distance";
  static constexpr observes observed = observes::nothing;
  static constexpr bool comparable_across_heads = true;
  static constexpr stored_rows reads = stored_rows::values;
  static constexpr int measures = 1;

  /// Each row goes into the mean as it is; `anchor` is the channel's mean.
  TESSERA_HD float anchor_scale(const float*) const { return 1; }
  TESSERA_HD void measure(float x, float anchor, float* sums) const { sums[0] += (x - anchor) * (x - anchor); }
  /// A row that is not finite, or whose squares overflow, has the sum infinity, which would come first: NaN ranks last.
  TESSERA_HD float score(const float* sums) const { return sums[0] < infinity ? sums[0] : sums[0] - sums[0]; }

  index_t protected_tail(index_t) const { return 0; }
  void check(index_t) const {}

  template <class Self, class Visit>
  static void parameters(Self&, Visit&&) {}
};

static_assert(check_scorer<value_distance>());
// [contents]

TESSERA_NAMESPACE_END

using namespace tessera;
recipe<retain<value_distance, uniform, top_tokens>, dense<fp32, 64>, retrieve_all, dense_decode, once> method;
