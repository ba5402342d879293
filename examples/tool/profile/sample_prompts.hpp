// Prompts that a model is measured on: documents of all families in turn.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "engine/config.hpp"
#include "engine/tokenizer.hpp"
#include "tool/eval/document.hpp"
#include "tool/methods/method_cache.hpp"

namespace tool {

class sample_prompts {
 public:
  /// Checks the options and reads the tasks file.   Errors   as document_request; no number of samples.
  sample_prompts(const document_options& given, const std::string& samples);
  /// Reads the model's configuration and tokenizer, and the text.
  /// Errors   files that are missing or disagree; prompts that do not fit the model.
  void open(const std::filesystem::path& model);

  index_t count() const { return count_; }
  std::int64_t context() const { return documents_.plan.context; }  ///< tokens of a prompt
  const std::vector<std::string>& families() const { return documents_.families; }
  const engine::llama_config& config() const { return config_; }
  const engine::tokenizer& tokenizer() const { return *tokenizer_; }
  /// Tokens of the i-th prompt, whose family is the i-th in turn.
  std::vector<engine::token_t> prompt(index_t i) const;

 private:
  index_t count_;
  document_request documents_;
  engine::llama_config config_;
  std::optional<engine::tokenizer> tokenizer_;
  std::string text_;
  std::optional<document_maker> maker_;
};

}  // namespace tool
