// Which questions follow one another about one document, and how much of their prompts is the same.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "engine/tokenizer.hpp"
#include "tool/methods/method_cache.hpp"

namespace tool {

/// A conversation in tokens, with how much may be generated for each answer.
struct planned_turn {
  std::vector<engine::token_t> prompt;
  std::string answer;
  std::int32_t max_new = 0;
  std::vector<std::string> references{};  ///< what the generated text is compared with; none: `answer`
};

/// Most tokens that any turn may decode, at least 1: the `max_new` of a conversation, whose plan is made once.
index_t longest_answer(const std::vector<planned_turn>& turns);

/// Tokens of a conversation with its longest answers.
index_t tokens_of(const std::vector<planned_turn>& turns);

/// Conversations that follow one another, each asked by itself.
struct question_group {
  std::size_t count = 1;
  std::size_t shared = 0;  ///< tokens that their first prompts begin with; a chunk ends there. 0: too few
  index_t tokens = 0;      ///< of the longest of them, with its answers
  bool same_limit = true;  ///< `longest_answer` of each is the same

  static question_group of(const std::vector<planned_turn>& turns) { return {1, 0, tokens_of(turns), true}; }
};

/// A question as it is grouped.
struct groupable {
  const std::vector<planned_turn>& turns;
  std::size_t document;  ///< as conversation::document
};

/// Groups all conversations in their order. Those of one document make a group, and share what their first prompts have in common,
/// tokens and ends of segments. Of others, neighbours whose first prompts begin with the same whole chunks make one: then every chunk is
/// what it would be alone. What is shared is at least a third of every prompt, and never all of one.
std::vector<question_group> group_questions(const std::vector<groupable>& all, const engine::tokenizer& tokenizer,
                                            std::int32_t chunk);

}  // namespace tool
