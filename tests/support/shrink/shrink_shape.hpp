// Shrinking a model: which layers, heads and sliding windows a conversation needs to fail.
#pragma once

#include <algorithm>
#include <string>
#include <vector>

#include <tessera/core/model_shape.hpp>

#include "must.hpp"
#include "shrink.hpp"

namespace support {

/// What is left of a model's shape: numbers of its layers, of its KV heads and of the query heads of each group.
struct shape_parts {
  std::vector<tessera::index_t> layers, sliding, kv_heads, members;  // sliding: those of the layers that still slide

  /// The shape of these parts alone, numbered anew.
  tessera::model_shape shape(const tessera::model_shape& whole) const {
    tessera::model_shape part = whole;
    part.layers = tessera::index_t(layers.size());
    part.kv_heads = tessera::index_t(kv_heads.size());
    part.q_heads = tessera::index_t(members.size()) * part.kv_heads;
    part.sliding.clear();
    for (const tessera::index_t layer : layers)
      part.sliding.push_back(std::count(sliding.begin(), sliding.end(), layer) > 0);
    if (std::count(part.sliding.begin(), part.sliding.end(), true) == 0) part.sliding.clear();
    if (part.sliding.empty()) part.window = 0;
    return part;
  }
  std::string text() const {
    return "layers " + listed(layers) + (sliding.empty() ? "" : " (sliding: " + listed(sliding) + ")") + ", kv_heads " +
           listed(kv_heads) + ", query heads of each group " + listed(members);
  }
};

/// The fewest parts of a shape with which `fails(parts)` holds, as it does with all of them: none of them can be left out.
template <class Fails>
shape_parts fewest_parts(const tessera::model_shape& shape, const Fails& fails, int max_tries = 200) {
  struct part {
    std::vector<tessera::index_t> shape_parts::* list;
    tessera::index_t number;
  };
  std::vector<part> all;
  const auto add = [&](std::vector<tessera::index_t> shape_parts::* list, tessera::index_t count) {
    for (tessera::index_t number = 0; number < count; ++number) {
      if (list != &shape_parts::sliding || shape.slides(number)) all.push_back({list, number});
    }
  };
  add(&shape_parts::layers, shape.layers);
  add(&shape_parts::kv_heads, shape.kv_heads);
  add(&shape_parts::members, shape.q_heads / shape.kv_heads);
  add(&shape_parts::sliding, shape.layers);
  const auto parts_of = [](const std::vector<part>& list) {
    shape_parts parts;
    for (const part& one : list) (parts.*one.list).push_back(one.number);
    // A layer that is left out slides no more.
    std::erase_if(parts.sliding, [&](tessera::index_t layer) {
      return std::find(parts.layers.begin(), parts.layers.end(), layer) == parts.layers.end();
    });
    return parts;
  };
  const auto makes_a_model = [](const shape_parts& parts) {
    return !parts.layers.empty() && !parts.kv_heads.empty() && !parts.members.empty();
  };
  const auto shrunk = shrink(
      all,
      [&](const std::vector<part>& list) {
        const shape_parts parts = parts_of(list);
        return makes_a_model(parts) && fails(parts);
      },
      nothing_simpler{}, max_tries);
  return parts_of(shrunk.calls);
}

}  // namespace support
