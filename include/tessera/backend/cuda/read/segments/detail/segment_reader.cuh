// Retrieval by segments of the text on the device: the mean key of every segment is read, and the tokens of the best
// ones are attended.
#pragma once

#include <algorithm>
#include <numeric>

#include "../../../../../core/host/host_vector.hpp"
#include "../../../../../core/model_shape.hpp"
#include "../../../choose/top_k.cuh"
#include "../../../device/copy.cuh"
#include "../../reader.cuh"
#include "../segment_means.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {

/// The device's cpu::segment_reader. An entry is a (layer, sequence). For every entry and kv_head it holds the sum of
/// each segment's keys, and the sum of the queries of the segment that the answer is writing. Its views are
/// `segmented_view`s. The choice lies in this object's memory until the next call.
/// Bytes    an index has k_dim fp32 a segment; room for as many segments as tokens, which cache_options::index_tokens
///          bounds.
template <class Recipe, class View, class Out>
class segment_reader : public slot_reader {
  using T = typename View::element_type;
  using policy = typename Recipe::retrieve_type;
  static constexpr int k_dim = View::k_dim;

 public:
  segment_reader(const Recipe& recipe, const model_shape& shape, const cache_options& options,
                 const device_info& device)
      : heads_(shape.kv_heads),
        sequences_(options.sequences),
        layers_(shape.layers),
        tokens_(index_tokens(recipe, options)),
        scorer_(recipe.retrieve.scorer),
        scale_(recipe.attention.rule.scale_for(k_dim)),
        select_(recipe.retrieve.selector, options.sequences * shape.kv_heads, tokens_, device, recipe.retrieve.tokens),
        firsts_(heads() * std::size_t(tokens_)),
        sums_(firsts_.size() * k_dim),
        stored_(heads()),
        queries_(heads() * k_dim),
        spoken_(heads()),
        scores_(std::size_t(sequences_ * heads_) * std::size_t(tokens_)),
        indices_(scores_.size()),
        counts_(std::size_t(sequences_ * heads_)),
        keep_(counts_.size()),
        tail_(counts_.size()),
        plans_(options.sequences),
        ids_(1, options.sequences, 1) {
    host_vector<index_t> ids(std::size_t(options.sequences), 0);
    std::iota(ids.begin(), ids.end(), 0);
    check(cudaMemcpy(ids_.entry({}), ids.data(), ids.size() * sizeof(index_t), cudaMemcpyHostToDevice), "cudaMemcpy");
    check(cudaMemset(spoken_.data(), 0xff, spoken_.bytes()), "cudaMemset");
    check(cudaStreamSynchronize(nullptr), "cudaStreamSynchronize");
  }

  /// The operation for another budget; `adopt` uses it from then on.
  /// Errors   plans that keep more than the index was made for.
  using operation = select_slots<typename policy::selector_type>;
  operation fit(const Recipe& recipe, const model_shape& shape, const cache_options& options,
                const device_info& device) const {
    require_indexed(recipe, options, tokens_);
    return operation(recipe.retrieve.selector, options.sequences * shape.kv_heads, tokens_, device,
                     recipe.retrieve.tokens);
  }
  void adopt(operation&& fitted) { select_ = std::move(fitted); }

  void require_covered(const planned<Recipe>&) const {}
  void require_fits(offset_t tokens) const { require_index_fits(tokens, tokens_); }
  host_vector<detail::gathered_column> gathered() const { return {plans_.gathered(), ids_.gathered()}; }
  void set_plan(index_t id, const planned<Recipe>& policies, cudaStream_t stream) {
    plans_.set(id, plan(policies), stream);
  }
  template <class PoliciesOf>
  void set_reads(const host_vector<index_t>& ids, const PoliciesOf& policies_of, cudaStream_t stream) {
    plans_.set(ids, [&](index_t id) { return plan(policies_of(id)); }, stream);
  }
  /// The next sequence with this id begins with nothing.
  void clear(index_t id, cudaStream_t stream) {
    for (index_t layer = 0; layer < layers_; ++layer) {
      const std::size_t first = (std::size_t(layer) * std::size_t(sequences_) + std::size_t(id)) * std::size_t(heads_);
      check(cudaMemsetAsync(stored_.data() + first, 0, std::size_t(heads_) * sizeof(segment_runs), stream),
            "cudaMemsetAsync");
      check(cudaMemsetAsync(spoken_.data() + first, 0xff, std::size_t(heads_) * sizeof(spoken_segment), stream),
            "cudaMemsetAsync");
    }
  }

  void refresh(sequence_layer owner, const View& view, index_t, cudaStream_t stream) const {
    means_.build(view, index(owner.layer, ids_.entry({0, owner.id})), stream);
  }
  /// Copies the state of the answer.
  void copy(index_t from, index_t to, cudaStream_t stream) const {
    for (index_t layer = 0; layer < layers_; ++layer) {
      const auto row = [&](index_t id) { return (std::size_t(layer) * sequences_ + id) * std::size_t(heads_); };
      copy_on_device(spoken_.data() + row(to), spoken_.data() + row(from), std::size_t(heads_), stream);
      copy_on_device(queries_.data() + row(to) * k_dim, queries_.data() + row(from) * k_dim,
                     std::size_t(heads_) * k_dim, stream);
    }
  }
  /// Saves the state of the answer in a layer, or loads it; `refresh` does not touch it. Waits for the stream.
  template <class Archive>
  void transfer(sequence_layer owner, Archive& archive, cudaStream_t stream) const {
    index_t form = 1;
    archive.number(form);
    archive.require(form == 1, "with the CPU's sums of queries, which a GPU does not read");
    const std::size_t first = (std::size_t(owner.layer) * sequences_ + std::size_t(owner.id)) * std::size_t(heads_);
    host_vector<spoken_segment> spoken{std::size_t(heads_)};
    host_vector<float> queries(std::size_t(heads_) * k_dim);
    const auto move = [&](auto& host, auto* device) {
      const std::size_t bytes = host.size() * sizeof(host[0]);
      check(Archive::loads ? cudaMemcpyAsync(device, host.data(), bytes, cudaMemcpyHostToDevice, stream)
                           : cudaMemcpyAsync(host.data(), device, bytes, cudaMemcpyDeviceToHost, stream),
            "cudaMemcpyAsync");
      check(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
    };
    if constexpr (!Archive::loads) move(spoken, spoken_.data() + first), move(queries, queries_.data() + first * k_dim);
    archive.rows(spoken.data(), spoken.size());
    archive.rows(queries.data(), queries.size());
    if constexpr (Archive::loads) move(spoken, spoken_.data() + first), move(queries, queries_.data() + first * k_dim);
  }
  void rebuild(index_t layer, const index_t* ids, const View& view, cudaStream_t stream) const {
    means_.build(view, index(layer, ids), stream);
  }

  bool choose(index_t layer, const View& view, const rows_view<const T>& q, const index_t* first, const logit_rule&,
              const rows_view<Out>&, const rows_view<float>&, selection_view& chosen, cudaStream_t stream) const {
    means_.score(view, scorer_, scale_, q, first, plans_.batch(), index(layer, ids_.batch(0)), scores_.data(), tokens_,
                 {keep_.data(), tail_.data()}, stream);
    select_problem select;
    select.scores = scores_.data();
    select.score_stride = tokens_;
    select.n = {view.lengths};
    select.keep = {keep_.data()};
    select.tail = {tail_.data()};
    select.out = indices_.data();
    select.out_stride = tokens_;
    select.counts = counts_.data();
    select.rows = view.sequences * heads_;
    select_.run(select, nullptr, stream);
    chosen = select.chosen();
    return false;
  }
  template <class ReadView>
  void complete(index_t, const index_t*, const ReadView&, const rows_view<Out>&, cudaStream_t) const {}

  /// Bytes of heads with `longest` tokens, as if each were a segment: only the device knows how many segments there
  /// are.
  offset_t bytes(const planned<Recipe>&, index_t longest) const {
    const offset_t state = k_dim * offset_t(sizeof(float)) + offset_t(sizeof(segment_runs) + sizeof(spoken_segment));
    return heads_ * (longest * offset_t(k_dim * sizeof(float) + sizeof(index_t)) + state);
  }
  /// Tokens that the last step attended. Synchronises.
  offset_t attended(const planned<Recipe>& policies, offset_t n, const head_place& of) const {
    return runs_read(of) == 0 ? n : (std::min<offset_t>)(n, policies.plan.read);
  }
  offset_t bytes_read(const planned<Recipe>&, offset_t, const head_place& of) const {
    return runs_read(of) * k_dim * offset_t(sizeof(float));
  }

 private:
  segment_plan plan(const planned<Recipe>& policies) const {
    return {policies.plan.read, scorer_.protected_tail(policies.plan.read)};
  }
  std::size_t heads() const { return std::size_t(layers_) * std::size_t(sequences_) * std::size_t(heads_); }
  offset_t runs_read(const head_place& of) const {
    return downloaded(spoken_.data() + layer_major{sequences_}.index(of.owner) * heads_ + of.head, 1)[0].runs;
  }
  segment_index index(index_t layer, const index_t* ids) const {
    return {firsts_.data(),     sums_.data(), stored_.data(), queries_.data(), spoken_.data(),
            layer * sequences_, ids,          tokens_};
  }

  index_t heads_, sequences_, layers_, tokens_;
  typename policy::scorer_type scorer_;
  float scale_;
  segment_means<View, typename policy::scorer_type> means_;
  operation select_;
  device_buffer<index_t> firsts_;  // the index, by entry and head: see segment_index
  device_buffer<float> sums_;
  device_buffer<segment_runs> stored_;
  device_buffer<float> queries_;
  device_buffer<spoken_segment> spoken_;
  device_buffer<float> scores_;
  device_buffer<index_t> indices_, counts_, keep_, tail_;  // by row of the batch
  id_values<segment_plan> plans_;
  id_column<index_t> ids_;  // maps each id to itself: gathered for a batch, it gives the batch's entries
};

template <class Recipe, class View, class Out>
requires(Recipe::retrieve_type::needs_segments) struct reader_of<Recipe, View, Out> {
  using type = segment_reader<Recipe, View, Out>;
};

}  // namespace cuda
TESSERA_NAMESPACE_END
