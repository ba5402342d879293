#include "tasks.hpp"

#include <algorithm>
#include <limits>

#include "engine/files/input_file.hpp"
#include "task_spec.hpp"
#include "tool/methods/values.hpp"

namespace tool {

const std::vector<suite>& suites() {
  constexpr std::size_t any = std::numeric_limits<std::size_t>::max();
  static const std::vector<suite> all{
      {"all", "every family of one document", 1, any},
      {"singleturn", "one question a document", 1, 1},
      {"multiturn", "at least three questions over one document, the answers stay in the conversation", 3, any},
      {"conversations",
       "new text in every turn, also text that nobody asks about, the question before, within or behind it; --turns", 0,
       0}};
  return all;
}

task_book task_book::load(const std::filesystem::path& path) {
  const std::string text = engine::read_text_file(path);
  try {
    const auto ordered = nlohmann::ordered_json::parse(text);
    auto read = std::make_shared<spec>();
    read->all = nlohmann::json::parse(text);
    read->words = read->all.at("words").get<strings>();
    for (const auto& adjective : read->all.at("adjectives")) {
      for (const auto& noun : read->all.at("nouns")) {
        read->names.push_back(adjective.get<std::string>() + " " + noun.get<std::string>());
      }
    }
    task_book book;
    book.spec_ = std::move(read);
    book.answer_cue_ = book.spec_->text("answer");
    for (const auto& [family, about] : ordered.at("families").items()) {
      book.families_.push_back(family);
      random_source trial(0);
      book.turns_of_family_.push_back(book.make(family, trial).turns.size());  // reads every entry it needs
    }
    if (book.spec_->all.contains("dialogues")) book.add_dialogues();
    (void)book.question_line("");  // what documents need beside their families
    return book;
  } catch (const tessera::error& problem) {
    throw tessera::error("tasks file " + engine::printable(path.native()) + ": " + problem.what());
  } catch (const nlohmann::json::exception& problem) {
    tessera::fail("tasks file " + engine::printable(path.native()), problem.what(),
                  "word lists, templates and families as in tasks.json", "start from examples/data/tasks.json");
  }
}

std::string task_book::question_line(std::string_view question) const {
  return filled(spec_->text("question"), {{"question", question}});
}

std::vector<std::string> task_book::families_of(std::string_view suite_name) const {
  strings names, fitting;
  for (const suite& known : suites()) names.push_back(known.name);
  require_one_of("suite", suite_name, names);
  for (const suite& known : suites()) {
    if (known.name != suite_name) continue;
    if (known.most_turns == 0) fitting = dialogues_;
    for (std::size_t i = 0; i < families_.size(); ++i) {
      const std::size_t turns = turns_of_family_[i];
      if (turns >= known.least_turns && turns <= known.most_turns) fitting.push_back(families_[i]);
    }
  }
  tessera::require(!fitting.empty(), "families of suite " + std::string(suite_name), 0,
                   "at least one in the tasks file",
                   suite_name == "conversations" ? "give the file \"dialogues\", as examples/data/tasks.json has them"
                                                 : "raise the turns of a conversation in it, or choose another suite");
  return fitting;
}

bool task_book::takes_several(std::string_view family) const {
  return family != "multi_value" && family != "variable_tracking" && family != "frequent_words" && !is_dialogue(family);
}

task task_book::make(std::string_view family, random_source& random, std::size_t questions) const {
  require_one_of("family", family, families_);
  tessera::require(questions == 1 || takes_several(family), "questions about a document of " + std::string(family),
                   questions, "1: its question asks for all that is hidden there", "choose another family");
  if (family == "multi_value") return values(random);
  if (family == "multi_query" || family == "long_answer") return several(random, family, questions);
  if (family == "variable_tracking") return chains(random);
  if (family == "frequent_words") return signals(random);
  if (family == "conversation" && questions == 1) return turns(random);
  return one_of(random, family, questions);
}

// Needles, one of which is asked for; or several, in a question each.
task task_book::one_of(random_source& random, std::string_view family, std::size_t questions) const {
  const auto codes = spec_->draw_codes(random, std::max(questions, spec_->number(family, "needles")));
  const question_place place = family.ends_with("_first")    ? question_place::first
                               : family.ends_with("_middle") ? question_place::middle
                                                             : question_place::last;
  task result{spec_->needles(codes), {}, place};
  if (questions == 1) {
    result.turns = {spec_->ask_one(codes[random.below(codes.size())])};
  } else {
    for (const code& wanted : random.sample(codes, questions)) result.turns.push_back(spec_->ask_one(wanted));
  }
  return result;
}

// One name with several values among names with one.
task task_book::values(random_source& random) const {
  const std::size_t count = spec_->number("multi_value", "values"), others = spec_->number("multi_value", "needles");
  const auto codes = spec_->draw_codes(random, count + others);
  const std::string& name = codes[0].name;
  strings listed;
  std::vector<strings> groups(1);
  for (std::size_t i = 0; i < codes.size(); ++i) {
    if (i < count) {
      listed.push_back(codes[i].value);
      groups[0].push_back(spec_->needle({name, codes[i].value}));
    } else {
      groups.push_back({spec_->needle(codes[i])});
    }
  }
  return {interleaved(random, groups),
          {{filled(spec_->text("ask_values"), {{"name", name}}), joined_by(listed, spec_->text("separator"))}}};
}

// Several names in one question, answered in the order asked: values alone, or a list of names and values.
task task_book::several(random_source& random, std::string_view family, std::size_t questions) const {
  const auto codes = spec_->draw_codes(random, spec_->number(family, "needles"));
  task result{spec_->needles(codes), {}};
  for (std::size_t i = 0; i < questions; ++i) {
    const auto wanted = random.sample(codes, spec_->number(family, "asked"));
    result.turns.push_back(family == "long_answer" ? spec_->ask_list(wanted) : spec_->ask_several(wanted));
  }
  return result;
}

// Chains of variables; which ones equal the first chain's value?
task task_book::chains(random_source& random) const {
  const std::size_t lengths[] = {spec_->number("variable_tracking", "chain"),
                                 spec_->number("variable_tracking", "distractors")};
  const strings words = random.sample(spec_->words, lengths[0] + lengths[1]);
  const strings values = draw_numbers(random, 2);
  std::vector<strings> groups(2);
  for (std::size_t chain = 0, word = 0; chain < 2; ++chain) {
    for (std::size_t i = 0; i < lengths[chain]; ++i, ++word) {
      groups[chain].push_back(
          i == 0 ? filled(spec_->text("assign_value"), {{"word", words[word]}, {"value", values[chain]}})
                 : filled(spec_->text("assign_word"), {{"word", words[word]}, {"source", words[word - 1]}}));
    }
  }
  const strings chain(words.begin(), words.begin() + std::ptrdiff_t(lengths[0]));
  return {interleaved(random, groups),
          {{filled(spec_->text("ask_variables"), {{"value", values[0]}}), joined_by(chain, spec_->text("separator"))}}};
}

// Words that occur often among words that do not; the most frequent ones, most frequent first.
task task_book::signals(random_source& random) const {
  const auto frequencies = [&] {
    std::vector<std::size_t> all;
    for (const auto& one : spec_->all.at("families").at("frequent_words").at("frequencies")) {
      all.push_back(counted(one, "frequencies"));
    }
    return all;
  }();
  const std::size_t others = spec_->number("frequent_words", "others");
  const std::size_t most = spec_->number("frequent_words", "others_max");
  const strings words = random.sample(spec_->words, frequencies.size() + others);
  strings sentences;
  for (std::size_t i = 0; i < words.size(); ++i) {
    const std::size_t times = i < frequencies.size() ? frequencies[i] : 1 + random.below(most);
    sentences.insert(sentences.end(), times, filled(spec_->text("signal"), {{"word", words[i]}}));
  }
  random.shuffle(sentences);
  const strings best(words.begin(), words.begin() + std::ptrdiff_t(frequencies.size()));
  const auto count = spec_->all.at("counts").at(std::to_string(best.size())).get<std::string>();
  return {std::move(sentences),
          {{filled(spec_->text("ask_signals"), {{"count", count}}), joined_by(best, spec_->text("separator"))}}};
}

// Several turns, each asking for another needle.
task task_book::turns(random_source& random) const {
  const auto codes = spec_->draw_codes(random, spec_->number("conversation", "needles"));
  task result{spec_->needles(codes), {}};
  for (const code& wanted : random.sample(codes, spec_->number("conversation", "turns"))) {
    result.turns.push_back(spec_->ask_one(wanted));
  }
  return result;
}

}  // namespace tool
