// What a cache needs of a backend: the calls of its parts, and of the whole.
#pragma once

#include <concepts>
#include <cstddef>

#include "../core/host/host_vector.hpp"
#include "../core/logit_rule.hpp"
#include "../core/prompt/prompt_lines.hpp"
#include "../core/prompt/prompt_reach.hpp"
#include "../core/sequence_layer.hpp"
#include "../core/views.hpp"

TESSERA_NAMESPACE_BEGIN

/// The store of a backend: the rows of every layer and sequence. `Queue...` is nothing on the CPU, a stream on a GPU.
///   view(owner)                 what a layer of a sequence stores
///   clear(id, queue...)         empties a sequence that was open; needs no memory
///   expect(id, tokens)          a pool of pages sets so many more tokens aside in every layer, 0: none; may throw
///   bytes(owner)                what is allocated, or taken of a pool
/// Rows move and go in two calls: `plan_keep` does all that may throw and shows nothing, `keep` carries it out.
template <class S, class... Queue>
concept backend_store = requires(S& store, const S& stored, sequence_layer owner, index_t id, Queue... queue) {
  typename S::view_type;
  { store.view(owner) } -> std::same_as<typename S::view_type>;
  store.clear(id, queue...);
  store.expect(id, id);
  { stored.bytes(owner) } -> std::convertible_to<offset_t>;
  { stored.kv_heads() } -> std::same_as<index_t>;
};

/// An observer of a backend: what a first stage's scorer has to see.
///   with_scores                 whether the store holds a score beside each token
///   forget(id), forget(owner)   what was observed goes; needs no memory
///   copy(id, id, queue...)      what lasts from turn to turn goes to another id
/// and `observe_prompt`, `observe_step` and `complete`, whose arguments are the backend's.
template <class O, class... Queue>
concept backend_observer = requires(O& observer, sequence_layer owner, index_t id, Queue... queue) {
  { O::with_scores } -> std::convertible_to<bool>;
  observer.forget(id);
  observer.forget(owner);
  observer.copy(id, id, queue...);
};

/// What prompts attend on a backend.
///   copy(id, id, queue...)      what prompts of one sequence left to be read goes to another one
///   trace(on), lines(owner)     the lines of the last chunk that was traced
template <class A, class... Queue>
concept backend_attending = requires(A& attending, const A& attended, sequence_layer owner, index_t id,
                                     Queue... queue) {
  attending.copy(id, id, queue...);
  attending.trace(true);
  { attended.lines(owner) } -> std::same_as<const prompt_lines&>;
};

/// Whether a type is the backend of a cache; what it lacks is said in a sentence. Policies, Sequences, Step and Chunk
/// are the turn's `planned`, `conversations`, `batch` and `prompt_chunk`. What takes rows is a template: the cache's
/// calls name it, and a compiler says what is missing there.
///
///   resources, queue, default_queue, output_type, in_groups
///   max_sequences(), max_step_tokens()              0: no bound; tokens of a step
///   open(id, policies, queue), close(id, queue)     `close` needs no memory
///   check_fork(id), fork(id, to, policies, queue)   where it throws, `to` is closed
///   follow_budget(recipe, queue)                    what another budget needs, in place of what there was
///   follow_plans(sequences, queue)                  the policies of every sequence have changed
///   check_chunk(owner, q), begin_prompt(id, queue), expect_chunk(id, tokens)
///   end_chunk(owner, policies, reach, reconsidered, queue)     a layer keeps its share of what it has of a prompt
///   append_chunk, attend_chunk, reread              rows of a prompt
///   end_layer(owner, recipe, tokens, queue), end_prompt(id, recipe, policies, due, reach, queue)
///   prepare_step(recipe, step, sequences, queue)    room for a step in every layer, or in none
///   begin_counting(step, sequences), count_layer(layer, step, sequences, queue)   when a step's tokens count
///   require_layer(layer, step, sequences, queue), decode                          one layer of a step
///   positions, readable, attended, lines, bytes, bytes_read                       answers
template <class B, class Policies, class Sequences, class Step, class Chunk>
constexpr bool check_backend() {
  using recipe = typename B::recipe_type;
  using queue = typename B::queue;
  static_assert(
      requires(const B& b) {
        { b.max_sequences() } -> std::same_as<index_t>;
        { b.max_step_tokens() } -> std::same_as<index_t>;
      },
      "tessera: a backend must say its bounds: index_t max_sequences(), index_t max_step_tokens()");
  static_assert(
      requires(B& b, index_t id, const Policies& policies, typename B::default_queue q) {
        b.open(id, policies, q);
        b.close(id, q);
        b.check_fork(id);
        b.fork(id, id, policies, q);
      },
      "tessera: a backend must open, close and copy sequences: open(id, policies, queue), close(id, queue), "
      "check_fork(id), fork(id, to, policies, queue)");
  static_assert(
      requires(B& b, const recipe& r, const Sequences& known, typename B::default_queue q) {
        b.follow_budget(r, q);
        b.follow_plans(known, q);
      },
      "tessera: a backend must follow a budget: follow_budget(recipe, queue), follow_plans(sequences, queue)");
  static_assert(
      requires(B& b, sequence_layer owner, const recipe& r, const Policies& policies, const prompt_reach& reach,
               queue q, index_t n) {
        b.begin_prompt(n, q);
        b.expect_chunk(n, n);
        b.end_chunk(owner, policies, reach, n, q);
        b.end_layer(owner, r, n, q);
        b.end_prompt(n, r, policies, true, reach, q);
      },
      "tessera: a backend must carry a prompt: begin_prompt(id, queue), expect_chunk(id, tokens), end_chunk(owner, "
      "policies, reach, reconsidered, queue), end_layer(owner, recipe, tokens, queue), end_prompt(id, recipe, "
      "policies, due, reach, queue)");
  static_assert(
      requires(B& b, const recipe& r, const Step& step, Sequences& known, queue q, index_t layer) {
        b.prepare_step(r, step, known, q);
        b.begin_counting(step, known);
        b.require_layer(layer, step, known, q);
        b.count_layer(layer, step, known, q);
      },
      "tessera: a backend must carry a step: prepare_step(recipe, step, sequences, queue), begin_counting(step, "
      "sequences), require_layer(layer, step, sequences, queue), count_layer(layer, step, sequences, queue)");
  static_assert(
      requires(const B& b, sequence_layer owner, const recipe& r, const Policies& policies, index_t n) {
        { b.positions(owner, n) } -> std::same_as<host_vector<index_t>>;
        { b.readable(owner, n) } -> std::same_as<host_vector<index_t>>;
        { b.attended(owner) } -> std::same_as<const host_vector<host_vector<index_t>>&>;
        { b.lines(owner) } -> std::same_as<const prompt_lines&>;
        { b.bytes(n, policies) } -> std::same_as<offset_t>;
      },
      "tessera: a backend must answer: positions(owner, head), readable(owner, head), attended(owner), lines(owner), "
      "bytes(id, policies)");
  (void)sizeof(Chunk);
  return true;
}

TESSERA_NAMESPACE_END
