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

TEST_CASE("an answer counts when the text begins with it, white space at the ends aside") {
  CHECK(tool::answers(" 12345\nmore", "12345"));
  CHECK(tool::answers("\n12345", "12345 "));
  CHECK(tool::answers("123456", "12345"));
  CHECK_FALSE(tool::answers("the 12345", "12345"));
  CHECK_FALSE(tool::answers("1234", "12345"));
  CHECK_FALSE(tool::answers("", "12345"));
}
