#include "document.hpp"

#include <algorithm>
#include <limits>
#include <tessera/core/error.hpp>

#include "tool/methods/values.hpp"

namespace tool {
namespace {

std::int64_t tokens_of(const std::string& text, const engine::tokenizer& tokenizer) {
  return std::int64_t(tokenizer.encode(text).size());
}

// Tokens of the text itself, beside the sentences that are hidden in it and the questions about it. Errors: fewer than `least`.
std::int64_t tokens_of_text(const std::vector<std::string>& sentences, const std::vector<asked>& questions,
                            std::string_view family, std::int64_t least, const document_plan& plan,
                            const task_book& book, const engine::tokenizer& tokenizer) {
  std::int64_t hidden = 0, around = 1;  // bos
  for (const std::string& sentence : sentences) hidden += tokens_of(sentence + "\n", tokenizer);
  for (const asked& one : questions) {
    around +=
        tokens_of("\n" + book.question_line(one.question) + book.answer_cue() + " " + one.answer + "\n", tokenizer);
  }
  const std::int64_t document = std::min(plan.context, plan.room - around);
  tessera::require(document - hidden >= least, "tokens of a document", document,
                   "at least " + std::to_string(least + hidden) + " for family " + std::string(family),
                   "raise --context, pass a model of a longer context, or choose other --families");
  return document - hidden;
}

constexpr std::int64_t least_text = 64;       // of a document, or of a dialogue's turn
constexpr std::int64_t most_questions = 100;  // about a document, for each of which it has a needle

std::int64_t tokens_of_text(const task& task, std::string_view family, const document_plan& plan, const task_book& book,
                            const engine::tokenizer& tokenizer) {
  if (plan.questions == 1) return tokens_of_text(task.sentences, task.turns, family, least_text, plan, book, tokenizer);
  std::int64_t least = std::numeric_limits<std::int64_t>::max();  // beside the longest of the questions
  for (const asked& one : task.turns)
    least = std::min(least, tokens_of_text(task.sentences, {one}, family, least_text, plan, book, tokenizer));
  return least;
}
std::int64_t tokens_of_text(const dialogue& talk, std::string_view family, const document_plan& plan,
                            const task_book& book, const engine::tokenizer& tokenizer) {
  std::vector<std::string> sentences;
  std::vector<asked> questions;
  for (const dialogue_turn& turn : talk.turns) {
    sentences.insert(sentences.end(), turn.sentences.begin(), turn.sentences.end());
    sentences.insert(sentences.end(), turn.distractors.begin(), turn.distractors.end());
    questions.push_back(turn.ask);
  }
  return tokens_of_text(sentences, questions, family, least_text * std::int64_t(talk.turns.size()), plan, book,
                        tokenizer);
}

std::string with_breaks(const std::vector<std::string>& lines, std::size_t first, std::size_t last) {
  std::string all;
  for (std::size_t i = first; i < last; ++i) all += lines[i] + "\n";
  return all;
}

}  // namespace

document_request document_request::checked(const document_options& given) {
  document_request request{{}, task_book::load(given.tasks), {}, given.text};
  request.plan.context = parse_count("--context", given.context, 1);
  request.plan.seed = std::uint64_t(parse_count("--seed", given.seed, 0, std::numeric_limits<std::int64_t>::max()));
  request.families =
      given.families.empty() ? request.book.families_of(given.suite) : parse_list("--families", given.families);
  std::vector<std::string> known = request.book.families();
  known.insert(known.end(), request.book.dialogues().begin(), request.book.dialogues().end());
  for (const std::string& family : request.families) require_one_of("family", family, known);
  request.plan.questions =
      std::size_t(parse_count("--questions-per-document", given.questions_per_document, 1, most_questions));
  if (request.plan.questions > 1) {
    const auto takes_one = [&](const std::string& family) { return !request.book.takes_several(family); };
    if (given.families.empty()) std::erase_if(request.families, takes_one);
    const auto found = std::ranges::find_if(request.families, takes_one);
    tessera::require(!request.families.empty() && found == request.families.end(), "--questions-per-document",
                     given.questions_per_document,
                     "1 for " + (found == request.families.end() ? "suite " + given.suite : "family " + *found),
                     "choose --families that leave something to ask for, as single, multi_key and multi_query");
  }
  if (!given.turns.empty()) {
    const auto is_dialogue = [&](const std::string& family) { return request.book.is_dialogue(family); };
    tessera::require(std::ranges::any_of(request.families, is_dialogue), "--turns", given.turns,
                     "none: no family here is a dialogue", "leave it out, or choose --suite conversations");
    request.plan.turns = std::size_t(parse_count("--turns", given.turns, 1, std::int64_t(longest_dialogue)));
  }
  return request;
}

void document_request::fit(std::int64_t room, const engine::tokenizer& tokenizer) {
  tessera::require(plan.context <= room, "--context", plan.context,
                   "at most the model's context, which is " + std::to_string(room), "lower it");
  plan.room = room;
  for (const std::string& family : families) {
    random_source random(plan.seed, family, 0);
    book.is_dialogue(family)
        ? tokens_of_text(book.make_dialogue(family, plan.turns, random), family, plan, book, tokenizer)
        : tokens_of_text(book.make(family, random, plan.questions), family, plan, book, tokenizer);
  }
}

document_maker::document_maker(std::string_view text, const engine::tokenizer& tokenizer, const task_book& book)
    : tokenizer_(tokenizer), book_(book), begins_{0} {
  for (std::size_t begin = 0; begin < text.size();) {
    const std::size_t end = std::min(text.find('\n', begin), text.size());
    lines_.push_back(text.substr(begin, end - begin));
    begins_.push_back(begins_.back() + tokens_of(std::string(lines_.back()) + "\n", tokenizer));
    begin = end + 1;
  }
}

// Whole lines of about so many tokens.
document_maker::span document_maker::slice(random_source& random, std::int64_t tokens) const {
  tessera::require(tokens < begins_.back(), "context", std::to_string(tokens) + " tokens of text",
                   "fewer than the text has, which are " + std::to_string(begins_.back()),
                   "lower --context or pass a longer --text");
  const auto line_at = [&](std::int64_t token) {
    return std::size_t(std::upper_bound(begins_.begin(), begins_.end(), token) - begins_.begin()) - 1;
  };
  const std::size_t first = line_at(std::int64_t(random.below(std::size_t(begins_.back() - tokens))));
  return {first, std::max(first + 1, line_at(begins_[first] + tokens))};
}

// The lines of a slice with the sentences between them, at depths drawn from one stratum of the document.
std::vector<std::string> document_maker::hide(random_source& random, span lines,
                                              const std::vector<std::string>& sentences, double stratum_begin,
                                              double stratum_size) const {
  const std::int64_t begin = begins_[lines.first], length = begins_[lines.last] - begin;
  std::vector<double> depths;
  for (std::size_t i = 0; i < sentences.size(); ++i) {
    depths.push_back((stratum_begin + stratum_size * random.unit()) * double(length));
  }
  std::sort(depths.begin(), depths.end());
  std::vector<std::string> all;
  std::size_t hidden = 0;
  for (std::size_t line = lines.first; line <= lines.last; ++line) {
    // A sentence stands before the first line whose middle lies behind its depth: at the nearest line break.
    const double middle =
        line < lines.last ? double(begins_[line] + begins_[line + 1]) / 2 - double(begin) : double(length);
    while (hidden < depths.size() && (depths[hidden] < middle || line == lines.last)) {
      all.push_back(sentences[hidden++]);
    }
    if (line < lines.last) all.emplace_back(lines_[line]);
  }
  return all;
}

// A text of these lines with a question line before, within or behind it, and the answer's cue.
std::string document_maker::prompt_of(const std::vector<std::string>& lines, const std::string& question,
                                      question_place place) const {
  const std::size_t at = place == question_place::first    ? 0
                         : place == question_place::middle ? lines.size() / 2
                                                           : lines.size();
  return with_breaks(lines, 0, at) + book_.question_line(question) + with_breaks(lines, at, lines.size()) +
         book_.answer_cue();
}

// The lines of a document that holds a task's sentences.
std::vector<std::string> document_maker::lines_of(const task& task, std::string_view family, std::size_t index,
                                                  random_source& random, const document_plan& plan) const {
  const std::int64_t tokens = tokens_of_text(task, family, plan, book_, tokenizer_);
  // A lone needle comes by every depth: question i of n lies in the document's i-th part.
  const bool lone = task.sentences.size() == 1;
  return hide(random, slice(random, tokens), task.sentences, lone ? double(index) / double(plan.count) : 0,
              lone ? 1 / double(plan.count) : 1);
}

std::vector<conversation> document_maker::about(std::string_view family, std::size_t index,
                                                const document_plan& plan) const {
  if (plan.questions == 1) return {make(family, index, plan)};
  random_source random(plan.seed, family, index);
  const task task = book_.make(family, random, plan.questions);
  const auto lines = lines_of(task, family, index, random, plan);
  std::vector<conversation> all;
  for (const asked& one : task.turns)
    all.push_back({std::string(family), {{prompt_of(lines, one.question, task.place), one.answer}}});
  return all;
}

conversation document_maker::make(std::string_view family, std::size_t index, const document_plan& plan) const {
  random_source random(plan.seed, family, index);
  if (book_.is_dialogue(family)) return dialogue_of(family, random, plan);
  const task task = book_.make(family, random);
  const auto lines = lines_of(task, family, index, random, plan);
  conversation result{std::string(family),
                      {{prompt_of(lines, task.turns[0].question, task.place), task.turns[0].answer}}};
  for (std::size_t i = 1; i < task.turns.size(); ++i) {
    result.turns.push_back(
        {"\n" + book_.question_line(task.turns[i].question) + book_.answer_cue(), task.turns[i].answer});
  }
  return result;
}

// Every turn has passages of equal length, slices of the text each: one with its sentences, then one for each distractor.
conversation document_maker::dialogue_of(std::string_view family, random_source& random,
                                         const document_plan& plan) const {
  const dialogue talk = book_.make_dialogue(family, plan.turns, random);
  const std::int64_t turn_tokens =
      tokens_of_text(talk, family, plan, book_, tokenizer_) / std::int64_t(talk.turns.size());
  conversation result{std::string(family), {}};
  for (const dialogue_turn& turn : talk.turns) {
    const std::int64_t tokens = turn_tokens / std::int64_t(1 + turn.distractors.size());
    auto lines = hide(random, slice(random, tokens), turn.sentences);
    for (const std::string& distractor : turn.distractors) {
      for (std::string& line : hide(random, slice(random, tokens), {distractor})) lines.push_back(std::move(line));
    }
    const std::string between = result.turns.empty() ? "" : "\n";
    result.turns.push_back({between + prompt_of(lines, turn.ask.question, talk.place), turn.ask.answer});
  }
  return result;
}

}  // namespace tool
