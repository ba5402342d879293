// Compiles: the budget of docs/how_to/add_a_budget.md, for both backends.
#include <tessera/attention/dense_decode.hpp>
#include <tessera/cache.hpp>
#include <tessera/layout/dense.hpp>
#include <tessera/recipe.hpp>
#include <tessera/schedule/once.hpp>
#include <tessera/scorer/observation_window.hpp>
#include <tessera/selector/top_tokens.hpp>

using namespace tessera;

// [budget]
/// Twice the budget in the first `wide` layers, the budget in all others.
/// Errors   tokens or wide out of range: tessera::error.
struct wide_start {
  static constexpr const char* name = "wide_start";
  static constexpr bool compares_heads = false, even_heads = true;
  static constexpr value_range<index_t> budgets = token_budgets;

  index_t tokens = 1024;  ///< per kv_head; what set_budget sets
  index_t wide = 2;

  /// What a head keeps. The backends hold it between the protected tail and what is stored.
  TESSERA_HD index_t share(const head_extent& head) const { return (head.layer < wide ? 2 : 1) * tokens; }

  /// Whether all of a layer stays: without this, where the longest head holds at most `tokens`.
  TESSERA_HD bool fits(const layer_extent& layer) const {
    return layer.longest <= (layer.layer < wide ? 2 : 1) * tokens;
  }

  /// Bounds for memory and scratch: without this, all that is stored.
  token_bound upper_bound(const layer_extent& layer) const {
    const index_t kept = std::max((layer.layer < wide ? 2 : 1) * tokens, layer.protected_tail);
    const index_t longest = std::min(layer.longest, kept);
    return {longest, offset_t(layer.kv_heads) * longest};
  }

  void check() const {
    budgets.check("budget", tokens, "pass how many tokens each head may keep");
    check_parameters(*this);
  }

  template <class Self, class Visit>
  static void parameters(Self& self, Visit&& visit) {
    visit("wide", self.wide, value_range{0, 1 << 16}, "so many of the first layers keep twice the budget");
  }
};

static_assert(check_budget<wide_start>());
static_assert(check_device_budget<wide_start>());
// [budget]

using widened =
    recipe<retain<observation_window, wide_start, top_tokens>, dense<bf16, 64>, retrieve_all, dense_decode, once>;
tessera::cache<widened> kv({.layers = 4, .q_heads = 4, .kv_heads = 2}, widened{}, std::make_shared<cpu::executor>(1));
