// tessera heads
#include <cstdio>

#include "engine/checkpoint.hpp"
#include "engine/files/input_file.hpp"
#include "engine/files/output_file.hpp"
#include "engine/tokenizer.hpp"
#include "probe.hpp"
#include "tool/commands.hpp"
#include "tool/methods/values.hpp"
#include "tool/progress.hpp"

namespace tool {

void find_heads(const heads_options& given) {
  const auto sinks = index_t(parse_count("--sinks", given.sinks, 0));
  const auto recent = index_t(parse_count("--recent", given.recent, 1));
  question_source source(given.documents);
  const auto workers = make_workers(given.documents.threads);
  engine::require_writable(given.out);
  const std::filesystem::path folder = given.documents.model;
  const engine::llama_config config = engine::config_of_model(folder);
  const auto tokenizer = engine::tokenizer::of_model(folder);
  engine::require_agreement(folder, config, tokenizer.vocab_size());
  const auto conversations = std::move(source).conversations(config, tokenizer);
  std::vector<std::vector<planned_turn>> plans;
  for (std::size_t i = 0; i < conversations.size(); ++i) {
    plans.push_back(plan_turns(conversations[i], "question " + std::to_string(i + 1), config, tokenizer));
  }
  const auto model = [&] {
    progress_line progress("loading the model");
    return load_model(folder, backend::cpu, *workers);
  }();
  head_probe probe(*model, sinks, recent, workers);
  {
    progress_line progress("documents");
    for (std::size_t i = 0; i < conversations.size(); ++i) {
      progress.update(std::int64_t(i), std::int64_t(conversations.size()));
      const planned_turn& first = plans[i].front();
      probe.add(first.prompt, tokenizer.encode(" " + first.answer + "\n"));
    }
  }
  head_gates found = probe.found();
  found.model = given.documents.model;
  engine::write_file(given.out, gates_text(found));
  std::printf("Mass beyond the first %d and the newest %d tokens, by KV head, over %d questions:\n", sinks, recent,
              found.questions);
  for (index_t layer = 0; layer < found.layers; ++layer) {
    std::printf("layer %d ", layer);
    for (index_t head = 0; head < found.kv_heads; ++head)
      std::printf(" %.3f", found.gates[std::size_t(layer * found.kv_heads + head)]);
    std::printf("\n");
  }
  std::printf("Wrote %s\n", engine::printable(given.out).c_str());
}

}  // namespace tool
