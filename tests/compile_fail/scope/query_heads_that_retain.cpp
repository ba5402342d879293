// expect: tessera: lists of single query heads can only be read, from a filter without a second stage; take the scope per_head
#include <tessera/attention/dense_decode.hpp>
#include <tessera/budget/uniform.hpp>
#include <tessera/layout/dense.hpp>
#include <tessera/recipe.hpp>
#include <tessera/schedule/once.hpp>
#include <tessera/scope/per_head_or_query.hpp>
#include <tessera/scorer/observation_window.hpp>
#include <tessera/selector/top_tokens.hpp>

using namespace tessera;

recipe<retain<observation_window, uniform, top_tokens, per_head_or_query>, dense<bf16, 128>, retrieve_all, dense_decode,
       once>
    chosen;
