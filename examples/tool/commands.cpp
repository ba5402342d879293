#include "commands.hpp"

#include "backend.hpp"
#include "progress.hpp"
#include "tool/methods/registry.hpp"
#include "tool/methods/values.hpp"

namespace tool {

const method_info& method_options::checked_method() const {
  const method_info& found = find_method(method);
  (void)found.configured(parsed_settings());
  require_backend(backend);
  return found;
}

std::vector<setting> method_options::parsed_settings() const { return parse_settings(settings); }

std::optional<index_t> method_options::parsed_budget(const method_info& chosen) const {
  tessera::require(chosen.has_budget || budget.empty(), "--budget", budget,
                   "none: " + chosen.name + " keeps everything", "leave it out");
  if (!chosen.has_budget) return std::nullopt;
  if (names_profile(chosen, parsed_settings())) {
    if (!budget.empty()) note("--budget has no effect: the profile says what each head of " + chosen.name + " keeps");
    return std::nullopt;
  }
  if (!budget.empty()) return index_t(parse_count("--budget", budget, chosen.budgets.least, chosen.budgets.largest));
  tessera::fail("--budget", "missing", chosen.budgets.text() + " tokens per KV head",
                "add --budget N for " + chosen.name);
}

std::shared_ptr<tessera::cpu::executor> make_workers(const std::string& threads) {
  auto workers = std::make_shared<tessera::cpu::executor>(int(parse_count("--threads", threads, 0, 1024)));
  if (workers->refused() > 0) {
    note("the system gives " + std::to_string(workers->threads()) + " of " +
         std::to_string(workers->threads() + workers->refused()) + " threads; working with these");
  }
  return workers;
}

}  // namespace tool
