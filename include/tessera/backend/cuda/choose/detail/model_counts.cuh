// How many tokens each layer's heads keep where one threshold runs over the model, on the GPU.
#pragma once

#include "../../../../core/host/host_vector.hpp"
#include "../../../../core/model_shape.hpp"
#include "../../../../planned.hpp"
#include "../../../../runtime/kept_lengths.hpp"
#include "../../../../runtime/layer_roles.hpp"
#include "../../cache_options.hpp"
#include "../../score/pool.cuh"
#include "../../store/kv_store.cuh"
#include "../allot.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {
namespace detail {

/// A budget that gives every row as many slots as it has won.
struct slots_won {
  static constexpr const char* name = "slots_won";
  static constexpr bool compares_heads = true;
  index_t tokens = 0;
  TESSERA_HD index_t share_won(index_t won, index_t, index_t tail) const { return tail + won; }
  TESSERA_HD bool fits(const layer_extent&) const { return false; }
  void check() const {}
};
static_assert(check_budget<slots_won>() && check_device_budget<slots_won>());

}  // namespace detail

/// Does nothing, for recipes whose layers choose separately.
template <class Recipe, bool OverModel = Recipe::retain_type::over_model>
class model_counts {
 public:
  model_counts(const model_shape&, const cache_options&, const device_info&) {}
  void allot(index_t, const kv_store<typename Recipe::layout_type>&, const planned<Recipe>&, const layer_roles&,
             cudaStream_t) const {}
  const index_t* counts(index_t) const { return nullptr; }
};

/// The device's cpu::model_counts of one sequence. Memory is planned by its counts, so the host waits for them.
/// Memory   layers * kv_heads * tokens scores, and the histograms of one budget over all heads of the model.
template <class Recipe>
class model_counts<Recipe, true> {
  using store_type = kv_store<typename Recipe::layout_type>;
  using scorer = typename Recipe::retain_type::scorer_type;

 public:
  model_counts(const model_shape& shape, const cache_options& options, const device_info& device)
      : layers_(shape.layers),
        heads_(shape.kv_heads),
        finish_(1, rows(), options.tokens, device),
        allot_(1, rows(), options.tokens, device),
        lengths_(std::size_t(rows())),
        begins_(lengths_.size()),
        counts_(lengths_.size()),
        finished_(finish_.out_scores()),
        workspace_(allot_.workspace_bytes()) {}

  /// Counts what every layer that follows the recipe keeps of a sequence. Synchronises.
  void allot(index_t id, const store_type& store, const planned<Recipe>& policies, const layer_roles& roles,
             cudaStream_t stream) {
    const auto& policy = policies.first;
    const std::size_t heads = std::size_t(heads_);
    first_.assign(std::size_t(layers_), -1);
    index_t taken = 0;
    for (index_t layer = 0; layer < layers_; ++layer) {
      if (!roles.follows_recipe(layer)) continue;
      first_[std::size_t(layer)] = taken;
      const auto view = store.view({layer, id});
      copy(lengths_.data() + taken, view.lengths, heads * sizeof(index_t), stream);
      copy(begins_.data() + taken, view.position_begin, heads * sizeof(offset_t), stream);
      taken += heads_;
    }
    host_.assign(std::size_t(taken), 0);
    if (taken == 0) return;
    score_rows all;
    all.scores = store.scores();
    all.offsets = begins_.data();
    all.sequences = 1;
    all.kv_heads = taken;
    all.lengths = lengths_.data();
    all.length_strides = {taken, 1};
    all.tail = policy.scorer.protected_tail(policy.budget.tokens);
    allot_.run(finish_.run(all, policy.scorer, finished_.data(), stream), detail::slots_won{policy.budget.tokens}, 0, 1,
               counts_.data(), workspace_.data(), stream);
    check(cudaMemcpyAsync(host_.data(), counts_.data(), host_.size() * sizeof(index_t), cudaMemcpyDeviceToHost, stream),
          "cudaMemcpyAsync");
    check(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
  }

  /// The counts of a layer that follows the recipe: [kv_heads], on the device.
  const index_t* counts(index_t layer) const { return counts_.data() + first_[std::size_t(layer)]; }
  /// The same counts as a bound, known to the host.
  kept_bound bound(index_t layer) const {
    kept_bound kept;
    const auto first = host_.begin() + first_[std::size_t(layer)];
    kept.by_head.assign(first, first + heads_);
    for (const index_t own : kept.by_head) {
      kept.longest = (std::max)(kept.longest, own);
      kept.total += own;
    }
    return kept;
  }

 private:
  index_t rows() const { return layers_ * heads_; }
  static void copy(void* to, const void* from, std::size_t bytes, cudaStream_t stream) {
    check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, stream), "cudaMemcpyAsync");
  }

  index_t layers_, heads_;
  finish_scores<scorer> finish_;
  cuda::allot<detail::slots_won> allot_;
  device_buffer<index_t> lengths_;
  device_buffer<offset_t> begins_;
  device_buffer<index_t> counts_;
  device_buffer<float> finished_;
  device_buffer<unsigned char> workspace_;
  host_vector<index_t> first_;  // by layer: its first row, or -1
  host_vector<index_t> host_;   // by row
};

}  // namespace cuda
TESSERA_NAMESPACE_END
