// Hides a task's sentences in a slice of a text and puts the questions around it.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "engine/tokenizer.hpp"
#include "questions.hpp"
#include "tasks.hpp"

namespace tool {

/// What the command line says of documents, as text.
struct document_options {
  std::string families, suite = "all", text, tasks, context = "4096", seed = "1", turns, questions_per_document = "1";
};

/// What documents to make.
struct document_plan {
  std::int64_t context = 4096;  ///< tokens of a document, hidden sentences included
  std::int64_t room = 4096;     ///< tokens of the longest conversation that the model takes
  std::size_t count = 40;       ///< conversations of each family
  std::uint64_t seed = 0;
  std::size_t turns = 3;      ///< of a dialogue
  std::size_t questions = 1;  ///< about a document, each asked by itself
};

/// Options of documents that are numbers, families and files that exist.
struct document_request {
  document_plan plan;  ///< `count` and `room` are the caller's to set
  task_book book;
  std::vector<std::string> families;
  std::string text;  ///< path

  /// Reads the tasks file and nothing else. Of a suite those families stay whose documents take that many questions. Errors: no number,
  /// an unknown suite or family, one that takes one question where several are wanted, turns where no family is a dialogue, a tasks file
  /// that is none.
  static document_request checked(const document_options& given);

  /// Errors: documents longer than `room`, the model's context; a family whose sentences alone are longer than a document.
  void fit(std::int64_t room, const engine::tokenizer& tokenizer);
};

/// A text cut into lines, with the tokens of each.
class document_maker {
 public:
  /// Keeps references: text, tokenizer and book must outlive it.
  document_maker(std::string_view text, const engine::tokenizer& tokenizer, const task_book& book);

  /// Conversation `index` of a family. A dialogue's turns share the context evenly. It depends on the plan, the family and the index and on nothing else.
  /// Errors: a context that is too short for the family's sentences, or longer than the text.
  conversation make(std::string_view family, std::size_t index, const document_plan& plan) const;

  /// The conversations about document `index` of a family: that one, or one for each of the plan's questions.
  std::vector<conversation> about(std::string_view family, std::size_t index, const document_plan& plan) const;

 private:
  struct span {
    std::size_t first, last;  // lines
  };

  std::vector<std::string> lines_of(const task& task, std::string_view family, std::size_t index, random_source& random,
                                    const document_plan& plan) const;
  span slice(random_source& random, std::int64_t tokens) const;
  std::vector<std::string> hide(random_source& random, span lines, const std::vector<std::string>& sentences,
                                double stratum_begin = 0, double stratum_size = 1) const;
  conversation dialogue_of(std::string_view family, random_source& random, const document_plan& plan) const;
  std::string prompt_of(const std::vector<std::string>& lines, const std::string& question, question_place place) const;

  const engine::tokenizer& tokenizer_;
  const task_book& book_;
  std::vector<std::string_view> lines_;
  std::vector<std::int64_t> begins_;  // tokens before each line; one more entry than lines
};

}  // namespace tool
