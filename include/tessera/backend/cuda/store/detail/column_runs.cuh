// Columns of numbers beside stored tokens on the device: positions, scores and segments, in runs.
#pragma once

#include "../../../../core/host/host_vector.hpp"
#include "../../../../core/sequence_layer.hpp"
#include "../step_table.cuh"
#include "run_pool.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {

/// The columns that a recipe asks for.
struct column_set {
  bool positions = false;  ///< where tokens are dropped
  bool scores = false;     ///< of scorers that accumulate
  bool segments = false;   ///< which segment of the text a token belongs to
  index_t mean_block = 0;  ///< packed rows that share a stored mean key; 0: no means
  bool drops = false;      ///< whether tokens of layers that follow the recipe are dropped
  std::size_t count() const { return std::size_t(positions) + std::size_t(scores) + std::size_t(segments); }
};

namespace detail {

/// The columns of every (layer, sequence). Each has runs of its own, in which heads lie one behind the other.
class column_runs : public run_pool {
 public:
  column_runs(const column_set& with, index_t layers, index_t sequences, index_t kv_heads, index_t tokens)
      : run_pool(layers * sequences, kv_heads, with.count() > 0 ? rows_for(layers * sequences, kv_heads, tokens) : 0,
                 host_vector<index_t>(with.count(), 4), "rows of the columns"),
        with_(with),
        order_{sequences},
        heads_(kv_heads),
        tokens_(tokens),
        begins_(layers, sequences, kv_heads) {}

  index_t* positions() const { return with_.positions ? plane_data<index_t>(0) : nullptr; }
  float* scores() const { return with_.scores ? plane_data<float>(with_.positions) : nullptr; }
  index_t* segments() const {
    return with_.segments ? plane_data<index_t>(std::size_t(with_.positions) + with_.scores) : nullptr;
  }
  /// Where the heads of an entry begin.
  const id_column<offset_t>& begins_column() const { return begins_; }
  offset_t* begins_of(sequence_layer owner) const { return begins_.entry(owner); }
  offset_t* begins(std::size_t entry) const { return begins_.entry(order_.owner(entry)); }

  /// Plans a run for heads with these bounds, and `tokens` more in each.
  void plan_rows(std::size_t entry, const token_bound& held, index_t tokens) {
    const index_t room = tokens + room_behind(held.longest + tokens, tokens_);
    plan_run(entry, held.total + offset_t(heads_) * room, room);
  }
  bool lay_out_rows(std::size_t entry, const index_t* counts, cudaStream_t stream) {
    return holds_planes() && lay_out(entry, counts, [&](std::size_t p) { return begins(p); }, stream);
  }
  /// Adds the columns to a problem that moves rows to where heads begin at `to`.
  template <class Problem>
  void add_to(Problem& problem, const offset_t* to) const {
    if (with_.positions) problem.positions = {positions(), 0, 0, to};
    if (with_.segments) {
      problem.source_segments = {segments(), 0, 0, problem.source.position_begin};
      problem.segments = {segments(), 0, 0, to};
    }
    if (with_.scores) {
      problem.source_scores = {scores(), 0, 0, problem.source.position_begin};
      problem.scores = {scores(), 0, 0, to};
    }
  }

 private:
  column_set with_;
  layer_major order_;
  index_t heads_, tokens_;
  id_column<offset_t> begins_;
};

}  // namespace detail
}  // namespace cuda
TESSERA_NAMESPACE_END
