// What a cache needs of a backend: the calls of the backend and of its parts.
#pragma once

#include <concepts>
#include <cstddef>

#include "../core/host/host_vector.hpp"
#include "../core/logit_rule.hpp"
#include "../core/plan/capacity.hpp"
#include "../core/plan/layer_peak.hpp"
#include "../core/prompt/prompt_lines.hpp"
#include "../core/prompt/prompt_reach.hpp"
#include "../core/sequence_layer.hpp"
#include "../core/views.hpp"

TESSERA_NAMESPACE_BEGIN

/// The store of a backend: the rows of every layer and sequence. `Queue...` is nothing on the CPU, a stream on a GPU.
///   view(owner)                 a view of the stored rows of a layer of a sequence
///   clear(id, queue...)         empties an open sequence; needs no memory
///   expect(id, tokens)          reserves pages of a pool for `tokens` more in every layer, 0: none; may throw
///   bytes(owner)                bytes that are allocated, or acquired of a pool
///   upper_bound(peaks), available()   upper bound of a new sequence's memory; memory that is neither used nor reserved
/// Rows are moved and dropped in two calls: `plan_keep` does all that may throw and changes nothing visible, `keep`
/// carries it out.
template <class S, class... Queue>
concept backend_store = requires(S& store, const S& stored, sequence_layer owner, index_t id, Queue... queue) {
  typename S::view_type;
  { store.view(owner) } -> std::same_as<typename S::view_type>;
  store.clear(id, queue...);
  store.expect(id, id);
  { stored.bytes(owner) } -> std::convertible_to<offset_t>;
  { stored.kv_heads() } -> std::same_as<index_t>;
  { stored.upper_bound(host_vector<layer_peak>()) } -> std::same_as<capacity>;
  { stored.available() } -> std::same_as<capacity>;
};

/// An observer of a backend: what a first stage's scorer needs to know.
///   with_scores                 whether the store has a score beside each token
///   forget(id), forget(owner)   forgets a sequence, or a layer of it; needs no memory
///   copy(source, target, queue...)   copies what it knows of a sequence to another one
/// and `observe_prompt`, `observe_step` and `complete`, whose arguments are the backend's.
template <class O, class... Queue>
concept backend_observer = requires(O& observer, sequence_layer owner, index_t id, Queue... queue) {
  { O::with_scores } -> std::convertible_to<bool>;
  observer.forget(id);
  observer.forget(owner);
  observer.copy(id, id, queue...);
};

/// The attention of prompts on a backend.
///   copy(source, target, queue...)   copies the columns that steps will read to another sequence
///   trace(on), lines(owner)     the lines of the last chunk that was traced
template <class A, class... Queue>
concept backend_attending =
    requires(A& attending, const A& attended, sequence_layer owner, index_t id, Queue... queue) {
      attending.copy(id, id, queue...);
      attending.trace(true);
      { attended.lines(owner) } -> std::same_as<const prompt_lines&>;
    };

/// Whether a type is the backend of a cache. A sentence says what it lacks. Policies, Sequences and Step are the turn's
/// `planned`, `conversations` and `batch`, Draft and Accepted its `draft_step` and `accepted_tokens`. Calls
/// with rows are templates, which are not checked here: the compiler reports a missing one where the cache calls it.
///
///   resources, queue, default_queue, output_type, in_groups, takes_uneven_steps
///   cancels_steps                                   whether a step with layers left can be taken back behind the last
///   max_sequences(), max_step_tokens(), max_draft_tokens()     0: no bound; tokens of a step, and of a draft
///   check_budgets(recipe, own)                      throws where the memory does not allow the budgets of a sequence
///   open(id, policies, queue), close(id, queue)     `close` needs no memory
///   check_fork(id), fork(id, copy, state, queue)    where it throws, `copy` is closed
///   saves, writer(sink, queue), reader(source, queue)   whether sequences can be saved; then: the archives
///   transfer(id, state, archive, queue)             saves a sequence, or loads it into an open, empty one, which the
///                                                   caller closes where it throws
///   settled(id, state)                              the smallest position that a sequence can go back to, as far as
///                                                   rows and index decide it
///   check_truncation(id), truncate(id, plan, state, queue)   takes back its newest tokens; `truncate` needs no memory
///   follow_budget(recipe, queue)                    replaces memory that depends on the budget
///   follow_plans(sequences, queue)                  the policies of every sequence have changed
///   check_chunk(owner, q), begin_prompt(id, queue), expect_chunk(id, tokens)
///   end_chunk(owner, policies, reach, reconsidered, coming, queue)   a layer keeps its share of the prompt so far,
///                                                   before `coming` more tokens; throws where these have no room
///   append_chunk, attend_chunk, reread              rows of a prompt
///   set_scores(owner, first, tokens, scores, queue)   scores that an engine gives
///   end_layer(owner, recipe, policies, due, reach, queue)       does what needs this layer alone
///   end_prompt(id, recipe, policies, due, state, queue)
///   prepare_step(recipe, step, sequences, queue)    memory for a step in every layer, or in none
///   begin_counting(step, sequences), count_layer(layer, step, sequences, queue)   when a step's tokens count
///   require_layer(layer, step, sequences, queue), decode                          one layer of a step
///   require_decoded(layer, step, sequences, queue), attend                        other queries in a layer of a step
///   is_under_way(state, id), forget_step(id)        whether a sequence's step has layers left; it has been taken back
///   prepare_draft(draft, sequences, queue), begin_counting_draft(draft), decode_draft   one layer of a draft
///   require_drafted(id, number)                     throws where a layer has not had the draft
///   plan_accepted(recipe, step, accepted, sequences, queue)    plans a step of accepted rows, in all layers or none
///   commit_accepted(recipe, step, sequences, queue), end_draft(id)   neither fails
///   positions, readable, attended, lines, bytes, bytes_read                       answers
///   roles()                                         which layers follow the recipe
///   upper_bound(recipe, policies, peaks)            upper bound of the memory of a new sequence whose layers store at
///                                                   most `peaks`
///   available()                                     memory that is neither used nor reserved
template <class B, class Policies, class Sequences, class Step, class Draft, class Accepted>
constexpr bool check_backend() {
  using recipe = typename B::recipe_type;
  using queue = typename B::queue;
  static_assert(
      requires(const B& b) {
        { b.max_sequences() } -> std::same_as<index_t>;
        { b.max_step_tokens() } -> std::same_as<index_t>;
        { b.max_draft_tokens() } -> std::same_as<index_t>;
      },
      "tessera: a backend must say its bounds: index_t max_sequences(), index_t max_step_tokens(), index_t "
      "max_draft_tokens()");
  static_assert(
      requires(B& b, const Sequences& known, index_t id, const Policies& policies, const recipe& own,
               typename B::default_queue q) {
        b.check_budgets(own, own);
        b.open(id, policies, q);
        b.close(id, q);
        b.check_fork(id);
        b.fork(id, id, known.sequence(id), q);
      },
      "tessera: a backend must open, close and copy sequences: check_budgets(recipe, own), open(id, policies, queue), "
      "close(id, queue), check_fork(id), fork(id, copy, state, queue)");
  static_assert(
      requires(B& b, const Sequences& known, index_t n, typename B::default_queue q) {
        { b.settled(n, known.sequence(n)) } -> std::same_as<index_t>;
        b.check_truncation(n);
        b.truncate(n, known.plan_truncation(n, n, n), known.sequence(n), q);
        { b.is_under_way(known.sequence(n), n) } -> std::same_as<bool>;
        b.forget_step(n);
      },
      "tessera: a backend must take back tokens: settled(id, state), check_truncation(id), truncate(id, plan, state, "
      "queue), is_under_way(state, id), forget_step(id)");
  static_assert(
      requires(B& b, const recipe& r, const Draft& draft, const Step& step, const host_vector<Accepted>& accepted,
               Sequences& known, queue q, index_t id) {
        b.prepare_draft(draft, known, q);
        b.begin_counting_draft(draft);
        b.require_drafted(id, step.number);
        b.plan_accepted(r, step, accepted, known, q);
        b.commit_accepted(r, step, known, q);
        b.end_draft(id);
      },
      "tessera: a backend must carry a draft: prepare_draft(draft, sequences, queue), begin_counting_draft(draft), "
      "require_drafted(id, number), plan_accepted(recipe, step, accepted, sequences, queue), commit_accepted(recipe, "
      "step, sequences, queue), end_draft(id)");
  static_assert(
      requires(B& b, const recipe& r, const Sequences& known, typename B::default_queue q) {
        b.follow_budget(r, q);
        b.follow_plans(known, q);
      }, "tessera: a backend must follow a budget: follow_budget(recipe, queue), follow_plans(sequences, queue)");
  static_assert(
      requires(B& b, sequence_layer owner, const recipe& r, const Policies& policies, const prompt_reach& reach,
               const Sequences& known, queue q, index_t n) {
        b.begin_prompt(n, q);
        b.expect_chunk(n, n);
        b.end_chunk(owner, policies, reach, n, n, q);
        b.end_layer(owner, r, policies, true, reach, q);
        b.end_prompt(n, r, policies, true, known.sequence(n), q);
      },
      "tessera: a backend must carry a prompt: begin_prompt(id, queue), expect_chunk(id, tokens), end_chunk(owner, "
      "policies, reach, reconsidered, coming, queue), end_layer(owner, recipe, policies, due, reach, queue), "
      "end_prompt(id, "
      "recipe, policies, due, state, queue)");
  static_assert(
      requires(B& b, const recipe& r, const Step& step, Sequences& known, queue q, index_t layer) {
        b.prepare_step(r, step, known, q);
        b.begin_counting(step, known);
        b.require_layer(layer, step, known, q);
        b.require_decoded(layer, step, known, q);
        b.count_layer(layer, step, known, q);
      },
      "tessera: a backend must carry a step: prepare_step(recipe, step, sequences, queue), begin_counting(step, "
      "sequences), require_layer(layer, step, sequences, queue), require_decoded(layer, step, sequences, queue), "
      "count_layer(layer, step, sequences, queue)");
  static_assert(
      requires(const B& b, sequence_layer owner, const Sequences& known, index_t n) {
        { b.positions(owner, n) } -> std::same_as<host_vector<index_t>>;
        { b.readable(owner, n) } -> std::same_as<host_vector<index_t>>;
        { b.attended(owner) } -> std::same_as<const host_vector<host_vector<index_t>>&>;
        { b.lines(owner) } -> std::same_as<const prompt_lines&>;
        { b.bytes(n, known.sequence(n)) } -> std::same_as<offset_t>;
      },
      "tessera: a backend must answer: positions(owner, head), readable(owner, head), attended(owner), lines(owner), "
      "bytes(id, state)");
  static_assert(
      requires(const B& b, const recipe& r, const Policies& policies, const host_vector<layer_peak>& peaks) {
        b.roles();
        { b.upper_bound(r, policies, peaks) } -> std::same_as<capacity>;
        { b.available() } -> std::same_as<capacity>;
      },
      "tessera: a backend must say what a new sequence takes at most, and what there is: roles(), "
      "upper_bound(recipe, policies, peaks), available()");
  return true;
}

TESSERA_NAMESPACE_END
