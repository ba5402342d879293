#include "catch.hpp"

#include <tessera/core/error.hpp>
#include <tessera/schedule/every_outputs.hpp>

#include "laws/policies.hpp"

using namespace tessera;

TEST_CASE("every_outputs obeys the laws of schedules") {
  support::obeys_the_laws_of_schedules(every_outputs{}, every_outputs{.first = 0});
  support::obeys_the_laws_of_schedules(every_outputs{.first = 0, .every = 1});
}

TEST_CASE("every_outputs fires at the end of the step with which a turn has its first outputs, and so many more") {
  for (const every_outputs& policy : {every_outputs{}, every_outputs{.first = 5},
                                      every_outputs{.first = 40, .every = 3}, every_outputs{.first = 1, .every = 1}}) {
    CAPTURE(policy.first, policy.every);
    for (const index_t turn : {1, 2, 3}) {
      CHECK_FALSE(policy.due(moment::prompt_end, {turn, 0}));
      for (index_t step = 1; step <= 100; ++step) {
        CHECK_FALSE(policy.due(moment::step_begin, {turn, step, step, 1}));
        CHECK(policy.due(moment::step_end, {turn, step, step, 1}) ==
              (step >= policy.first && (step - policy.first) % policy.every == 0));
      }
    }
  }
}

TEST_CASE("every_outputs with nothing before the first choice fires when a prompt ends, and at multiples") {
  const every_outputs policy{.first = 0, .every = 16};
  CHECK(policy.due(moment::prompt_end, {1, 0}));
  for (index_t step = 1; step <= 100; ++step)
    CHECK(policy.due(moment::step_end, {1, step, step, 1}) == (step % 16 == 0));
}

TEST_CASE("every_outputs counts tokens, not steps") {
  const every_outputs policy{.first = 3, .every = 3}, late{.first = 5, .every = 4};
  // Steps of 2, 2, 8 and 1 tokens: 2, 4, 12 and 13 outputs.
  CHECK_FALSE(policy.due(moment::step_end, {1, 1, 2, 2}));
  CHECK(policy.due(moment::step_end, {1, 2, 4, 2}));
  CHECK(policy.due(moment::step_end, {1, 3, 12, 8}));
  CHECK_FALSE(policy.due(moment::step_end, {1, 4, 13, 1}));
  // 5, 9, 13: passed in the third step, in which 9 is passed too, and reached in the fourth.
  CHECK_FALSE(late.due(moment::step_end, {1, 2, 4, 2}));
  CHECK(late.due(moment::step_end, {1, 3, 12, 8}));
  CHECK(late.due(moment::step_end, {1, 4, 13, 1}));
  CHECK_FALSE(late.due(moment::step_end, {1, 5, 16, 3}));
}

TEST_CASE("every_outputs refuses to fire less than never") {
  CHECK_THROWS_WITH(every_outputs{.every = 0}.check(), contains("every is 0; expected 1"));
  CHECK_THROWS_WITH(every_outputs{.first = -1}.check(), contains("first is -1; expected 0"));
  CHECK_NOTHROW(every_outputs{}.check());
  CHECK_NOTHROW(every_outputs{.first = 0}.check());
}
