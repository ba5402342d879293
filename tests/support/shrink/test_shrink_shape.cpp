// A model's shape shrinks to the layers, heads and windows that a failure needs.
#include "catch.hpp"

#include "shrink_shape.hpp"
#include "support/random.hpp"

using tessera::index_t;
using tessera::model_shape;
using numbers = std::vector<index_t>;

namespace {

bool has_all(const numbers& parts, const numbers& needed) {
  return std::includes(parts.begin(), parts.end(), needed.begin(), needed.end());
}
numbers some(support::rng& random, index_t count) {
  numbers chosen;
  for (index_t number = 0; number < count; ++number)
    if (random.chance(0.3)) chosen.push_back(number);
  if (chosen.empty()) chosen.push_back(random.between(0, count - 1));
  return chosen;
}

}  // namespace

TEST_CASE("a shape keeps exactly the layers, heads and sliding layers that the failure needs") {
  support::rng random(9912);
  for (int i = 0; i < 200; ++i) {
    const index_t layers = random.between(1, 9), kv_heads = random.between(1, 5), group = random.between(1, 8);
    model_shape shape{layers, kv_heads * group, kv_heads, 16};
    for (index_t layer = 0; layer < layers; ++layer) shape.sliding.push_back(random.chance(0.5));
    support::shape_parts needed{some(random, layers), {}, some(random, kv_heads), some(random, group)};
    for (const index_t layer : needed.layers)
      if (shape.slides(layer) && random.chance(0.5)) needed.sliding.push_back(layer);
    const auto fails = [&](const support::shape_parts& parts) {
      parts.shape(shape).check();
      return has_all(parts.layers, needed.layers) && has_all(parts.sliding, needed.sliding) &&
             has_all(parts.kv_heads, needed.kv_heads) && has_all(parts.members, needed.members);
    };
    const support::shape_parts found = support::fewest_parts(shape, fails);
    REQUIRE(fails(found));
    REQUIRE(found.layers == needed.layers);
    REQUIRE(found.sliding == needed.sliding);
    REQUIRE(found.kv_heads == needed.kv_heads);
    REQUIRE(found.members == needed.members);
  }
}

TEST_CASE("a failure that any model shows is shown with one layer, one head and no window") {
  model_shape shape{4, 12, 3, 8};
  shape.sliding = {true, false, true, false};
  const auto found = support::fewest_parts(shape, [](const support::shape_parts&) { return true; });
  const model_shape part = found.shape(shape);
  CHECK((part.layers == 1 && part.kv_heads == 1 && part.q_heads == 1 && part.window == 0 && part.sliding.empty()));
}

TEST_CASE("the parts of a shape are numbered anew, and their windows go with them") {
  model_shape shape{3, 8, 2, 8};
  shape.sliding = {true, false, true};
  const support::shape_parts parts{{1, 2}, {2}, {1}, {0, 3}};
  const model_shape part = parts.shape(shape);
  CHECK((part.layers == 2 && part.kv_heads == 1 && part.q_heads == 2 && part.window == 8));
  CHECK((!part.slides(0) && part.slides(1)));
  CHECK(parts.text() == "layers {1, 2} (sliding: {2}), kv_heads {1}, query heads of each group {0, 3}");
}
