// tessera list
#include <cstdio>
#include <nlohmann/json.hpp>

#include "backend.hpp"
#include "commands.hpp"
#include "tool/methods/registry.hpp"
#include "tool/methods/values.hpp"

namespace tool {
namespace {

void print_text() {
  std::printf("Backends in this build: %s\n", joined(backends()).c_str());
  for (const method_info& method : methods()) {
    std::printf("\n%s  (%s)%s\n", method.name.c_str(), method.paper.c_str(), method.on_cuda ? "" : "  on the CPU only");
    for (const policy_info& policy : method.policies) {
      std::printf("    %-18s %s\n", policy.axis.c_str(), policy.name.c_str());
    }
    if (method.has_budget) {
      std::printf("    --budget N           per KV head, %s (%s)\n", method.budget_counts.c_str(),
                  method.budgets.text().c_str());
    }
    for (const parameter_info& parameter : method.parameters) {
      std::printf("    --set %-14s %s (%s)\n", (parameter.name + "=" + parameter.value).c_str(),
                  parameter.about.c_str(), parameter.allowed.c_str());
    }
  }
}

void print_json() {
  nlohmann::ordered_json all;
  all["backends"] = backends();
  all["methods"] = nlohmann::ordered_json::array();
  for (const method_info& method : methods()) {
    nlohmann::ordered_json item{{"name", method.name}, {"paper", method.paper}, {"has_budget", method.has_budget}};
    item["backends"] = method.on_cuda ? nlohmann::ordered_json{"cpu", "cuda"} : nlohmann::ordered_json{"cpu"};
    item["needs_boundaries"] = method.needs_segments;
    item["needs_step_boundaries"] = method.needs_step_segments;
    item["needs_engine"] = method.rereads;
    item["needs_scores"] = method.takes_scores;
    item["needs_profile"] = method.needs_profile;
    item["needs_rope_theta"] = method.needs_rope;
    if (method.has_budget) {
      item["budget"] = {{"allowed", method.budgets.text()}, {"counts", method.budget_counts}};
    }
    item["policies"] = nlohmann::ordered_json::object();
    for (const policy_info& policy : method.policies) item["policies"][policy.axis] = policy.name;
    item["parameters"] = nlohmann::ordered_json::array();
    for (const parameter_info& parameter : method.parameters) {
      item["parameters"].push_back({{"name", parameter.name},
                                    {"default", parameter.value},
                                    {"allowed", parameter.allowed},
                                    {"about", parameter.about}});
    }
    all["methods"].push_back(std::move(item));
  }
  std::printf("%s\n", all.dump(1).c_str());
}

}  // namespace

void list_methods(const list_options& given) { given.as_json ? print_json() : print_text(); }

}  // namespace tool
