// expect: tessera: whole pages cannot meet a head's count exactly; choose them in retrieve
#include <tessera/budget/uniform.hpp>
#include <tessera/recipe.hpp>
#include <tessera/scorer/observation_window.hpp>
#include <tessera/selector/top_pages.hpp>

tessera::retain<tessera::observation_window, tessera::uniform, tessera::top_pages> chosen;
