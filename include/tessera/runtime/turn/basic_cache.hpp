// A whole KV cache of one model: the calls of a turn, their checks and their order, over a backend that does the work.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <span>
#include <type_traits>
#include <utility>

#include "../../concepts/backend.hpp"
#include "../../core/error.hpp"
#include "../../core/host/float_mode.hpp"
#include "../../core/host/host_vector.hpp"
#include "../../core/plan/capacity.hpp"
#include "../background.hpp"
#include "../page_plan.hpp"
#include "../strategy.hpp"
#include "conversations.hpp"
#include "detours.hpp"
#include "layer_peaks.hpp"
#include "own_budgets.hpp"
#include "prompt_chunk.hpp"
#include "reread_part.hpp"

TESSERA_NAMESPACE_BEGIN

/// Stores, compresses and attends the KV cache of a model by one recipe. Engines use it as tessera::cache on the CPU
/// and as tessera::cuda::cache on a GPU; their headers list the differences.
///
/// A turn is: `prefill` a chunk in every layer, and its attention if the engine has none of its own, chunk after chunk;
/// `end_prefill` once; then for each step `prepare_step`, and `decode` in every layer. The next turn begins with the
/// next `prefill`. Keys and queries come after RoPE; positions are counted here and survive every eviction.
/// Types    k and v of a call have one element type. On the CPU q may have another one, and both may differ from what
///          the layout stores; on a GPU all three are of the layout's.
/// Queues   on a GPU every call has its stream as last argument, or before `boundaries`; on the CPU there is none.
/// Errors   bad shapes, unknown sequences and steps out of order throw tessera::error before anything changes. Where
///          memory runs out, std::bad_alloc or another exception of the program's operator new: the cache is then as if
///          the call had not been made. `close` never fails.
/// Floats   calls calculate in the mode that programs begin with (core/host/float_mode.hpp), and restore the caller's.
template <class Recipe, class Backend>
class basic_cache {
  static_assert(check_backend<Backend, planned<Recipe>, conversations<Recipe>, batch, draft_step, accepted_tokens>());
  using queue_type = typename Backend::queue;
  using default_queue = typename Backend::default_queue;
  using Out = typename Backend::output_type;
  static constexpr bool has_queue = !std::is_default_constructible_v<queue_type>;
  static constexpr bool searches = requires(const Backend& backend) { backend.store().searches(); };

 public:
  using layout = typename Recipe::layout_type;
  using element_type = typename layout::element_type;
  static constexpr int k_dim = layout::k_dim, v_dim = layout::v_dim;
  /// Whether some tokens of a prompt that has begun can be taken back, and forks stand at positions within it.
  static constexpr bool cuts_prompts = prompts_can_be_cut<Recipe>;

  /// `resources`: the CPU's executor, or the sizes of a device's cache.
  /// Errors   an impossible shape, recipe or pair of them; no executor: tessera::error.
  basic_cache(model_shape shape, Recipe recipe, typename Backend::resources resources)
      : shape_((shape.check(), std::move(shape))),
        recipe_((recipe.check(), std::move(recipe))),
        conversations_(shape_, recipe_),
        backend_(shape_, recipe_, std::move(resources)) {}

  /// Whether sequences can be saved and loaded: not where a GPU searches strategies of packed rows.
  bool can_save() const { return Backend::saves(recipe_); }
  const model_shape& shape() const { return shape_; }
  const Recipe& recipe() const { return recipe_; }

  // --- sequences -----------------------------------------------------------------------------------------------------

  /// Changes the recipe's token budget, which sequences without one of their own have. The new one takes effect when
  /// the schedule retains next, or with the next step that retrieves by exact scores; where the budget pays for an
  /// estimate, at the end of the next turn's prompt. On a GPU it allocates and synchronises, and steps that a graph
  /// recorded must be recorded anew.
  /// Errors   a budget that the recipe does not allow; a prompt that has ended in some layers; on a GPU, a prepared
  ///          step with layers to go: tessera::error.
  void set_budget(index_t tokens, default_queue queue = {});

  /// Opens an empty sequence and returns its id: the lowest closed one, or a new one. `options`: budgets of its own, in
  /// place of the recipe's; on a GPU at most those of the recipe, for which the cache was made. Steps that a graph
  /// recorded follow them.
  /// Errors   budgets that the recipe has not or does not allow: tessera::error. On a GPU a share may come to more than
  ///          the recipe's budget later: then the call at which it does throws, and changes nothing.
  index_t open(const sequence_options& options, default_queue queue = {});
  index_t open(default_queue queue = {}) { return open(sequence_options{}, queue); }

  /// Opens a copy of a sequence, and returns its id. The two are independent. Each stores, chooses and outputs what the
  /// original would have. Each may go on with a prompt that has begun, and end it: the prompt stays announced, and
  /// what it reserved is reserved for both.
  /// Rows     in pages (fixed_pages, ragged_pages) are shared. Who writes to a shared page, or drops rows of it,
  ///          gets one of its own first, which may need a page where it needed none before. Rows in runs are copied.
  ///          Finished segments of packed rows are shared; on a GPU they stay in memory until the sequence that packed
  ///          them is closed.
  /// Errors   a chunk or a step that some layers have not had, a prompt that has ended in some of them, on a GPU a
  ///          step of any sequence that is under way; a pool with too few pages: tessera::error. The host does not
  ///          know of the work that a graph replays: enqueue a fork after that work.
  index_t fork(index_t id, default_queue queue = {});

  /// Opens a copy of a sequence as it was at an earlier position: a fork, truncated. Errors: those of both.
  index_t fork(index_t id, index_t position, default_queue queue = {});

  /// Takes back the tokens from `position` on, which becomes the next position. What follows has the bits of a sequence
  /// that never had them. Where an ended prompt is cut, the next call writes a new turn's prompt. A step that was
  /// prepared and not decoded is forgotten, and so is a prompt that was announced and has no tokens left. Pages return
  /// to their pool; other memory stays.
  /// Cost     on a GPU the sequence's index is built anew.
  /// Differs  a layer that slides may have dropped more tokens behind its window than one without the detour: outputs
  ///          are then equal to rounding. Packed rows whose strategy is searched are replaced when the search is over,
  ///          for which a detour gives time.
  /// Errors   a position below `settled` or above `next_position`; layers in different places: tessera::error.
  void truncate(index_t id, index_t position, default_queue queue = {});
  /// The smallest position that `truncate` and `fork` take now. 0: methods that drop nothing. The end of the last
  /// prompt: methods that drop then. The present position: methods that choose in steps, and readers whose steps leave
  /// more behind than rows. Rows that are packed are settled, and so is what a sliding layer no longer has. Of a prompt
  /// that has begun, its own tokens can be taken back: all of them or, if the method observes no queries, some.
  index_t settled(index_t id) const {
    const auto& state = conversations_.sequence(id);
    return (std::max)(settled_position(state), backend_.settled(id, state));
  }

  /// Takes back the call that is under way, for this sequence alone: a draft, a prompt's chunk that only some layers
  /// have, or a step with layers left. What follows has the bits of a sequence that never had it. A cancelled step goes
  /// on for the other sequences of its batch, with the same rows and calls, and is taken back from this one behind the
  /// last layer; where all of its sequences are cancelled, at once. If the others never finish it, the sequence can
  /// only be closed.
  /// Errors   nothing under way; a chunk that cannot be taken back (see `settled`); a step that cannot, of methods that
  ///          choose in steps or pack rows, which take drafts instead: tessera::error.
  void cancel(index_t id, default_queue queue = {});

  /// Writes a sequence as bytes to sink(const void* data, std::size_t bytes), whose exceptions pass through. They hold
  /// rows, columns, candidates, lines, observed queries, budgets, plan and clock, the facts of recipe and shape, and
  /// checksums. The sequence stays. Of a segment's basis each sequence has a copy; a search that has not ended is
  /// saved with the rows that it reads.
  /// On a GPU a cuda::saved_sequence may be the sink. The call then waits for the stream's earlier work, enqueues the
  /// copy and returns. `queue` must come behind the cache's other work: let it wait for an event of that stream. Until
  /// the bytes have arrived the sequence must stay as it is. Others may step on their stream, which waits where rows of
  /// other sequences move.
  /// Errors   a prompt, a step or a draft under way; a cache that cannot save: tessera::error.
  template <class Sink>
  void save(index_t id, Sink&& sink, default_queue queue = {});

  /// Opens the sequence that `save` wrote, in a cache with the same recipe, parameters and shape, and returns its id.
  /// source(void* data, std::size_t bytes) fills the memory and returns the bytes that it had, fewer only at the end.
  /// What follows has the bits of the sequence that was saved. An index is built anew from the rows. On a GPU a
  /// cuda::saved_sequence may be the source; the call waits until it has been read.
  /// Errors   bytes that are cut, damaged, of another version or of another cache; a cache that cannot save; on a GPU,
  ///          a step of any sequence that is under way; no memory, or a pool with too few pages: an exception, and the
  ///          cache is as before.
  template <class Source>
  index_t load(Source&& source, default_queue queue = {});

  void close(index_t id, default_queue queue = {});

  // --- prompts -------------------------------------------------------------------------------------------------------

  /// Reserves memory for `tokens` more in every layer, so that a prompt's rows do not move from chunk to chunk.
  void reserve(index_t id, index_t tokens, queue_type queue) requires has_queue {
    conversations_.sequence(id);
    require(tokens >= 0, "tokens to reserve", tokens, "0 or more", "pass the prompt's length");
    backend_.reserve(id, tokens, queue);
  }

  /// Announces how many tokens the turn's prompt will have, before its first chunk. Budgets of shares then know their
  /// counts, and a store with a pool of pages reserves the prompt's peak, or throws. Where the schedule chooses after
  /// chunks, the reservation is for chunks no longer than the schedule's. The call is optional.
  void announce(index_t id, index_t tokens);

  /// Appends a chunk of the prompt to one layer. The scorer observes its queries.
  /// Shapes   k, v [tokens, kv_heads, dim]; q [n_q, q_heads, k_dim], the queries of the chunk's last n_q tokens: all of
  ///          them, or fewer where the scorer needs fewer (its window, or none). boundaries [tokens], on the host, for
  ///          a recipe that `needs_segments`: 1 for a token after which a segment of the text ends, else 0; the same in
  ///          every layer.
  template <class K, class V, class Q = K>
  void prefill(index_t layer, index_t id, const rows_view<Q>& q, const rows_view<K>& k, const rows_view<V>& v,
               queue_type queue = {}, std::span<const std::uint8_t> boundaries = {});
  template <class K, class V, class Q = K>
  void prefill(index_t layer, index_t id, const rows_view<Q>& q, const rows_view<K>& k, const rows_view<V>& v,
               std::span<const std::uint8_t> boundaries) requires(!has_queue) {
    prefill(layer, id, q, k, v, queue_type(), boundaries);
  }

  /// Causal attention of the newest q.tokens tokens of a layer over all of its stored tokens. Where the recipe's
  /// prefill policy chooses lines, attention is along the lines that it chooses by these queries: then pass a whole
  /// chunk.
  /// Shapes   q [tokens, q_heads, k_dim], out [tokens, q_heads, v_dim], lse [tokens, q_heads] (data null: not wanted).
  template <class Q>
  void prefill_attention(index_t layer, index_t id, const rows_view<Q>& q, const rows_view<Out>& out,
                         const rows_view<float>& lse = {}, queue_type queue = {});

  /// Passes tokens through one layer once more, for a scorer of rereadings (KVzip). They follow the prompt, attend to
  /// all stored tokens and to themselves, and are not stored. The probabilities that they give to the `count` prompt
  /// tokens from position `first` on become scores of these. Call it between the prompt's last chunk and `end_prefill`,
  /// any number of times.
  /// Shapes   q, k, v, out as those of `prefill` and `prefill_attention`, one query for each key.
  template <class Q, class K, class V>
  void reread(index_t layer, index_t id, index_t first, index_t count, const rows_view<Q>& q, const rows_view<K>& k,
              const rows_view<V>& v, const rows_view<Out>& out, queue_type queue = {})
      requires(Recipe::retain_type::rereads || !has_queue);

  /// Sets the scores of a layer's tokens at positions first, ..., first + tokens - 1, for a scorer whose scores an
  /// engine gives (`given_scores`). Scores come in order, and again for tokens that have some: a choice at the end of a
  /// chunk or of a prompt needs those of all tokens so far, earlier answers included. What is no longer stored is
  /// passed over, and so is a layer that does not choose.
  /// Shapes   scores [kv_heads, tokens], fp32, where rows lie.
  /// Errors   tokens that the layer has not had, or behind some without scores: tessera::error.
  /// Cost     CPU: the tokens' slots; CUDA: a launch that reads a layer's positions.
  void set_scores(index_t layer, index_t id, index_t first, index_t tokens, const float* scores, queue_type queue = {})
      requires(Recipe::retain_type::takes_scores);

  /// Ends the turn's prompt in one layer, after the layer's attention. The call is optional and changes no output. It
  /// does the part of `end_prefill` that needs this layer alone: the layer chooses the tokens that it keeps and frees
  /// the rest, or packs its rows into segments. A prompt in one chunk then needs memory for the whole rows of one layer
  /// instead of all layers. Methods whose layers choose together (one threshold over the model, choices that other
  /// layers reuse) choose in `end_prefill`.
  ///
  /// On a GPU segments are made on a stream of the cache's own. They replace whole rows when the next packing layer
  /// ends, when a step is prepared, or sooner if the pool is full: a prompt in one chunk needs the whole rows of two
  /// layers, or one. Rows that join a segment, or have no basis, wait for `end_prefill`. Not within a step.
  /// Errors   on the CPU, rows without a basis: tessera::error, and the layer has not ended.
  void end_layer(index_t layer, index_t id, queue_type queue = {});

  /// Ends a turn's prompt. Where the schedule fires, every layer chooses the tokens that it keeps and frees the rest,
  /// or chooses a filter's candidates. It makes the plan: see `plan`.
  void end_prefill(index_t id, queue_type queue = {});

  // --- steps ---------------------------------------------------------------------------------------------------------

  /// Prepares a step of 1 to 8 tokens for every layer's `decode`, and reserves its memory in every layer. On a GPU it
  /// is the host's part of a step of at most cache_options::step_tokens tokens: call it before a replayed step too, and
  /// never record it. boundaries [ids, tokens], on the host, for a recipe that `needs_step_segments`: 1 for a token
  /// after which a segment of the text ends, else 0.
  batch prepare_step(const host_vector<index_t>& ids, index_t tokens, queue_type queue = {},
                     std::span<const std::uint8_t> boundaries = {}) {
    return prepare(batch{ids, tokens}, queue, boundaries);
  }
  batch prepare_step(const host_vector<index_t>& ids, index_t tokens, std::span<const std::uint8_t> boundaries)
      requires(!has_queue) {
    return prepare_step(ids, tokens, queue_type(), boundaries);
  }

  /// The same with `lengths[b]` tokens of the b-th sequence. Rows of such a step have the tokens of the longest: behind
  /// a sequence's own tokens queries, keys and values have no effect, and outputs are not defined.
  /// Errors   on a GPU, different lengths under a method that reads, scores or chooses by a step's queries:
  ///          tessera::error.
  batch prepare_step(const host_vector<index_t>& ids, const host_vector<index_t>& lengths, queue_type queue = {},
                     std::span<const std::uint8_t> boundaries = {});
  batch prepare_step(const host_vector<index_t>& ids, const host_vector<index_t>& lengths,
                     std::span<const std::uint8_t> boundaries) requires(!has_queue) {
    return prepare_step(ids, lengths, queue_type(), boundaries);
  }

  /// Prepares a pass through the model with chunks of prompts and a step of other sequences. It reserves the step's
  /// memory, and on a GPU that of the chunks. Then `process` takes each layer once. A prompt ends with `end_prefill`,
  /// after the last layer of its last chunk. Lengths may differ from item to item. On a GPU, steps of one length whose
  /// rows lie side by side are read in place, as those of `prepare_step`, and can be recorded; the rows of others are
  /// copied before and after each layer.
  /// boundaries [rows], on the host, for a recipe that `needs_segments`: see `prefill` and `prepare_step`.
  /// Errors   those of `prefill` and of `prepare_step`, for every item: tessera::error, and nothing has changed.
  mixed_batch prepare(const host_vector<batch_item>& items, queue_type queue = {},
                      std::span<const std::uint8_t> boundaries = {});

  /// One layer of a pass: for chunks `prefill` and its attention, for steps `decode`. On a GPU call `begin_step` of
  /// `work.step` before the first layer, if `work.has_step()`.
  /// Shapes   q, out [rows, q_heads, dim], k, v [rows, kv_heads, dim], lse [rows, q_heads] (data null: not wanted): one
  ///          sequence of `work.rows()` tokens, the items' in order.
  /// Errors   those of `prefill` and `decode`. Where memory runs out, some items of the layer are done.
  template <class Q, class K, class V>
  void process(index_t layer, const mixed_batch& work, const rows_view<Q>& q, const rows_view<K>& k,
               const rows_view<V>& v, const rows_view<Out>& out, const rows_view<float>& lse = {},
               queue_type queue = {});

  /// The device's part of a step, before its layers: gathers the batch's numbers and advances positions and lengths.
  void begin_step(const batch& step, queue_type queue) requires has_queue { backend_.begin_step(step, queue); }

  /// One layer of a decode step for a batch of sequences, of any ids: append, retrieve, attend, retain.
  /// Shapes   q [sequences, tokens, q_heads, k_dim], k, v [sequences, tokens, kv_heads, dim], out as q with v_dim, lse
  ///          [sequences, tokens, q_heads] (data null: not wanted). Causal inside the step.
  template <class Q, class K, class V>
  void decode(index_t layer, const batch& step, const rows_view<Q>& q, const rows_view<K>& k, const rows_view<V>& v,
              const rows_view<Out>& out, const rows_view<float>& lse = {}, queue_type queue = {});

  /// Attention of other queries in a layer of a step that has been decoded: nothing is appended, observed or chosen to
  /// stay. For model layers that share the keys and values of this one. What it reads is chosen by these queries. In a
  /// prompt, call `prefill_attention` of the layer that has the rows.
  /// Shapes   as those of `decode`, without k and v.
  /// Errors   a layer that the step has not decoded; a method whose steps add up queries (SentenceKV) or values
  ///          (SparQ): tessera::error.
  template <class Q>
  void attend(index_t layer, const batch& step, const rows_view<Q>& q, const rows_view<Out>& out,
              const rows_view<float>& lse = {}, queue_type queue = {});

  // --- drafts --------------------------------------------------------------------------------------------------------

  /// Prepares a draft for every layer's `decode`: tokens that wait beside the cache until `accept`. A sequence has one
  /// draft at a time, and until it is accepted or cancelled no other call changes the sequence. Nothing is chosen,
  /// dropped or packed meanwhile. Branches have at most the tokens of a step. On a GPU it is the host's part, for which
  /// cache_options::draft_tokens makes the memory; `bound` does not count it.
  /// boundaries [ids, tokens], on the host, for a recipe that `needs_step_segments`: see `prepare_step`.
  /// Errors   those of `prepare_step`; a sequence without tokens; a method whose steps add up queries (SentenceKV) or
  ///          values (SparQ): tessera::error.
  draft_step prepare_draft(const host_vector<index_t>& ids, const host_vector<draft_tree>& trees, queue_type queue = {},
                           std::span<const std::uint8_t> boundaries = {});
  /// Of chains of `tokens` tokens.
  draft_step prepare_draft(const host_vector<index_t>& ids, index_t tokens, queue_type queue = {},
                           std::span<const std::uint8_t> boundaries = {}) {
    return prepare_draft(ids, {draft_tree::chain(tokens)}, queue, boundaries);
  }
  /// The device's part of a draft, before its layers.
  void begin_step(const draft_step& draft, queue_type queue) requires has_queue { backend_.begin_draft(draft, queue); }

  /// One layer of a draft. Each token attends to what a step would read, to its ancestors in the draft and to itself.
  /// The draft's tokens are read beside the budget. Steps that retrieve choose for each token alone. It may be called
  /// again: the last rows count.
  /// Shapes   as those of a step of step.tokens tokens. Rows behind the tokens of a smaller tree have no effect.
  template <class Q, class K, class V>
  void decode(index_t layer, const draft_step& draft, const rows_view<Q>& q, const rows_view<K>& k,
              const rows_view<V>& v, const rows_view<Out>& out, const rows_view<float>& lse = {},
              queue_type queue = {});

  /// Ends the drafts of these sequences. The accepted tokens of each are a path from the beginning of its tree. The
  /// cache then is as after one step of these tokens; the others leave no trace.
  /// Errors   no draft; a layer without its rows; tokens that are no path; on a GPU, different numbers of accepted
  ///          tokens where `prepare_step` refuses different lengths: tessera::error. The drafts then stay.
  void accept(const host_vector<accepted_tokens>& accepted, queue_type queue = {});
  void accept(index_t id, const host_vector<index_t>& nodes, queue_type queue = {}) {
    accept(host_vector<accepted_tokens>{{id, nodes}}, queue);
  }
  /// Accepts the first `tokens` tokens of a chain; 0: none.
  void accept(index_t id, index_t tokens, queue_type queue = {}) {
    host_vector<index_t> nodes;
    for (index_t t = 0; t < tokens; ++t) nodes.push_back(t);
    accept(id, nodes, queue);
  }

  // --- answers -------------------------------------------------------------------------------------------------------

  /// The logical position of the next token: the number of tokens that layer 0 has had.
  index_t next_position(index_t id) const { return conversations_.sequence(id).front().next_position; }

  /// Tokens that a layer stores for one kv_head, and their logical positions, ascending. On a GPU `positions`
  /// synchronises.
  index_t length(index_t layer, index_t id, index_t head) const requires(!has_queue) {
    return backend_.length(checked({layer, id}, head), head);
  }
  host_vector<index_t> positions(index_t layer, index_t id, index_t head) const {
    return backend_.positions(checked({layer, id}, head), head);
  }

  /// The plan of this sequence, made when its last prompt ended for all tokens that it had taken until then. Numbers of
  /// the recipe that the caller set are not planned.
  stage_plan plan(index_t id) const { return conversations_.sequence(id).policies.plan; }
  /// Tokens of the prompt that has begun and not ended, in layer 0; 0: none has.
  index_t prompt_tokens(index_t id) const { return conversations_.sequence(id).front().turn_tokens; }
  /// The tokens that the prompt under way was announced with; 0: it was not.
  index_t announced(index_t id) const { return conversations_.sequence(id).announced; }

  /// Logical positions that this turn's steps may read of one kv_head: a filter's candidates and the tokens decoded
  /// since; without a filter all stored ones. On a GPU it synchronises.
  host_vector<index_t> readable(index_t layer, index_t id, index_t head) const {
    return backend_.readable(checked({layer, id}, head), head);
  }

  /// Whether decode steps record the positions that they attend; off by default. On a GPU a traced step synchronises
  /// and cannot be recorded as a graph.
  void trace_attended(bool on) { backend_.trace_attended(on); }
  /// Positions that the last traced decode step of a layer attended, by kv_head, or by query head where those of a
  /// group read apart.
  const host_vector<host_vector<index_t>>& attended(index_t layer, index_t id) const {
    return backend_.attended(checked({layer, id}));
  }

  /// Whether prompts record the lines that they attend; off by default. On a GPU a traced call synchronises.
  void trace_lines(bool on) { backend_.trace_lines(on); }
  /// Lines of the last traced prompt chunk of a layer; no heads where all of its rows attend everything.
  const prompt_lines& lines(index_t layer, index_t id) const { return backend_.lines(checked({layer, id})); }

  /// Whether the first stage records the tokens that it ranked; off by default. On the CPU.
  void trace_ranked(bool on) requires(!has_queue) { backend_.trace_ranked(on); }
  /// Tokens that competed in the last traced choice of a layer, and their scores, by kv_head; empty without a choice.
  const auto& ranked(index_t layer, index_t id) const requires(!has_queue) {
    return backend_.ranked(checked({layer, id}));
  }

  /// A view of the stored rows of a layer, for engines with their own attention. Valid until the cache changes.
  auto view(index_t layer, index_t id) { return backend_.view(checked({layer, id})); }
  auto view(index_t layer, index_t id) const requires has_queue { return backend_.view(checked({layer, id})); }

  /// Bytes of a sequence in all layers: rows and columns, observed queries, the second stage's index.
  offset_t bytes(index_t id) const { return backend_.bytes(id, conversations_.sequence(id)); }

  /// An upper bound of the memory of one new sequence during a prompt, in chunks of at most `chunk` tokens (0: one
  /// chunk), and its answer, in steps of any length. It covers what `bytes` counts, and a second copy of one layer
  /// while its rows move. Pages are those of the layout's pool, 0 without one. If a schedule chooses after chunks, the
  /// bound holds for announced prompts only. Every token counts as one segment of text. A second turn may take more.
  /// Errors   a turn that the recipe or the cache's sizes do not allow: tessera::error.
  capacity bound(index_t prompt, index_t answer, index_t chunk = 0, const sequence_options& options = {}) const {
    return bound(turn_extent{prompt, answer, chunk}, options);
  }
  /// The same where layers may end one by one: with `turn.layers_end` and a prompt in one chunk, one layer at a time is
  /// whole.
  capacity bound(turn_extent turn, const sequence_options& options = {}) const;
  /// The memory that one more sequence can take now. A sequence whose `bound` fits into it runs to its end if the other
  /// sequences take no more meanwhile. To admit several, subtract their bounds from what an empty cache has. Quantities
  /// without a limit are capacity::unlimited: bytes on the CPU, and bytes where pages run out first. {0, 0}: no more
  /// sequences may be open.
  capacity available() const {
    const index_t upper = backend_.max_sequences();
    return upper > 0 && conversations_.next_id() >= upper ? capacity{} : backend_.available();
  }

  /// Distinct bytes of stored K, V and scores, of candidates, index and sums, that the last decode step of a sequence
  /// touched, summed over layers. What a step writes is not counted. On a GPU it synchronises.
  offset_t bytes_read(index_t id) const { return backend_.bytes_read(id, recipe_, conversations_.sequence(id)); }

  /// Bytes of K and V of an uncompressed sequence of `tokens` tokens.
  offset_t full_bytes(index_t tokens) const {
    return offset_t(shape_.layers) * shape_.kv_heads * tokens * layout::token_bytes();
  }

  /// For a store with ragged pages. `plan_pages`: the pages that a prompt of `tokens` tokens needs, with chunks no
  /// longer than the schedule's that end at its multiples. `pages`: pages of each group of heads of a sequence.
  /// `upper_bound_pages`: the peak of a new sequence's prompt.
  page_plan plan_pages(index_t id, index_t tokens) const requires(Backend::in_groups) {
    return backend_.plan_pages(id, recipe_, conversations_.plan_announced(recipe_, id, tokens), tokens);
  }
  host_vector<index_t> pages(index_t id) const requires(Backend::in_groups) {
    conversations_.sequence(id);
    const auto& rows = backend_.store().rows();
    host_vector<index_t> counts;
    for (index_t group = 0; group < rows.groups().count(); ++group) counts.push_back(rows.page_count(id, group));
    return counts;
  }
  index_t upper_bound_pages(index_t tokens) const requires(Backend::in_groups) {
    return backend_.plan_pages(-1, recipe_, conversations_.plan_first(recipe_, tokens), tokens).peak;
  }

  /// For rows whose packing strategies are searched. `strategies` returns a report. `search_on` replaces the thread
  /// that searches; call it before the first step. Copies of a cache share the thread. After it is stopped, caches keep
  /// the strategies that they have.
  strategy_report strategies(index_t id) const requires searches {
    conversations_.sequence(id);
    return backend_.store().searches().report(id);
  }
  const std::shared_ptr<background>& searcher() const requires searches { return backend_.store().searches().worker(); }
  void search_on(std::shared_ptr<background> worker) requires searches {
    require(worker != nullptr, "the thread that searches strategies", "none", "one", "pass a background");
    backend_.store().searches().use(std::move(worker));
  }

  /// On a GPU: reallocates the rows for the stored tokens and `tokens` more of every sequence, in place of
  /// cache_options::rows. Rows in pages stay. Steps that a graph recorded must be recorded anew. Allocates the new
  /// memory before it releases the old one; synchronises.
  /// Errors   too little memory, or a step with layers to go: tessera::error, and nothing has changed.
  void fit_memory(index_t tokens, queue_type queue) requires has_queue { backend_.fit_memory(tokens, queue); }
  /// On a GPU: the largest number of bytes of rows that were ever in use at one time, all sequences together.
  offset_t peak_bytes() const requires has_queue { return backend_.store().peak_bytes(); }
  /// On the device, by sequence of the batch: the position of the first token of the step that `begin_step` began.
  const index_t* step_positions() const requires has_queue { return backend_.step_positions(); }

 private:
  /// Errors   tokens of a layer that chooses by an engine's scores have none: tessera::error.
  void require_scores(sequence_layer owner) const;
  /// Rows of a call, which may lie in memory that may be written.
  template <class Q, class K, class V>
  struct read_rows {
    rows_view<const Q> q;
    rows_view<const common_element<K, V>> k, v;
  };

  static void require_even(const batch& step);
  static void require_drafts();
  batch prepare(batch step, queue_type queue, std::span<const std::uint8_t> boundaries);
  truncation plan_truncation(index_t id, index_t position) const;
  void carry_out(index_t id, const truncation& plan, default_queue queue);
  void take_back_step(index_t id, default_queue queue);

  sequence_layer checked(sequence_layer owner) const {
    conversations_.progress(owner);
    return owner;
  }
  sequence_layer checked(sequence_layer owner, index_t head) const {
    conversations_.check_head(owner, head);
    return owner;
  }

  model_shape shape_;
  Recipe recipe_;
  conversations<Recipe> conversations_;
  detours<Recipe> detours_;
  Backend backend_;
};

TESSERA_NAMESPACE_END

#include "detail/basic_cache_calls.hpp"
#include "detail/prompt_end_calls.hpp"
#include "detail/saving.hpp"
