// A recipe's cache on the CPU.
#pragma once

#include <memory>
#include <tessera/backend/cpu/any_cache.hpp>

#include "recipe_settings.hpp"

namespace tessera_torch {

/// Reads rows of the layout's element type where they lie; outputs are fp32.
template <class Recipe>
class cpu_cache final : public tessera::cpu::any_cache_of<Recipe, typename Recipe::layout_type::element_type> {
  using base = tessera::cpu::any_cache_of<Recipe, typename Recipe::layout_type::element_type>;

 public:
  explicit cpu_cache(const cache_request& request)
      : base(request.shape, requested<Recipe>(request), request.workers, request.table) {}

  std::unique_ptr<tessera::any_cache> copy_in(const device_memory&) const { return base::clone(); }
};

}  // namespace tessera_torch
