// Compiles: a mixture of both stages, so the other files here fail for their own reasons.
#include <tessera/attention/gathered_decode.hpp>
#include <tessera/budget/adaptive.hpp>
#include <tessera/cache.hpp>
#include <tessera/layout/dense.hpp>
#include <tessera/recipe.hpp>
#include <tessera/schedule/once.hpp>
#include <tessera/scorer/exact_score.hpp>
#include <tessera/scorer/observation_window.hpp>
#include <tessera/selector/top_blocks.hpp>
#include <tessera/selector/top_tokens.hpp>

using mixture =
    tessera::recipe<tessera::retain<tessera::observation_window, tessera::adaptive, tessera::top_blocks>,
                    tessera::dense<tessera::bf16, 128>, tessera::retrieve<tessera::exact_score, tessera::top_tokens>,
                    tessera::gathered_decode, tessera::once>;

tessera::cache<mixture> cache({.layers = 2, .q_heads = 4, .kv_heads = 2}, mixture{},
                              std::make_shared<tessera::cpu::executor>(1));
