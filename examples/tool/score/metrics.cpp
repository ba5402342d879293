#include "metrics.hpp"

#include <algorithm>
#include <cctype>
#include <map>

#include "tool/methods/values.hpp"

namespace tool {
namespace {

// Of ASCII alone, whatever the locale.
bool is_space(char letter) { return letter == ' ' || (letter >= '\t' && letter <= '\r'); }
bool is_digit(char letter) { return letter >= '0' && letter <= '9'; }
char small(char letter) { return letter >= 'A' && letter <= 'Z' ? char(letter - 'A' + 'a') : letter; }
bool is_punctuation(char letter) {
  return letter > ' ' && letter < 127 && !is_digit(letter) && !(small(letter) >= 'a' && small(letter) <= 'z');
}
/// A letter or digit; every byte of a character beyond ASCII counts as a letter.
bool is_of_word(char letter) { return !is_space(letter) && !is_punctuation(letter) && letter != '\0' && letter != 127; }

std::string in_small_letters(std::string_view text) {
  std::string all(text);
  std::ranges::transform(all, all.begin(), small);
  return all;
}

std::vector<std::string> words_in(std::string_view text) {
  std::vector<std::string> words;
  for (std::size_t begin = 0; begin < text.size();) {
    std::size_t end = begin;
    while (end < text.size() && !is_space(text[end])) ++end;
    if (end > begin) words.emplace_back(text.substr(begin, end - begin));
    begin = end + 1;
  }
  return words;
}

/// Whether a word or a number goes on in `rest`.
bool goes_on(std::string_view rest) {
  if (rest.empty()) return false;
  if (is_of_word(rest[0])) return true;
  return (rest[0] == '.' || rest[0] == ',') && rest.size() > 1 && is_digit(rest[1]);
}

double f_measure(std::size_t common, std::size_t generated, std::size_t wanted) {
  return common == 0 ? 0 : 2.0 * double(common) / double(generated + wanted);  // 2 p r / (p + r)
}

double word_f1(const std::vector<std::string>& generated, const std::vector<std::string>& wanted) {
  std::map<std::string, std::size_t> left;
  for (const std::string& word : wanted) ++left[word];
  std::size_t common = 0;
  for (const std::string& word : generated) {
    const auto found = left.find(word);
    if (found == left.end() || found->second == 0) continue;
    --found->second;
    ++common;
  }
  return f_measure(common, generated.size(), wanted.size());
}

std::size_t longest_common_subsequence(const std::vector<std::string>& a, const std::vector<std::string>& b) {
  std::vector<std::size_t> row(b.size() + 1, 0);
  for (const std::string& word : a) {
    std::size_t diagonal = 0;  // of the row before, one column to the left
    for (std::size_t j = 1; j <= b.size(); ++j) {
      const std::size_t above = row[j];
      row[j] = word == b[j - 1] ? diagonal + 1 : std::max(above, row[j - 1]);
      diagonal = above;
    }
  }
  return row.back();
}

double score_of(metric kind, std::string_view generated, std::string_view answer) {
  if (answer.empty()) return kind == metric::exact && generated.empty();  // nothing is left of it: "The", normalised
  switch (kind) {
    case metric::prefix:
      return generated.starts_with(answer);
    case metric::strict:
      return generated.starts_with(answer) && !goes_on(generated.substr(answer.size()));
    case metric::exact:
      return generated == answer;
    case metric::contains_all:
    case metric::contains_any:
      return in_small_letters(generated).find(in_small_letters(answer)) != std::string::npos;
    case metric::f1:
      return word_f1(words_in(generated), words_in(answer));
    case metric::rouge_l: {
      const std::vector<std::string> a = words_in(generated), b = words_in(answer);
      return f_measure(longest_common_subsequence(a, b), a.size(), b.size());
    }
  }
  return 0;
}

}  // namespace

const std::vector<std::string>& metric_names() {
  static const std::vector<std::string> names{"prefix",       "strict", "exact",  "contains_all",
                                              "contains_any", "f1",     "rouge_l"};
  return names;
}

scoring scoring::parsed(std::string_view name, bool normalised) {
  require_one_of("--metric", name, metric_names());
  const auto kind = metric(std::ranges::find(metric_names(), name) - metric_names().begin());
  return {kind, normalised || kind == metric::f1};
}

std::string scoring::text() const {
  return metric_names()[std::size_t(kind)] + (normalised && kind != metric::f1 ? ", normalised" : "");
}

bool scoring::is_yes_or_no() const {
  return kind != metric::f1 && kind != metric::rouge_l && kind != metric::contains_all;
}

double scoring::operator()(std::string_view generated, const std::vector<std::string>& answers) const {
  const auto prepared = [&](std::string_view text) {
    return normalised ? normalised_text(text) : std::string(trimmed(text));
  };
  const std::string text = prepared(generated);
  double best = 0, sum = 0;
  for (const std::string& answer : answers) {
    const double score = score_of(kind, text, prepared(answer));
    best = std::max(best, score);
    sum += score;
  }
  return kind == metric::contains_all ? sum / double(answers.size()) : best;
}

std::string normalised_text(std::string_view text) {
  std::string kept;
  for (const char letter : text) {
    if (!is_punctuation(letter)) kept += small(letter);
  }
  std::string all;
  for (const std::string& word : words_in(kept)) {
    if (word == "a" || word == "an" || word == "the") continue;
    all += (all.empty() ? "" : " ") + word;
  }
  return all;
}

}  // namespace tool
