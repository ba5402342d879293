#include "catch.hpp"

#include <tessera/core/host/float_mode.hpp>
#include <tessera/core/host/process.hpp>

#include "support/host/flush_to_zero.hpp"
#include "support/host/forked.hpp"

using namespace tessera;

TEST_CASE(
    "the default mode rounds to nearest and keeps subnormal numbers, and the thread's own mode is back behind it") {
  const support::odd_float_mode odd;
  const bool flushes = !support::keeps_subnormals();
  REQUIRE_FALSE(support::rounds_to_nearest());
  for (int again = 0; again < 2; ++again) {
    {
      const default_float_mode mode;
      CHECK(support::keeps_subnormals());
      CHECK(support::rounds_to_nearest());
      {
        const default_float_mode within;
        CHECK(support::rounds_to_nearest());
      }
      CHECK(support::keeps_subnormals());
    }
    CHECK(flushes == !support::keeps_subnormals());
    CHECK_FALSE(support::rounds_to_nearest());
  }
}

TEST_CASE("a thread that is in the default mode already stays in it") {
  {
    const default_float_mode mode;
  }
  CHECK(support::keeps_subnormals());
  CHECK(support::rounds_to_nearest());
}

TEST_CASE("a child of fork() counts one more than its parent") {
  const home_process own;
  const auto is_home = [](const home_process& home) { return home.is_here() ? 1 : 0; };
  CHECK(support::in_a_child([&] { return is_home(own); }) == 0);
  CHECK(support::in_a_child([&] { return is_home(home_process()); }) == 1);
  CHECK(support::in_a_child([&] {
          const home_process childs;
          return 2 * is_home(own) + support::in_a_child([&] { return is_home(childs); });
        }) == 0);
  CHECK(own.is_here());
}
