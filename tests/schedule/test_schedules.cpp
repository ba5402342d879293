#include "catch.hpp"

#include <tessera/schedule/each_step.hpp>
#include <tessera/schedule/once.hpp>

#include "support/laws.hpp"

using namespace tessera;

TEST_CASE("once fires when a prompt ends and never after a step") {
  CHECK(once{}.due(moment::prefill_end));
  CHECK(!once{}.due(moment::step_end));
  CHECK(!once::after_steps);
}

TEST_CASE("each_step fires at every moment") {
  CHECK(each_step{}.due(moment::prefill_end));
  CHECK(each_step{}.due(moment::step_end));
  CHECK(each_step::after_steps);
}

TEST_CASE("once and each_step obey the laws of schedules") {
  support::obeys_the_laws_of_schedules(once{});
  support::obeys_the_laws_of_schedules(each_step{});
}
