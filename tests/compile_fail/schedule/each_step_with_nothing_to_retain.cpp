// expect: tessera: a schedule that fires in steps has nothing to do when everything is retained
#include <tessera/attention/dense_decode.hpp>
#include <tessera/layout/dense.hpp>
#include <tessera/recipe.hpp>
#include <tessera/schedule/each_step.hpp>

tessera::recipe<tessera::retain_all, tessera::dense<tessera::bf16, 128>, tessera::retrieve_all, tessera::dense_decode,
                tessera::each_step>
    chosen;
