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
#include "../../../runtime/saved/rows.hpp"
#include "../choose/lines.hpp"
#include "../kernel/scratch.hpp"
#include "line_attention.hpp"

TESSERA_NAMESPACE_BEGIN
namespace cpu {

/// Attends everything. Both kinds have these calls:
///   open(id), close(id)           opens a sequence; releases its memory, and needs none
///   copy(source, target)          copies to an empty sequence the lines that steps will read
///   transfer(id, next, archive)   saves these lines, or loads them into an empty sequence; next(layer): its position
///   attend(...)                   attends a chunk's rows; where it throws, nothing has changed
///   join(owner, selections)       adds the prompts' columns to the selections of a filter
///   has_slashes(owner)            whether slash lines of prompts join what steps read
///   with_slashes(owner, ...)      what a step reads, with what those say of its tokens
///   lines(owner)                  of the last chunk that was traced
template <class Recipe, bool ChoosesLines = Recipe::prefill_type::chooses_lines>
class prompt_attending {
 public:
  explicit prompt_attending(const model_shape&) {}
  void open(index_t) {}
  void close(index_t) {}
  void copy(index_t, index_t) {}
  template <class Next, class Archive>
  void transfer(index_t, const Next&, Archive&) {}
  void trace(bool) {}
  template <class View, class E>
  void attend(sequence_layer, const Recipe&, const View& view, const query_rows<E>& queries, const logit_rule& rule,
              const attention_output& output, executor& workers) {
    prefill_attention(view, queries, rule, output, workers);
  }
  void join(sequence_layer, const Recipe&, host_vector<selection>&) const {}
  static constexpr bool has_slashes(sequence_layer) { return false; }
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
      remembered& to = remembered_[sequence_layer{layer, target}];
      to.columns = remembered_[sequence_layer{layer, source}].columns;
      to.slashes = remembered_[sequence_layer{layer, source}].slashes;
    }
  }
  template <class Next, class Archive>
  void transfer(index_t id, const Next& next, Archive& archive) {
    for (index_t layer = 0; layer < shape_.layers; ++layer) {
      remembered& own = remembered_[sequence_layer{layer, id}];
      for (lines_by_head* all : {&own.columns, &own.slashes}) {
        index_t heads = index_t(all->size());
        archive.number(heads);
        archive.require(heads == 0 || heads == shape_.q_heads, "with lines of other heads");
        all->resize(std::size_t(heads));
        for (host_vector<index_t>& lines : *all) {
          index_t count = index_t(lines.size());
          archive.number(count);
          archive.require(count >= 0 && count <= next(layer), "with more lines than tokens");
          lines.resize(std::size_t(count));
          transfer_ascending(lines.data(), count, next(layer), archive);
        }
      }
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
    lines_by_head columns, slashes;
    if constexpr (lasting_pattern<pattern_type>) {
      if (recipe.prefill.adds_to_reading()) columns = joined(own.columns, lines, &line_set::vertical);
      if (adds_slashes(recipe.prefill)) slashes = joined(own.slashes, lines, &line_set::slash);
    }
    prompt_lines traced = tracing_ ? lines : prompt_lines{};
    line_attention(view, queries, rule, lines, output, workers);
    own.columns = std::move(columns);
    own.slashes = std::move(slashes);
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
          add_row(row, joined);
        }
      }
    }
  }
  bool has_slashes(sequence_layer owner) const { return !remembered_[owner].slashes.empty(); }
  /// What a step of `tokens` tokens reads of heads of these lengths, the first token at position `first`: the slots of
  /// `list`, of member `member` of `members`, and what slash lines say of the step's tokens. A draft's tokens are not
  /// among the lengths.
  template <class List>
  selection with_slashes(sequence_layer owner, const List& list, index_t member, index_t members, index_t first,
                         index_t tokens, const host_vector<index_t>& lengths) const {
    const index_t group = shape_.q_heads / shape_.kv_heads;
    selection joined;
    for (index_t h = 0; h < shape_.kv_heads; ++h) {
      host_vector<index_t> row(list.row(h), list.row(h) + list.count(h));
      for (index_t g = members == 1 ? 0 : member; g < (members == 1 ? group : member + 1); ++g) {
        for (const index_t distance : remembered_[owner].slashes[std::size_t(h * group + g)]) {
          const index_t begin = (std::max)(0, first - distance);
          const index_t end = (std::min)(first + tokens - distance, lengths[std::size_t(h)]);
          for (index_t slot = begin; slot < end; ++slot) row.push_back(slot);
        }
      }
      add_row(row, joined);
    }
    return joined;
  }
  const prompt_lines& lines(sequence_layer owner) const { return remembered_[owner].lines; }
  offset_t bytes(sequence_layer owner) const {
    offset_t bytes = 0;
    for (const lines_by_head* all : {&remembered_[owner].columns, &remembered_[owner].slashes}) {
      for (const auto& lines : *all) bytes += offset_t(lines.capacity() * sizeof(index_t));
    }
    return bytes;
  }
  /// The most that the lines of a layer take.
  offset_t upper_bound([[maybe_unused]] const Recipe& recipe, [[maybe_unused]] const turn_extent& turn) const {
    if constexpr (lasting_pattern<pattern_type>) {
      const index_t kinds = index_t(recipe.prefill.adds_to_reading()) + index_t(adds_slashes(recipe.prefill));
      return kinds * offset_t(shape_.q_heads) * turn.prompt * offset_t(sizeof(index_t));
    }
    return 0;
  }

 private:
  using lines_by_head = host_vector<host_vector<index_t>>;  // of all prompts; none where nobody reads them
  struct remembered {
    prompt_lines lines;  // of the last chunk, when traced
    lines_by_head columns, slashes;
  };
  struct workspace {
    prompt_lines lines;
    line_workspace<Recipe::layout_type::k_dim> memory;
  };

  /// `all` with the chosen lines of a kind.
  static lines_by_head joined(lines_by_head all, const prompt_lines& chosen, host_vector<index_t> line_set::* kind) {
    all.resize(chosen.heads.size());
    for (std::size_t h = 0; h < all.size(); ++h) {
      const host_vector<index_t>& fresh = chosen.heads[h].*kind;
      host_vector<index_t> both;
      std::set_union(all[h].begin(), all[h].end(), fresh.begin(), fresh.end(), std::back_inserter(both));
      all[h] = host_vector<index_t>(both);
    }
    return all;
  }
  /// Adds a row of slots in any order, each perhaps several times.
  static void add_row(host_vector<index_t>& row, selection& to) {
    std::sort(row.begin(), row.end());
    row.erase(std::unique(row.begin(), row.end()), row.end());
    to.indices.insert(to.indices.end(), row.begin(), row.end());
    to.counts.push_back(index_t(row.size()));
    to.offsets.push_back(offset_t(to.indices.size()));
  }

  model_shape shape_;
  bool tracing_ = false;
  sequence_table<remembered> remembered_;
  scratch<workspace> choosing_;
};

}  // namespace cpu
TESSERA_NAMESPACE_END
