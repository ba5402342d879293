// Retrieval by segments on the CPU: the mean key of every segment is read, the tokens of the best segments are
// attended.
#pragma once

#include <algorithm>

#include "../../../../core/host/host_vector.hpp"
#include "../../../../core/model_shape.hpp"
#include "../../../../planned.hpp"
#include "../../kernel/executor.hpp"
#include "../../kernel/rows.hpp"
#include "../../kernel/scratch.hpp"
#include "../reader.hpp"

TESSERA_NAMESPACE_BEGIN
namespace cpu {

/// Keeps, for every (layer, sequence), the sum of each segment's keys by kv_head, and the sum of the queries of the
/// answer's last segment. Its views are `segmented_view`s.
template <class Recipe>
class segment_reader {
  static constexpr int k_dim = Recipe::layout_type::k_dim;

 public:
  explicit segment_reader(const model_shape& shape) : heads_(std::size_t(shape.kv_heads)) {}

  void open(std::size_t index) {
    while (entries_.size() <= index) entries_.push_back({host_vector<head_index>(heads_), {}, {}});
    clear(index);
  }
  void clear(std::size_t index) {
    forget(index);
    entries_[index].previous.clear();
    entries_[index].current.clear();
  }
  void copy(std::size_t source, std::size_t target) { entries_[target] = entries_[source]; }
  template <class Archive>
  void transfer(std::size_t index, Archive& archive) {
    index_t form = 0;
    archive.number(form);
    archive.require(form == 0, "with a GPU's sums of queries, which the CPU does not read");
    for (spoken* part : {&entries_[index].previous, &entries_[index].current}) {
      for (index_t* number : {&part->segment, &part->tokens, &part->end}) archive.number(*number);
      archive.numbers(part->sums, offset_t(heads_) * k_dim);
      archive.require(part->sums.empty() || part->sums.size() == heads_ * std::size_t(k_dim), "with a part of a sum");
      archive.require(part->segment >= -1 && part->tokens >= 0 && part->end >= -1, "with sums that cannot be");
    }
  }
  /// Keeps the sums of queries: the position of the next step tells whether the last step failed.
  void forget(std::size_t index) {
    for (head_index& keys : entries_[index].heads) keys.clear();
  }

  template <class View>
  void refresh(std::size_t index, const View& view, const planned<Recipe>&, bool moved) {
    if (moved) forget(index);
    append(index, view, 0);
  }
  template <class View>
  void append(std::size_t index, const View& view, index_t) {
    for (index_t h = 0; h < view.kv_heads; ++h) {
      head_index& keys = entries_[index].heads[std::size_t(h)];
      for (; keys.slots < view.length(0, h); ++keys.slots) {
        const index_t segment = view.segment(h, keys.slots);
        if (keys.runs.empty() || keys.runs.back().segment != segment) {
          keys.runs.push_back({segment, keys.slots});
          keys.sums.resize(keys.runs.size() * k_dim, 0.0f);
        }
        float key[k_dim];
        load_key(view, 0, h, keys.slots, key);
        float* sum = keys.sums.data() + keys.sums.size() - k_dim;
        for (int d = 0; d < k_dim; ++d) sum[d] += key[d];
      }
    }
  }

  template <class View, class Q>
  offset_t choose(std::size_t index, const View& all, const query_rows<Q>& queries, const logit_rule& rule,
                  const planned<Recipe>& policies, selection& chosen, executor& workers) {
    entry& here = entries_[index];
    const auto& policy = policies.read;
    const index_t tokens = queries.q.tokens;
    listen(here, queries, all.kv_heads);
    (*workspaces_).resize((std::max)((*workspaces_).size(), std::size_t(workers.threads())));
    offset_t bytes = 0, work = 0;
    const bool whole = here.current.tokens <= policy.scorer.whole;
    for (const head_index& keys : here.heads) {
      if (!whole) bytes += offset_t(keys.sums.size() * sizeof(float));
      work += keys.slots + offset_t(keys.sums.size());
    }
    // A step of several tokens reads them all, so that each of them sees a key.
    const index_t step = tokens > 1 ? tokens : 0, tail = (std::max)(policy.scorer.protected_tail(policy.tokens), step);
    const index_t keep = (std::max)(policy.tokens, step);
    const float scale = rule.scale_for(k_dim) / float(here.current.tokens);
    workers.for_each(
        all.kv_heads,
        [&](index_t h, int worker) {
          auto& [scores, top_k] = (*workspaces_)[std::size_t(worker)];
          const index_t n = all.length(0, h);
          scores.assign(std::size_t(n), 0.0f);
          if (!whole)
            score(here.heads[std::size_t(h)], here.current.sums.data() + h * k_dim, scale, policy.scorer, scores);
          chosen.counts[std::size_t(h)] =
              choose_slots(policy.selector, scores.data(), n, whole ? n : tail, whole ? n : keep, chosen.row(h), top_k);
        },
        double(work));
    return bytes;
  }

  template <class View>
  void complete(std::size_t, const View&, index_t, index_t, const rows_view<float>&) {}

  /// Means read no list: of the list only the attended slots are read.
  offset_t list_bytes(std::size_t, index_t, index_t count) const { return count * offset_t(sizeof(index_t)); }
  offset_t side_bytes() const { return 0; }
  offset_t bytes(std::size_t index) const {
    const entry& here = entries_[index];
    offset_t total = offset_t((here.previous.sums.capacity() + here.current.sums.capacity()) * sizeof(float));
    for (const head_index& keys : here.heads)
      total += offset_t(keys.runs.capacity() * sizeof(run) + keys.sums.capacity() * sizeof(float));
    return total;
  }
  /// Counts each token as one segment, and allows for vectors that double when they grow.
  offset_t upper_bound(const planned<Recipe>&, const kept_bound& readable) const {
    const offset_t sum = k_dim * offset_t(sizeof(float));
    return 2 * readable.total * (offset_t(sizeof(run)) + sum) + 2 * offset_t(heads_) * sum;
  }

 private:
  /// Consecutive slots of one segment. They end where the next run begins, or at the last slot.
  struct run {
    index_t segment, first;
  };
  struct head_index {
    host_vector<run> runs;
    host_vector<float> sums;  // [runs, k_dim], of the keys
    index_t slots = 0;        // that are in them
    void clear() {
      host_vector<run>().swap(runs);
      host_vector<float>().swap(sums);
      slots = 0;
    }
  };
  /// The segment that an answer is writing: its queries so far.
  struct spoken {
    index_t segment = -1, tokens = 0;
    index_t end = -1;         // the position behind its last token; -1: none
    host_vector<float> sums;  // [kv_heads, k_dim], over the query heads of each group
    void clear() {
      segment = end = -1;
      tokens = 0;
      host_vector<float>().swap(sums);
    }
  };
  struct entry {
    host_vector<head_index> heads;
    spoken previous, current;  // without the newest step; with it
  };

  /// Adds a step's queries. If the step begins at the same position as the last one, that one failed and is replaced. A
  /// step that does not begin where the last one ended follows a prompt and begins a segment.
  template <class Q>
  void listen(entry& here, const query_rows<Q>& queries, index_t kv_heads) const {
    const index_t tokens = queries.q.tokens, first = queries.position(0, 0), group = queries.q.heads / kv_heads;
    if (here.current.end == first) {
      std::swap(here.previous, here.current);
      here.current.end = -1;
    }
    const run& newest = here.heads.front().runs.back();
    const index_t joined = (std::min)(tokens, here.heads.front().slots - newest.first);  // tokens of the newest segment
    const bool goes_on = here.previous.end == first && here.previous.segment == newest.segment;
    spoken& now = here.current;
    now.end = -1;
    now.sums.assign(std::size_t(kv_heads) * k_dim, 0.0f);
    if (goes_on) std::copy(here.previous.sums.begin(), here.previous.sums.end(), now.sums.begin());
    for (index_t t = tokens - joined; t < tokens; ++t) {
      for (index_t head = 0; head < queries.q.heads; ++head) {
        const Q* q = queries.q.row(0, t, head);
        float* sum = now.sums.data() + head / group * k_dim;
        for (int d = 0; d < k_dim; ++d) sum[d] += float(q[d]);
      }
    }
    now.segment = newest.segment;
    now.tokens = joined + (goes_on ? here.previous.tokens : 0);
    now.end = first + tokens;
  }

  /// Writes the score of its segment to every slot.
  template <class Scorer>
  static void score(const head_index& keys, const float* query, float scale, const Scorer& scorer,
                    host_vector<float>& scores) {
    for (std::size_t r = 0; r < keys.runs.size(); ++r) {
      const index_t first = keys.runs[r].first, end = r + 1 < keys.runs.size() ? keys.runs[r + 1].first : keys.slots;
      float dot = 0;
      for (int d = 0; d < k_dim; ++d) dot += query[d] * keys.sums[r * k_dim + std::size_t(d)];
      const float score = scorer.weigh(scale * dot / float(end - first), 0);
      std::fill(scores.begin() + first, scores.begin() + end, score);
    }
    std::fill_n(scores.begin(), (std::min<std::size_t>)(scores.size(), std::size_t(scorer.start)), infinity);
  }

  struct workspace {
    host_vector<float> scores;
    top_k_scratch top_k;
  };

  std::size_t heads_;
  host_vector<entry> entries_;
  scratch<host_vector<workspace>> workspaces_;
};

template <class Recipe>
requires(Recipe::retrieve_type::needs_segments) struct reader_of<Recipe> {
  using type = segment_reader<Recipe>;
};

}  // namespace cpu
TESSERA_NAMESPACE_END
