#include "catch.hpp"

#include <tessera/core/error.hpp>
#include <tessera/schedule/every_outputs.hpp>

#include "laws/policies.hpp"

using namespace tessera;

TEST_CASE("every_outputs obeys the laws of schedules") {
  support::obeys_the_laws_of_schedules(every_outputs{});
  support::obeys_the_laws_of_schedules(every_outputs{.every = 1});
}

TEST_CASE("every_outputs fires when a prompt ends, and at the end of the step that reaches a multiple") {
  const every_outputs policy{.every = 16};
  CHECK(policy.due(moment::prompt_end, {1, 0}));
  CHECK_FALSE(policy.due(moment::step_begin, {1, 16, 16, 1}));
  for (index_t step = 1; step <= 100; ++step)
    CHECK(policy.due(moment::step_end, {1, step, step, 1}) == (step % 16 == 0));
}

TEST_CASE("every_outputs counts tokens, not steps") {
  const every_outputs policy{.every = 3};
  // Steps of 2, 2, 8 and 1 tokens: 2, 4, 12 and 13 outputs.
  CHECK_FALSE(policy.due(moment::step_end, {1, 1, 2, 2}));
  CHECK(policy.due(moment::step_end, {1, 2, 4, 2}));
  CHECK(policy.due(moment::step_end, {1, 3, 12, 8}));
  CHECK_FALSE(policy.due(moment::step_end, {1, 4, 13, 1}));
}

TEST_CASE("every_outputs refuses to fire less than never") {
  CHECK_THROWS_WITH(every_outputs{.every = 0}.check(), contains("every is 0; expected 1"));
  CHECK_NOTHROW(every_outputs{}.check());
}
