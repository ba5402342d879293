// Which rows become a segment, and when.
#include "catch.hpp"

#include <tessera/budget/uniform.hpp>
#include <tessera/cache.hpp>
#include <tessera/methods/mosaickv.hpp>
#include <tessera/methods/think.hpp>
#include <tessera/scorer/position.hpp>
#include <tessera/selector/top_tokens.hpp>

#include "packed_conversation.hpp"

using namespace tessera;
using namespace packed_conversation;

TEST_CASE("a first prompt becomes segments, what is left over stays whole, and decoded tokens join a tail at a time") {
  conversation<mosaic> now{of_short_segments(64)};
  now.prompt(100);
  CHECK(now.parts() == list{96, 4});
  for (index_t i = 0; i < 27; ++i) now.step(1);
  CHECK(now.parts() == list{96, 31});
  now.step(8);
  CHECK(now.parts() == list{128, 7});
  now.prompt(30);  // a short turn goes through the tail
  CHECK(now.parts() == list{160, 5});
  now.prompt(4091);  // and so does one of fewer than 4,096 tokens, even if the tail makes it so many
  CHECK(now.parts() == list{160 + 4096, 0});
}

TEST_CASE("a prompt of 4,096 tokens has segments of its own, and what follows joins the last one") {
  conversation<mosaic> now{mosaic{}};
  now.prompt(2100);
  CHECK(now.parts() == list{2080, 20});
  now.prompt(4096);
  CHECK(now.parts() == list{2080, 4096, 20});
  now.step(1);
  now.prompt(70);
  CHECK(now.parts() == list{2080, 4096 + 64, 27});
}

TEST_CASE("rows stay whole until a basis fits them") {
  conversation<mosaic> now{mosaic{}};
  now.prompt(100);
  CHECK(now.parts() == list{100});
  for (index_t i = 0; i < 155; ++i) now.step(1);
  CHECK(now.parts() == list{255});
  now.step(1);
  CHECK(now.parts() == list{256, 0});  // four times as many as a vector has elements
  now.prompt(250);
  CHECK(now.parts() == list{256, 250});
  now.step(6);
  CHECK(now.parts() == list{256, 256, 0});  // as many as all packed ones
  now.prompt(511);
  now.step(1);
  CHECK(now.parts() == list{256, 256, 512, 0});
  now.prompt(1060);
  CHECK(now.parts() == list{256, 256, 512, 1056, 4});
  now.prompt(2040);
  CHECK(now.parts() == list{256, 256, 512, 1056, 2044});
  now.step(4);
  CHECK(now.parts() == list{256, 256, 512, 1056, 2048, 0});
  now.step(8), now.step(8), now.step(8), now.step(8);
  CHECK(now.parts() == list{256, 256, 512, 1056, 2048 + 32, 0});  // a basis of 2,048 rows lasts
  const auto view = now.held.view(0, now.id);
  for (std::size_t i = 1; i < view.segments->size(); ++i)
    CHECK((*view.segments)[i - 1]->basis != (*view.segments)[i]->basis);
}

TEST_CASE("chunks of a prompt are packed when the next one comes, where the prefill packs") {
  mosaic recipe;
  recipe.layout.rows.prefill = prefill_rows::packed;
  conversation<mosaic> now{recipe};
  now.chunk(200);
  now.chunk(200);
  CHECK(now.parts() == list{400});  // 200 rows are too few for a basis
  now.chunk(100);
  CHECK(now.parts() == list{384, 116});
  now.chunk(2000);
  CHECK(now.parts() == list{384, 2116});
  now.chunk(100);
  CHECK(now.parts() == list{384, 2112, 104});
  now.chunk(1000);
  CHECK(now.parts() == list{384, 2112 + 96, 1008});
  now.held.end_prefill(now.id);
  CHECK(now.parts() == list{384, 2112 + 96 + 992, 16});
  now.prompt(5000);  // a later turn joins too
  CHECK(now.parts() == list{384, 2112 + 96 + 992 + 5016 / 32 * 32, 5016 % 32});

  recipe.layout.rows.segment = 512;
  conversation<mosaic> full{recipe};
  for (int i = 0; i < 4; ++i) full.chunk(300);
  CHECK(full.parts() == list{288, 288, 24 + 600});  // the next segment begins with 512 rows
  full.chunk(300);
  CHECK(full.parts() == list{288, 288, 608, 16 + 300});
  full.chunk(10);
  CHECK(full.parts() == list{288, 288, 608, 326});  // and so does one behind a full segment
  full.held.end_prefill(full.id);
  CHECK(full.parts() == list{288, 288, 608, 320, 6});  // 256 are enough at a prompt's end
}

TEST_CASE("a packed prefill is refused where it cannot be") {
  think<fp32, 64> thin;
  thin.layout.rows.prefill = prefill_rows::packed;
  CHECK_THAT(refused(thin),
             contains("prefill is packed; expected whole where a prompt's last queries choose channels"));
  mosaic searched;
  searched.layout.rows.prefill = prefill_rows::packed;
  searched.layout.rows.strategy.strategy = strategy_choice::searched;
  CHECK_THAT(refused(searched), contains("prefill is packed; expected whole where strategies are searched"));
}

TEST_CASE("a prompt that ends with nothing to pack leaves the next one its own segment") {
  conversation<mosaic> now{of_short_segments(64)};
  now.prompt(100);
  now.prompt(10);
  CHECK(now.parts() == list{96, 14});
  now.prompt(200);
  CHECK(now.parts() == list{96 + 192, 22});
}

TEST_CASE("a prompt of several segments, and conversations shorter than a tail") {
  mosaic recipe;
  recipe.layout.rows.segment = 64;
  conversation<mosaic> several{recipe};
  several.prompt(240);
  CHECK(several.parts() == list{64, 64, 96, 16});  // a remainder of 32 belongs to the segment before it
  const auto view = several.held.view(0, several.id);
  CHECK((*view.segments)[0]->basis != (*view.segments)[1]->basis);

  recipe.layout.rows.segment = 1024;
  conversation<mosaic> longer{recipe};
  longer.prompt(2048 + 4 * 64 - 32);
  CHECK(longer.parts() == list{1024, 1024 + 4 * 64 - 32, 0});
  conversation<mosaic> longest{recipe};
  longest.prompt(2048 + 4 * 64);
  CHECK(longest.parts() == list{1024, 1024, 4 * 64, 0});

  conversation<mosaic> small{of_short_segments(32)};
  small.prompt(31);
  CHECK(small.parts() == list{31});
  small.step(1);
  CHECK(small.parts() == list{32, 0});
  conversation<mosaic> unprompted{of_short_segments(32)};
  for (index_t i = 0; i < 33; ++i) unprompted.step(1);
  CHECK(unprompted.parts() == list{32, 1});

  conversation<think<fp32, 64>> thin{{}};
  thin.prompt(100);
  CHECK(thin.parts() == list{68, 32});
  for (index_t i = 0; i < 31; ++i) thin.step(1);
  CHECK(thin.parts() == list{68, 63});
  thin.step(1);
  CHECK(thin.parts() == list{100, 32});
}

TEST_CASE("a prompt that is cut and written again is as long as it was for its segments") {
  for (const bool cut : {false, true}) {
    conversation<mosaic> now{mosaic{}};
    now.prompt(4096);
    now.chunk(5000);
    if (cut) {
      now.held.truncate(now.id, 4096 + 4500);
      now.chunk(500);
    }
    now.held.end_prefill(now.id);
    CHECK(now.parts() == list{4096, 4992, 8});
  }
}

TEST_CASE("rows join a segment whose blocks stay whole behind a choice, and begin another one behind others") {
  recipe<retain<position, uniform, top_tokens>, mosaic_rows<dense<fp32, 64>>, retrieve<block_mean, whole_blocks>,
         gathered_decode, once>
      method;
  method.layout.rows.segment = 64;
  method.set_budget(200);
  method.retrieve.tokens = 64;
  conversation<decltype(method)> now{method};
  now.prompt(100);
  CHECK(now.parts() == list{96, 4});
  now.prompt(60);  // nothing is dropped
  CHECK(now.parts() == list{160, 0});
  now.prompt(72);  // four blocks of eight rows, though not the first ones
  CHECK(now.parts() == list{192, 8});
  now.prompt(30);
  CHECK(now.parts() == list{162, 32, 6});
  for (index_t i = 0; i < 30; ++i) now.step(1);
  CHECK(now.parts() == list{162, 64, 4});
}
