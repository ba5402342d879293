// expect: tessera: a recipe that retrieves needs an attention that gathers, and one that does not needs an attention that reads everything
#include <tessera/attention/dense_decode.hpp>
#include <tessera/layout/dense.hpp>
#include <tessera/recipe.hpp>
#include <tessera/schedule/once.hpp>
#include <tessera/scorer/exact_score.hpp>
#include <tessera/selector/top_tokens.hpp>

tessera::recipe<tessera::retain_all, tessera::dense<tessera::bf16, 128>,
                tessera::retrieve<tessera::exact_score, tessera::top_tokens>, tessera::dense_decode, tessera::once>
    chosen;
