// The order in which the layers of a step are decoded on the CPU.
#pragma once

#include <string>

#include "../../../../runtime/turn/conversations.hpp"

TESSERA_NAMESPACE_BEGIN
namespace cpu {

/// Checks that layers are decoded in order, once for each `prepare_step`: a layer that is behind or ahead would compute
/// with other positions. A layer counts its tokens after it has been decoded.
template <class Recipe>
class step_order {
 public:
  explicit step_order(index_t) {}

  void require_layer(index_t layer, const batch& step, const conversations<Recipe>& known) const {
    for (index_t b = 0; b < step.sequences(); ++b) {
      const index_t id = step.ids[std::size_t(b)];
      const auto& c = known.sequence(id);
      if (layer == 0 && c.front().next_position != c.step_began) {
        fail("tokens before the step", c.front().next_position,
             "those that prepare_step saw, which are " + std::to_string(c.step_began),
             "call prepare_step before every step");
      }
      const index_t own = known.progress({layer, id}).next_position;
      index_t expected = c.step_began;
      if (layer == 0) expected = c.layers.back().next_position;
      if (layer > 0 && own == expected) expected = c.front().next_position - step.tokens_of(b);  // layer 0 comes first
      if (own != expected) {
        fail("tokens of a layer before the step", own, std::to_string(expected),
             "decode every layer, in order, in every step");
      }
    }
  }
  /// Errors   the step has not decoded the layer.
  void require_decoded(index_t layer, const batch& step, const conversations<Recipe>& known) const {
    for (index_t b = 0; b < step.sequences(); ++b) {
      const index_t id = step.ids[std::size_t(b)], next = known.progress({layer, id}).next_position,
                    expected = known.sequence(id).step_began + step.tokens_of(b);
      if (next != expected)
        fail("tokens of a layer in the step", next, std::to_string(expected), "decode the layer first");
    }
  }
  void prepared(const batch&, conversations<Recipe>&) {}
  void decoded(index_t layer, const batch& step, conversations<Recipe>& known) { known.took_step(layer, step); }
};

}  // namespace cpu
TESSERA_NAMESPACE_END
