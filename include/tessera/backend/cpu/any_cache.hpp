// One recipe's cache on the CPU as an any_cache.
#pragma once

#include <memory>
#include <utility>

#include "../../runtime/any/any_cache_over.hpp"
#include "../../runtime/any/settings.hpp"
#include "backend.hpp"

TESSERA_NAMESPACE_BEGIN
namespace cpu {

/// See any_cache. `In` is the element type of q, k and v; outputs are fp32.
template <class Recipe, class In = float>
class any_cache_of : public any_cache_over<Recipe, backend<Recipe>, In> {
  using base = any_cache_over<Recipe, backend<Recipe>, In>;

 public:
  using base::base;
  any_cache_of(const any_cache_request& request, std::shared_ptr<executor> workers)
      : base(request.shape, recipe_of<Recipe>(request), std::move(workers)) {}

  std::unique_ptr<any_cache> clone() const override { return std::make_unique<any_cache_of>(*this); }

  unpacked_rows unpacked([[maybe_unused]] index_t layer, [[maybe_unused]] index_t id) override {
    if constexpr (base::packs_rows) {
      unpacked_rows rows;
      const auto view = this->cache().view(layer, id);
      for (index_t head = 0; head < view.kv_heads; ++head) {
        for (index_t slot = 0; slot < view.length(0, head); ++slot) {
          float key[base::cache_type::k_dim], value[base::cache_type::v_dim];
          load_key(view, 0, head, slot, key);
          load_value(view, 0, head, slot, value);
          rows.k.insert(rows.k.end(), key, key + base::cache_type::k_dim);
          rows.v.insert(rows.v.end(), value, value + base::cache_type::v_dim);
        }
      }
      return rows;
    }
    base::fail_to_unpack();
  }
};

}  // namespace cpu
TESSERA_NAMESPACE_END
