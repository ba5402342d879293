// The state of one sequence of a cache: its turn, its clock and the progress of each layer.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>

#include "../../core/error.hpp"
#include "../../core/host/host_vector.hpp"
#include "../../core/prompt/layer_progress.hpp"
#include "own_budgets.hpp"

TESSERA_NAMESPACE_BEGIN

/// The state of one sequence of a cache whose recipe is `Recipe`.
template <class Recipe>
struct sequence_state {
  bool open = false;
  turn_clock now{};
  std::uint64_t step = 0;          ///< the number of the one that `begin_step` began; 0: none yet in this turn
  index_t step_began = -1;         ///< the position of its first token
  own_budgets<Recipe> budgets;     ///< that `open` was given
  planned<Recipe> policies;        ///< those of an announced prompt, else those of the last turn's end
  planned<Recipe> ended_policies;  ///< as the last turn's end left them
  host_vector<layer_progress> layers;
  index_t answer_began = 0;  ///< the position of the turn's first decoded token
  index_t announced = 0;     ///< tokens of the turn's prompt; 0: not announced
  index_t announced_at = 0;  ///< the position at which it was announced; steps may come before its first chunk
  index_t step_tokens = 0;   ///< of the step that `begin_step` began
  bool is_cut = false;       ///< `truncate` cut an ended prompt: the next call is a prompt's

  sequence_state(bool is_open, const own_budgets<Recipe>& own, const planned<Recipe>& first, index_t layer_count)
      : open(is_open), budgets(own), policies(first), ended_policies(first), layers(std::size_t(layer_count)) {}

  const layer_progress& front() const { return layers.front(); }

  /// The policies of a prompt that ends, in all layers or in one, when `taken` tokens have been taken.
  planned<Recipe> plan(const Recipe& recipe, index_t taken) const {
    return planned<Recipe>(budgets.fitted(recipe, {taken, 0}), taken);
  }
  /// Adopts a changed budget of the recipe.
  void follow_budget(const Recipe& recipe) {
    policies.follow(budgets.fitted(recipe, {policies.plan.prompt, 0}));
    ended_policies.follow(budgets.fitted(recipe, {ended_policies.plan.prompt, 0}));
    if (open && announced == 0 && front().turn_tokens == 0) follow_shares(recipe, 0);
  }
  /// The recipe with this sequence's budgets in a step that takes `tokens` more; 0: now.
  Recipe with_budgets(const Recipe& recipe, index_t tokens = 0) const {
    const index_t taken = front().next_position + tokens;
    return budgets.fitted(recipe, {taken, taken - answer_began});
  }
  /// Adopts what shares come to in a step that takes `tokens` more; 0: no step, and a prompt that was announced here
  /// gets its plan back.
  void follow_shares(const Recipe& recipe, index_t tokens) {
    if (!budgets.options().has_shares()) return;
    const index_t began = front().next_position - front().turn_tokens;
    announced_at = (std::min)(announced_at, began);  // what lay before may have been taken back
    if (tokens == 0 && announced > 0 && began == announced_at) {
      policies = plan(recipe, began + announced);
    } else {
      policies.follow_step(with_budgets(recipe, tokens));
    }
  }

  /// Forgets the step that `begin_step` began; its tokens have been taken back.
  void forget_step() { step = 0, step_began = -1; }
  /// The clock of the next step. A step that was prepared at the same position and never decoded does not count.
  turn_clock step_clock(index_t tokens) const {
    return {now.turn, now.steps + (step_began == front().next_position ? 0 : 1),
            front().next_position - answer_began + tokens, tokens};
  }

  /// Errors   `tokens` more are too many for a layer's prompt, or its first chunk comes while layers have a step that
  ///          others have not: tessera::error.
  void check_chunk_tokens(index_t layer, index_t tokens) const {
    const layer_progress& state = layers[std::size_t(layer)];
    state.require_positions(tokens);
    for (const layer_progress& other : layers) {
      if (state.turn_tokens > 0 || other.turn_tokens > 0 || other.next_position == state.next_position) continue;
      fail("tokens of a layer", other.next_position,
           "those of layer " + std::to_string(layer) + ", which are " + std::to_string(state.next_position),
           "finish the step in every layer before a prompt begins");
    }
    require(announced == 0 || state.turn_tokens + tokens <= announced, "tokens of this turn",
            state.turn_tokens + tokens, "at most those that were announced, which are " + std::to_string(announced),
            "announce the whole prompt before its first chunk");
  }
  /// Errors   a layer without prompt tokens, or with fewer than announced: tessera::error.
  void require_whole_prompt(const layer_progress& layer) const {
    require(layer.turn_tokens >= 1, "tokens of this turn", layer.turn_tokens, "at least 1",
            "prefill a prompt before ending it");
    require(announced == 0 || announced == layer.turn_tokens, "tokens of this turn", layer.turn_tokens,
            "those that were announced, which are " + std::to_string(announced), "prefill the rest of the prompt");
  }
  /// Errors   layers that have had different tokens: tessera::error.
  void check_even_layers() const {
    for (const layer_progress& layer : layers) {
      if (layer.next_position != front().next_position) {
        fail("tokens of a layer", layer.next_position,
             "those of layer 0, which are " + std::to_string(front().next_position),
             "give every layer every chunk, and every step, before the next batch");
      }
    }
  }

  /// Errors   the next step, of `tokens` tokens, may not come yet: tessera::error. `id`: of this sequence.
  void check_step(index_t id, index_t tokens) const {
    front().require_positions(tokens);
    if (is_cut) {
      fail("turn of sequence " + std::to_string(id), "cut by truncate", "one whose prompt has ended",
           "write a prompt before the next step");
    }
    for (const layer_progress& layer : layers) {
      require(layer.turn_tokens == 0, "tokens since the prompt began", layer.turn_tokens, "0",
              "call end_prefill before the first decode step");
      if (layer.next_position != front().next_position) {
        fail("tokens of a layer before the step", layer.next_position, std::to_string(front().next_position),
             "decode every layer, in order, in every step");
      }
    }
  }

  /// Saves the clock and the progress of a sequence between two turns or steps, or loads them.
  template <class Archive>
  void transfer(Archive& archive) {
    for (index_t* number : {&now.turn, &now.steps, &now.outputs, &now.tokens, &answer_began, &step_tokens}) {
      archive.number(*number);
      archive.require(*number >= 0, "with a clock that cannot be");
    }
    archive.flag(is_cut);
    index_t next = front().next_position;
    archive.number(next);
    archive.require(next >= 0, "with positions that cannot be");  // a turn that was cut began behind it
    for (layer_progress& layer : layers) {
      layer.next_position = next;
      if constexpr (Recipe::retain_type::takes_scores) {
        archive.number(layer.scored);
        archive.require(layer.scored >= 0 && layer.scored <= next, "with scores of other tokens");
      }
      for (segment_cursor* cursor : {&layer.text, &layer.answer_text}) {
        archive.number(cursor->segment);
        archive.number(cursor->tokens);
        archive.require(cursor->segment >= 0 && cursor->tokens >= 0 && cursor->tokens < max_segment_tokens,
                        "with segments that cannot be");
      }
    }
  }

  /// Errors   a chunk or a step that some layers have not had, a prompt that has ended in some: tessera::error.
  void check_fork() const {
    for (const layer_progress& layer : layers) {
      if (layer.next_position != front().next_position || layer.turn_tokens != front().turn_tokens) {
        fail("tokens of a layer", layer.next_position,
             "those of layer 0, which are " + std::to_string(front().next_position),
             "finish the step, or the prompt's chunk, in every layer before the sequence is forked or saved");
      }
      require(!layer.ended, "layers whose prompt has ended", 1, "0",
              "call end_prefill before the sequence is forked or saved");
    }
    require(step == 0 || front().next_position != step_began, "steps without rows", 1, "0",
            "before the fork, decode the step that was prepared");
  }
  /// Errors   those of a fork; a prompt under way: tessera::error.
  void check_save() const {
    check_fork();
    require(front().turn_tokens == 0 && announced == 0, "tokens of this turn",
            (std::max)(front().turn_tokens, announced), "0",
            "save a sequence before a prompt is announced or begins, or once end_prefill has ended it");
  }
};

TESSERA_NAMESPACE_END
