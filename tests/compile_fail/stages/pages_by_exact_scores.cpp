// expect: tessera: whole pages need a scorer that scores pages; choose tokens or blocks
#include <tessera/recipe.hpp>
#include <tessera/scorer/exact_score.hpp>
#include <tessera/selector/tokens_or_pages.hpp>

tessera::retrieve<tessera::exact_score, tessera::tokens_or_pages> chosen;
