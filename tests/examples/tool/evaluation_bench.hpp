// A tiny model with everything that an evaluation needs, and all methods at some budgets.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "catch.hpp"
#include "engine/tokenizer.hpp"
#include "examples/gates_file.hpp"
#include "examples/tiny_model.hpp"
#include "tool/backend.hpp"
#include "tool/eval/evaluate.hpp"
#include "tool/methods/registry.hpp"

namespace tool_tests {

struct bench {
  tiny_model folder;
  std::shared_ptr<tessera::cpu::executor> workers;
  engine::tokenizer tokenizer;
  std::unique_ptr<tool::runner> model;

  explicit bench(int threads = 2, tool::backend where = tool::backend::cpu)
      : workers(std::make_shared<tessera::cpu::executor>(threads)),
        tokenizer(engine::tokenizer::load(folder.path() / "tokenizer.model")),
        model(tool::load_model(folder.path(), where, *workers)) {}

  std::vector<tool::planned_turn> plan(const tool::conversation& asked, const std::string& place = "question 1") const {
    return tool::plan_turns(asked, place, model->config(), tokenizer);
  }

  tool::evaluation evaluation(std::vector<tool::variant> variants) {
    const auto element = model->where() == tool::backend::cpu ? tool::element_type::fp32 : tool::element_type::bf16;
    return {*model, tokenizer, std::move(variants), element, workers};
  }
};

/// Whole vectors, of a method that leaves elements of them out.
inline std::vector<tool::setting> all_elements(const tool::method_info& method) {
  std::vector<tool::setting> settings;
  for (const auto& policy : method.policies) {
    if (policy.axis == "key channels") settings.push_back({"channels", "1"});
    if (policy.name == "rotated") settings.push_back({"truncate", "0"});
  }
  return settings;
}

/// Where `dense`, prompts that choose lines by a share of the attention choose all of them.
inline std::vector<tool::variant> all_methods(std::vector<tessera::index_t> budgets, bool dense = false) {
  std::vector<tool::variant> variants;
  for (const auto& method : tool::methods()) {
    std::vector<tool::setting> settings = needed_settings(method.name, 2, 2);
    for (tool::setting& whole : all_elements(method)) settings.push_back(std::move(whole));
    for (const auto& parameter : method.parameters) {
      if (dense && method.chooses_lines && parameter.name == "alpha") settings.push_back({"alpha", "1"});
    }
    if (!method.has_budget) variants.push_back({&method, {}, settings});
    for (const auto budget : budgets) {
      if (method.has_budget) variants.push_back({&method, budget, settings});
    }
  }
  return variants;
}

}  // namespace tool_tests
