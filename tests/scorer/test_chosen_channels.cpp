#include "catch.hpp"

#include <tessera/scorer/chosen_channels.hpp>

#include "laws/paged_scorers.hpp"

using namespace tessera;

TEST_CASE("chosen_channels obeys the laws of paged scorers") {
  support::obeys_the_laws_of_paged_scorers(chosen_channels{});
}

TEST_CASE("SparQ reads as many channels as the budget pays for, one at least") {
  CHECK(chosen_channels{}.fitted(1, 128).channels == 128);
  CHECK(chosen_channels{}.fitted(4, 128).channels == 32);
  CHECK(chosen_channels{}.fitted(6.2305, 128).channels == 20);
  CHECK(chosen_channels{}.fitted(129, 128).channels == 1);
  CHECK(chosen_channels{32}.fitted(129, 128).channels == 32);
  CHECK(chosen_channels::page == 1);
}

TEST_CASE("a quarter of what is attended is the newest, unless given") {
  CHECK(chosen_channels{}.protected_tail(128) == 32);
  CHECK(chosen_channels{0, 5}.protected_tail(128) == 5);
  CHECK(chosen_channels{0, 0}.protected_tail(128) == 0);
  CHECK_THROWS_WITH((chosen_channels{0, 65}).check(64),
                    contains("recent is 65; expected at most what a step attends, which is 64"));
  CHECK_THROWS_WITH((chosen_channels{0, -2}).check(64), contains("recent is -2"));
  CHECK_THROWS_WITH((chosen_channels{-1, 0}).check(64), contains("channels is -1"));
  CHECK_THROWS_WITH((chosen_channels{65, 0}).fitted(1, 64), contains("channels is 65"));
}
