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

/// What documents to make.
struct document_plan {
  std::int64_t context = 4096;  ///< tokens of a document, hidden sentences included
  std::int64_t room = 4096;     ///< tokens of the longest conversation that the model takes
  std::size_t count = 40;       ///< conversations of each family
  std::uint64_t seed = 0;
};

/// A text cut into lines, with the tokens of each.
class document_maker {
 public:
  /// Keeps references: text, tokenizer and book must outlive it.
  document_maker(std::string_view text, const engine::tokenizer& tokenizer, const task_book& book);

  /// Conversation `index` of a family. It depends on the plan, the family and the index and on nothing else.
  /// Errors: a context that is too short for the family's sentences, or longer than the text.
  conversation make(std::string_view family, std::size_t index, const document_plan& plan) const;

 private:
  struct span {
    std::size_t first, last;  // lines
  };

  std::int64_t tokens_of(const std::string& text) const;
  std::int64_t tokens_around(const task& task) const;
  span slice(random_source& random, std::int64_t tokens) const;
  std::vector<std::string> hide(random_source& random, span lines, const task& task, double stratum_begin,
                                double stratum_size) const;

  const engine::tokenizer& tokenizer_;
  const task_book& book_;
  std::vector<std::string_view> lines_;
  std::vector<std::int64_t> begins_;  // tokens before each line; one more entry than lines
};

}  // namespace tool
