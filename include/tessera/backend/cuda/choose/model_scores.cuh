// One set of tokens for all layers and heads of a model, on the device: scores of layers, added as they come, and one
// choice.
#pragma once

#include "../../../scope/per_layer.hpp"
#include "score_and_choose.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {

namespace detail {

/// One thread handles one slot; blockIdx.y is the sequence. Heads are joined in order behind what is there, as on the
/// host.
template <class Scope, int Threads>
__global__ void __launch_bounds__(Threads)
    join_layer_entry(const __grid_constant__ score_rows in, const __grid_constant__ finished_rows out, Scope scope,
                     bool is_first) {
  const index_t b = blockIdx.y, tokens = (min)(in.tokens(b, 0), out.capacity);
  float* to = out.row(b);
  for (index_t i = index_t(blockIdx.x * Threads + threadIdx.x); i < tokens; i += index_t(gridDim.x) * Threads) {
    float joined = is_first ? in.scores[in.begin(b * in.kv_heads) + i] : to[i];
    for (index_t h = is_first ? 1 : 0; h < in.kv_heads; ++h)
      joined = scope.join(joined, in.scores[in.begin(b * in.kv_heads + h) + i]);
    to[i] = joined;
  }
}

}  // namespace detail

/// The scores of a batch of sequences, added over all heads and layers that were given: the device's cpu::model_scores,
/// with its bits. For engines whose cells or pages hold all layers, so that a token stays in all of them or in none.
///
///   cuda::model_scores<> all(policy, sequences, capacity, max_retained(policy, 1, 1, capacity, tail), device);
///   all.begin();
///   // in each layer, in any order, in one pass through the model or in several:
///   all.add(scoring.score(policy, problem, workspace, stream), sums, stream);   // a score_and_choose of the policy
///   const selection_view kept = all.choose(policy, sums, memory, stream);       // row b: the slots that stay
///
/// Memory   sums [sequences, capacity] fp32, the caller's, and `workspace_bytes` for a choice.
/// Join     over_heads::sum adds scores, over_heads::maximum takes the largest. NaN in one head makes a token's sum
///          NaN, which ranks last; the maximum goes by the others.
/// No allocation, no synchronisation, no length on the host: a recorded run can be replayed while lengths change.
/// Not checked, because the host does not know them: heads and layers in which a sequence has different lengths.
template <class Policy, over_heads Join = over_heads::sum>
class model_scores {
  static_assert(Join != over_heads::mean,
                "tessera: model_scores joins by sum or maximum; a mean ranks as the sum does");
  using scorer = typename Policy::scorer_type;
  static_assert(!segment_scorer<scorer> && !weighted_scorer<scorer> && !Policy::needs_segments,
                "tessera: model_scores chooses by scores alone; scorers of values and selectors of segments need more: "
                "score_and_choose");

 public:
  /// `capacity`: tokens that a sequence stores at most; `max_retained`: that it keeps at most.
  model_scores(const Policy& policy, index_t sequences, index_t capacity, index_t max_retained,
               const device_info& device)
      : sequences_(sequences),
        capacity_(capacity),
        max_retained_(max_retained),
        choose_(policy, sequences, 1, capacity, max_retained, device) {}

  std::size_t workspace_bytes() const { return choose_.workspace_bytes(); }

  /// Forgets all layers.
  void begin() { layers_ = 0; }
  /// Layers that have been added.
  index_t layers() const { return layers_; }

  /// Adds a layer. The order of layers decides how sums are rounded.
  /// Errors   more sequences than there is memory for, another number of them or another protected tail than in the
  ///          layers before: tessera::error, and nothing has been added.   Cost  one launch.
  void add(const score_rows& layer, float* sums, cudaStream_t stream) {
    require(layer.sequences >= 1 && layer.sequences <= sequences_, "sequences of a layer", layer.sequences,
            "1 to " + std::to_string(sequences_), "make model_scores for the largest batch");
    require(layers_ == 0 || layer.sequences == joined_.sequences, "sequences of a layer", layer.sequences,
            std::to_string(joined_.sequences) + ", as in the layers before", "score the same batch in every layer");
    require(layers_ == 0 || layer.tail == joined_.tail, "newest tokens that stay", layer.tail,
            std::to_string(joined_.tail) + ", as in the layers before", "score every layer by the same policy");
    const dim3 grid{unsigned(std::clamp(ceil_div(capacity_, 1024), 1, 512)), unsigned(layer.sequences)};
    detail::join_layer_entry<per_layer<Join>, 256>
        <<<grid, 256, 0, stream>>>(layer, detail::finished_rows{sums, capacity_}, per_layer<Join>(), layers_ == 0);
    check(cudaGetLastError(), "launch of join_layer");
    joined_ = layer;
    joined_.scores = sums;
    joined_.offsets = nullptr;
    joined_.row_stride = capacity_;
    joined_.kv_heads = 1;
    ++layers_;
  }

  /// Chooses the slots that stay in all layers, by the policy's last pass over the sums, its budget and its selector.
  /// Its scope is not asked. The lengths, tails and budgets of the layer that was added last are read again.
  /// Returns  row b begins at b * max_retained in the workspace; valid until it is used again.
  /// Errors   no layer; a budget above `max_retained`: tessera::error.
  selection_view choose(const Policy& policy, const float* sums, void* workspace, cudaStream_t stream) const {
    require(layers_ >= 1, "layers of the scores", layers_, "at least 1", "add the scores of every layer");
    if (!joined_.budgets && !joined_.tails) {
      const index_t largest = bound_kept(policy.budget, {0, 1, 1, joined_.tail, capacity_}).longest;
      require(largest <= max_retained_, "tokens that a sequence may keep", largest,
              "at most " + std::to_string(max_retained_), "make model_scores for the larger budget");
    }
    score_rows rows = joined_;
    rows.scores = sums;
    return choose_.run(policy, rows, 0, 1, workspace, stream);
  }

 private:
  index_t sequences_, capacity_, max_retained_, layers_ = 0;
  score_rows joined_;
  choose_kept<Policy> choose_;
};

}  // namespace cuda
TESSERA_NAMESPACE_END
