// Attention of prompts on the CPU: over everything, or along the lines that a recipe's prefill policy chooses.
#pragma once

#include <algorithm>
#include <iterator>
#include <utility>

#include "../../../core/host/host_vector.hpp"
#include "../../../core/plan/layer_peak.hpp"
#include "../../../core/selection.hpp"
#include "../../../core/sequence_layer.hpp"
#include "../../../recipe.hpp"
#include "../choose/lines.hpp"
#include "../kernel/scratch.hpp"
#include "line_attention.hpp"

TESSERA_NAMESPACE_BEGIN
namespace cpu {

/// Attends everything. Both kinds have these calls:
///   open(id), close(id)           opens a sequence; releases its memory, and needs none
///   copy(source, target)          copies to an empty sequence the columns that steps will read
///   attend(...)                   attends a chunk's rows; where it throws, nothing has changed
///   join(owner, selections)       adds the prompts' columns to the selections of a filter
///   lines(owner)                  of the last chunk that was traced
template <class Recipe, bool ChoosesLines = Recipe::prefill_type::chooses_lines>
class prompt_attending {
 public:
  explicit prompt_attending(const model_shape&) {}
  void open(index_t) {}
  void close(index_t) {}
  void copy(index_t, index_t) {}
  void trace(bool) {}
  template <class View, class E>
  void attend(sequence_layer, const Recipe&, const View& view, const query_rows<E>& queries, const logit_rule& rule,
              const attention_output& output, executor& workers) {
    prefill_attention(view, queries, rule, output, workers);
  }
  void join(sequence_layer, const Recipe&, host_vector<selection>&) const {}
  const prompt_lines& lines(sequence_layer) const { return none_; }
  offset_t bytes(sequence_layer) const { return 0; }
  offset_t upper_bound(const Recipe&, const turn_extent&) const { return 0; }

 private:
  prompt_lines none_;
};

/// Attends along lines, chosen for every chunk.
template <class Recipe>
class prompt_attending<Recipe, true> {
  using pattern_type = typename Recipe::prefill_type;

 public:
  explicit prompt_attending(const model_shape& shape) : shape_(shape), remembered_(shape.layers) {}

  void open(index_t id) { remembered_.open_empty(id); }
  void close(index_t id) { remembered_.clear(id); }
  void copy(index_t source, index_t target) {
    for (index_t layer = 0; layer < shape_.layers; ++layer) {
      remembered_[sequence_layer{layer, target}].columns = remembered_[sequence_layer{layer, source}].columns;
    }
  }
  void trace(bool on) { tracing_ = on; }

  template <class View, class E>
  void attend(sequence_layer owner, const Recipe& recipe, const View& view, const query_rows<E>& queries,
              const logit_rule& rule, const attention_output& output, executor& workers) {
    check_attention(view, queries, output);
    auto& [lines, memory] = *choosing_;
    choose_lines(recipe.prefill, view, queries, rule, lines, memory, workers);
    remembered& own = remembered_[owner];
    host_vector<host_vector<index_t>> columns = joined_columns(recipe, own, lines);
    prompt_lines traced = tracing_ ? lines : prompt_lines{};
    line_attention(view, queries, rule, lines, output, workers);
    own.columns = std::move(columns);
    if (tracing_) own.lines = std::move(traced);
  }

  /// Adds the columns of all prompts to a filter's selections: those of a group's query heads, or of the one query head
  /// that reads the selection.
  void join([[maybe_unused]] sequence_layer owner, [[maybe_unused]] const Recipe& recipe,
            [[maybe_unused]] host_vector<selection>& selections) const {
    if constexpr (lasting_pattern<pattern_type>) {
      const remembered& own = remembered_[owner];
      if (!recipe.prefill.adds_to_reading() || own.columns.empty()) return;
      const index_t members = index_t(selections.size()), group = shape_.q_heads / shape_.kv_heads;
      for (index_t m = 0; m < members; ++m) {
        const selection chosen = selections[std::size_t(m)];
        selection& joined = selections[std::size_t(m)];
        joined = {};
        for (index_t h = 0; h < shape_.kv_heads; ++h) {
          host_vector<index_t> row(chosen.row(h), chosen.row(h) + chosen.counts[std::size_t(h)]);
          for (index_t g = members == 1 ? 0 : m; g < (members == 1 ? group : m + 1); ++g) {
            const host_vector<index_t>& columns = own.columns[std::size_t(h * group + g)];
            row.insert(row.end(), columns.begin(), columns.end());  // a filter drops nothing: slots are positions
          }
          std::sort(row.begin(), row.end());
          row.erase(std::unique(row.begin(), row.end()), row.end());
          joined.indices.insert(joined.indices.end(), row.begin(), row.end());
          joined.counts.push_back(index_t(row.size()));
          joined.offsets.push_back(offset_t(joined.indices.size()));
        }
      }
    }
  }

  const prompt_lines& lines(sequence_layer owner) const { return remembered_[owner].lines; }
  offset_t bytes(sequence_layer owner) const {
    offset_t bytes = 0;
    for (const auto& columns : remembered_[owner].columns) {
      bytes += offset_t(columns.capacity() * sizeof(index_t));
    }
    return bytes;
  }
  /// The most that the columns of a layer take.
  offset_t upper_bound([[maybe_unused]] const Recipe& recipe, [[maybe_unused]] const turn_extent& turn) const {
    if constexpr (lasting_pattern<pattern_type>) {
      if (recipe.prefill.adds_to_reading()) return offset_t(shape_.q_heads) * turn.prompt * offset_t(sizeof(index_t));
    }
    return 0;
  }

 private:
  struct remembered {
    prompt_lines lines;                         // of the last chunk, when traced
    host_vector<host_vector<index_t>> columns;  // by query head, of all prompts; none where nobody reads them
  };
  struct workspace {
    prompt_lines lines;
    line_workspace<Recipe::layout_type::k_dim> memory;
  };

  static host_vector<host_vector<index_t>> joined_columns([[maybe_unused]] const Recipe& recipe,
                                                          [[maybe_unused]] const remembered& own,
                                                          [[maybe_unused]] const prompt_lines& lines) {
    if constexpr (lasting_pattern<pattern_type>) {
      if (!recipe.prefill.adds_to_reading()) return {};
      host_vector<host_vector<index_t>> columns = own.columns;
      columns.resize(lines.heads.size());
      for (std::size_t h = 0; h < columns.size(); ++h) {
        host_vector<index_t> both;
        std::set_union(columns[h].begin(), columns[h].end(), lines.heads[h].vertical.begin(),
                       lines.heads[h].vertical.end(), std::back_inserter(both));
        columns[h] = host_vector<index_t>(both);
      }
      return columns;
    }
    return {};
  }

  model_shape shape_;
  bool tracing_ = false;
  sequence_table<remembered> remembered_;
  scratch<workspace> choosing_;
};

}  // namespace cpu
TESSERA_NAMESPACE_END
