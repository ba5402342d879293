// Paged retrieval over an engine's own blocks on the CPU: what a step reads of every row of a batch.
#pragma once

#include <algorithm>
#include <string>

#include "../../../../core/engine/read_problem.hpp"
#include "../../kernel/executor.hpp"
#include "page_scores.hpp"

TESSERA_NAMESPACE_BEGIN
namespace cpu {

/// Chooses what a step reads of an engine's blocks, as choose_by_pages does of an index of its own: the same slots.
///
/// `scorer` is fitted: its page is the index's. A step of several tokens reads its own tokens in any case.
/// Shapes   as choose_by_blocks_problem says; rows of `out` hold `max_chosen_slots` of the longest row.
/// Errors   shapes that do not fit, tables that leave the pool, positions that do not ascend: tessera::error.
/// Cost     reads the chosen channels of the extrema of every stored page, 2 * k_dim values a page at most.
template <class View, paged_scorer Scorer, class Selector>
void choose_by_blocks(const choose_by_blocks_problem<View>& p, const Scorer& scorer, const Selector& selector,
                      host_vector<page_workspace<View::k_dim>>& workspaces, executor& workers) {
  static_assert(!Scorer::adds_mean_value,
                "tessera: an index by block has no sums of values, which this scorer adds for what is not attended");
  require(scorer.page == p.index.page, "page of the scorer", scorer.page,
          std::to_string(p.index.page) + ", as in the index", "fit the scorer, and index pages of its size");
  const index_t heads = p.view.kv_heads, step = p.q.tokens > 1 ? p.q.tokens : 0;
  const auto tail_of = [&](index_t read) { return (std::max)(step, scorer.protected_tail(read)); };
  require_memory(p.view, false, false);
  index_t longest = 0;
  offset_t total = 0;
  for (index_t row = 0; row < p.view.sequences * heads; ++row) {
    const index_t n = p.view.length(row / heads, row % heads);
    longest = (std::max)(longest, n), total += n;
  }
  p.check(max_chosen_slots(p.read, scorer.page, tail_of(p.read), longest));
  require_pages(p.view, p.pool);
  for (index_t b = 0; p.reads && b < p.view.sequences; ++b) {
    require(p.reads[b] >= 1 && p.reads[b] <= p.read, "tokens to read of sequence " + std::to_string(b), p.reads[b],
            "1 to " + std::to_string(p.read), "pass as `read` the most that a sequence attends");
  }
  for (index_t b = 0; p.channels && b < p.view.sequences; ++b) {
    require(p.channels[b] >= 1 && p.channels[b] <= View::k_dim, "channels of sequence " + std::to_string(b),
            p.channels[b], "1 to " + std::to_string(View::k_dim), "pass what the plan of its prompt says");
  }
  workspaces.resize((std::max)(workspaces.size(), std::size_t(workers.threads())));
  workers.for_each(
      p.view.sequences * heads,
      [&](index_t row, int worker) {
        const index_t b = row / heads, read = p.reads ? p.reads[b] : p.read;
        Scorer of_sequence = scorer;
        if (p.channels) of_sequence.channels = p.channels[b];
        p.counts[row] = choose_by_pages(p.view, b, row % heads, p.index,
                                        query_rows<typename View::element_type>{p.q, p.first_position}, p.rule,
                                        of_sequence, selector, tail_of(read), read, p.out + row * p.out_stride, nullptr,
                                        workspaces[std::size_t(worker)])
                            .count;
      },
      double(total) / p.index.page * scorer.channels * p.q.tokens * (p.q.heads / heads));
}

}  // namespace cpu
TESSERA_NAMESPACE_END
