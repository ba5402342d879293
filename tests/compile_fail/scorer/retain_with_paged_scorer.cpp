// expect: tessera: a retained set cannot be chosen by a scorer that only sees one decode step; use it in retrieve
#include <tessera/budget/uniform.hpp>
#include <tessera/recipe.hpp>
#include <tessera/scorer/hybrid_min_max.hpp>
#include <tessera/selector/top_tokens.hpp>

tessera::retain<tessera::hybrid_min_max, tessera::uniform, tessera::top_tokens> chosen;
