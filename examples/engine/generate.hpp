// What every backend of the engine shares: the options of a prefill and of an answer, and greedy answering.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "config.hpp"

namespace engine {

/// How a model is told to write a text once more, for caches that want it (KVzip): in parts, each behind a sentence.
struct repeat_options {
  std::vector<token_t> first{};   ///< before the first part
  std::vector<token_t> next{};    ///< before another one's last words
  std::vector<token_t> behind{};  ///< between these and the part
  std::int32_t words = 8;         ///< tokens that end the part before
  std::int32_t part = 2048;       ///< tokens of a part; bounds the working memory
};

struct prefill_options {
  std::int32_t chunk = 512;  ///< tokens that pass through the layers together; bounds the working memory
  std::span<const std::uint8_t>
      boundaries{};  ///< one flag for each token of the prompt, as tokenizer::boundaries; or none
  /// Called after each chunk, tokens done and tokens in all. What it throws ends the prefill and reaches the caller.
  std::function<void(std::int64_t done, std::int64_t total)> progress;
  repeat_options repeat{};
};

struct generate_options {
  std::int32_t max_new = 64;  ///< >= 0
  /// Told the tokens so far, the newest last; true ends the answer. Empty: one of the config's eos tokens ends it.
  std::function<bool(std::span<const token_t>)> stop;
  prefill_options prefill;
  /// One flag for each token id, as tokenizer::ends_segment, for caches that want to know where an answer's segments end; or none.
  std::span<const std::uint8_t> ends_segment{};
};

inline constexpr std::int32_t longest_step = 8;  ///< tokens of a decode step

/// The token with the highest logit; the lowest id among equals. Errors: no logits.
token_t best_token(std::span<const float> logits);

/// Errors: a token outside the vocabulary; `tokens` and `more` after them do not fit behind the `seen` ones.
void require_room(const llama_config& config, std::span<const token_t> tokens, std::int64_t more, std::int64_t seen);

/// Errors: no token, a chunk below 1, flags for another number of tokens, or as `require_room`.
void require_prompt(const llama_config& config, std::span<const token_t> prompt, const prefill_options& options,
                    std::int64_t seen);

/// Errors: no token, more than `longest_step`, or as `require_room`.
void require_step(const llama_config& config, std::span<const token_t> tokens, std::int64_t seen);

/// Errors: max_new below 0 or beyond the model's context, or another number of logits, or of flags, than vocab_size.
void require_answer(const llama_config& config, std::span<const float> logits, std::int64_t seen,
                    const generate_options& options);

/// A part of a prompt, and what a model writes when it is told to write that part once more.
struct repeated_part {
  std::int64_t first = 0, count = 0;  ///< positions of the part
  std::vector<token_t> text;
};
/// Of a prompt whose last token is at `seen` - 1. Errors: no part, or as `require_room`.
std::vector<repeated_part> repeat_in_parts(const llama_config& config, std::span<const token_t> prompt,
                                           const repeat_options& options, std::int64_t seen);

/// Answers greedily from the logits behind `seen` tokens; `next(token)` decodes a token and returns the best one after
/// it. Returns the answer, a token that stopped it included; its last token has not been decoded.
/// Errors: as `require_answer`.
template <class Next>
std::vector<token_t> answer_greedily(const llama_config& config, std::span<const float> logits, std::int64_t seen,
                                     const generate_options& options, const Next& next) {
  require_answer(config, logits, seen, options);
  const auto ends = [&](const std::vector<token_t>& answer) {
    if (options.stop) return options.stop(answer);
    return std::find(config.eos.begin(), config.eos.end(), answer.back()) != config.eos.end();
  };
  std::vector<token_t> answer;
  if (options.max_new > 0) answer.push_back(best_token(logits));
  while (!answer.empty() && !ends(answer) && std::int32_t(answer.size()) < options.max_new)
    answer.push_back(next(answer.back()));
  return answer;
}

}  // namespace engine
