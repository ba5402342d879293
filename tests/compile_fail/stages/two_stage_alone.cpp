// expect: tessera: a budget over two stages needs a second stage; add retrieve, or take a budget of one stage
#include <tessera/attention/dense_decode.hpp>
#include <tessera/budget/two_stage.hpp>
#include <tessera/budget/uniform.hpp>
#include <tessera/layout/dense.hpp>
#include <tessera/recipe.hpp>
#include <tessera/schedule/once.hpp>
#include <tessera/scorer/observation_window.hpp>
#include <tessera/selector/top_tokens.hpp>

tessera::recipe<tessera::retain<tessera::observation_window, tessera::two_stage<tessera::uniform>, tessera::top_tokens>,
                tessera::dense<tessera::bf16, 128>, tessera::retrieve_all, tessera::dense_decode, tessera::once>
    chosen;
