// How right a generated text is: a number from 0 to 1 for a text and the answers that were expected.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace tool {

enum class metric {
  prefix,        ///< it begins with an answer, white space at the ends aside: "123" begins with "12"
  strict,        ///< so, and neither a letter nor a digit of the same word or number follows
  exact,         ///< it is an answer, white space at the ends aside
  contains_all,  ///< how many of the answers it contains, in small letters: RULER's string_match_all
  contains_any,  ///< whether it contains one of them: RULER's string_match_part
  f1,            ///< of the words, after normalisation: LongBench's qa_f1_score
  rouge_l        ///< F measure of the longest common subsequence of words
};

/// A metric and whether texts are normalised first.
struct scoring {
  metric kind = metric::prefix;
  bool normalised = false;

  /// By the metric's name. Errors: an unknown one.
  static scoring parsed(std::string_view name, bool normalised);
  std::string text() const;  ///< "f1", "exact, normalised"
  /// Whether every score is 0 or 1.
  bool is_yes_or_no() const;

  /// The best score over the answers, of which there is at least one; of contains_all, their mean.
  double operator()(std::string_view generated, const std::vector<std::string>& answers) const;
};

/// The names of all metrics, in the order of the enumeration.
const std::vector<std::string>& metric_names();

/// Small letters, no punctuation of ASCII, none of the words a, an and the, one blank between words: as LongBench does it. What is
/// not ASCII stays as it is.
std::string normalised_text(std::string_view text);

}  // namespace tool
