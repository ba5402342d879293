#include "catch.hpp"

#include <tessera/backend/cpu/score/finish.hpp>
#include <tessera/scorer/observation_window.hpp>

#include "laws/policies.hpp"

using namespace tessera;

TEST_CASE("observation_window protects its own tokens and pools as it is told") {
  CHECK(observation_window{.window = 8}.protected_tail(1000) == 8);
  const std::vector<float> in{0, 3, 0, 0, 0};
  std::vector<float> out(5);
  host_vector<float> scratch;
  const auto finished = [&](const observation_window& scorer) {
    CHECK(cpu::finished(scorer, in.data(), 5, out.data(), scratch) == out.data());
    return out;
  };
  CHECK(finished({.pool = 3}) == std::vector<float>{3, 3, 3, 0, 0});
  CHECK(finished({.pool = 3, .pool_kind = pooling::average}) == std::vector<float>{1, 1, 1, 0, 0});
  CHECK(finished({.pool = 1}) == in);
}

TEST_CASE("observation_window refuses an empty window, one above the budget and an even or empty pool") {
  CHECK_THROWS_WITH((observation_window{.window = 0}.check(100)),
                    contains("window is 0; expected 1 to 32768; it means: last prompt queries"));
  CHECK_THROWS_WITH((observation_window{.window = 65}.check(64)),
                    contains("window is 65; expected at most the budget, which is 64"));
  CHECK_NOTHROW((observation_window{.window = 64}.check(64)));
  for (const index_t pool : {-1, 0, 2, 8})
    CHECK_THROWS_WITH((observation_window{.pool = pool}.check(64)), contains("pool is"));
}

TEST_CASE("observation_window obeys the laws of scorers") {
  support::obeys_the_laws_of_scorers(observation_window{});
  support::obeys_the_laws_of_scorers(observation_window{.pool = 1});
  support::obeys_the_laws_of_scorers(observation_window{.pool = 5, .pool_kind = pooling::average});
}
