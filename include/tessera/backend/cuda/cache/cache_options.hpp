// The sizes of a CUDA cache.
#pragma once

#include <algorithm>

#include "../../../core/model_shape.hpp"
#include "../../../core/stage_plan.hpp"

TESSERA_NAMESPACE_BEGIN
namespace cuda {

/// Sizes that are fixed when a cache is made: its memory is allocated then, and never in a recorded step.
struct cache_options {
  index_t sequences = 1;  ///< most that are open at a time
  index_t tokens = 0;     ///< most tokens that one kv_head of a sequence ever holds
  offset_t rows = 0;      ///< of the pool, a row being a token of one kv_head of one layer; 0: enough for everything
  index_t room = 256;     ///< tokens that fit behind the stored ones when rows have moved, before they move again
  offset_t index_pages =
      0;  ///< of the index of paged retrieval; 0: enough for first prompts of any length up to `tokens`
  index_t step_tokens = 1;  ///< most tokens of a decode step, 1 to 8

  void check() const {
    require(sequences >= 1, "sequences", sequences, "at least 1", "pass the largest batch");
    require(tokens >= 1, "tokens", tokens, "at least 1", "pass the longest context, or what a head holds at most");
    require(room >= 0 && rows >= 0, "room and rows", std::to_string(room) + " and " + std::to_string(rows),
            "at least 0", "leave them at their defaults");
    require(step_tokens >= 1 && step_tokens <= 8, "step_tokens", step_tokens, "1 to 8", "prefill longer runs");
  }
  /// Everything, and one layer of one sequence more: what moves needs a free run beside its old one.
  offset_t rows_for(const model_shape& shape) const {
    const offset_t places = offset_t(shape.layers) * sequences + 1;
    return rows > 0 ? rows : places * shape.kv_heads * (offset_t(tokens) + room);
  }

  /// Pages that a recipe's index needs when every sequence's first prompt is as unfavourable as can be.
  template <class Recipe>
  offset_t index_pages_for(const model_shape& shape, const Recipe& recipe) const {
    if constexpr (!Recipe::estimates) {
      return 0;
    } else {
      if (index_pages > 0) return index_pages;
      offset_t most = 0;
      for (double prompt = tokens; prompt >= 1; prompt *= 0.98) {
        stage_plan plan;
        try {
          plan = recipe.plan(index_t(prompt));
        } catch (const error&) {
          continue;  // a prompt that leaves no room for the window gets this error when it ends
        }
        const index_t page = recipe.step_scorer(plan).page;
        offset_t held = plan.capacity;
        if constexpr (Recipe::chooses) held = std::max<offset_t>(held, recipe.first_stage(plan).budget.tokens + 1);
        // What a head's last page and the rounding of its room add, and 2 % for the lengths between those tried.
        // Pages of one slot have one side, half of what others take.
        most = std::max(most, (offset_t(1.02 * double(held + 2 * room)) / page + 24) / (page == 1 ? 2 : 1) + 1);
      }
      return (offset_t(shape.layers) * sequences + 1) * shape.kv_heads * most;
    }
  }
};

}  // namespace cuda
TESSERA_NAMESPACE_END
