// expect: tessera: a recipe that retrieves needs an attention that gathers, and one that does not needs an attention that reads everything
#include <tessera/attention/gathered_decode.hpp>
#include <tessera/layout/dense.hpp>
#include <tessera/recipe.hpp>
#include <tessera/schedule/once.hpp>

tessera::recipe<tessera::retain_all, tessera::dense<tessera::bf16, 128>, tessera::retrieve_all,
                tessera::gathered_decode, tessera::once>
    chosen;
