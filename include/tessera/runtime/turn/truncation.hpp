// How far a sequence can go back: which positions `truncate` takes, and what it does to a sequence's state.
#pragma once

#include <algorithm>
#include <string>

#include "../../core/error.hpp"
#include "sequence_state.hpp"

TESSERA_NAMESPACE_BEGIN

/// Tokens of a sequence that are taken back: its newest `tokens`, in every layer.
struct truncation {
  index_t position = 0;       ///< the next position afterwards
  index_t tokens = 0;         ///< 0: nothing changes
  bool is_of_prompt = false;  ///< they are of a prompt that has not ended
  bool withdraws = false;     ///< nothing is left of a prompt that has not ended: it is no longer announced
  bool ends_lists = false;    ///< what a filter chose for this turn's steps is lost: the next call is a prompt's
  bool releases = false;      ///< pages that were set aside for the prompt are free again

  /// Tokens that a layer loses. After a call that was cancelled, layers may have different ones.
  index_t tokens_of(const layer_progress& layer) const { return layer.next_position - position; }
};

/// Which of its tokens a sequence can take back.
enum class takes_back {
  anything,  ///< also tokens of prompts that have ended
  answers,   ///< tokens behind the last prompt
  nothing    ///< steps drop tokens, or leave more behind than rows tell
};

/// What sequences of a recipe can take back between two calls. Rows may allow less: packed ones, and those that a
/// sliding layer has dropped.
template <class Recipe>
constexpr takes_back taken_back() {
  using retain_type = typename Recipe::retain_type;
  // Steps that choose count their queries into scores and windows.
  if (fires_in_steps<typename Recipe::schedule_type> || retain_type::follows || Recipe::needs_step_segments)
    return takes_back::nothing;
  if (retain_type::drops || lies_beside_tokens(retain_type::observed) || Recipe::needs_segments ||
      lasting_pattern<typename Recipe::prefill_type>)
    return takes_back::answers;
  return takes_back::anything;
}

/// Whether what a first stage knows of a pending prompt follows from the prompt's stored rows alone, or from scores
/// that an engine sets token by token.
template <class Recipe>
inline constexpr bool prompts_can_be_cut =
    (Recipe::retain_type::observed == observes::nothing || Recipe::retain_type::takes_scores) &&
    !Recipe::needs_segments && Recipe::layout_type::window == 0 && !Recipe::schedule_type::fires_at(moment::chunk_end);

/// The smallest position that a sequence can go back to, as far as its recipe and its turn decide it. The rows may
/// decide otherwise: see `truncate` of basic_cache. During a prompt, positions between this one and the present one
/// are possible only if `prompts_can_be_cut`.
template <class Recipe>
index_t settled_position(const sequence_state<Recipe>& state) {
  constexpr takes_back taken = taken_back<Recipe>();
  const index_t next = state.front().next_position;
  if (taken == takes_back::nothing) return next;
  if (state.front().turn_tokens == 0) return taken == takes_back::answers ? state.answer_began : 0;
  bool is_settled = lasting_pattern<typename Recipe::prefill_type>;
  for (const layer_progress& layer : state.layers) is_settled = is_settled || layer.judged > 0 || layer.ended;
  const index_t began = next - state.front().turn_tokens;
  // A prompt's queries have been counted into scores of earlier turns' tokens.
  constexpr bool counts_queries =
      lies_beside_tokens(Recipe::retain_type::observed) && !Recipe::retain_type::takes_scores;
  if (is_settled || (counts_queries && began > 0)) return next;
  return began;
}

/// Plans that a sequence goes back to `position`. `settled`: the smallest position that all parts allow.
/// Errors   layers in different places; a position that the sequence has not reached or cannot go back to:
///          tessera::error.
template <class Recipe>
truncation plan_truncation(const sequence_state<Recipe>& state, index_t position, index_t settled) {
  const layer_progress& front = state.front();
  for (const layer_progress& layer : state.layers) {
    require(layer.next_position == front.next_position && layer.turn_tokens == front.turn_tokens, "tokens of a layer",
            layer.next_position, "those of layer 0, which are " + std::to_string(front.next_position),
            "finish the step, or the prompt's chunk, in every layer before tokens are taken back");
  }
  const index_t next = front.next_position, began = next - front.turn_tokens;
  require(position >= settled && position <= next, "position to go back to", position,
          value_range{settled, next}.text(), "pass a position from settled(id) to next_position(id)");
  truncation made{position, next - position, front.turn_tokens > 0 && position < next, position <= began};
  made.releases = made.withdraws;
  if (made.is_of_prompt) {
    require(position >= began, "position to go back to", position,
            value_range{began, next}.text() + " while a prompt is written",
            "take back the prompt first, and then what was before it");
    require(prompts_can_be_cut<Recipe> || position == began, "position to go back to", position,
            std::to_string(began) + " or " + std::to_string(next) + " while a prompt is written",
            "take back all of the prompt or nothing: the method has observed its queries");
  }
  constexpr bool filters = Recipe::retain_type::chooses && !Recipe::retain_type::drops;
  made.ends_lists = made.is_of_prompt ? filters : made.tokens > 0 && position < state.answer_began;
  return made;
}

/// Plans that a prompt's chunk is taken back from the layers that have it.
/// Errors   all layers have it, or none has begun; a chunk that cannot be taken back: tessera::error.
template <class Recipe>
truncation plan_cancelled_chunk(const sequence_state<Recipe>& state, index_t settled) {
  const layer_progress& front = state.front();
  index_t position = front.next_position;
  for (const layer_progress& layer : state.layers) position = (std::min)(position, layer.next_position);
  const index_t next = front.next_position, began = next - front.turn_tokens;
  require(position < next, "layers without the chunk", 0, "at least 1 while a chunk is under way",
          "call truncate for tokens that every layer has");
  require(position >= settled && (prompts_can_be_cut<Recipe> || position == began), "position to go back to", position,
          "one that the method can still go back to, from " + std::to_string((std::max)(settled, began)),
          "truncate the whole prompt once every layer has the chunk, or close the sequence");
  truncation made{position, next - position, true, position == began && state.announced == 0};
  made.ends_lists = Recipe::retain_type::chooses && !Recipe::retain_type::drops;
  made.releases = state.announced == 0;
  return made;
}

/// Takes the tokens of a plan out of a sequence's state. Needs no memory.
template <class Recipe>
void carry_out(const truncation& plan, sequence_state<Recipe>& state) {
  if (plan.tokens == 0) return;
  for (layer_progress& layer : state.layers) {
    if (plan.is_of_prompt) layer.turn_tokens -= plan.tokens_of(layer);
    layer.next_position = plan.position;
    layer.scored = (std::min)(layer.scored, plan.position);
    if constexpr (Recipe::needs_segments) {
      // Steps of these recipes end segments by their length alone.
      layer.text = layer.answer_text;
      layer.text.advance(nullptr, plan.position - state.answer_began);
    }
  }
  if (plan.withdraws) {
    state.announced = 0;
    state.policies = state.ended_policies;
  }
  state.is_cut = state.is_cut || plan.ends_lists;
  state.now.steps = (std::min)(state.now.steps, (std::max)(0, plan.position - state.answer_began));
  state.forget_step();  // one that was prepared
}

/// The smallest position that a layer of `stored` tokens can go back to, if it keeps those of its `window` only: its
/// window before that position must still be stored.
inline index_t settled_of_window(index_t next, index_t stored, index_t window) {
  return stored == next ? 0 : (std::min)(next, next - stored + window);
}

TESSERA_NAMESPACE_END
