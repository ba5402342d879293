// tessera eval
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <limits>

#include "backend.hpp"
#include "commands.hpp"
#include "document.hpp"
#include "engine/tokenizer.hpp"
#include "evaluate.hpp"
#include "progress.hpp"
#include "registry.hpp"
#include "report.hpp"
#include "tasks.hpp"
#include "values.hpp"

namespace tool {
namespace {

/// Gives each setting to the methods that have such a parameter. Errors: none of them has it.
void apply_settings(const std::vector<std::string>& texts, std::vector<variant>& variants) {
  for (const std::string& text : texts) {
    const setting given = parse_setting(text);
    bool known = false;
    for (variant& row : variants) {
      if (!has_parameter(*row.method, given.name)) continue;
      row.settings.push_back(given);
      known = true;
    }
    tessera::require(known, "parameter", given.name, "a parameter of one of the methods",
                     "`tessera list` shows the parameters of every method");
  }
}

/// Every method at every budget; a method without a budget once.
std::vector<variant> parse_variants(const eval_options& given) {
  std::vector<index_t> budgets;
  if (!given.budgets.empty()) {
    for (const std::string& text : parse_list("--budgets", given.budgets)) {
      budgets.push_back(index_t(parse_count("--budgets", text, 1)));
    }
  }
  std::vector<variant> variants;
  for (const std::string& name : parse_list("--methods", given.methods)) {
    const method_info& method = find_method(name);
    if (!method.has_budget) variants.push_back({&method, {}, {}});
    tessera::require(!method.has_budget || !budgets.empty(), "--budgets", "missing", "one or more numbers of tokens",
                     "add --budgets N,N for " + name);
    for (const index_t budget : budgets) {
      if (method.has_budget) variants.push_back({&method, budget, {}});
    }
  }
  apply_settings(given.settings, variants);
  return variants;
}

std::vector<conversation> make_conversations(const eval_options& given, const engine::llama_config& config,
                                             const engine::tokenizer& tokenizer) {
  document_plan plan;
  plan.context = parse_count("--context", given.context, 1);
  plan.room = config.max_position_embeddings;
  plan.count = std::size_t(parse_count("--count", given.count, 1));
  plan.seed = std::uint64_t(parse_count("--seed", given.seed, 0, std::numeric_limits<std::int64_t>::max()));
  tessera::require(plan.context <= plan.room, "--context", plan.context,
                   "at most the model's context, which is " + std::to_string(plan.room), "lower it");
  const task_book book = task_book::load(given.tasks);
  const std::string text = engine::read_text_file(given.text);
  const document_maker maker(text, tokenizer, book);
  std::vector<conversation> all;
  for (const std::string& family :
       given.families.empty() ? book.families_of(given.suite) : parse_list("--families", given.families)) {
    for (std::size_t i = 0; i < plan.count; ++i) all.push_back(maker.make(family, i, plan));
  }
  return all;
}

}  // namespace

void evaluate(const eval_options& given) {
  const backend where = require_backend(given.backend);
  const auto variants = parse_variants(given);
  const element_type element = parse_element(given.dtype);
  const auto workers = make_workers(given.threads);
  if (!given.json.empty()) require_writable(given.json);
  const std::filesystem::path folder = given.model;
  const engine::llama_config config = engine::load_config(folder / "config.json");
  const auto tokenizer = engine::tokenizer::load(folder / "tokenizer.model");
  const auto conversations =
      given.questions.empty() ? make_conversations(given, config, tokenizer) : load_questions(given.questions);
  const auto model = load_model(folder, where, *workers);
  evaluation evaluation(*model, tokenizer, variants, element, workers);

  std::vector<std::vector<planned_turn>> plans;
  for (std::size_t i = 0; i < conversations.size(); ++i) {
    plans.push_back(evaluation.plan(conversations[i], "question " + std::to_string(i + 1)));
  }
  const auto start = std::chrono::steady_clock::now();
  {
    progress_line progress("documents");
    for (std::size_t i = 0; i < plans.size(); ++i) {
      progress.update(std::int64_t(i), std::int64_t(plans.size()));
      evaluation.run(conversations[i].family, plans[i]);
    }
  }
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  if (!given.json.empty()) write_atomically(given.json, json_text(variants, evaluation.cells()));
  std::printf("%s\n%zu documents in %s. Families: percent of right answers.\n%s",
              table_text(variants, evaluation.cells()).c_str(), plans.size(), duration_text(seconds).c_str(),
              limits_text(variants, evaluation.cells()).c_str());
}

}  // namespace tool
