#include <algorithm>
#include <nlohmann/json.hpp>
#include <set>
#include <tessera/core/error.hpp>

#include "catch.hpp"
#include "engine/files/input_file.hpp"
#include "examples/tiny_model.hpp"
#include "tool/eval/document.hpp"
#include "tool/eval/tasks.hpp"

using tool::random_source;
using tool::task_book;

namespace {

const task_book& book() {
  static const task_book loaded = task_book::load(tool_tests::shipped("data/tasks.json"));
  return loaded;
}

std::size_t occurrences(const std::string& text, const std::string& part) {
  std::size_t count = 0;
  for (std::size_t at = 0; (at = text.find(part, at)) != std::string::npos; at += part.size()) ++count;
  return count;
}

/// The shipped text and tokenizer, and documents made of them.
struct workshop {
  std::string text = engine::read_text_file(tool_tests::shipped("data/opticks.txt"));
  engine::tokenizer tokenizer = engine::tokenizer::load(tool_tests::shipped("model/tokenizer.model"));
  tool::document_maker maker{text, tokenizer, book()};
};

workshop& shop() {
  static workshop made;
  return made;
}

tool::document_plan plan_of(std::int64_t context, std::size_t count = 8) {
  tool::document_plan plan;
  plan.context = context;
  plan.room = 16384;
  plan.count = count;
  return plan;
}

}  // namespace

TEST_CASE("the families are those of the file, in its order") {
  const std::vector<std::string> expected{"single",      "single_first", "single_middle",     "multi_key",
                                          "multi_value", "multi_query",  "variable_tracking", "frequent_words",
                                          "long_answer", "conversation"};
  CHECK(book().families() == expected);
  random_source random(1);
  CHECK_THROWS_WITH(book().make("multikey", random), contains("did you mean multi_key?"));
}

TEST_CASE("a suite is the families with its number of turns") {
  CHECK(book().families_of("all") == book().families());
  CHECK(book().families_of("multiturn") == std::vector<std::string>{"conversation"});
  const auto single = book().families_of("singleturn");
  CHECK(single.size() + 1 == book().families().size());
  CHECK(std::count(single.begin(), single.end(), "conversation") == 0);
  CHECK_THROWS_WITH(book().families_of("multitrun"), contains("did you mean multiturn?"));
  CHECK_THROWS_WITH(book().families_of(""), contains("suite"));
}

TEST_CASE("dialogues are three kinds with the question before, within and behind a turn's text") {
  const std::vector<std::string> expected{"passages_first",  "passages_middle",  "passages_last",
                                          "fragments_first", "fragments_middle", "fragments_last",
                                          "examples_first",  "examples_middle",  "examples_last"};
  CHECK(book().families_of("conversations") == expected);
  CHECK(book().is_dialogue("passages_last"));
  CHECK_FALSE(book().is_dialogue("conversation"));
  random_source random(1);
  CHECK_THROWS_WITH(book().make_dialogue("passage_last", 3, random), contains("did you mean passages_last?"));
  CHECK_THROWS_WITH(book().make_dialogue("passages_last", 10, random), contains("turns is 10; expected 1 to 9"));
  auto tasks = nlohmann::json::parse(engine::read_text_file(tool_tests::shipped("data/tasks.json")));
  const engine_tests::temporary_folder folder;
  tasks["dialogues"]["examples"]["frequencies"] = {6, 5, 2};
  folder.write("tasks.json", tasks.dump());
  CHECK_THROWS_WITH(task_book::load(folder / "tasks.json"), contains("frequencies of examples is 6"));
  tasks.erase("dialogues");
  folder.write("tasks.json", tasks.dump());
  CHECK_THROWS_WITH(task_book::load(folder / "tasks.json").families_of("conversations"), contains("\"dialogues\""));
}

TEST_CASE("a dialogue's answers stand in its turns so far, and passages that nobody asks for do not hold them") {
  bool asks_two = false, asks_earlier = false, spreads = false;
  for (std::size_t i = 0; i < 40; ++i) {
    for (const char* family : {"passages_last", "fragments_first", "examples_middle"}) {
      random_source random(9, family, i);
      const auto talk = book().make_dialogue(family, 1 + i % 9, random);
      REQUIRE(talk.turns.size() == 1 + i % 9);
      std::vector<std::string> so_far, distractors;
      for (const auto& turn : talk.turns) {
        so_far.insert(so_far.end(), turn.sentences.begin(), turn.sentences.end());
        distractors.insert(distractors.end(), turn.distractors.begin(), turn.distractors.end());
        CAPTURE(family, i, turn.ask.question, turn.ask.answer);
        std::vector<std::string> parts;
        for (std::size_t begin = 0; begin <= turn.ask.answer.size();) {
          const std::size_t end = std::min(turn.ask.answer.find(", ", begin), turn.ask.answer.size());
          parts.push_back(turn.ask.answer.substr(begin, end - begin));
          begin = end + 2;
        }
        const auto holds = [&](const std::vector<std::string>& all, const std::string& part) {
          return std::count_if(all.begin(), all.end(),
                               [&](const std::string& one) { return one.ends_with(" is " + part + "."); });
        };
        if (std::string_view(family) == "examples_middle") {
          // The most frequent words of all turns so far, no two of them nearly as frequent.
          REQUIRE(parts.size() == 3);
          for (std::size_t rank = 0; rank < 3; ++rank)
            CHECK(holds(so_far, parts[rank]) >= 2 + (rank < 2 ? holds(so_far, parts[rank + 1]) : 0));
          continue;
        }
        std::size_t place = 0;
        for (const std::string& part : parts) {
          CHECK(holds(so_far, part) == 1);
          CHECK(holds(distractors, part) == 0);
          asks_earlier |= holds(turn.sentences, part) == 0;
          if (std::string_view(family) != "fragments_first") continue;
          const auto found = std::find_if(so_far.begin(), so_far.end(),
                                          [&](const std::string& one) { return one.ends_with(" is " + part + "."); });
          CHECK(std::size_t(found - so_far.begin()) >= place);  // in the order in which they came
          place = std::size_t(found - so_far.begin());
        }
        asks_two |= std::string_view(family) == "passages_last" && parts.size() == 2;
        spreads |= std::string_view(family) == "fragments_first" && holds(turn.sentences, parts[0]) == 0 &&
                   holds(turn.sentences, parts[1]) == 1;
      }
    }
  }
  CHECK((asks_two && asks_earlier && spreads));
}

TEST_CASE("every turn of a dialogue brings text of its own, and its question stands where the family says") {
  for (const std::string& family : book().dialogues()) {
    for (const std::size_t turns : {std::size_t(1), std::size_t(3), std::size_t(9)}) {
      auto plan = plan_of(2048);
      plan.turns = turns;
      const auto made = shop().maker.make(family, 2, plan);
      REQUIRE(made.turns.size() == turns);
      std::int64_t tokens = 0;
      for (const auto& turn : made.turns) {
        CAPTURE(family, turns, turn.prompt);
        CHECK(turn.prompt.ends_with("\nAnswer:"));
        const double place = double(turn.prompt.find("Question: ")) / double(turn.prompt.size());
        if (family.ends_with("_first")) CHECK(place <= 1.0 / double(turn.prompt.size()));
        if (family.ends_with("_middle")) CHECK((place > 0.2 && place < 0.8));
        if (family.ends_with("_last")) CHECK(place > 0.5);
        tokens += std::int64_t(shop().tokenizer.encode(turn.prompt).size());
      }
      CAPTURE(family, turns);
      CHECK((tokens > 2048 - 300 && tokens < 2048 + 64 + 40 * std::int64_t(turns)));
    }
  }
  auto narrow = plan_of(256);
  narrow.turns = 9;
  CHECK_THROWS_WITH(shop().maker.make("passages_last", 0, narrow), contains("raise --context"));
}

TEST_CASE("turns where no family is a dialogue are refused") {
  tool::document_options given;
  given.tasks = tool_tests::shipped("data/tasks.json").string();
  given.turns = "5";
  CHECK_THROWS_WITH(tool::document_request::checked(given), contains("--turns is 5; expected none"));
  given.suite = "conversations";
  CHECK(tool::document_request::checked(given).plan.turns == 5);
  given.turns = "10";
  CHECK_THROWS_WITH(tool::document_request::checked(given), contains("--turns"));
  given.turns = "";
  CHECK(tool::document_request::checked(given).plan.turns == 3);
  given.families = "examples_first,single";
  CHECK(tool::document_request::checked(given).families == std::vector<std::string>{"examples_first", "single"});
}

TEST_CASE("a suite that no family fits is refused") {
  auto tasks = nlohmann::json::parse(engine::read_text_file(tool_tests::shipped("data/tasks.json")));
  tasks["families"]["conversation"]["turns"] = 2;
  const engine_tests::temporary_folder folder;
  folder.write("tasks.json", tasks.dump());
  const auto changed = task_book::load(folder / "tasks.json");
  CHECK(changed.families_of("all").size() == book().families().size());
  CHECK_THROWS_WITH(changed.families_of("multiturn"), contains("suite multiturn"));
}

TEST_CASE("an answer to a needle question stands in exactly one sentence") {
  for (const char* family : {"single", "single_first", "single_middle", "multi_key", "conversation"}) {
    for (std::size_t i = 0; i < 50; ++i) {
      random_source random(7, family, i);
      const auto task = book().make(family, random);
      for (const auto& turn : task.turns) {
        const auto holds = [&](const std::string& sentence) { return sentence.find(turn.answer) != std::string::npos; };
        CHECK(std::count_if(task.sentences.begin(), task.sentences.end(), holds) == 1);
      }
    }
  }
}

TEST_CASE("a conversation asks for another needle each turn") {
  random_source random(1);
  const auto task = book().make("conversation", random);
  std::set<std::string> questions;
  for (const auto& turn : task.turns) questions.insert(turn.question);
  CHECK(task.sentences.size() == 8);
  CHECK(questions.size() == 3);
}

TEST_CASE("all values of a name are asked for in document order") {
  random_source random(2);
  const auto task = book().make("multi_value", random);
  CHECK(task.sentences.size() == 8);
  const std::string asked = task.turns[0].question, before = "What are all the secret codes of ";
  const std::string name = asked.substr(before.size(), asked.size() - before.size() - 1);
  const std::string start = "The secret code of " + name + " is ";
  std::string in_order;
  for (const std::string& sentence : task.sentences) {
    if (!sentence.starts_with(start)) continue;
    in_order += (in_order.empty() ? "" : ", ") + sentence.substr(start.size(), sentence.size() - start.size() - 1);
  }
  CHECK(task.turns[0].answer == in_order);
}

TEST_CASE("several names are answered in the order asked, and lists name them") {
  random_source random(3);
  CHECK(occurrences(book().make("multi_query", random).turns[0].answer, ", ") == 3);
  const auto list = book().make("long_answer", random);
  CHECK(list.sentences.size() == 16);
  CHECK(occurrences(list.turns[0].answer, "; ") == 11);
  CHECK(occurrences(list.turns[0].answer, ": ") == 12);
}

TEST_CASE("a chain of variables is set link by link, and every link is in the answer") {
  random_source random(4);
  const auto task = book().make("variable_tracking", random);
  REQUIRE(task.sentences.size() == 8);
  CHECK(occurrences(task.turns[0].answer, ", ") == 3);
  std::string document;
  for (const auto& sentence : task.sentences) document += sentence + "\n";
  CHECK(occurrences(document, "set to variable") == 6);
}

TEST_CASE("signal words occur as often as the file says") {
  random_source random(5);
  const auto task = book().make("frequent_words", random);
  std::string document;
  for (const auto& sentence : task.sentences) document += sentence + "\n";
  const std::string& answer = task.turns[0].answer;
  const std::size_t first = answer.find(", "), second = answer.find(", ", first + 2);
  CHECK(occurrences(document, " " + answer.substr(0, first) + ".") == 18);
  CHECK(occurrences(document, " " + answer.substr(first + 2, second - first - 2) + ".") == 12);
  CHECK(occurrences(document, " " + answer.substr(second + 2) + ".") == 7);
}

TEST_CASE("a document has about the tokens asked for, and every sentence is a line of its own") {
  for (const std::string& family : book().families()) {
    for (const std::int64_t context : {1024, 4096}) {
      const auto made = shop().maker.make(family, 3, plan_of(context));
      const std::string& prompt = made.turns[0].prompt;
      const auto tokens = std::int64_t(shop().tokenizer.encode(prompt).size());
      INFO(family << " " << context);
      CHECK(tokens > context - 64);
      CHECK(tokens < context + 256);
      random_source random(0, family, 3);
      for (const auto& sentence : book().make(family, random).sentences) {
        CHECK(("\n" + prompt).find("\n" + sentence + "\n") != std::string::npos);
      }
      CHECK(prompt.ends_with("Answer:"));
      for (std::size_t i = 1; i < made.turns.size(); ++i) CHECK(made.turns[i].prompt.starts_with("\nQuestion: "));
    }
  }
}

TEST_CASE("the question stands where the family says") {
  const auto place = [](const char* family) {
    const std::string prompt = shop().maker.make(family, 0, plan_of(2048)).turns[0].prompt;
    return double(prompt.find("Question: ")) / double(prompt.size());
  };
  CHECK(place("single_first") == 0);
  CHECK(place("single_middle") == Approx(0.5).margin(0.1));
  CHECK(place("single") > 0.95);
}

TEST_CASE("lone needles come by every depth") {
  const auto plan = plan_of(2048, 10);
  for (std::size_t i = 0; i < plan.count; ++i) {
    const std::string prompt = shop().maker.make("single", i, plan).turns[0].prompt;
    const double depth = double(prompt.find("The secret code of")) / double(prompt.find("Question: "));
    CHECK(depth >= double(i) / 10 - 0.05);
    CHECK(depth <= double(i + 1) / 10 + 0.05);
  }
}

TEST_CASE("a conversation fits into the model even where the context asked for is all of it") {
  auto plan = plan_of(2048);
  plan.room = 2048;
  for (const std::string& family : book().families()) {
    std::int64_t tokens = 1;
    for (const auto& turn : shop().maker.make(family, 1, plan).turns) {
      tokens += std::int64_t(shop().tokenizer.encode(turn.prompt + " " + turn.answer).size());
    }
    CHECK(tokens <= plan.room);
  }
}

TEST_CASE("documents depend on seed, family and number only") {
  const auto prompt = [](std::size_t index, std::uint64_t seed) {
    auto plan = plan_of(1024);
    plan.seed = seed;
    return shop().maker.make("multi_key", index, plan).turns[0].prompt;
  };
  const std::string first = prompt(2, 5);
  CHECK(prompt(3, 5) != first);
  CHECK(prompt(2, 6) != first);
  CHECK(prompt(2, 5) == first);
}

TEST_CASE("documents that cannot be made are refused") {
  CHECK_THROWS_WITH(shop().maker.make("long_answer", 0, plan_of(128)), contains("family long_answer"));
  const tool::document_maker short_text("a few words\n", shop().tokenizer, book());
  CHECK_THROWS_WITH(short_text.make("single", 0, plan_of(4096)), contains("longer --text"));
}

TEST_CASE("a tasks file with something missing is refused with its path") {
  const engine_tests::temporary_folder folder;
  folder.write("tasks.json", R"({"words": ["a"], "adjectives": ["b"], "nouns": ["c"], "families": {"single": {}}})");
  CHECK_THROWS_WITH(task_book::load(folder / "tasks.json"), contains("tasks.json"));
  folder.write("tasks.json", R"({"words": ["a"], "adjectives": ["b"], "nouns": ["c"], "value_words": 2, "answer": "d",)"
                             R"("needle": "e", "ask_one": "f", "families": {"single": {"needles": 1}}})");
  CHECK_THROWS_WITH(task_book::load(folder / "tasks.json"), contains("lengthen the list"));
  folder.write("tasks.json", "no json");
  CHECK_THROWS_AS(task_book::load(folder / "tasks.json"), tessera::error);
  CHECK_THROWS_AS(task_book::load(folder / "absent.json"), tessera::error);
}
