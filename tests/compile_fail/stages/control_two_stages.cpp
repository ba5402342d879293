// Compiles: a filter under one budget for both stages, so the other files here fail for their own reasons.
#include <tessera/attention/gathered_decode.hpp>
#include <tessera/budget/adaptive.hpp>
#include <tessera/budget/two_stage.hpp>
#include <tessera/cache.hpp>
#include <tessera/layout/dense.hpp>
#include <tessera/recipe.hpp>
#include <tessera/schedule/once.hpp>
#include <tessera/scorer/hybrid_min_max.hpp>
#include <tessera/scorer/observation_window.hpp>
#include <tessera/selector/tokens_or_pages.hpp>
#include <tessera/selector/top_tokens.hpp>

using mixture = tessera::recipe<
    tessera::filter<tessera::observation_window, tessera::two_stage<tessera::adaptive>, tessera::top_tokens>,
    tessera::dense<tessera::bf16, 128>, tessera::retrieve<tessera::hybrid_min_max, tessera::tokens_or_pages>,
    tessera::gathered_decode, tessera::once>;

tessera::cache<mixture> cache({.layers = 2, .q_heads = 4, .kv_heads = 2}, mixture{},
                              std::make_shared<tessera::cpu::executor>(1));
