// The sizes of a CUDA cache.
#pragma once

#include <algorithm>
#include <string>

#include "../../core/error.hpp"
#include "../../core/types.hpp"

TESSERA_NAMESPACE_BEGIN
namespace cuda {

/// Sizes that are fixed when a cache is made. All of its memory is allocated then, none in a step.
struct cache_options {
  index_t sequences = 1;     ///< upper bound of the sequences that are open at a time
  index_t tokens = 0;        ///< upper bound of the tokens that one kv_head of a sequence stores
  offset_t rows = 0;         ///< rows of the pool, one per token, kv_head and layer; 0: enough for everything. Packed
                             ///< rows in pages lie in the pool too: three of them, say, in the memory of one
  index_t step_tokens = 1;   ///< upper bound of the tokens of a decode step, 1 to 8
  index_t draft_tokens = 0;  ///< upper bound of the tokens of a draft, 0 to 64; 0: no drafts
  index_t index_tokens =
      0;  ///< upper bound of the tokens of a kv_head that are indexed at a time, in pages or segments; 0: `tokens`,
          ///< or, where a first stage drops tokens, twice what its plans keep and 1,024 more
  index_t first_prompt =
      0;  ///< no conversation begins with a shorter prompt: bounds the index of paged retrieval, whose
          ///< pages are larger for longer prompts; 0: any
  index_t smallest_budget = 0;  ///< of a sequence with a budget of its own: bounds the pages of paged retrieval, which
                                ///< are larger for smaller budgets; 0: the recipe's

  void check() const {
    require(smallest_budget >= 0, "smallest_budget", smallest_budget, "0 or more", "pass the smallest budget in use");
    require(sequences >= 1, "sequences", sequences, "at least 1", "pass the largest batch");
    require(tokens >= 1 && tokens <= max_tokens_of_a_head, "tokens", tokens,
            "1 to " + std::to_string(max_tokens_of_a_head), "pass the longest context, or what a head holds at most");
    require(rows >= 0, "rows", rows, "at least 0", "leave it at its default");
    require(step_tokens >= 1 && step_tokens <= 8, "step_tokens", step_tokens, "1 to 8", "prefill longer runs");
    require(draft_tokens >= 0 && draft_tokens <= 64, "draft_tokens", draft_tokens, "0 to 64",
            "pass the tokens of the largest draft");
    require(index_tokens >= 0 && index_tokens <= tokens, "index_tokens", index_tokens, "0 to tokens",
            "pass how many tokens a head holds once its prompt has ended, the answer included");
    require(first_prompt >= 0 && first_prompt <= tokens, "first_prompt", first_prompt, "0 to tokens",
            "pass the shortest first prompt");
  }

  static constexpr index_t max_tokens_of_a_head = 1 << 30;
};

/// Errors   a head would store more tokens than `capacity`: tessera::error.
inline void require_tokens_of_head(offset_t wanted, index_t capacity) {
  require(wanted <= capacity, "tokens of a kv_head", wanted,
          "at most cache_options::tokens, which is " + std::to_string(capacity), "raise tokens, or lower the budget");
}

}  // namespace cuda
TESSERA_NAMESPACE_END
