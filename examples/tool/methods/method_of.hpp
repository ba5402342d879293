// From a method of the library, a class template, to the tool's interface. Each method is instantiated in a source
// file of its own (method.cpp.in), so that compile time spreads over the cores.
#pragma once

#include <tessera/backend/cpu/any_cache.hpp>

#include "any_conversation.hpp"
#include "kernels.hpp"
#include "recipe_settings.hpp"
#include "values.hpp"

namespace tool {

template <class Recipe>
std::unique_ptr<method_cache> make_cpu_cache(const cache_request& request) {
  const recipe_with_profile<Recipe> wanted(request);
  return cpu_conversation(std::make_unique<tessera::cpu::any_cache_of<Recipe>>(request.shape, wanted.recipe,
                                                                               request.workers, wanted.profile),
                          request.element, wanted.rows.rotates);
}

/// A cache over rows of few bits, whose elements come in fp32, whatever a model has.
/// `Method::over<T, D, ..>` is the recipe over a layout.
template <class Method>
std::unique_ptr<method_cache> make_over_rows([[maybe_unused]] std::string_view rows,
                                             [[maybe_unused]] const cache_request& request) {
#define TESSERA_TOOL_MAKE(format)                                                                                 \
  if (rows == #format) {                                                                                          \
    return with_head_dim<tessera::fp32>(request.head_dim, [&]<class T, int D>() {                                 \
      return make_cpu_cache<                                                                                      \
          typename Method::template over<T, D, format##_layout<T, D>, grouped_##format##_layout<T, D>>>(request); \
    });                                                                                                           \
  }
  TESSERA_TOOL_FOR_ROWS(TESSERA_TOOL_MAKE)
#undef TESSERA_TOOL_MAKE
  return nullptr;
}

/// `Method::of<T, D>` is the recipe. No template parameter that is a template of constrained ones: clang 16 dies of it.
template <class Method>
std::unique_ptr<method_cache> make_method(const cache_request& request) {
  std::vector<setting> settings = request.settings;
  const row_settings chosen = row_settings::taken_from(settings);
  if (chosen.whole_tail > 0) return make_over_rows<Method>("tailed", chosen.tailed(request));
  if (chosen.encodes()) return make_over_rows<Method>(chosen.rows, request);
  return with_layout(chosen.element(request.element), request.head_dim,
                     [&]<class T, int D>() { return make_cpu_cache<typename Method::template of<T, D>>(request); });
}

/// Everything about a method that does not depend on element type and head dim.
template <class Method>
method_info describe() {
  using recipe = typename Method::template of<tessera::bf16, 64>;
  method_info info;
  info.name = recipe::name;
  info.paper = recipe::paper;
  info.has_budget = recipe::retain_type::chooses || recipe::retrieve_type::retrieves;
  info.ranks = recipe::retain_type::chooses;
  info.needs_segments = recipe::needs_segments;
  info.needs_step_segments = recipe::needs_step_segments;
  info.needs_profile = takes_gates<recipe>;
  info.rereads = recipe::retain_type::rereads;
  info.takes_scores = recipe::retain_type::takes_scores;
  info.needs_rope = recipe::needs_rope;
  if constexpr (recipe::retain_type::chooses) {
    info.takes_projection = tessera::weighted_scorer<typename recipe::retain_type::scorer_type>;
    info.keeps_blocks_of_segments = tessera::segment_selector<typename recipe::retain_type::selector_type>;
  }
  info.chooses_lines = recipe::prefill_type::chooses_lines;
  info.on_cuda = tessera::runs_on_devices<recipe>;
  info.budgets = recipe::budgets;
  info.budget_counts = budget_counts<recipe>();
  recipe::policies([&](const char* axis, const char* policy) { info.policies.push_back({axis, policy}); });
  info.takes_profile = takes_profile<recipe>;
  info.fuses_chunks = fuses_chunks<recipe>;
  info.parameters = shown_parameters(recipe{}, {});
  info.configured = [](const std::vector<setting>& settings) {
    return shown_parameters(configured_recipe<recipe>(settings), settings);
  };
  info.planned = [](const std::vector<setting>& settings, std::optional<index_t> budget, index_t prompt, int dim) {
    return shown_parameters(planned_recipe(requested_recipe<recipe>(settings, budget), prompt, dim), settings, true);
  };
  info.make = &make_method<Method>;
  return info;
}

}  // namespace tool
