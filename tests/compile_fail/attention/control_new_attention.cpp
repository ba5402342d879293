// Compiles: the attention of docs/how_to/add_an_attention.md.
#include <tessera/attention/gathered_decode.hpp>
#include <tessera/cache.hpp>
#include <tessera/layout/dense.hpp>
#include <tessera/recipe.hpp>
#include <tessera/schedule/once.hpp>
#include <tessera/scorer/exact_score.hpp>
#include <tessera/selector/top_tokens.hpp>

using namespace tessera;

// [attention]
/// Reads a selection with the logits of Gemma 2: 1 / 16 for a scale, capped at 50. Scorers cap theirs alike.
struct gemma2_gathered_decode {
  static constexpr const char* name = "gemma2_gathered_decode";
  static constexpr bool gathers = true;  // false: reads everything that is stored
  logit_rule rule{.scale = 1.0f / 16, .soft_cap = 50};
};

static_assert(check_attention<gemma2_gathered_decode>());

using exact_for_gemma2 =
    recipe<retain_all, dense<bf16, 256>, retrieve<exact_score, top_tokens>, gemma2_gathered_decode, once>;
// [attention]

tessera::cache<exact_for_gemma2> kv({.layers = 4, .q_heads = 4, .kv_heads = 2}, exact_for_gemma2{},
                                    std::make_shared<cpu::executor>(1));
