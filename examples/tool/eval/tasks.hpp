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

/// A turn of a dialogue: what its text says, and what it asks.
struct dialogue_turn {
  std::vector<std::string> sentences;    ///< in the turn's first passage, in order
  std::vector<std::string> distractors;  ///< each in a further passage of its own; nobody asks for them
  asked ask;
};

/// A conversation with new text in every turn.
struct dialogue {
  std::vector<dialogue_turn> turns;
  question_place place = question_place::last;  ///< where each turn's question stands in the turn's text
};

inline constexpr std::size_t longest_dialogue = 9;  ///< turns

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

  /// Families of dialogues: each kind of the file with the question before, within or behind a turn's text.
  const std::vector<std::string>& dialogues() const { return dialogues_; }
  bool is_dialogue(std::string_view family) const;

  /// The families of a suite, in the file's order. Errors: an unknown suite, or one that no family of the file fits.
  std::vector<std::string> families_of(std::string_view suite_name) const;

  /// Whether a document of the family can be asked about more than once: its question leaves something to ask for.
  bool takes_several(std::string_view family) const;

  /// A task of one family with the settings of the file. Names and values in a task are all different, so an answer
  /// is unique. `questions` above 1: as many turns of one question each, none of which builds on another; a document then has
  /// as many needles at least. Errors: an unknown family; several questions where it takes one.
  task make(std::string_view family, random_source& random, std::size_t questions = 1) const;

  /// A dialogue of one family of `dialogues`, after LoopServe's benchmark (arXiv:2507.13681, Algorithms 1 to 3). Names and values
  /// are all different. Errors: an unknown family, no turn or more than `longest_dialogue`.
  dialogue make_dialogue(std::string_view family, std::size_t turns, random_source& random) const;

  /// "Question: {question}\n" and "Answer:".
  std::string question_line(std::string_view question) const;
  const std::string& answer_cue() const { return answer_cue_; }

 private:
  struct spec;

  task one_of(random_source& random, std::string_view family, std::size_t questions) const;
  task values(random_source& random) const;
  task several(random_source& random, std::string_view family, std::size_t questions) const;
  task chains(random_source& random) const;
  task signals(random_source& random) const;
  task turns(random_source& random) const;

  void add_dialogues();
  void fill_passages(random_source& random, dialogue& made) const;
  void fill_fragments(random_source& random, dialogue& made) const;
  void fill_examples(random_source& random, dialogue& made) const;

  std::shared_ptr<const spec> spec_;
  std::vector<std::string> families_, dialogues_;
  std::vector<std::size_t> turns_of_family_;  // in the order of families_
  std::string answer_cue_;
};

}  // namespace tool
