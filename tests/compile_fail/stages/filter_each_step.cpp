// expect: tessera: a filter is chosen when a turn's prompt ends, not in steps; use once
#include <tessera/attention/dense_decode.hpp>
#include <tessera/budget/uniform.hpp>
#include <tessera/layout/dense.hpp>
#include <tessera/recipe.hpp>
#include <tessera/schedule/each_step.hpp>
#include <tessera/scorer/accumulated_attention.hpp>
#include <tessera/selector/top_tokens.hpp>

tessera::recipe<tessera::filter<tessera::accumulated_attention, tessera::uniform, tessera::top_tokens>,
                tessera::dense<tessera::bf16, 128>, tessera::retrieve_all, tessera::dense_decode, tessera::each_step>
    chosen;
