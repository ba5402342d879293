#include <algorithm>
#include <nlohmann/json.hpp>
#include <tessera/core/error.hpp>

#include "evaluation_bench.hpp"
#include "tool/eval/report.hpp"

using engine::token_t;
using tool::cell;
using tool::variant;

using namespace tool_tests;

namespace {

/// Two turns. The expected answer of the first is what the model says under the full cache; the second has none.
tool::conversation self_answered(bench& on) {
  tool::conversation asked{"own",
                           {{"Light is a thing that bends, and colours are many.\nQuestion: why?\nAnswer:", ""},
                            {"\nQuestion: and then?\nAnswer:", "nothing that a model would say"}}};
  const auto cache = tool::find_method("full").make({{2, 4, 2}, 64, tool::element_type::fp32, {}, {}, on.workers});
  std::vector<token_t> prompt = on.tokenizer.encode(asked.turns[0].prompt);
  prompt.insert(prompt.begin(), *on.tokenizer.bos());
  engine::generate_options options;
  options.max_new = 4;
  asked.turns[0].answer = on.tokenizer.decode(on.model->extend(on.model->prefill(prompt, *cache), *cache, options));
  return asked;
}

}  // namespace

TEST_CASE("at a budget that covers everything every method answers as the full cache does") {
  bench on;
  const auto asked = self_answered(on);
  auto evaluation = on.evaluation(all_methods({500}, true));
  evaluation.run(asked.family, on.plan(asked));
  REQUIRE(evaluation.cells().size() == 2 * tool::methods().size());  // two turns each
  for (const cell& cell : evaluation.cells()) {
    INFO(evaluation.variants()[cell.variant].method->name << ", turn " << cell.turn);
    CHECK(cell.questions == 1);
    CHECK(cell.right == (cell.turn == 1));
    CHECK(cell.steps > 0);
    CHECK(cell.bytes_held >= cell.bytes_full);
  }
}

TEST_CASE("compressed caches hold less, budgets of one method share one observation") {
  bench on;
  std::string document;
  for (int i = 0; i < 40; ++i) document += "The rays which differ in colour differ also in degrees.\n";
  const tool::conversation asked{"long", {{document + "Question: which?\nAnswer:", "none"}}};
  // A prompt that is read again stands twice in the model's context: this one does not fit.
  std::vector<variant> variants = all_methods({40, 80});
  std::erase_if(variants, [](const variant& row) { return row.method->rereads; });
  for (variant& row : variants) {  // the answer is shorter than what LoopServe's turns read whole
    if (tool::has_parameter(*row.method, "every")) row.settings.push_back({"first", "0"});
  }
  auto together = on.evaluation(variants);
  together.run("long", on.plan(asked));
  for (const cell& cell : together.cells()) {
    const auto& row = together.variants()[cell.variant];
    // The same row alone, with nobody to share with.
    auto alone = on.evaluation({row});
    alone.run("long", on.plan(asked));
    INFO(row.method->name << " " << row.budget.value_or(0));
    CHECK(alone.cells()[0].bytes_held == cell.bytes_held);
    CHECK(alone.cells()[0].bytes_read == cell.bytes_read);
    CHECK(alone.cells()[0].steps == cell.steps);
    const std::string& name = row.method->name;
    const bool keeps_all = !row.method->has_budget || name == "exact_topk" || name == "hsa" || name == "quest" ||
                           name == "sparq" || name == "rocketkv_mt" || name == "duo_attention" || name == "mosaickv" ||
                           name == "loopserve" || name == "loopserve_decode";
    // rocketkv keeps room for the answer, and an index of its pages.
    if (!keeps_all) CHECK(cell.bytes_held < (name == "rocketkv" ? 0.6 : 0.4) * cell.bytes_full);
    if (row.method->has_budget) CHECK(cell.bytes_read / double(cell.steps) < 0.8 * cell.bytes_full);
  }
}

TEST_CASE("a conversation's longest answer is the max_new of methods that have one, unless the user sets it") {
  bench on;
  std::string document;
  for (int i = 0; i < 40; ++i) document += "The rays which differ in colour differ also in degrees.\n";
  const tool::conversation asked{
      "long", {{document + "Question: which?\nAnswer:", "x"}, {"\nQuestion: why?\nAnswer:", "one two three four"}}};
  std::vector<variant> variants;
  for (const char* name : {"rocketkv", "hsa", "snapkv"}) variants.push_back({&tool::find_method(name), 40, {}});
  const auto turns = on.plan(asked);
  REQUIRE(turns[1].max_new > turns[0].max_new);
  const auto limit = tool::longest_answer(turns);
  CHECK(limit == turns[1].max_new);
  CHECK(tool::longest_answer({}) == 1);

  const auto cells_of = [&](std::vector<variant> rows) {
    auto evaluation = on.evaluation(std::move(rows));
    evaluation.run("long", turns);
    return evaluation.cells();
  };
  const auto with = [&](const std::string& value) {
    std::vector<variant> rows = variants;
    for (variant& row : rows) {
      if (tool::has_parameter(*row.method, "max_new")) row.settings.push_back({"max_new", value});
    }
    return rows;
  };
  const auto handed = cells_of(variants), same = cells_of(with(std::to_string(limit))), more = cells_of(with("128"));
  const auto find = [](const std::vector<cell>& cells, std::size_t row) {
    return *std::find_if(cells.begin(), cells.end(), [&](const cell& one) { return one.variant == row; });
  };
  for (std::size_t row = 0; row < variants.size(); ++row) {
    INFO(variants[row].method->name);
    CHECK(find(handed, row).bytes_held == find(same, row).bytes_held);
    CHECK(find(handed, row).bytes_read == find(same, row).bytes_read);
    CHECK(find(handed, row).least_limit == limit);
    CHECK(find(handed, row).most_limit == limit);
  }
  CHECK(find(handed, 0).bytes_held != find(more, 0).bytes_held);
  CHECK(find(handed, 2).bytes_held == find(more, 2).bytes_held);

  const auto json = nlohmann::json::parse(tool::json_text(variants, handed));
  CHECK(json[0]["parameters"]["max_new"] == limit);
  CHECK(nlohmann::json::parse(tool::json_text(with("128"), more))[0]["parameters"]["max_new"] == 128);
  CHECK(tool::limits_text(variants, handed) ==
        "max_new of rocketkv, hsa: " + std::to_string(limit) + ", the longest that an answer may get.\n");
  CHECK(tool::limits_text(with("128"), more).empty());
}

TEST_CASE("an evaluation counts the pairs of row and key along lines, in chunks of any size, in every turn") {
  bench on;
  std::string document;
  for (int i = 0; i < 20; ++i) document += "The rays which differ in colour differ also in degrees.\n";
  const auto turns =
      on.plan({"lines", {{document + "Question: which?\nAnswer:", "x"}, {"\nQuestion: why?\nAnswer:", "y"}}});
  const auto tokens = tessera::index_t(turns[0].prompt.size());
  const std::vector<tool::setting> shape{{"init", "4"}, {"local", "16"}};
  const std::vector<variant> variants{{&tool::find_method("a_shape"), {}, shape},
                                      {&tool::find_method("loopserve_prefill"), {}, {{"alpha", "1"}}},
                                      {&tool::find_method("full"), {}, {}}};
  double seen = 0, all = 0;
  for (tessera::index_t row = 0; row < tokens; ++row) {
    seen += std::min(row + 1, 16 + std::clamp(row - 15, 0, 4));
    all += row + 1;
  }
  REQUIRE(seen < 0.5 * all);
  for (const std::int32_t chunk : {37, 64, 100'000}) {
    on.model->set_chunk(chunk);
    auto evaluation = on.evaluation(variants);
    evaluation.run("lines", turns);
    const std::vector<cell>& cells = evaluation.cells();
    REQUIRE(cells.size() == 6);
    for (const cell& one : cells) {
      CAPTURE(chunk, one.variant, one.turn, one.pairs.attended, one.pairs.visible);
      if (one.variant == 2) {
        CHECK(one.pairs.visible == 0);
      } else if (one.turn == 1) {
        CHECK(one.pairs.visible == 8 * all);  // two layers, four query heads
        CHECK(one.pairs.attended == 8 * (one.variant == 0 ? seen : all));
      } else {
        CHECK(one.pairs.visible > 0);
        CHECK((one.variant == 0) == (one.pairs.attended < one.pairs.visible));
      }
    }
    const auto json = nlohmann::json::parse(tool::json_text(variants, cells));
    CHECK(json[0]["prompt_pairs"] == Approx(seen / all));
    CHECK(json[2]["prompt_pairs"] == 1);
    CHECK(json[4]["prompt_pairs"] == 1);
    CHECK_THAT(tool::table_text(variants, cells), contains("pairs %"));
  }
  auto chunks_of = [&](std::int32_t chunk) {
    on.model->set_chunk(chunk);
    auto evaluation = on.evaluation({{&tool::find_method("full"), {}, {}}});
    int ticks = 0;
    evaluation.call_often([&] { ++ticks; });
    evaluation.run("lines", turns);
    return ticks;
  };
  CHECK(chunks_of(10) - chunks_of(100'000) > tokens / 10 - 3);
}

TEST_CASE("a conversation that does not fit into the model is refused before anything runs") {
  bench on;
  std::string document;
  for (int i = 0; i < 400; ++i) document += "one two three four\n";
  CHECK_THROWS_WITH(on.plan({"long", {{document, "x"}}}, "question 7"), contains("question 7") && contains("1024"));
  CHECK_THROWS_WITH(on.evaluation(all_methods({16})), contains("window is 32"));
}

TEST_CASE("the table has a row a variant and a column a family or turn") {
  const auto& snapkv = tool::find_method("snapkv");
  const auto& full = tool::find_method("full");
  const std::vector<variant> variants{{&full, {}, {}}, {&snapkv, 128, {{"window", "16"}}}};
  std::vector<cell> cells;
  for (std::size_t i = 0; i < 2; ++i) {
    for (const auto& [family, turn] : {std::pair{"multi_key", 1}, {"talk", 1}, {"talk", 2}}) {
      cell made;
      made.variant = i;
      made.family = family;
      made.turn = turn;
      made.questions = 40;
      made.right = i == 0 ? 40 : 39;
      made.scores.assign(40, 1.0);
      if (i == 1) made.scores[7] = 0;
      made.bytes_full = 4000;
      made.bytes_held = i == 0 ? 4000 : 1000;
      made.bytes_read = 10240;
      made.steps = 10;
      cells.push_back(made);
    }
  }
  CHECK(tool::table_text(variants, cells) ==
        "                multi  talk            memory      read\n"
        "method  budget    key  turn 1  turn 2  held %  per step\n"
        "-------------------------------------------------------\n"
        "full         -    100     100     100     100  1.00 KiB\n"
        "snapkv     128   97.5    97.5    97.5      25  1.00 KiB\n");
  cells.back().scores[8] = 0.5;
  const std::string averaged = tool::table_text(variants, cells, true);
  CHECK(averaged.find("turn 2  average  held %") != std::string::npos);
  CHECK(averaged.find("   96.2     97.2      25") != std::string::npos);  // of 97.5 and the mean of 97.5 and 96.25

  const auto json = nlohmann::json::parse(tool::json_text(variants, cells, tool::scoring::parsed("f1", false)));
  REQUIRE(json.size() == 6);
  CHECK(json[5]["metric"] == "f1");
  CHECK(json[5]["score"] == Approx(38.5 / 40));
  CHECK(json[5]["scores"][8] == 0.5);
  CHECK_FALSE(nlohmann::json::parse(tool::json_text(variants, cells))[5].contains("scores"));
  CHECK(json[0]["budget"].is_null());
  CHECK(json[5]["method"] == "snapkv");
  CHECK(json[5]["budget"] == 128);
  CHECK(json[5]["parameters"]["window"] == 16);
  CHECK(json[5]["parameters"]["pool_kind"] == "max");
  CHECK(json[5]["family"] == "talk");
  CHECK(json[5]["turn"] == 2);
  CHECK(json[5]["questions"] == 40);
  CHECK(json[5]["right"] == 39);
  CHECK(json[5]["bytes_held"] == 25);
  CHECK(json[5]["bytes_full"] == 100);
  CHECK(json[5]["bytes_read_per_step"] == 1024);
}
