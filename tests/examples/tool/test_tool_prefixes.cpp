// Questions about one document: what is read once is answered as if it had been read each time.
#include <algorithm>
#include <set>
#include <stdexcept>
#include <tessera/core/error.hpp>

#include "engine/files/input_file.hpp"
#include "prefix_questions.hpp"
#include "tool/eval/document.hpp"
#include "tool/eval/report.hpp"

using tool::cell;
using tool::question_group;
using tool::variant;

using namespace tool_tests;

TEST_CASE("every method answers questions about a document that was read once as if each had read it") {
  bench on;
  on.model->set_chunk(64);
  const plans all = questions_about(on, 16, {"x", "y", "z"});
  const std::vector<variant> variants = all_methods({40, 80});
  const auto groups = groups_of(on, all, 1, 64);
  REQUIRE(groups.size() == 1);
  REQUIRE(groups[0].shared % 64 != 0);
  const auto once = asked(on, variants, all, groups, true), each = asked(on, variants, all, groups, false);
  check_same(variants, once.cells(), each.cells());
  const auto shared = std::int64_t(groups[0].shared);
  for (const cell& one : once.cells()) {
    const tool::method_info& method = *variants[one.variant].method;
    INFO(method.name << ", turn " << one.turn);
    CHECK(one.questions == 3);
    CHECK(one.reused_tokens == (one.turn == 1 && !method.fuses_chunks ? 2 * shared : 0));
  }
  for (const cell& one : each.cells()) CHECK(one.reused_tokens == 0);

  // Those that need a prompt's length before its first token are named.
  std::set<std::string> fused;
  for (const auto& method : tool::methods()) {
    if (method.fuses_chunks) fused.insert(method.name);
  }
  CHECK(once.use_of_prefixes().need_length == fused);
  CHECK(once.use_of_prefixes().need_answer_limit.empty());
  const std::string said = tool::prefix_text(once.use_of_prefixes());
  CHECK_THAT(said, contains("were not read again"));
  for (const std::string& name : fused) CHECK_THAT(said, contains(name) && contains("Read anew for every question: "));
  CHECK_THAT(tool::prefix_text(each.use_of_prefixes()), contains("Prefix cache: 0 of "));
}

TEST_CASE(
    "where no document is known whole chunks are shared, and answers are those of questions that nobody grouped") {
  bench on;
  on.model->set_chunk(64);
  const plans all = questions_about(on, 16, {"x", "y", "z"});
  std::vector<variant> variants = all_methods({40});
  const auto groups = groups_of(on, all, 0, 64);
  REQUIRE(groups.size() == 1);
  REQUIRE(groups[0].shared > 0);
  REQUIRE(groups[0].shared % 64 == 0);
  const auto grouped = asked(on, variants, all, groups, true);
  auto alone = on.evaluation(variants);
  for (const auto& turns : all) alone.run("many", turns);
  check_same(variants, grouped.cells(), alone.cells());
  CHECK(tool::prefix_text(alone.use_of_prefixes()).empty());
}

TEST_CASE("a method that plans by the longest answer reads every prompt anew where answers differ in length") {
  bench on;
  const plans all = questions_about(on, 16, {"x", "one two three four", "z"});
  std::vector<variant> variants{{&tool::find_method("full"), {}, {}}};
  for (const auto& method : tool::methods()) {
    if (tool::has_parameter(method, "max_new") && !method.fuses_chunks) variants.push_back({&method, 60, {}});
  }
  const auto groups = groups_of(on, all, 1, 64);
  REQUIRE(groups.size() == 1);
  CHECK_FALSE(groups[0].same_limit);
  const auto once = asked(on, variants, all, groups, true), each = asked(on, variants, all, groups, false);
  check_same(variants, once.cells(), each.cells());
  for (const cell& one : once.cells())
    CHECK(one.reused_tokens == (one.turn == 1 && one.variant == 0 ? 2 * std::int64_t(groups[0].shared) : 0));
  CHECK(once.use_of_prefixes().need_answer_limit.size() + 1 == variants.size());
}

TEST_CASE("neighbours make a group as far as their prompts are the same") {
  bench on;
  const plans about = questions_about(on, 16, {"x", "y", "z"});
  const std::size_t tokens = about[0][0].prompt.size();
  // Known documents: everything but the questions' own tokens, at least one of each.
  const auto known = groups_of(on, about, 3, 64);
  REQUIRE(known.size() == 1);
  CHECK(known[0].count == 3);
  CHECK(known[0].shared < tokens);
  CHECK(known[0].shared + 16 > tokens);
  CHECK(known[0].tokens == std::max({tool::tokens_of(about[0]), tool::tokens_of(about[1]), tool::tokens_of(about[2])}));
  CHECK(known[0].same_limit);
  const auto same = groups_of(on, {about[0], about[0]}, 3, 64);
  CHECK(same[0].shared == tokens - 1);

  // Chunks that are longer than what is shared, and prompts that differ from their beginning on.
  for (const question_group& one : groups_of(on, about, 0, 100'000)) CHECK(one.count == 1);
  plans other = about;
  for (std::size_t i = 0; i < other.size(); ++i) other[i][0].prompt[1] = tessera::index_t(300 + i);
  CHECK(groups_of(on, other, 0, 64).size() == 3);
  const auto unlike = groups_of(on, other, 3, 64);
  REQUIRE(unlike.size() == 1);
  CHECK(unlike[0].shared == 0);
  const std::vector<variant> variants{{&tool::find_method("full"), {}, {}}};
  CHECK_THAT(tool::prefix_text(asked(on, variants, other, unlike, true).use_of_prefixes()),
             contains("begin alike for less than a third: many."));

  // Each document by itself.
  std::vector<tool::groupable> two;
  for (std::size_t i = 0; i < 3; ++i) two.push_back({about[i], i == 0 ? std::size_t(1) : std::size_t(2)});
  const auto apart = tool::group_questions(two, on.tokenizer, 64);
  REQUIRE(apart.size() == 2);
  CHECK(apart[0].count == 1);
  CHECK(apart[1].count == 2);
  CHECK(tool::group_questions({}, on.tokenizer, 64).empty());
}

TEST_CASE("a question that is interrupted leaves its group, and later ones are read whole") {
  bench on;
  on.model->set_chunk(64);
  const plans all = questions_about(on, 16, {"x", "y"});
  const std::vector<variant> variants{{&tool::find_method("snapkv"), 40, {}}, {&tool::find_method("snapkv"), 80, {}}};
  auto evaluation = on.evaluation(variants);
  evaluation.begin_group(groups_of(on, all, 1, 64)[0]);
  evaluation.run("many", all[0]);
  int left = 3;
  evaluation.call_often([&] {
    if (--left == 0) throw std::runtime_error("enough");
  });
  CHECK_THROWS_WITH(evaluation.run("many", all[1]), "enough");
  evaluation.run("many", all[1]);
  for (const cell& one : evaluation.cells()) CHECK(one.questions == 2);
  for (const cell& one : evaluation.cells()) CHECK(one.reused_tokens == 0);
}

TEST_CASE("a document has as many needles as questions, and each question asks for another") {
  const tool::task_book book = tool::task_book::load(shipped("data/tasks.json"));
  const std::string text = engine::read_text_file(shipped("data/opticks.txt"));
  const engine::tokenizer tokenizer = engine::tokenizer::load(shipped("model/tokenizer.model"));
  const tool::document_maker maker(text, tokenizer, book);
  tool::document_plan plan;
  plan.context = 2000, plan.room = 16384, plan.count = 2, plan.questions = 10;
  for (const std::string& family : book.families()) {
    INFO(family);
    if (!book.takes_several(family)) {
      CHECK_THROWS_WITH(maker.about(family, 0, plan), contains("questions about a document of " + family + " is 10"));
      continue;
    }
    const auto all = maker.about(family, 1, plan);
    REQUIRE(all.size() == 10);
    std::set<std::string> prompts;
    for (const auto& one : all) {
      REQUIRE(one.turns.size() == 1);
      CHECK(one.family == family);
      prompts.insert(one.turns[0].prompt);
      const std::string answer = one.turns[0].answer.substr(0, one.turns[0].answer.find(','));
      if (family != "long_answer") CHECK_THAT(one.turns[0].prompt, contains(answer));
    }
    CHECK(prompts.size() == 10);
  }
  plan.questions = 1;
  const auto one = maker.about("conversation", 1, plan);
  REQUIRE(one.size() == 1);
  CHECK(one[0].turns.size() == 3);

  tool::document_options given;
  given.tasks = shipped("data/tasks.json").string();
  given.questions_per_document = "4";
  const auto of_suite = tool::document_request::checked(given).families;
  CHECK(of_suite.size() == book.families().size() - 3);
  CHECK(std::count(of_suite.begin(), of_suite.end(), "frequent_words") == 0);
  given.families = "single,frequent_words";
  CHECK_THROWS_WITH(tool::document_request::checked(given),
                    contains("--questions-per-document is 4; expected 1 for family frequent_words"));
  given.families.clear();
  given.suite = "conversations";
  CHECK_THROWS_WITH(tool::document_request::checked(given), contains("expected 1 for suite conversations"));
  given.questions_per_document = "101";
  CHECK_THROWS_WITH(tool::document_request::checked(given), contains("--questions-per-document"));
}
