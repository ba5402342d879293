// expect: tessera: this layout cannot store what the retaining selector chooses
#include <concepts>

#include <tessera/attention/dense_decode.hpp>
#include <tessera/budget/uniform.hpp>
#include <tessera/layout/dense.hpp>
#include <tessera/recipe.hpp>
#include <tessera/schedule/once.hpp>
#include <tessera/scorer/observation_window.hpp>
#include <tessera/selector/top_blocks.hpp>

struct tokens_only : tessera::dense<tessera::bf16, 128> {
  template <class Unit>
  static constexpr bool accepts = std::same_as<Unit, tessera::token_unit>;
};

tessera::recipe<tessera::retain<tessera::observation_window, tessera::uniform, tessera::top_blocks>, tokens_only,
                tessera::retrieve_all, tessera::dense_decode, tessera::once>
    chosen;
