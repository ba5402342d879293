// The long-range retrieval tasks of examples/data/tasks.json: sentences to hide in a text, questions and answers.
#pragma once

#include <filesystem>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "random.hpp"

namespace tool {

enum class question_place { last, first, middle };

struct asked {
  std::string question;  ///< without the word "Question:"
  std::string answer;
};

/// One document's worth of work. The place is that of the first question; later ones follow the document.
struct task {
  std::vector<std::string> sentences;  ///< in document order
  std::vector<asked> turns;
  question_place place = question_place::last;
};

/// A group of families that `tessera eval --suite` names.
struct suite {
  std::string name, about;
  std::size_t least_turns, most_turns;  ///< of the families that belong to it
};

/// Every suite; the first one is every family.
const std::vector<suite>& suites();

/// Word lists and sentence templates, read from a file that the training script reads too.
class task_book {
 public:
  /// Errors: not readable, no JSON, or an entry that is missing or of the wrong type.
  static task_book load(const std::filesystem::path& path);

  /// The families in the file's order.
  const std::vector<std::string>& families() const { return families_; }

  /// The families of a suite, in the file's order. Errors: an unknown suite, or one that no family of the file fits.
  std::vector<std::string> families_of(std::string_view suite_name) const;

  /// A task of one family with the settings of the file. Names and values in a task are all different, so an answer
  /// is unique. Errors: an unknown family.
  task make(std::string_view family, random_source& random) const;

  /// "Question: {question}\n" and "Answer:".
  std::string question_line(std::string_view question) const;
  const std::string& answer_cue() const { return answer_cue_; }

 private:
  struct spec;

  task one_of(random_source& random, std::string_view family) const;
  task values(random_source& random) const;
  task several(random_source& random, std::string_view family) const;
  task chains(random_source& random) const;
  task signals(random_source& random) const;
  task turns(random_source& random) const;

  std::shared_ptr<const spec> spec_;
  std::vector<std::string> families_;
  std::vector<std::size_t> turns_of_family_;  // in the order of families_
  std::string answer_cue_;
};

}  // namespace tool
