// expect: tessera: a retained set cannot be chosen by a scorer that only sees one decode step; use it in retrieve
#include <tessera/budget/uniform.hpp>
#include <tessera/recipe.hpp>
#include <tessera/scorer/exact_score.hpp>
#include <tessera/selector/top_tokens.hpp>

tessera::retain<tessera::exact_score, tessera::uniform, tessera::top_tokens> chosen;
