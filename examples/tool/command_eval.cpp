// tessera eval
#include <algorithm>
#include <cstdio>

#include "backend.hpp"
#include "commands.hpp"
#include "engine/checkpoint.hpp"
#include "engine/files/input_file.hpp"
#include "engine/files/output_file.hpp"
#include "engine/tokenizer.hpp"
#include "progress.hpp"
#include "tool/eval/evaluate.hpp"
#include "tool/eval/report.hpp"
#include "tool/methods/registry.hpp"
#include "tool/methods/values.hpp"

namespace tool {
namespace {

/// Gives each setting to the methods that have such a parameter. Errors: none of them has it.
/// METHOD.NAME=VALUE is for one method and goes before NAME=VALUE.
void apply_settings(const std::vector<std::string>& texts, std::vector<variant>& variants) {
  auto all = parse_settings(texts);
  std::ranges::stable_partition(all, [](const setting& one) { return one.name.find('.') != std::string::npos; });
  for (const setting& given : all) {
    const std::size_t dot = given.name.find('.');
    const std::string method = dot == std::string::npos ? "" : given.name.substr(0, dot);
    const setting wanted{dot == std::string::npos ? given.name : given.name.substr(dot + 1), given.value};
    bool known = false;
    for (variant& row : variants) {
      if ((!method.empty() && row.method->name != method) || !has_parameter(*row.method, wanted.name)) continue;
      known = true;
      const auto same = [&](const setting& other) { return other.name == wanted.name; };
      if (std::ranges::none_of(row.settings, same)) row.settings.push_back(wanted);
    }
    tessera::require(known, "parameter", "'" + engine::printable(given.name) + "'",
                     "a parameter of one of the methods, or METHOD.NAME for one of them",
                     "`tessera list` shows the parameters of every method");
  }
}

/// Adds, behind the rows of each method that has the parameter, the same rows with each of its values.
/// Errors: none of the methods has it; a value that it may not have.
void add_varied(const std::vector<std::string>& texts, std::vector<variant>& variants) {
  const std::vector<variant> base = variants;
  for (const setting& given : parse_settings(texts)) {
    const std::size_t dot = given.name.find('.');
    const std::string method = dot == std::string::npos ? "" : given.name.substr(0, dot);
    const std::string name = dot == std::string::npos ? given.name : given.name.substr(dot + 1);
    const std::vector<std::string> values = parse_list("--vary " + given.name, given.value);
    bool known = false;
    for (std::size_t i = 0; i < base.size();) {
      std::size_t end = i + 1;
      while (end < base.size() && base[end].method == base[i].method) ++end;
      if ((method.empty() || base[i].method->name == method) && has_parameter(*base[i].method, name)) {
        known = true;
        const auto end_of_method = std::find_if(variants.rbegin(), variants.rend(), [&](const variant& row) {
                                     return row.method == base[i].method;
                                   }).base();
        std::vector<variant> more;
        for (const std::string& value : values) {
          for (std::size_t row = i; row < end; ++row) {
            variant changed = base[row];
            changed.settings.push_back({name, value});
            changed.differs = name + "=" + value;
            if (names_profile(*changed.method, changed.settings)) {
              if (row > i) break;  // the same for every budget: the profile says what each head keeps
              changed.budget.reset();
            }
            tessera::require(
                changed.budget || !changed.method->has_budget || names_profile(*changed.method, changed.settings),
                "--vary " + given.name, value, "profiles, where --set gives one",
                "give them all to --vary, and --budgets");
            more.push_back(std::move(changed));
          }
        }
        variants.insert(end_of_method, more.begin(), more.end());
      }
      i = end;
    }
    tessera::require(known, "--vary", "'" + engine::printable(given.name) + "'",
                     "a parameter of one of the methods, or METHOD.NAME for one of them",
                     "`tessera list` shows the parameters of every method");
  }
}

/// Whether the settings give a method a profile: its budgets then count.
bool has_own_profile(const method_info& method, const std::vector<std::string>& settings) {
  std::vector<setting> own = parse_settings(settings);
  for (setting& one : own) {
    if (one.name == method.name + ".profile") one.name = "profile";
  }
  return names_profile(method, own);
}

}  // namespace

std::vector<variant> parse_variants(const eval_options& given) {
  std::vector<index_t> budgets;
  if (!given.budgets.empty()) {
    for (const std::string& text : parse_list("--budgets", given.budgets)) {
      budgets.push_back(index_t(parse_count("--budgets", text, 1)));
      tessera::require(std::ranges::count(budgets, budgets.back()) == 1, "--budgets", text, "every budget once",
                       "take out the second " + std::to_string(budgets.back()));
    }
  }
  std::vector<variant> variants;
  for (const std::string& name : parse_list("--methods", given.methods)) {
    const method_info& method = find_method(name);
    const bool counted = method.has_budget && !has_own_profile(method, given.settings);
    if (!counted) variants.push_back({&method, {}, {}});
    tessera::require(!counted || !budgets.empty(), "--budgets", "missing", "one or more numbers of tokens",
                     "add --budgets N,N for " + name);
    for (const index_t budget : budgets) {
      if (counted) variants.push_back({&method, budget, {}});
    }
  }
  bool used = false;
  for (const variant& row : variants) {
    used |= row.method->has_budget;
    if (row.method->has_budget && !row.budget && !budgets.empty())
      note("--budgets do not count for " + row.method->name + ": its profile says what each head keeps");
  }
  tessera::require(used || budgets.empty(), "--budgets", given.budgets, "none: no method here has a budget",
                   "leave it out");
  add_varied(given.varied, variants);
  apply_settings(given.settings, variants);
  for (const variant& row : variants) (void)row.method->configured(row.settings);
  return variants;
}

question_source::question_source(const eval_options& given) {
  if (!given.questions.empty()) {
    questions_ = load_questions(given.questions, prompt_template::parsed(given.how_to_ask), given.separately);
    return;
  }
  documents_ = document_request::checked(given);
  documents_->plan.count = std::size_t(parse_count("--count", given.count, 1, 1'000'000));
}

std::vector<conversation> question_source::conversations(const engine::llama_config& config,
                                                         const engine::tokenizer& tokenizer) && {
  if (!documents_) return std::move(questions_);
  documents_->fit(config.max_position_embeddings, tokenizer);
  const std::string text = engine::read_text_file(documents_->text);
  progress_line progress("making documents");
  const document_maker maker(text, tokenizer, documents_->book);
  std::vector<conversation> all;
  const std::size_t count = documents_->plan.count, wanted = documents_->families.size() * count;
  std::size_t done = 0;
  for (const std::string& family : documents_->families) {
    for (std::size_t i = 0; i < count; ++i) {
      progress.update(std::int64_t(done), std::int64_t(wanted));
      ++done;
      for (conversation& asked : maker.about(family, i, documents_->plan)) {
        asked.document = documents_->plan.questions > 1 ? done : 0;
        all.push_back(std::move(asked));
      }
    }
  }
  return all;
}

void evaluate(const eval_options& given) {
  const backend where = require_backend(given.backend);
  const auto variants = parse_variants(given);
  const element_type element = parse_element(given.dtype);
  const scoring how = scoring::parsed(given.metric, given.normalise);
  question_source source(given);
  const std::int32_t chunk = given.chunk == "whole"
                                 ? tessera::max_tokens
                                 : std::int32_t(parse_count("--chunk", given.chunk, 1, tessera::max_tokens));
  const auto workers = make_workers(given.threads);
  require_one_of("--prefix-cache", given.prefix_cache, {"on", "off"});
  if (!given.json.empty()) engine::require_writable(given.json);
  const std::filesystem::path folder = given.model;
  const engine::llama_config config = engine::config_of_model(folder);
  const auto tokenizer = engine::tokenizer::of_model(folder);
  engine::require_agreement(folder, config, tokenizer.vocab_size());
  require_caches(variants, config, element, workers);
  const auto conversations = std::move(source).conversations(config, tokenizer);
  std::vector<std::vector<planned_turn>> plans;
  {
    progress_line progress("cutting documents into tokens");
    for (std::size_t i = 0; i < conversations.size(); ++i) {
      progress.update(std::int64_t(i), std::int64_t(conversations.size()));
      plans.push_back(plan_turns(conversations[i], "question " + std::to_string(i + 1), config, tokenizer));
    }
  }
  std::vector<groupable> questions;
  for (std::size_t i = 0; i < plans.size(); ++i) questions.push_back({plans[i], conversations[i].document});
  const auto groups = group_questions(questions, tokenizer, chunk);
  const auto model = [&] {
    progress_line progress("loading the model");
    return load_model(folder, where, *workers);
  }();
  model->set_chunk(chunk);
  evaluation evaluation(*model, tokenizer, variants, element, workers);
  evaluation.score_by(how);
  evaluation.call_often([] { throw_if_interrupted(); });
  evaluation.store_prefixes(given.prefix_cache == "on");
  const char* const items = groups.size() == plans.size() ? "documents" : "questions";
  std::size_t group = 0, next_group = 0;  // the latter's first question
  run_items(
      items, plans.size(),
      [&](std::size_t i) {
        if (i == next_group) {
          evaluation.begin_group(groups[group]);
          next_group += groups[group++].count;
        }
        evaluation.run(conversations[i].family, plans[i]);
      },
      [&](std::size_t finished, double seconds) {
        if (!given.json.empty()) engine::write_file(given.json, json_text(variants, evaluation.cells(), how));
        const std::string shown = how.is_yes_or_no() ? "percent of right answers" : "mean score in percent";
        std::printf("%s\n%zu %s in %s. Families: %s (%s).\n%s%s",
                    table_text(variants, evaluation.cells(), !given.questions.empty()).c_str(), finished, items,
                    duration_text(seconds).c_str(), shown.c_str(), how.text().c_str(),
                    limits_text(variants, evaluation.cells()).c_str(),
                    prefix_text(evaluation.use_of_prefixes()).c_str());
      });
}

}  // namespace tool
