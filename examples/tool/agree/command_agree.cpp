// tessera agree
#include <algorithm>
#include <cstdio>

#include "agreement.hpp"
#include "engine/checkpoint.hpp"
#include "engine/files/input_file.hpp"
#include "engine/files/output_file.hpp"
#include "engine/tokenizer.hpp"
#include "tool/backend.hpp"
#include "tool/commands.hpp"
#include "tool/methods/registry.hpp"
#include "tool/methods/values.hpp"
#include "tool/progress.hpp"
#include "tool/rows/row_settings.hpp"

namespace tool {
namespace {

/// Every length's pieces, from the user's prompts or from a text.
std::vector<text_piece> all_pieces(const agree_options& given, const piece_sizes& sizes,
                                   const engine::tokenizer& tokenizer) {
  const std::string text = engine::read_text_file(given.prompts.empty() ? given.text : given.prompts);
  if (!given.prompts.empty())
    return parse_prompts(text, given.prompts == "-" ? "standard input" : engine::printable(given.prompts), tokenizer,
                         sizes);
  const std::vector<engine::token_t> tokens = tokenizer.encode(text), first = first_tokens(tokenizer);
  const auto count = std::size_t(parse_count("--count", given.count, 1, 1'000'000));
  std::vector<text_piece> all;
  for (const std::int64_t prompt : sizes.prompts) {
    for (text_piece& piece : pieces_of(tokens, first, count, prompt, sizes.steps)) all.push_back(std::move(piece));
  }
  return all;
}

}  // namespace

void agree(const agree_options& given) {
  const backend where = require_backend(given.backend);
  std::vector<variant> variants = parse_variants(given);
  const auto is_full = [](const variant& row) { return row.method->name == "full"; };
  const auto is_reference = [&](const variant& row) {
    std::vector<setting> settings = row.settings;
    return is_full(row) && row_settings::taken_from(settings).as_given();
  };
  if (std::ranges::none_of(variants, is_reference)) {
    const bool other = std::ranges::any_of(variants, is_full);  // over rows that --set chooses
    variants.insert(variants.begin(), {&find_method("full"), {}, {}, other ? "rows=given" : ""});
  }
  std::ranges::stable_partition(variants, is_full);
  std::ranges::stable_partition(variants, is_reference);
  const element_type element = parse_element(given.dtype);
  (void)parse_count("--count", given.count, 1, 1'000'000);
  piece_sizes sizes{{}, parse_count("--steps", given.steps, 1), !given.prompt.empty()};
  for (const std::string& text : parse_list("--prompt", sizes.required ? given.prompt : given.usual_prompt))
    sizes.prompts.push_back(parse_count("--prompt", text, 2));
  const auto workers = make_workers(given.threads);
  if (!given.json.empty()) engine::require_writable(given.json);
  const std::filesystem::path folder = given.model;
  const engine::llama_config config = engine::config_of_model(folder);
  const auto tokenizer = engine::tokenizer::of_model(folder);
  engine::require_agreement(folder, config, tokenizer.vocab_size());
  require_caches(variants, config, element, workers);
  const std::vector<text_piece> pieces = all_pieces(given, sizes, tokenizer);
  for (const text_piece& piece : pieces) {
    const auto tokens = std::int64_t(piece.prompt.size() + piece.following.size());
    tessera::require(tokens <= config.max_position_embeddings, "tokens of a prompt and its steps", tokens,
                     "at most the model's context, which is " + std::to_string(config.max_position_embeddings),
                     "lower --prompt or --steps, or shorten the prompts");
  }
  const auto model = [&] {
    progress_line progress("loading the model");
    return load_model(folder, where, *workers);
  }();
  agreement_run compared(*model, tokenizer, variants, element, workers);
  compared.call_often([] { throw_if_interrupted(); });
  run_items(
      "pieces of text", pieces.size(), [&](std::size_t i) { compared.run(pieces[i]); },
      [&](std::size_t finished, double seconds) {
        if (!given.json.empty()) engine::write_file(given.json, agreement_json(compared.variants(), compared.sums()));
        std::printf("%s\n%zu pieces in %s. KL(full, method) of the next token, in nats.\n",
                    agreement_table(compared.variants(), compared.sums()).c_str(), finished,
                    duration_text(seconds).c_str());
      });
}

}  // namespace tool
