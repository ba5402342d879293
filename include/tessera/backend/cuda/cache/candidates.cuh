// Which slots a turn's steps may read, on the device: what a filter let through, and what was decoded since.
#pragma once

#include <algorithm>
#include <vector>

#include "../store/kv_store.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {
namespace detail {

/// Writes what a selection chose of one sequence as its heads' candidates.
template <int Threads>
__global__ void __launch_bounds__(Threads)
    pass_entry(selection_view chosen, const offset_t* begins, index_t* slots, index_t* counts) {
  const index_t h = blockIdx.y, count = chosen.count(h);
  for (index_t i = index_t(blockIdx.x) * Threads + index_t(threadIdx.x); i < count; i += index_t(gridDim.x) * Threads)
    slots[begins[h] + i] = chosen.row(h)[i];
  if (blockIdx.x == 0 && threadIdx.x == 0) counts[h] = count;
}

/// The newest `tokens` slots of every row join its candidates; `lengths` count them.
template <int Threads>
__global__ void __launch_bounds__(Threads) join_entry(const index_t* lengths, const offset_t* begins, index_t* slots,
                                                      index_t* counts, index_t rows, index_t tokens) {
  const index_t row = index_t(blockIdx.x * Threads + threadIdx.x);
  if (row >= rows) return;
  const index_t held = counts[row];
  for (index_t t = 0; t < tokens; ++t) slots[begins[row] + held + t] = lengths[row] - tokens + t;
  counts[row] = held + tokens;
}

}  // namespace detail

/// Steps may read everything: the same verbs, and nothing to do.
template <class View>
class no_candidates {
 public:
  using view_type = View;
  using place_list = std::vector<std::pair<index_t, index_t>>;
  no_candidates(index_t, index_t, index_t, index_t) {}
  std::vector<detail::gathered_column> gathered() const { return {}; }
  token_bound bound(index_t, index_t, const token_bound& stored) const { return stored; }
  View view(index_t, index_t, const View& all) const { return all; }
  View batch_view(index_t, const View& all) const { return all; }
  void join(index_t, const View&, index_t, cudaStream_t) const {}
  void plan_pass(const place_list&, const std::vector<kept_bound>&) {}
  void pass(index_t, index_t, const kept_slots&, cudaStream_t) {}
  void plan_room(const place_list&, index_t) {}
  void abandon() {}
  void commit_room(const place_list&, cudaStream_t) {}
  void took(index_t, index_t, index_t) {}
  void advance(const step_table&, index_t, index_t, index_t, cudaStream_t) const {}
  void clear(index_t, cudaStream_t) {}
  offset_t bytes(index_t, index_t) const { return 0; }
  template <class Store>
  std::vector<std::vector<index_t>> downloaded_positions(index_t layer, index_t id, const Store& store) const {
    return store.downloaded_positions(layer, id);
  }
};

/// Ascending slot lists by kv_head of every (layer, sequence), in runs of their own. Of K and V nothing is copied.
template <class View>
class candidates {
 public:
  using view_type =
      kv_view<view_element<typename View::encoding_type>, View::k_dim, filtered<decltype(View::table)>, View::v_dim>;
  using place_list = std::vector<std::pair<index_t, index_t>>;

  candidates(index_t layers, index_t sequences, index_t kv_heads, index_t tokens)
      : layers_(layers),
        sequences_(sequences),
        heads_(kv_heads),
        tokens_(tokens),
        bounds_(std::size_t(layers) * std::size_t(sequences)),
        pool_(layers * sequences, kv_heads, run_pool::rows_for(layers * sequences, kv_heads, tokens), {4},
              "candidates of the cache"),
        counts_(layers, sequences, kv_heads),
        begins_(layers, sequences, kv_heads) {}

  std::vector<detail::gathered_column> gathered() const { return {counts_.gathered(), begins_.gathered()}; }
  const token_bound& bound(index_t layer, index_t id, const token_bound&) const { return bounds_[place(layer, id)]; }

  view_type view(index_t layer, index_t id, const View& all) const {
    return view(all, counts_.of(layer, id), begins_.of(layer, id));
  }
  view_type batch_view(index_t layer, const View& all) const {
    return view(all, counts_.batch(layer), begins_.batch(layer));
  }

  /// Plans lists of at most these bounds, for `pass` calls in the same order.
  void plan_pass(const place_list& places, const std::vector<kept_bound>& passed) {
    pool_.plan();
    try {
      for (std::size_t i = 0; i < places.size(); ++i) {
        const index_t room = room_behind(passed[i].longest, tokens_);
        pool_.plan_run(place(places[i].first, places[i].second), passed[i].total + offset_t(heads_) * room, room);
      }
    } catch (...) {
      pool_.abandon();
      throw;
    }
  }
  /// The slots of each head that a filter has let through since the last prompt ended.
  void pass(index_t layer, index_t id, const kept_slots& passed, cudaStream_t stream) {
    const std::size_t at = place(layer, id);
    lay_out(at, passed.chosen.counts, stream);
    pool_.adopt(begins(at), stream);
    const unsigned blocks = unsigned(std::clamp(passed.bound.longest / 1024, 1, 64));
    detail::pass_entry<256>
        <<<dim3(blocks, unsigned(heads_)), 256, 0, stream>>>(passed.chosen, begins(at), slots(), counts_.of(layer, id));
    check(cudaGetLastError(), "launch of pass");
    bounds_[at] = passed.bound;
  }

  void plan_room(const place_list& places, index_t tokens) {
    pool_.plan();
    try {
      for (const auto& [layer, id] : places) {
        const std::size_t at = place(layer, id);
        if (pool_.room(at) >= tokens) continue;
        const index_t room = tokens + room_behind(bounds_[at].longest + tokens, tokens_);
        pool_.plan_run(at, bounds_[at].total + offset_t(heads_) * room, room);
      }
    } catch (...) {
      pool_.abandon();
      throw;
    }
  }
  void abandon() { pool_.abandon(); }
  void commit_room(const place_list& places, cudaStream_t stream) {
    for (const auto& [layer, id] : places) {
      const std::size_t at = place(layer, id);
      if (!lay_out(at, counts_.of(layer, id), stream)) continue;
      pool_.move(begins(at), counts_.of(layer, id), bounds_[at].longest, stream);
      pool_.adopt(begins(at), stream);
    }
  }
  void took(index_t layer, index_t id, index_t tokens) {
    const std::size_t at = place(layer, id);
    bounds_[at].longest += tokens;
    bounds_[at].total += offset_t(heads_) * tokens;
    pool_.took(at, tokens);
  }
  /// The newest tokens of a batch, which `all` counts, join its candidates.
  void join(index_t layer, const View& all, index_t tokens, cudaStream_t stream) const {
    const index_t rows = all.sequences * heads_;
    detail::join_entry<128><<<unsigned(ceil_div(rows, 128)), 128, 0, stream>>>(
        all.lengths, begins_.batch(layer), slots(), counts_.batch(layer), rows, tokens);
    check(cudaGetLastError(), "launch of join");
  }
  void advance(const step_table& steps, index_t layers, index_t batch, index_t tokens, cudaStream_t stream) const {
    steps.advance(counts_, layers, batch, tokens, stream);
  }

  void clear(index_t id, cudaStream_t stream) {
    for (index_t layer = 0; layer < layers_; ++layer) {
      pool_.clear(place(layer, id));
      bounds_[place(layer, id)] = {};
      check(cudaMemsetAsync(counts_.of(layer, id), 0, std::size_t(heads_) * sizeof(index_t), stream),
            "cudaMemsetAsync");
    }
  }
  offset_t bytes(index_t layer, index_t id) const { return pool_.rows(place(layer, id)) * pool_.row_bytes(); }

  /// By kv_head: of a store that drops nothing, slots are positions. Synchronises.
  template <class Store>
  std::vector<std::vector<index_t>> downloaded_positions(index_t layer, index_t id, const Store&) const {
    const auto counts = downloaded(counts_.of(layer, id), std::size_t(heads_));
    const auto first = downloaded(begins_.of(layer, id), std::size_t(heads_));
    std::vector<std::vector<index_t>> all;
    for (std::size_t h = 0; h < counts.size(); ++h) {
      all.push_back(downloaded(slots() + first[h], std::size_t(counts[h])));
    }
    return all;
  }

 private:
  std::size_t place(index_t layer, index_t id) const {
    return std::size_t(layer) * std::size_t(sequences_) + std::size_t(id);
  }
  offset_t* begins(std::size_t at) const { return begins_.of(index_t(at) / sequences_, index_t(at) % sequences_); }
  index_t* slots() const { return pool_.plane_data<index_t>(0); }
  bool lay_out(std::size_t at, const index_t* counts, cudaStream_t stream) {
    return pool_.lay_out(
        at, counts, [&](std::size_t p) { return begins(p); }, stream);
  }
  view_type view(const View& all, const index_t* counts, const offset_t* begins) const {
    view_type view;
    view.k = all.k;
    view.v = all.v;
    view.k_strides = all.k_strides;
    view.v_strides = all.v_strides;
    view.scales = all.scales;
    view.sequences = all.sequences;
    view.kv_heads = all.kv_heads;
    view.lengths = counts;
    view.length_strides = {heads_, 1};
    view.positions = slots();  // of a store that drops nothing, slots are positions
    view.position_begin = begins;
    view.table = {all.table, slots(), begins, heads_};
    return view;
  }

  index_t layers_, sequences_, heads_, tokens_;
  std::vector<token_bound> bounds_;
  run_pool pool_;
  id_column<index_t> counts_;
  id_column<offset_t> begins_;
};

}  // namespace cuda
TESSERA_NAMESPACE_END
