// Calls whose tokens are taken back, all or some, against a model of what a cache promises.
#pragma once

#include "prompt_calls.hpp"

namespace support {

/// Detours, which leave no trace, and drafts, of which the accepted tokens stay.
class draft_calls : public prompt_calls {
 protected:
  using prompt_calls::prompt_calls;

  /// Steps, a draft, or a chunk of a prompt, which only the cache makes, and takes back. From then on its twin must still
  /// go on alike, to the bit. Not in tight pools: a detour leaves rows in other places, and less room may be in one piece.
  bool detour(const cache_call& call) {
    const index_t tokens = call.q.tokens;
    const bool is_chunk = call.first == detour_kind::chunk || call.first == detour_kind::part_of_chunk;
    const bool is_part = call.first == detour_kind::part_of_chunk || call.first == detour_kind::part_of_step;
    bool possible = !limits_.is_tight && !call.ids.empty() && call.q.sequences == index_t(call.ids.size()) &&
                    !is_under_way() && tokens >= 1;
    if (call.first != detour_kind::draft) possible = possible && !method_.searches;
    if (is_chunk) possible = possible && call.ids.size() == 1 && !method_.filters;
    if (is_part) possible = possible && call.tokens >= (is_chunk || limits_.on_device) && call.tokens < shape_.layers;
    if (!is_chunk) {
      const bool reads_them = !method_.exact || method_.read >= tokens;
      possible = possible && tokens <= limits_.step_tokens && reads_them;
    }
    for (const index_t id : call.ids) {
      const sequence* held = known(id);
      possible = possible && held && held->is_between_turns() && !held->is_cut && held->next[0] <= 90 &&
                 std::count(call.ids.begin(), call.ids.end(), id) == 1;
    }
    if (!possible) return false;
    auto gone = cache_->copy();
    turn_ = 0;
    try {  // there may be no room, or the method cannot go back
      take_detour(*gone, call);
    } catch (const tessera::error&) {
      return false;
    }
    if (is_part || call.first == detour_kind::draft) {
      for (const index_t id : call.ids) gone->cancel(id);
    } else {
      for (const index_t id : call.ids) {
        if (gone->settled(id) > known(id)->next[0]) return false;
      }
      for (const index_t id : call.ids) gone->truncate(id, known(id)->next[0]);
    }
    for (const index_t id : call.ids)
      must(gone->next_position(id) == known(id)->next[0], "a detour ends where it began");
    cache_ = std::move(gone);
    has_detoured_ = true;
    return true;
  }

  /// A draft of the cache, of which some tokens are accepted. Its twin, and the reference, take a step of these tokens.
  bool draft(const cache_call& call) {
    if (!can_draft(call)) return false;
    const tessera::draft_tree tree(tessera::host_vector<index_t>(call.parents.begin(), call.parents.end()));
    if (tree.longest_branch() > limits_.step_tokens) return false;
    std::vector<tessera::accepted_tokens> accepted;
    std::vector<index_t> ids, lengths;
    for (std::size_t b = 0; b < call.ids.size(); ++b) {
      accepted.push_back({call.ids[b], call.nodes[b]});
      if (call.nodes[b].empty()) continue;
      ids.push_back(call.ids[b]);
      lengths.push_back(index_t(call.nodes[b].size()));
    }
    // A step of several tokens must read them all. To accept them reads nothing, so there is no step to compare with.
    for (std::size_t b = 0; b < ids.size(); ++b)
      if (const index_t read = cache_->plan(ids[b]).read; read > 0 && read < lengths[b]) return false;
    turn_ = 0;
    auto drafted = cache_->copy();
    try {
      pass_draft(*drafted, call, tree);
    } catch (const tessera::error& refusal) {
      must(std::string(refusal.what()).find("add up queries") != std::string::npos || limits_.on_device ||
               limits_.is_tight || method_.exact,
           "a draft is not refused", refusal.what());
      return false;
    }
    cache_ = std::move(drafted);
    has_detoured_ = true;
    step_.is_stale = true;
    const bool done = apply(std::nullopt, [&](called_cache& cache) {
      if (turn_ == 0) return cache.accept(accepted);
      if (!ids.empty()) pass_accepted(cache, call, ids, lengths);
    });
    if (!done) {
      for (const index_t id : call.ids) cache_->cancel(id);
      return false;
    }
    for (std::size_t b = 0; b < ids.size(); ++b) {
      sequence& held = *changed(ids[b]);
      held.step_tokens = lengths[b];
      for (index_t& next : held.next) next += lengths[b];
    }
    for (const index_t id : ids) compare_stored(id);
    return true;
  }

 private:
  bool can_draft(const cache_call& call) const {
    const index_t tokens = index_t(call.parents.size());
    bool possible = !call.ids.empty() && tokens >= 1 && call.q.tokens == tokens && !is_under_way() &&
                    call.q.sequences == index_t(call.ids.size()) && call.nodes.size() == call.ids.size();
    for (const index_t id : call.ids) {
      const sequence* held = known(id);
      possible = possible && held && held->is_between_turns() && !held->is_cut && held->next[0] >= 1 &&
                 held->next[0] <= 90 && std::count(call.ids.begin(), call.ids.end(), id) == 1;
    }
    return possible;
  }

  void take_detour(called_cache& cache, const cache_call& call) {
    if (call.first == detour_kind::draft) return pass_draft(cache, call, tessera::draft_tree::chain(call.q.tokens));
    if (call.first == detour_kind::part_of_chunk) {
      pass_chunk(cache, call, call.tokens);
      return cancel_to_see(cache, call);
    }
    if (call.first == detour_kind::part_of_step) {
      pass_step(cache, call, call.tokens);
      return cancel_to_see(cache, call);
    }
    if (call.first == detour_kind::chunk) return pass_chunk(cache, call, shape_.layers);
    for (index_t made = 0; made < call.first; ++made) pass_step(cache, call, shape_.layers);
  }
  /// A copy says whether the method takes parts back at all.
  void cancel_to_see(const called_cache& cache, const cache_call& call) const {
    const auto tried = cache.copy();
    for (const index_t id : call.ids) tried->cancel(id);
  }
  void pass_step(called_cache& cache, const cache_call& call, index_t layers) {
    const tessera::batch now = cache.prepare_step(call.ids, call.q.tokens);
    cache.begin_step(now);
    for (index_t layer = 0; layer < layers; ++layer) {
      const auto [out, lse] = take(call.wanted);
      cache.decode(layer, now, call.q, call.k, call.v, out, lse);
    }
  }
  void pass_chunk(called_cache& cache, const cache_call& call, index_t layers) {
    for (index_t layer = 0; layer < layers; ++layer) {
      const auto [out, lse] = take(call.wanted);
      cache.prefill(layer, call.ids[0], call.q, call.k, call.v);
      cache.prefill_attention(layer, call.ids[0], call.q, out, lse);
    }
  }
  void pass_draft(called_cache& cache, const cache_call& call, const tessera::draft_tree& tree) {
    const tessera::draft_step now = cache.prepare_draft(call.ids, tree);
    cache.begin_draft(now);
    for (index_t layer = 0; layer < shape_.layers; ++layer) {
      const auto [out, lse] = take(call.wanted);
      cache.decode_draft(layer, now, call.q, call.k, call.v, out, lse);
    }
  }

  /// Rows of the accepted tokens, by sequence.
  struct accepted_rows {
    std::vector<float> memory;
    called_cache::rows view;
  };
  static accepted_rows gathered(const called_cache::rows& all, const cache_call& call, index_t longest) {
    accepted_rows made;
    index_t sequences = 0;
    for (std::size_t b = 0; b < call.nodes.size(); ++b) {
      if (call.nodes[b].empty()) continue;
      ++sequences;
      for (index_t t = 0; t < longest; ++t) {
        const bool is_own = std::size_t(t) < call.nodes[b].size();
        for (index_t head = 0; head < all.heads; ++head) {
          const float* row = all.row(index_t(b), is_own ? call.nodes[b][std::size_t(t)] : 0, head);
          made.memory.insert(made.memory.end(), row, row + cache_call::dim);
        }
      }
    }
    made.view = tessera::nhd_rows<const float>(made.memory.data(), longest, all.heads, cache_call::dim, sequences);
    return made;
  }
  void pass_accepted(called_cache& cache, const cache_call& call, const std::vector<index_t>& ids,
                     const std::vector<index_t>& lengths) {
    const index_t longest = *std::max_element(lengths.begin(), lengths.end());
    const bool are_even = std::count(lengths.begin(), lengths.end(), longest) == index_t(lengths.size());
    const tessera::batch now = are_even ? cache.prepare_step(ids, longest) : cache.prepare_uneven(ids, lengths);
    cache.begin_step(now);
    const accepted_rows q = gathered(call.q, call, longest), k = gathered(call.k, call, longest),
                        v = gathered(call.v, call, longest);
    const auto sequences = index_t(ids.size());
    std::vector<float> to(std::size_t(sequences * longest * shape_.q_heads * cache_call::dim));
    for (index_t layer = 0; layer < shape_.layers; ++layer)
      cache.decode(layer, now, q.view, k.view, v.view,
                   tessera::nhd_rows(to.data(), longest, shape_.q_heads, cache_call::dim, sequences), {});
  }
};

}  // namespace support
