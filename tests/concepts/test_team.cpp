#include "catch.hpp"

#include <tessera/concepts/team.hpp>
#include <tessera/team/serial.hpp>

using namespace tessera;

TEST_CASE("a team's results hold on every lane") {
  static_assert(check_team<team::serial>());
  constexpr team::serial lane;
  CHECK(team::serial::size == 1);
  CHECK(lane.rank() == 0);
  CHECK(lane.sum(2.5f) == 2.5f);
  CHECK(lane.sum(index_t(3)) == 3);
  CHECK(lane.max(-1.0f) == -1.0f);
  CHECK(lane.scan(9) == 0);
  lane.sync();
}
