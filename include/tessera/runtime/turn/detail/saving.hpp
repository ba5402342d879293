// How a cache saves a sequence and loads it. The contracts stand in basic_cache.hpp.
#pragma once

#include <cmath>

#include "../../saved/identity.hpp"
#include "../basic_cache.hpp"

TESSERA_NAMESPACE_BEGIN

namespace detail {

inline void require_saves(bool holds) {
  require(holds, "saved sequence", "one whose packing strategies a GPU searches", "one of fixed strategies",
          "pass strategy fixed, or save sequences of the CPU");
}

/// Saves or loads the budgets that `open` was given.
template <class Archive>
void transfer_options(sequence_options& options, Archive& archive) {
  for (token_budget* budget : {&options.budget, &options.read_tokens}) {
    archive.number(budget->tokens);
    archive.number(budget->share);
  }
}

/// Saves or loads a plan.
template <class Archive>
void transfer_plan(stage_plan& plan, Archive& archive) {
  for (index_t* number : {&plan.capacity, &plan.retained, &plan.read, &plan.prompt}) {
    archive.number(*number);
    archive.require(*number >= 0, "with a plan that cannot be");
  }
  archive.number(plan.ratio);
  archive.require(std::isfinite(plan.ratio) && plan.ratio >= 1, "with a plan that cannot be");
}

}  // namespace detail

template <class Recipe, class Backend>
template <class Sink>
void basic_cache<Recipe, Backend>::save(index_t id, Sink&& sink, default_queue queue) {
  const default_float_mode mode;
  detail::require_saves(can_save());
  conversations_.sequence(id).check_save();
  detours_.require_none(id);
  backend_.check_fork(id);
  sequence_state<Recipe> state = conversations_.sequence(id);
  auto archive = backend_.writer(sink, queue);
  transfer_identity(identity_of(recipe_, shape_), archive);
  sequence_options options = state.budgets.options();
  detail::transfer_options(options, archive);
  for (stage_plan* plan : {&state.policies.plan, &state.ended_policies.plan}) detail::transfer_plan(*plan, archive);
  state.transfer(archive);
  backend_.transfer(id, state, archive, queue);
  archive.end();
}

template <class Recipe, class Backend>
template <class Source>
index_t basic_cache<Recipe, Backend>::load(Source&& source, default_queue queue) {
  const default_float_mode mode;
  detail::require_saves(can_save());
  auto archive = backend_.reader(source, queue);
  transfer_identity(identity_of(recipe_, shape_), archive);
  sequence_options options;
  detail::transfer_options(options, archive);
  const own_budgets<Recipe> budgets(recipe_, options);
  stage_plan plan, ended;
  for (stage_plan* part : {&plan, &ended}) detail::transfer_plan(*part, archive);
  const auto planned_by = [&](const stage_plan& part) {
    return planned<Recipe>(budgets.fitted(recipe_, {part.prompt, 0}), part);
  };
  sequence_state<Recipe> state(true, budgets, planned_by(plan), shape_.layers);
  state.ended_policies = planned_by(ended);
  state.transfer(archive);
  conversations_.require_room(backend_.max_sequences());
  backend_.check_budgets(recipe_, state.with_budgets(recipe_));
  const index_t id = conversations_.next_id();
  backend_.open(id, state.policies, queue);
  try {
    backend_.transfer(id, state, archive, queue);
    archive.end();
    return conversations_.adopt(std::move(state));
  } catch (...) {
    backend_.close(id, queue);
    throw;
  }
}

TESSERA_NAMESPACE_END
