#include "sample_prompts.hpp"

#include "engine/checkpoint.hpp"
#include "engine/files/input_file.hpp"
#include "tool/methods/values.hpp"
#include "tool/progress.hpp"

namespace tool {

sample_prompts::sample_prompts(const document_options& given, const std::string& samples)
    : count_(index_t(parse_count("--samples", samples, 1, 1'000'000))), documents_(document_request::checked(given)) {
  auto& families = documents_.families;
  if (families.size() > std::size_t(count_)) families.resize(std::size_t(count_));  // the first ones, a prompt each
  documents_.plan.count = (std::size_t(count_) + families.size() - 1) / families.size();
}

void sample_prompts::open(const std::filesystem::path& model) {
  config_ = engine::config_of_model(model);
  tokenizer_.emplace(engine::tokenizer::of_model(model));
  engine::require_agreement(model, config_, tokenizer_->vocab_size());
  documents_.fit(config_.max_position_embeddings, *tokenizer_);
  text_ = engine::read_text_file(documents_.text);
  progress_line progress("reading the text");
  maker_.emplace(text_, *tokenizer_, documents_.book);
}

std::vector<engine::token_t> sample_prompts::prompt(index_t i) const {
  const std::size_t all = families().size(), family = std::size_t(i) % all;
  const conversation document = maker_->make(families()[family], std::size_t(i) / all, documents_.plan);
  std::vector<engine::token_t> prompt = tokenizer_->encode(document.turns.front().prompt);
  if (tokenizer_->bos()) prompt.insert(prompt.begin(), *tokenizer_->bos());
  return prompt;
}

}  // namespace tool
