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

// Tokens of a conversation outside its document.
std::int64_t tokens_around(const task& task, const task_book& book, const engine::tokenizer& tokenizer) {
  std::int64_t tokens = 1;  // bos
  for (const asked& turn : task.turns) {
    tokens +=
        tokens_of("\n" + book.question_line(turn.question) + book.answer_cue() + " " + turn.answer + "\n", tokenizer);
  }
  return tokens;
}

// Tokens of a document's own text, beside what is hidden in it. Errors: hardly any.
std::int64_t tokens_of_text(const task& task, std::string_view family, const document_plan& plan, const task_book& book,
                            const engine::tokenizer& tokenizer) {
  std::int64_t hidden = 0;
  for (const std::string& sentence : task.sentences) hidden += tokens_of(sentence + "\n", tokenizer);
  const std::int64_t document = std::min(plan.context, plan.room - tokens_around(task, book, tokenizer));
  constexpr std::int64_t least_text = 64;
  tessera::require(document - hidden >= least_text, "tokens of a document", document,
                   "at least " + std::to_string(least_text + hidden) + " for family " + std::string(family),
                   "raise --context, pass a model of a longer context, or choose other --families");
  return document - hidden;
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
  for (const std::string& family : request.families) require_one_of("family", family, request.book.families());
  return request;
}

void document_request::fit(std::int64_t room, const engine::tokenizer& tokenizer) {
  tessera::require(plan.context <= room, "--context", plan.context,
                   "at most the model's context, which is " + std::to_string(room), "lower it");
  plan.room = room;
  for (const std::string& family : families) {
    random_source random(plan.seed, family, 0);
    (void)tokens_of_text(book.make(family, random), family, plan, book, tokenizer);
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
std::vector<std::string> document_maker::hide(random_source& random, span lines, const task& task, double stratum_begin,
                                              double stratum_size) const {
  const std::int64_t begin = begins_[lines.first], length = begins_[lines.last] - begin;
  std::vector<double> depths;
  for (std::size_t i = 0; i < task.sentences.size(); ++i) {
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
      all.push_back(task.sentences[hidden++]);
    }
    if (line < lines.last) all.emplace_back(lines_[line]);
  }
  return all;
}

conversation document_maker::make(std::string_view family, std::size_t index, const document_plan& plan) const {
  random_source random(plan.seed, family, index);
  const task task = book_.make(family, random);
  const std::int64_t tokens = tokens_of_text(task, family, plan, book_, tokenizer_);

  // A lone needle comes by every depth: question i of n lies in the document's i-th part.
  const bool lone = task.sentences.size() == 1;
  const auto lines = hide(random, slice(random, tokens), task, lone ? double(index) / double(plan.count) : 0,
                          lone ? 1 / double(plan.count) : 1);
  const std::string question = book_.question_line(task.turns[0].question);
  std::string prompt;
  switch (task.place) {
    case question_place::last:
      prompt = with_breaks(lines, 0, lines.size()) + question;
      break;
    case question_place::first:
      prompt = question + with_breaks(lines, 0, lines.size());
      break;
    case question_place::middle:
      prompt = with_breaks(lines, 0, lines.size() / 2) + question + with_breaks(lines, lines.size() / 2, lines.size());
      break;
  }
  conversation result{std::string(family), {{prompt + book_.answer_cue(), task.turns[0].answer}}};
  for (std::size_t i = 1; i < task.turns.size(); ++i) {
    result.turns.push_back(
        {"\n" + book_.question_line(task.turns[i].question) + book_.answer_cue(), task.turns[i].answer});
  }
  return result;
}

}  // namespace tool
