#include <tessera/core/error.hpp>

#include "catch.hpp"
#include "tool/eval/questions.hpp"

using tool::parse_questions;

TEST_CASE("a questions file gives its conversations in order") {
  const auto all = parse_questions(
      "{\"family\": \"a\", \"turns\": [{\"prompt\": \"p\\nq\", \"answer\": \"1\"}, {\"prompt\": \"r\", \"answer\": "
      "\"2\"}]}"
      "\n\n  {\"family\": \"b\", \"turns\": [{\"prompt\": \"s\", \"answer\": \"3\"}], \"more\": 1}\r\n",
      "file");
  REQUIRE(all.size() == 2);
  CHECK(all[0].family == "a");
  REQUIRE(all[0].turns.size() == 2);
  CHECK(all[0].turns[0].prompt == "p\nq");
  CHECK(all[0].turns[1].answer == "2");
  CHECK(all[1].family == "b");
}

TEST_CASE("what is no conversation is refused with its line") {
  const std::string good = R"({"family": "a", "turns": [{"prompt": "p", "answer": "1"}]})";
  for (const char* bad : {
           "nonsense",
           "[]",
           "3",
           R"({"turns": [{"prompt": "p", "answer": "1"}]})",
           R"({"family": 3, "turns": [{"prompt": "p", "answer": "1"}]})",
           R"({"family": "a"})",
           R"({"family": "a", "turns": []})",
           R"({"family": "a", "turns": {}})",
           R"({"family": "a", "turns": ["p"]})",
           R"({"family": "a", "turns": [{"prompt": "p"}]})",
           R"({"family": "a", "turns": [{"prompt": "", "answer": "1"}]})",
           R"({"family": "a", "turns": [{"prompt": "p", "answer": " "}]})",
       }) {
    INFO(bad);
    CHECK_THROWS_WITH(parse_questions(good + "\n" + bad, "file"), contains("file, line 2"));
  }
  CHECK_THROWS_WITH(parse_questions(" \n\n", "file"), contains("at least one line"));
}

TEST_CASE("lines of LongBench, RULER and SCBench become conversations") {
  const auto all = parse_questions(
      R"({"context": "Book.", "input": "Who?", "answers": ["A man", "Newton"], "dataset": "qasper", "language": "en", "length": 3, "all_classes": null, "_id": "x"})"
      "\n"
      R"({"context": "Book.", "input": "", "answers": ["All of it."], "dataset": "gov_report"})"
      "\n"
      R"({"index": 0, "input": "Text. What are they?", "outputs": ["1", 22], "length": 9, "answer_prefix": " They are"})"
      "\n"
      R"({"id": 1, "context": "Keys.", "multi_turns": [{"input": "k1", "answer": "v1"}, {"input": "k2", "answer": 5}]})"
      "\n"
      R"({"context": "Shots.", "task": "many_shot", "multi_turns": [{"input": "q", "answer": ["a", "b"], "options": ["a"]}]})",
      "file", "niah", tool::prompt_template::parsed("<{context}|{input}>\\n"));
  REQUIRE(all.size() == 5);
  CHECK(all[0].family == "qasper");
  CHECK(all[0].turns[0].prompt == "<Book.|Who?>\n");
  CHECK(all[0].turns[0].answer == "Newton");
  CHECK(all[0].turns[0].references == std::vector<std::string>{"A man", "Newton"});
  CHECK(all[1].turns[0].prompt == "<Book.|>\n");
  CHECK(all[2].family == "niah");
  CHECK(all[2].turns[0].prompt == "Text. What are they? They are");
  CHECK(all[2].turns[0].answer == "1, 22");
  CHECK(all[2].turns[0].references == std::vector<std::string>{"1", "22"});
  CHECK(all[3].family == "niah");
  REQUIRE(all[3].turns.size() == 2);
  CHECK(all[3].turns[0].prompt == "<Keys.|k1>\n");
  CHECK(all[3].turns[1].prompt == "|k2>\n");
  CHECK(all[3].turns[1].references == std::vector<std::string>{"5"});
  CHECK(all[4].family == "many_shot");
}

TEST_CASE("questions of SCBench's lines are asked in one conversation, or each by itself") {
  const std::string lines =
      R"({"context": "Keys.", "multi_turns": [{"input": "k1", "answer": "v1"}, {"input": "k2", "answer": 5}]})"
      "\n"
      R"({"context": "More.", "multi_turns": [{"input": "k3", "answer": "v3"}]})";
  const auto how = tool::prompt_template::parsed("<{context}|{input}>");
  const auto apart = parse_questions(lines, "file", "kv", how, true);
  REQUIRE(apart.size() == 3);
  CHECK(apart[1].turns[0].prompt == "<Keys.|k2>");
  CHECK(apart[1].turns[0].references == std::vector<std::string>{"5"});
  CHECK(apart[1].family == "kv");
  CHECK(apart[0].document == apart[1].document);
  CHECK(apart[1].document != apart[2].document);
  const auto together = parse_questions(lines, "file", "kv", how);
  REQUIRE(together.size() == 2);
  CHECK(together[0].turns[1].prompt == "|k2>");
  CHECK(together[0].document == 0);
}

TEST_CASE("lines of those forms without their keys, and templates without places, are refused") {
  for (const char* bad : {
           R"({"context": "c", "input": "i", "answers": ["a"]})",
           R"({"context": "c", "input": "i", "dataset": "d"})",
           R"({"context": "c", "answers": ["a"], "dataset": "d"})",
           R"({"context": "c", "input": "i", "answers": [], "dataset": "d"})",
           R"({"context": "c", "input": "i", "answers": "a", "dataset": "d"})",
           R"({"context": "c", "input": "i", "answers": ["a"], "dataset": "d", "language": "zh"})",
           R"({"input": "i", "outputs": [null]})",
           R"({"outputs": ["a"]})",
           R"({"input": "i", "outputs": ["a"], "answer_prefix": 3})",
           R"({"context": [1, 2], "multi_turns": [{"input": "i", "answer": 3}]})",
           R"({"context": "c", "multi_turns": [{"input": "i"}]})",
           R"({"context": "c", "multi_turns": ["i"]})",
           R"({"input": "i"})",
       }) {
    INFO(bad);
    CHECK_THROWS_WITH(parse_questions(std::string("\n") + bad, "file"), contains("file, line 2"));
  }
  for (const char* bad : {"", "{context}", "{input}", "{input} {context}", "{context} {input} {input}"}) {
    INFO(bad);
    CHECK_THROWS_WITH(tool::prompt_template::parsed(bad), contains("--question-template is '"));
  }
}
