#include "question_groups.hpp"

#include <algorithm>

namespace tool {
namespace {

using engine::token_t;

/// A first prompt, and where its segments end.
struct first_prompt {
  std::span<const token_t> tokens;
  std::vector<std::uint8_t> ends;
};

std::size_t common(const first_prompt& a, const first_prompt& b, std::size_t most) {
  std::size_t same = 0;
  while (same < most && a.tokens[same] == b.tokens[same] && a.ends[same] == b.ends[same]) ++same;
  return same;
}

}  // namespace

index_t longest_answer(const std::vector<planned_turn>& turns) {
  index_t longest = 1;
  for (const planned_turn& turn : turns) longest = std::max<index_t>(longest, turn.max_new);
  return longest;
}

index_t tokens_of(const std::vector<planned_turn>& turns) {
  std::int64_t tokens = 0;
  for (const planned_turn& turn : turns) tokens += std::int64_t(turn.prompt.size()) + turn.max_new;
  return index_t(tokens);
}

std::vector<question_group> group_questions(const std::vector<groupable>& all, const engine::tokenizer& tokenizer,
                                            std::int32_t chunk) {
  const auto first_of = [&](const groupable& one) {
    const std::vector<token_t>& prompt = one.turns.front().prompt;
    return first_prompt{prompt, tokenizer.boundaries(prompt)};
  };
  std::vector<question_group> groups;
  for (std::size_t begin = 0; begin < all.size(); begin += groups.back().count) {
    const std::size_t document = all[begin].document;
    const first_prompt head = first_of(all[begin]);
    question_group group = question_group::of(all[begin].turns);
    std::size_t shared = head.tokens.size() - 1, longest = head.tokens.size();
    for (std::size_t i = begin + 1; i < all.size() && all[i].document == document; ++i) {
      const first_prompt next = first_of(all[i]);
      std::size_t same = common(head, next, std::min(shared, next.tokens.size() - 1));
      if (document == 0) same -= same % std::size_t(chunk);
      const std::size_t prompt = std::max(longest, next.tokens.size());
      if (document == 0 && 3 * same < prompt) break;
      shared = same, longest = prompt;
      group.count += 1;
      group.tokens = std::max(group.tokens, tokens_of(all[i].turns));
      group.same_limit &= longest_answer(all[i].turns) == longest_answer(all[begin].turns);
    }
    if (group.count > 1 && 3 * shared >= longest) group.shared = shared;
    groups.push_back(group);
  }
  return groups;
}

}  // namespace tool
