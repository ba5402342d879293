// expect: tessera: a scorer that observes the prompt's window, or its statistics, learns nothing from decode steps; retain once
#include <tessera/attention/dense_decode.hpp>
#include <tessera/budget/uniform.hpp>
#include <tessera/layout/dense.hpp>
#include <tessera/recipe.hpp>
#include <tessera/schedule/each_step.hpp>
#include <tessera/scorer/observation_window.hpp>
#include <tessera/selector/top_tokens.hpp>

tessera::recipe<tessera::retain<tessera::observation_window, tessera::uniform, tessera::top_tokens>,
                tessera::dense<tessera::bf16, 128>, tessera::retrieve_all, tessera::dense_decode, tessera::each_step>
    chosen;
