#include "catch.hpp"

#include <tessera/schedule/before_each_step.hpp>
#include <tessera/schedule/each_chunk.hpp>
#include <tessera/schedule/each_step.hpp>
#include <tessera/schedule/once.hpp>

#include "laws/policies.hpp"

using namespace tessera;

TEST_CASE("once fires when a prompt ends and never in a step") {
  CHECK(once{}.due(moment::prompt_end, {1, 0}));
  CHECK(!once{}.due(moment::step_begin, {1, 1}));
  CHECK(!once{}.due(moment::step_end, {1, 1}));
  CHECK(!fires_in_steps<once>);
}

TEST_CASE("each_step fires when a prompt ends and when a step ends") {
  CHECK(each_step{}.due(moment::prompt_end, {2, 0}));
  CHECK(!each_step{}.due(moment::step_begin, {2, 7}));
  CHECK(each_step{}.due(moment::step_end, {2, 7}));
  CHECK(fires_in_steps<each_step>);
}

TEST_CASE("before_each_step fires when a prompt ends and before a step reads") {
  CHECK(before_each_step{}.due(moment::prompt_end, {1, 0}));
  CHECK(before_each_step{}.due(moment::step_begin, {1, 3}));
  CHECK(!before_each_step{}.due(moment::step_end, {1, 3}));
  CHECK(fires_in_steps<before_each_step>);
}

TEST_CASE("each_chunk fires before more than a chunk would wait, and when a prompt ends") {
  CHECK(each_chunk{}.due(moment::prompt_end, {1, 0}));
  CHECK(!each_chunk{}.due(moment::step_begin, {1, 1}));
  CHECK(!each_chunk{}.due(moment::step_end, {1, 1}));
  CHECK(!fires_in_steps<each_chunk>);
  for (const index_t piece : {16, 32, 64}) {  // pieces that end at the multiples of a chunk are judged there
    index_t waiting = 0;
    for (index_t first = 0; first < 640; first += piece) {
      const bool due = each_chunk{64}.due(moment::chunk_end, {.turn = 1, .waiting = waiting, .coming = piece});
      REQUIRE(due == (first > 0 && first % 64 == 0));
      waiting = (due ? 0 : waiting) + piece;
    }
  }
  CHECK(!each_chunk{64}.due(moment::chunk_end, {.turn = 1, .coming = 500}));  // a larger piece is a chunk of its own
  CHECK(each_chunk{64}.due(moment::chunk_end, {.turn = 1, .waiting = 500, .coming = 1}));
}

TEST_CASE("every schedule obeys the laws of schedules") {
  support::obeys_the_laws_of_schedules(each_chunk{});
  support::obeys_the_laws_of_schedules(once{});
  support::obeys_the_laws_of_schedules(each_step{});
  support::obeys_the_laws_of_schedules(before_each_step{});
}
