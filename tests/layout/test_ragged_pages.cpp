#include "catch.hpp"

#include <tessera/layout/dense.hpp>
#include <tessera/layout/ragged_pages.hpp>

#include "laws/layouts.hpp"

using namespace tessera;

TEST_CASE("rows in ragged pages obey the laws of layouts") {
  support::obeys_the_laws_of_layouts<stored<dense_rows<fp16, 80, 64>, ragged_pages>>(1240);
}

TEST_CASE("a layer of few heads is one group where the number of heads is left as it is") {
  CHECK(ragged_pages{}.groups(2, 8).count() == 4);
  CHECK(ragged_pages{}.groups(2, 2).count() == 2);
  CHECK_THROWS_WITH(ragged_pages{}.groups(2, 6),
                    contains("heads is 4; expected a divisor of the 6 KV heads of a layer"));
  CHECK_THROWS_WITH((ragged_pages{.heads = 3}.groups(2, 2)), contains("heads is 3; expected a divisor of the 2"));
}

TEST_CASE("layers that keep everything stand together where groups go over the model") {
  const double shares[] = {0.1, 0.2, 0.3, 0.4};
  const ragged_pages pages{.heads = 2, .cluster = clustering::model, .shares = {shares, 2, 2}, .whole_layers = 1};
  CHECK(pages.groups(2, 2).members == std::vector<index_t>{2, 3, 0, 1});
}
