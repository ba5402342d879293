// What the calls of a cache do, in which order. Their contracts stand in basic_cache.hpp.
#pragma once

#include "../basic_cache.hpp"

TESSERA_NAMESPACE_BEGIN

template <class Recipe, class Backend>
void basic_cache<Recipe, Backend>::set_budget(index_t tokens, default_queue queue) {
  const default_float_mode mode;
  Recipe changed = recipe_;
  changed.set_budget(tokens);
  changed.check();
  conversations_.check_budget_change();
  for (index_t id = 0; id < conversations_.size(); ++id) {
    if (conversations_.is_open(id)) backend_.check_budgets(changed, conversations_.sequence(id).with_budgets(changed));
  }
  backend_.follow_budget(changed, queue);
  recipe_ = changed;
  conversations_.follow_budget(recipe_);
  backend_.follow_plans(conversations_, queue);
}

template <class Recipe, class Backend>
index_t basic_cache<Recipe, Backend>::open(const sequence_options& options, default_queue queue) {
  const default_float_mode mode;
  const own_budgets<Recipe> budgets(recipe_, options);
  conversations_.require_room(backend_.max_sequences());
  const Recipe own = budgets.fitted(recipe_, {});
  backend_.check_budgets(recipe_, own);
  backend_.open(conversations_.next_id(), planned<Recipe>(own, 0), queue);
  return conversations_.open(recipe_, budgets);
}

template <class Recipe, class Backend>
index_t basic_cache<Recipe, Backend>::fork(index_t id, default_queue queue) {
  const default_float_mode mode;
  conversations_.sequence(id).check_fork();
  detours_.require_none(id);
  conversations_.require_room(backend_.max_sequences());
  backend_.check_fork(id);
  const index_t copy = conversations_.next_id();
  backend_.fork(id, copy, conversations_.sequence(id), queue);
  try {
    return conversations_.fork(id);
  } catch (...) {
    backend_.close(copy, queue);
    throw;
  }
}

template <class Recipe, class Backend>
index_t basic_cache<Recipe, Backend>::fork(index_t id, index_t position, default_queue queue) {
  const default_float_mode mode;
  const truncation plan = plan_truncation(id, position);
  const index_t copy = fork(id, queue);
  carry_out(copy, plan, queue);
  return copy;
}

template <class Recipe, class Backend>
truncation basic_cache<Recipe, Backend>::plan_truncation(index_t id, index_t position) const {
  conversations_.sequence(id);
  detours_.require_none(id);
  backend_.check_truncation(id);
  return conversations_.plan_truncation(id, position, settled(id));
}

template <class Recipe, class Backend>
void basic_cache<Recipe, Backend>::carry_out(index_t id, const truncation& plan, default_queue queue) {
  if (plan.tokens == 0) return;
  backend_.truncate(id, plan, conversations_.sequence(id), queue);
  conversations_.truncate(id, plan);
  if (plan.withdraws || !plan.is_of_prompt) conversations_.follow_shares(recipe_, id, 0);
}

template <class Recipe, class Backend>
void basic_cache<Recipe, Backend>::truncate(index_t id, index_t position, default_queue queue) {
  const default_float_mode mode;
  carry_out(id, plan_truncation(id, position), queue);
}

template <class Recipe, class Backend>
void basic_cache<Recipe, Backend>::close(index_t id, default_queue queue) {
  conversations_.close(id);
  backend_.close(id, queue);
  detours_.forget(id);
  for (index_t alone; (alone = detours_.cancelled_alone(conversations_)) >= 0;) take_back_step(alone, queue);
}

template <class Recipe, class Backend>
void basic_cache<Recipe, Backend>::cancel(index_t id, default_queue queue) {
  const default_float_mode mode;
  const sequence_state<Recipe>& state = conversations_.sequence(id);
  if (detours_.has_draft(id)) return backend_.end_draft(id), detours_.forget(id);
  detours_.require_none(id);
  if (state.front().turn_tokens > 0) return carry_out(id, plan_cancelled_chunk(state, settled(id)), queue);
  require(backend_.is_under_way(state, id), "call under way for sequence " + std::to_string(id), "none",
          "a draft, a chunk or a step with layers left", "call truncate for what every layer has");
  require(Backend::cancels_steps && settled(id) <= state.step_began, "step of sequence " + std::to_string(id),
          "one that cannot be taken back", "one of a method that neither chooses in steps nor packs rows",
          "take drafts, which every method can take back");
  detours_.cancel(id);
  for (index_t alone; (alone = detours_.cancelled_alone(conversations_)) >= 0;) take_back_step(alone, queue);
}

template <class Recipe, class Backend>
void basic_cache<Recipe, Backend>::take_back_step(index_t id, default_queue queue) {
  const sequence_state<Recipe>& state = conversations_.sequence(id);
  const index_t began = state.step_began;
  carry_out(id, truncation{began, state.front().next_position - began}, queue);
  backend_.forget_step(id);
  conversations_.forget_step(id);
  conversations_.follow_shares(recipe_, id, 0);
  detours_.forget(id);
}

template <class Recipe, class Backend>
void basic_cache<Recipe, Backend>::announce(index_t id, index_t tokens) {
  const default_float_mode mode;
  const planned<Recipe> policies = conversations_.plan_announced(recipe_, id, tokens);
  detours_.require_none(id);
  if constexpr (Backend::in_groups) backend_.reserve_pages(id, backend_.plan_pages(id, recipe_, policies, tokens).peak);
  conversations_.announce(id, tokens, policies);
}

template <class Recipe, class Backend>
template <class K, class V, class Q>
void basic_cache<Recipe, Backend>::prefill(index_t layer, index_t id, const rows_view<Q>& q, const rows_view<K>& k,
                                           const rows_view<V>& v, queue_type queue,
                                           std::span<const std::uint8_t> boundaries) {
  const default_float_mode mode;
  const sequence_layer owner{layer, id};
  const auto [queries, keys, values] = read_rows<Q, K, V>{q, k, v};
  conversations_.check_chunk(recipe_, owner, queries, keys, values);
  detours_.require_none(id);
  const prompt_chunk chunk{conversations_.progress(owner).next_position,
                           conversations_.progress(owner).turn_tokens == 0,
                           conversations_.check_boundaries(owner, boundaries, k.tokens)};
  const planned<Recipe>& policies = conversations_.sequence(id).policies;
  backend_.check_chunk(owner, queries);
  if (chunk.begins && layer == 0) backend_.begin_prompt(id, queue);  // before the turn's rows join what is open
  if (conversations_.chunk_is_due(recipe_, owner, k.tokens)) {
    require_scores(owner);
    const index_t reconsidered = conversations_.reconsidered_tokens(owner);
    backend_.end_chunk(owner, policies, conversations_.reach(owner), reconsidered, k.tokens, queue);
    conversations_.ended_chunk(owner, reconsidered);
  }
  if (layer == 0 && conversations_.sequence(id).announced == 0) backend_.expect_chunk(id, k.tokens);  // for all layers
  backend_.append_chunk(owner, policies, chunk, queries, keys, values, queue);
  conversations_.took_chunk(owner, k.tokens, chunk.marks);
}

template <class Recipe, class Backend>
template <class Q>
void basic_cache<Recipe, Backend>::prefill_attention(index_t layer, index_t id, const rows_view<Q>& q,
                                                     const rows_view<Out>& out, const rows_view<float>& lse,
                                                     queue_type queue) {
  const default_float_mode mode;
  const sequence_layer owner{layer, id};
  const auto queries = read_only(q);
  conversations_.check_prompt_attention(owner, queries, out, lse);
  backend_.attend_chunk(owner, recipe_, conversations_.progress(owner).next_position - q.tokens, queries, out, lse,
                        queue);
}

template <class Recipe, class Backend>
template <class Q, class K, class V>
void basic_cache<Recipe, Backend>::reread(index_t layer, index_t id, index_t first, index_t count,
                                          const rows_view<Q>& q, const rows_view<K>& k, const rows_view<V>& v,
                                          const rows_view<Out>& out, queue_type queue)
    requires(Recipe::retain_type::rereads || !has_queue) {
  const default_float_mode mode;
  const sequence_layer owner{layer, id};
  const auto [queries, keys, values] = read_rows<Q, K, V>{q, k, v};
  conversations_.check_rereading(owner, first, count, queries, keys, values, out);
  const reread_part part{first, first + count, conversations_.progress(owner).next_position};
  backend_.reread(owner, conversations_.sequence(id).policies, part, queries, keys, values, out, queue);
}

template <class Recipe, class Backend>
batch basic_cache<Recipe, Backend>::prepare_step(const host_vector<index_t>& ids, const host_vector<index_t>& lengths,
                                                 queue_type queue, std::span<const std::uint8_t> boundaries) {
  require(lengths.size() == ids.size(), "lengths of a decode step", lengths.size(),
          "one for each sequence, which are " + std::to_string(ids.size()), "pass the tokens of each sequence");
  batch step{ids, lengths.empty() ? 0 : *std::max_element(lengths.begin(), lengths.end())};
  step.lengths = lengths;
  step.drop_equal_lengths();
  require_even(step);
  return prepare(std::move(step), queue, boundaries);
}

template <class Recipe, class Backend>
void basic_cache<Recipe, Backend>::require_even(const batch& step) {
  require(step.lengths.empty() || Backend::takes_uneven_steps, "lengths of a decode step", "different",
          "the same of all sequences",
          "step sequences of equal length together: on a GPU this method reads or chooses by all queries of a step");
}

template <class Recipe, class Backend>
batch basic_cache<Recipe, Backend>::prepare(batch step, queue_type queue, std::span<const std::uint8_t> boundaries) {
  const default_float_mode mode;
  step = conversations_.plan_step(recipe_, std::move(step), backend_.max_step_tokens(), boundaries);
  for (const index_t id : step.ids) detours_.require_none(id);
  for (index_t b = 0; b < step.sequences(); ++b)
    conversations_.follow_shares(recipe_, step.ids[std::size_t(b)], step.tokens_of(b));
  try {
    conversations_.check_reads(recipe_, step);
    backend_.prepare_step(recipe_, step, conversations_, queue);
  } catch (...) {
    for (const index_t id : step.ids) conversations_.follow_shares(recipe_, id, 0);
    throw;
  }
  step = conversations_.begin_step(std::move(step));
  backend_.begin_counting(step, conversations_);
  return step;
}

template <class Recipe, class Backend>
mixed_batch basic_cache<Recipe, Backend>::prepare(const host_vector<batch_item>& items, queue_type queue,
                                                  std::span<const std::uint8_t> boundaries) {
  const default_float_mode mode;
  mixed_batch work = mixed_batch::laid_out(items);
  conversations_.check_chunks(work, boundaries);
  for (const batch_item& item : items) detours_.require_none(item.id);
  if constexpr (Recipe::needs_segments) work.boundaries.assign(boundaries.begin(), boundaries.end());
  require_even(work.step);
  host_vector<std::uint8_t> of_step;
  if constexpr (Recipe::needs_step_segments) {
    of_step.assign(std::size_t(work.step.sequences() * work.step.tokens), 0);
    for (std::size_t i = 0, b = 0; i < items.size(); ++i) {
      if (items[i].is_prompt) continue;
      std::copy_n(boundaries.begin() + work.indptr[i], items[i].tokens,
                  of_step.begin() + offset_t(b++) * work.step.tokens);
    }
  }
  if constexpr (has_queue) {
    for (const batch_item& item : items) {
      if (item.is_prompt) backend_.reserve(item.id, item.tokens, queue);
    }
  }
  for (const batch_item& item : items) work.positions.push_back(conversations_.sequence(item.id).front().next_position);
  if (work.has_step()) work.step = prepare(std::move(work.step), queue, of_step);
  return work;
}

template <class Recipe, class Backend>
template <class Q, class K, class V>
void basic_cache<Recipe, Backend>::process(index_t layer, const mixed_batch& work, const rows_view<Q>& q,
                                           const rows_view<K>& k, const rows_view<V>& v, const rows_view<Out>& out,
                                           const rows_view<float>& lse, queue_type queue) {
  require(work.is_whole() && work.rows() > 0, "batch", "changed", "what prepare returned", "pass the batch as it is");
  const index_t rows = first_other(work.rows(), q.tokens, k.tokens, v.tokens);
  require(q.sequences == 1 && k.sequences == 1 && v.sequences == 1 && rows == work.rows(), "rows of a batch", rows,
          "one sequence of " + std::to_string(work.rows()) + " in q, k and v", "pass the rows of all items");
  shape_.check_rows(q, k, v, k_dim, v_dim);
  shape_.check_output(q, out, lse, k_dim, v_dim);
  for (std::size_t i = 0; i < work.items.size(); ++i) {
    if (!work.items[i].is_prompt) continue;
    const index_t next = conversations_.require_not_ended({layer, work.items[i].id}).next_position;
    require(next == work.positions[i], "tokens of a layer before the batch", next, std::to_string(work.positions[i]),
            "prepare every batch, and give every layer once to process");
  }
  if (work.has_step()) {
    decode(layer, work.step, work.step_rows(q), work.step_rows(k), work.step_rows(v), work.step_rows(out),
           work.step_rows(lse), queue);
  }
  for (std::size_t i = 0; i < work.items.size(); ++i) {
    const batch_item& item = work.items[i];
    if (!item.is_prompt) continue;
    const auto marks = std::span<const std::uint8_t>(work.boundaries);
    prefill(layer, item.id, work.rows_of(q, i), work.rows_of(k, i), work.rows_of(v, i), queue,
            marks.empty() ? marks : marks.subspan(std::size_t(work.indptr[i]), std::size_t(item.tokens)));
    prefill_attention(layer, item.id, work.rows_of(q, i), work.rows_of(out, i), work.rows_of(lse, i), queue);
  }
}

template <class Recipe, class Backend>
template <class Q, class K, class V>
void basic_cache<Recipe, Backend>::decode(index_t layer, const batch& step, const rows_view<Q>& q,
                                          const rows_view<K>& k, const rows_view<V>& v, const rows_view<Out>& out,
                                          const rows_view<float>& lse, queue_type queue) {
  const default_float_mode mode;
  const auto [queries, keys, values] = read_rows<Q, K, V>{q, k, v};
  conversations_.check_step(layer, step, queries, keys, values, out, lse);
  backend_.require_layer(layer, step, conversations_, queue);
  backend_.decode(layer, recipe_, step, conversations_, queries, keys, values, out, lse, queue);
  backend_.count_layer(layer, step, conversations_, queue);
  if (layer + 1 < shape_.layers) return;
  for (index_t id; (id = detours_.cancelled_of(step)) >= 0;) take_back_step(id, queue);
}

template <class Recipe, class Backend>
draft_step basic_cache<Recipe, Backend>::prepare_draft(const host_vector<index_t>& ids,
                                                       const host_vector<draft_tree>& trees, queue_type queue,
                                                       std::span<const std::uint8_t> boundaries) {
  const default_float_mode mode;
  require_drafts();
  draft_step draft{batch{ids}, trees};
  for (const draft_tree& tree : trees) draft.step.tokens = (std::max)(draft.step.tokens, tree.tokens());
  detours_.check(draft, conversations_, backend_.max_draft_tokens(), backend_.max_step_tokens(), boundaries);
  backend_.prepare_draft(draft, conversations_, queue);
  draft.step.number = conversations_.next_number();
  backend_.begin_counting_draft(draft);
  detours_.begin(draft, boundaries);
  return draft;
}

template <class Recipe, class Backend>
template <class Q, class K, class V>
void basic_cache<Recipe, Backend>::decode(index_t layer, const draft_step& draft, const rows_view<Q>& q,
                                          const rows_view<K>& k, const rows_view<V>& v, const rows_view<Out>& out,
                                          const rows_view<float>& lse, queue_type queue) {
  const default_float_mode mode;
  require_drafts();
  const auto [queries, keys, values] = read_rows<Q, K, V>{q, k, v};
  detours_.require_pending(draft);
  conversations_.check_draft(layer, draft.step, queries, keys, values, out, lse);
  backend_.decode_draft(layer, recipe_, draft, conversations_, queries, keys, values, out, lse, queue);
}

template <class Recipe, class Backend>
void basic_cache<Recipe, Backend>::accept(const host_vector<accepted_tokens>& accepted, queue_type queue) {
  const default_float_mode mode;
  require_drafts();
  batch step = detours_.step_of(accepted);
  for (const accepted_tokens& part : accepted) backend_.require_drafted(part.id, detours_.number(part.id));
  if (!step.ids.empty()) {
    require_even(step);
    const host_vector<std::uint8_t> boundaries = detours_.boundaries_of(accepted, step);
    step = conversations_.plan_step(recipe_, std::move(step), backend_.max_step_tokens(), boundaries);
    for (index_t b = 0; b < step.sequences(); ++b)
      conversations_.follow_shares(recipe_, step.ids[std::size_t(b)], step.tokens_of(b));
    try {
      backend_.plan_accepted(recipe_, step, accepted, conversations_, queue);
    } catch (...) {
      for (const index_t id : step.ids) conversations_.follow_shares(recipe_, id, 0);
      throw;
    }
    step = conversations_.begin_step(std::move(step));
    backend_.begin_counting(step, conversations_);
    backend_.commit_accepted(recipe_, step, conversations_, queue);
  }
  for (const accepted_tokens& part : accepted) backend_.end_draft(part.id), detours_.forget(part.id);
}

template <class Recipe, class Backend>
void basic_cache<Recipe, Backend>::require_drafts() {
  require(!Recipe::retrieve_type::adds_up, "draft", "asked for",
          "none of a method whose steps add up queries or values",
          "take steps of single tokens, or a method whose steps only read");
}

template <class Recipe, class Backend>
template <class Q>
void basic_cache<Recipe, Backend>::attend(index_t layer, const batch& step, const rows_view<Q>& q,
                                          const rows_view<Out>& out, const rows_view<float>& lse, queue_type queue) {
  const default_float_mode mode;
  const auto queries = read_only(q);
  require(!Recipe::retrieve_type::adds_up, "method", "one whose steps add up queries or values",
          "one whose steps only read", "decode the layer with keys and values of its own");
  conversations_.check_queries(layer, step, queries, out, lse);
  backend_.require_decoded(layer, step, conversations_, queue);
  backend_.attend(layer, recipe_, step, conversations_, queries, out, lse, queue);
}

template <class Recipe, class Backend>
capacity basic_cache<Recipe, Backend>::bound(turn_extent turn, const sequence_options& options) const {
  if (turn.chunk == 0) turn.chunk = turn.prompt;
  turn.step = backend_.max_step_tokens();
  turn.check();
  const own_budgets<Recipe> budgets(recipe_, options);
  // Shares grow within the answer: the last step's are the largest.
  const Recipe own = budgets.fitted(recipe_, {turn.tokens(), turn.answer});
  backend_.check_budgets(recipe_, own);
  const planned<Recipe> policies = conversations_.plan_first(own, turn.prompt);
  return backend_.upper_bound(own, policies, layer_peaks(own, policies, backend_.roles(), shape_, turn));
}

TESSERA_NAMESPACE_END
