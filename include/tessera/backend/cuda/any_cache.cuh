// One recipe's cache on a GPU as an any_cache.
#pragma once

#include <memory>

#include "../../runtime/any/any_cache_over.hpp"
#include "../../runtime/any/settings.hpp"
#include "backend.cuh"
#include "device/memory.cuh"
#include "store/packed/unpack_rows.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {

/// See any_cache. Rows lie on the device. q, k and v have the layout's element type; attention is written as `Out`:
/// fp32, fp16 or bf16.
template <class Recipe, class Out = float>
class any_cache_of : public any_cache_over<Recipe, backend<Recipe, Out>, typename Recipe::layout_type::element_type> {
  using base = any_cache_over<Recipe, backend<Recipe, Out>, typename Recipe::layout_type::element_type>;

 public:
  using base::base;
  any_cache_of(const any_cache_request& request, const cache_options& options)
      : base(request.shape, recipe_of<Recipe>(request), options) {}

  std::unique_ptr<any_cache> clone() const override { return std::make_unique<any_cache_of>(*this); }

  unpacked_rows unpacked([[maybe_unused]] index_t layer, [[maybe_unused]] index_t id) override {
    if constexpr (base::packs_rows) {
      using cache_type = typename base::cache_type;
      const index_t slots = index_t(this->positions(layer, id, 0).size());
      const std::size_t rows = std::size_t(this->shape().kv_heads) * std::size_t(slots);
      const device_buffer<float> k(rows * cache_type::k_dim), v(rows * cache_type::v_dim);
      unpack_rows(this->cache().view(layer, id), slots, k.data(), v.data(), nullptr);
      return {downloaded(k.data(), k.size()), downloaded(v.data(), v.size())};
    }
    base::fail_to_unpack();
  }
};

}  // namespace cuda
TESSERA_NAMESPACE_END
