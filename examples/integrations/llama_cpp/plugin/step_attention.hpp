// Attention of a step over some of the cells that its rows see.
#pragma once

#include <algorithm>
#include <numeric>
#include <vector>

#include <tessera/backend/cpu/attend/attend.hpp>
#include <tessera/backend/cpu/score/score.hpp>
#include <tessera/core/selection.hpp>
#include <tessera/scorer/exact_score.hpp>
#include <tessera/selector/top_tokens.hpp>

#include "cell_bounds.hpp"

namespace tessera_plugin {

/// What steps have read so far: keys and values, by row and kv_head.
struct read_counts {
  std::int64_t nodes = 0, visible = 0, attended = 0, rebuilt = 0;
};

/// Chooses and attends. One object for a context; its memory grows to what the largest step takes.
template <int D>
class step_attention {
 public:
  /// Writes the node's output. `bounds`: of the layer, for quest. `new_cells`: those of the node's rows, stream by
  /// stream, or empty.
  /// Errors   a mask with a bias: tessera::error.
  void compute(const step_node& node, const read_options& options, cell_bounds* bounds,
               const std::vector<std::int64_t>& new_cells, tessera::cpu::executor& workers, read_counts& counts) {
    ++counts.nodes;
    if (bounds) bounds->describe(node, options.page);
    for (index_t stream = 0; stream < node.streams(); ++stream) {
      find_visible(node, stream);
      const bool chooses = *std::max_element(lengths_.begin(), lengths_.end()) > options.cells;
      if (!chooses) {
        attended_cells_ = visible_, attended_begins_ = begins_;
        attended_lengths_ = lengths_of_heads(node);
      } else if (options.method == read_method::top_k) {
        choose_by_scores(node, stream, options.cells, workers);
      } else {
        choose_by_bounds(node, stream, options, *bounds, new_cells, counts);
      }
      attend(node, stream, workers);
      for (const index_t length : lengths_) counts.visible += std::int64_t(length) * node.kv_heads();
      counts.attended = std::accumulate(attended_lengths_.begin(), attended_lengths_.end(), counts.attended);
    }
  }

 private:
  using view_type = tessera::kv_view<const tessera::fp16, D, tessera::filtered<tessera::contiguous>>;

  /// The cells that each row of a stream sees, in the order of cells.
  void find_visible(const step_node& node, index_t stream) {
    visible_.clear(), lengths_.clear(), begins_.clear();
    for (index_t row = 0; row < node.rows(); ++row) {
      const offset_t begin = offset_t(visible_.size());
      const ggml_fp16_t* const mask = node.mask_row(stream, row);
      for (index_t cell = 0; cell < node.cells(); ++cell) {
        if ((mask[cell] & 0x7fff) == 0) {  // 0 or -0
          visible_.push_back(cell);
        } else {
          tessera::require(mask[cell] == 0xfc00, "mask of a cell", ggml_fp16_to_fp32(mask[cell]), "0 or -infinity",
                           "take a model whose attention has no bias");
        }
      }
      lengths_.push_back(index_t(offset_t(visible_.size()) - begin));
      begins_.insert(begins_.end(), std::size_t(node.kv_heads()), begin);  // all heads see the same
    }
  }
  std::vector<index_t> lengths_of_heads(const step_node& node) const {
    std::vector<index_t> result;
    for (const index_t length : lengths_) result.insert(result.end(), std::size_t(node.kv_heads()), length);
    return result;
  }

  /// Every row is a sequence of the view, with lists of cells by (row, kv_head).
  view_type view_of(const step_node& node, index_t stream, const std::vector<index_t>& cells,
                    const std::vector<offset_t>& begins, const std::vector<index_t>& lengths) const {
    const auto strides = [](const ggml_tensor* rows) {
      return tessera::row_strides{0, offset_t(rows->nb[2] / 2), offset_t(rows->nb[1] / 2), 1};
    };
    view_type view;
    view.k = reinterpret_cast<const tessera::fp16*>(node.key(stream, 0, 0));
    view.v = reinterpret_cast<const tessera::fp16*>(static_cast<const char*>(node.v->data) + stream * node.v->nb[3]);
    view.k_strides = strides(node.k), view.v_strides = strides(node.v);
    view.sequences = node.rows();
    view.kv_heads = node.kv_heads();
    view.lengths = lengths.data();
    view.length_strides = {view.kv_heads, 1};
    // outer is 0: all rows read the same memory.
    view.table = {{}, cells.data(), begins.data(), view.kv_heads};
    return view;
  }
  tessera::cpu::query_rows<float> queries_of(const step_node& node, index_t stream) {
    positions_.assign(lengths_.begin(), lengths_.end());  // behind every slot: the mask alone says what is visible
    return {{reinterpret_cast<const float*>(static_cast<const char*>(node.q->data) + stream * node.q->nb[3]),
             offset_t(node.q->nb[1] / 4), 0, offset_t(node.q->nb[2] / 4), node.rows(), 1, node.heads(), D},
            positions_.data()};
  }
  tessera::logit_rule rule_of(const step_node& node) const {
    tessera::logit_rule rule;
    rule.scale = node.scale, rule.soft_cap = node.soft_cap;
    return rule;
  }

  /// The cells with the largest probabilities, summed over a group.
  void choose_by_scores(const step_node& node, index_t stream, index_t keep, tessera::cpu::executor& workers) {
    const std::vector<index_t> lengths = lengths_of_heads(node);
    offsets_.assign(1, 0);
    for (const index_t length : lengths) offsets_.push_back(offsets_.back() + length);
    scores_.assign(std::size_t(offsets_.back()), 0.0f);
    tessera::cpu::score_rows(view_of(node, stream, visible_, begins_, lengths), queries_of(node, stream), rule_of(node),
                             tessera::exact_score{}, scores_.data(), offsets_.data(), scoring_, workers);
    begin_choice();
    for (std::size_t row = 0; row < lengths.size(); ++row) {
      const index_t* const visible = visible_.data() + begins_[row];
      slots_.resize(std::size_t(keep));
      const index_t count =
          tessera::top_tokens{}.select(scores_.data() + offsets_[row], lengths[row], 0, keep, slots_.data(), top_k_);
      for (index_t i = 0; i < count; ++i) attended_cells_.push_back(visible[slots_[std::size_t(i)]]);
      end_row(count);
    }
  }

  /// The pages whose keys could have the largest products, until `cells` are read; the page of the row's own cell
  /// first.
  void choose_by_bounds(const step_node& node, index_t stream, const read_options& options, cell_bounds& bounds,
                        const std::vector<std::int64_t>& new_cells, read_counts& counts) {
    begin_choice();
    const offset_t first_cell = cell_bounds::first_cell(node, stream);
    for (index_t row = 0; row < node.rows(); ++row) {
      const std::size_t token = std::size_t(stream) * std::size_t(node.rows()) + std::size_t(row);
      const bool is_known = new_cells.size() == std::size_t(node.rows()) * std::size_t(node.streams());
      find_pages(row, node.kv_heads(), options.page, first_cell);
      for (index_t head = 0; head < node.kv_heads(); ++head) {
        const index_t group = node.heads() / node.kv_heads();
        const tessera::cpu::query_rows<float> queries = queries_of(node, stream);
        query_.read(D, group, [&](index_t m) { return queries.q.row(row, 0, head * group + m); });
        const offset_t own_page = is_known ? new_cells[token] / options.page : -1;
        choose_pages(node, head, own_page, options.cells, bounds);
        bool is_current = true;
        for (std::size_t i = 0; i < chosen_.size() && head == 0 && is_current; ++i)
          is_current = bounds.matches(node, pages_[std::size_t(chosen_[i])].number, head);
        if (!is_current) {  // cells have changed without a node that wrote them
          ++counts.rebuilt;
          bounds.forget();
          choose_pages(node, head, own_page, options.cells, bounds);
        }
        index_t count = 0;
        for (const index_t i : chosen_) {
          const page_run& page = pages_[std::size_t(i)];
          const index_t* const cells = visible_.data() + page.begin;
          attended_cells_.insert(attended_cells_.end(), cells, cells + page.count);
          count += page.count;
        }
        end_row(count);
      }
    }
  }

  /// What a row sees of a page.
  struct page_run {
    offset_t number = 0, begin = 0;  ///< of the page in the layer's memory; of its cells in `visible_`
    index_t count = 0;
  };
  void find_pages(index_t row, index_t kv_heads, index_t page, offset_t first_cell) {
    pages_.clear();
    const offset_t begin = begins_[std::size_t(row) * std::size_t(kv_heads)];
    for (offset_t i = begin; i < begin + lengths_[std::size_t(row)]; ++i) {
      const offset_t number = (first_cell + visible_[std::size_t(i)]) / page;
      if (pages_.empty() || pages_.back().number != number) pages_.push_back({number, i, 0});
      ++pages_.back().count;
    }
  }
  void choose_pages(const step_node& node, index_t head, offset_t own_page, index_t cells, cell_bounds& bounds) {
    scores_.clear(), chosen_.clear();
    for (const page_run& page : pages_) scores_.push_back(query_.bound(bounds.of(node, page.number, head)));
    for (std::size_t i = 0; i < pages_.size(); ++i)
      if (pages_[i].number == own_page) scores_[i] = std::numeric_limits<float>::infinity();
    order_.resize(pages_.size());
    std::iota(order_.begin(), order_.end(), 0);
    const auto comparable = [&](index_t i) {  // a bound that is no number comes last
      const float score = scores_[std::size_t(i)];
      return score == score ? score : -std::numeric_limits<float>::infinity();
    };
    std::stable_sort(order_.begin(), order_.end(), [&](index_t a, index_t b) { return comparable(a) > comparable(b); });
    index_t count = 0;
    for (std::size_t i = 0; i < order_.size() && count < cells; ++i) {
      chosen_.push_back(order_[i]);
      count += pages_[std::size_t(order_[i])].count;
    }
    std::sort(chosen_.begin(), chosen_.end());
  }

  void begin_choice() { attended_cells_.clear(), attended_begins_.clear(), attended_lengths_.clear(); }
  void end_row(index_t count) {
    attended_begins_.push_back(offset_t(attended_cells_.size()) - count);
    attended_lengths_.push_back(count);
  }

  void attend(const step_node& node, index_t stream, tessera::cpu::executor& workers) {
    const ggml_tensor& out = *node.out;
    const tessera::rows_view<float> rows{reinterpret_cast<float*>(static_cast<char*>(out.data) + stream * out.nb[3]),
                                         offset_t(out.nb[2] / 4),
                                         0,
                                         offset_t(out.nb[1] / 4),
                                         node.rows(),
                                         1,
                                         node.heads(),
                                         D};
    tessera::cpu::decode_attention(view_of(node, stream, attended_cells_, attended_begins_, attended_lengths_),
                                   queries_of(node, stream), rule_of(node), nullptr,
                                   tessera::cpu::attention_output{rows, {}}, decoding_, workers);
  }

  std::vector<index_t> visible_, lengths_;  // cells of one row after another; by row
  std::vector<offset_t> begins_;            // by (row, kv_head)
  std::vector<index_t> attended_cells_, attended_lengths_;
  std::vector<offset_t> attended_begins_;
  std::vector<index_t> positions_, slots_, order_, chosen_;
  std::vector<page_run> pages_;
  std::vector<float> scores_;
  std::vector<offset_t> offsets_;
  bound_query query_;
  tessera::top_k_scratch top_k_;
  tessera::cpu::score_workspace<D> scoring_;
  tessera::cpu::decode_workspace decoding_;
};

}  // namespace tessera_plugin
