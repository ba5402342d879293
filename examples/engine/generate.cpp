#include "generate.hpp"

#include <string>
#include <tessera/core/error.hpp>

namespace engine {

token_t best_token(std::span<const float> logits) {
  tessera::require(!logits.empty(), "number of logits", 0, "at least 1", "pass the logits of one token");
  const auto strange = std::find_if(logits.begin(), logits.end(), [](float logit) { return !(logit - logit == 0); });
  if (strange != logits.end()) {
    tessera::fail("logit of token id " + std::to_string(strange - logits.begin()), *strange, "a finite number",
                  "the model's values overflow: check the weights");
  }
  // max_element returns the first of equals.
  return token_t(std::max_element(logits.begin(), logits.end()) - logits.begin());
}

void require_room(const llama_config& config, std::span<const token_t> tokens, std::int64_t more, std::int64_t seen) {
  for (const token_t token : tokens)
    tessera::require(token >= 0 && token < config.vocab_size, "token id", token,
                     "an id in [0, " + std::to_string(config.vocab_size) + ")",
                     "use the tokenizer that the model was trained with");
  const std::int64_t end = seen + std::int64_t(tokens.size()) + more;
  tessera::require(end <= config.max_position_embeddings, "number of positions needed",
                   std::to_string(end) + " (" + std::to_string(seen) + " of them in the cache)",
                   "at most max_position_embeddings = " + std::to_string(config.max_position_embeddings),
                   "shorten the prompt, ask for fewer new tokens or start a new conversation");
}

void require_prompt(const llama_config& config, std::span<const token_t> prompt, const prefill_options& options,
                    std::int64_t seen) {
  tessera::require(!prompt.empty(), "prompt length", 0, "at least 1 token", "begin the prompt with bos");
  tessera::require(options.chunk >= 1, "chunk", options.chunk, "at least 1 token", "leave it at its default");
  tessera::require(options.boundaries.empty() || options.boundaries.size() == prompt.size(), "boundaries",
                   options.boundaries.size(),
                   "one flag for each token of the prompt, which are " + std::to_string(prompt.size()),
                   "pass tokenizer::boundaries of the prompt");
  require_room(config, prompt, 0, seen);
}

void require_step(const llama_config& config, std::span<const token_t> tokens, std::int64_t seen) {
  tessera::require(!tokens.empty() && tokens.size() <= longest_step, "tokens in a decode step", tokens.size(), "1 to 8",
                   "split the step, or prefill a longer run");
  require_room(config, tokens, 0, seen);
}

std::vector<repeated_part> repeat_in_parts(const llama_config& config, std::span<const token_t> prompt,
                                           const repeat_options& options, std::int64_t seen) {
  tessera::require(options.part >= 1 && options.words >= 0, "part and words of a re-reading",
                   std::to_string(options.part) + " and " + std::to_string(options.words), "at least 1 and 0",
                   "leave them at their defaults");
  const std::int64_t total = std::int64_t(prompt.size());
  std::vector<repeated_part> parts;
  for (std::int64_t done = 0; done < total; done += parts.back().count) {
    const std::int64_t count = std::min<std::int64_t>(options.part, total - done);
    std::vector<token_t> text = done == 0 ? options.first : options.next;
    const auto part = prompt.begin() + done;
    text.insert(text.end(), part - std::min<std::int64_t>(options.words, done), part);
    text.insert(text.end(), options.behind.begin(), options.behind.end());
    text.insert(text.end(), part, part + count);
    require_room(config, text, 0, seen);
    parts.push_back({seen - total + done, count, std::move(text)});
  }
  return parts;
}

void require_answer(const llama_config& config, std::span<const float> logits, std::int64_t seen,
                    const generate_options& options) {
  tessera::require(options.max_new >= 0, "max_new", options.max_new, "at least 0", "pass a number of tokens");
  tessera::require(logits.size() == std::size_t(config.vocab_size), "number of logits", logits.size(),
                   std::to_string(config.vocab_size), "pass the logits of one token");
  tessera::require(options.ends_segment.empty() || options.ends_segment.size() == std::size_t(config.vocab_size),
                   "number of ends_segment", options.ends_segment.size(), std::to_string(config.vocab_size),
                   "pass tokenizer::ends_segment");
  // The last new token is never decoded, so it takes no position.
  require_room(config, {}, std::max(options.max_new - 1, 0), seen);
}

}  // namespace engine
