// Rows in runs on the CPU.
#pragma once

#include <algorithm>

#include "../../../core/host/host_vector.hpp"
#include "../../../core/stored/room.hpp"
#include "../../../layout/runs.hpp"
#include "columns.hpp"
#include "pack.hpp"

TESSERA_NAMESPACE_BEGIN
namespace cpu {

/// Where a cache's rows lie; specialised by placement. A place is a (layer, sequence); lengths are the caller's.
///   view(place, lengths)                     its rows, as one sequence; valid until the place changes
///   make_room(place, lengths, tokens)        for `tokens` more in every head
///   keep(place, lengths, chosen, workers)    the chosen slots alone stay; needs no memory
///   open(place), clear(place)                an empty place; gives its memory back, and needs none
///   copy(from, to)                           an empty place gets what another one holds; cleared by the caller where
///                                            it throws
///   expect(id, tokens)                       every head of a sequence will get so many more, 0: none for now; throws
///                                            where a pool has no room for them
///   bytes(place)
template <class Layout, class Placement = typename Layout::placement_type>
class placed_rows {
  static_assert(sizeof(Placement) == 0,
                "tessera: the CPU's store does not know this placement; include the header that specialises "
                "cpu::placed_rows for it");
};

/// Each place has memory of its own. It grows by `spare_room`; `keep` gives memory back once a quarter is unused.
template <class Layout>
class placed_rows<Layout, runs> {
 public:
  using encoding_type = typename Layout::encoding_type;
  using view_type = kv_view<view_element<encoding_type>, Layout::k_dim, ragged, Layout::v_dim>;

  placed_rows(const runs&, index_t, index_t kv_heads) : heads_(kv_heads) {}

  view_type view(std::size_t place, const host_vector<index_t>& lengths) { return view(at(place), lengths); }

  void make_room(std::size_t place, const host_vector<index_t>& lengths, index_t tokens) {
    run& here = at(place);
    bool room = true;
    for (std::size_t h = 0; h < lengths.size(); ++h) room &= lengths[h] + tokens <= here.capacities[h];
    if (room) return;
    host_vector<index_t> wanted;
    for (const index_t length : lengths) wanted.push_back(length + tokens + spare_room(length + tokens));
    selection everything;
    everything.reset(lengths);
    for (std::size_t h = 0; h < lengths.size(); ++h) {
      for (index_t i = 0; i < lengths[h]; ++i) everything.row(index_t(h))[i] = i;
    }
    everything.counts = lengths;
    executor alone(1);
    move(here, lengths, wanted, everything, alone);
  }

  void keep(std::size_t place, const host_vector<index_t>& lengths, const selection& chosen, executor& workers) {
    run& here = at(place);
    offset_t used = 0, held = 0;
    for (std::size_t h = 0; h < lengths.size(); ++h) {
      used += chosen.counts[h];
      held += here.capacities[h];
    }
    if (gives_back(used, held)) {
      try {
        return move(here, lengths, chosen.counts, chosen, workers);
      } catch (...) {  // no memory for a smaller run: the rows stay in the old one
      }
    }
    pack(view(here, lengths), chosen.view(), view(here, lengths), workers);
  }

  void expect(index_t, index_t) {}
  void open(std::size_t place) { at(place).clear(); }
  void clear(std::size_t place) { runs_[place].clear(); }
  void copy(std::size_t from, std::size_t to) {
    at(to);  // what follows moves nothing
    runs_[to] = at(from);
  }
  offset_t bytes(std::size_t place) const {
    if (place >= runs_.size()) return 0;
    const run& here = runs_[place];
    return offset_t((here.k.capacity() + here.v.capacity()) * sizeof(stored) +
                    (here.k_scales.capacity() + here.v_scales.capacity()) * sizeof(float));
  }

 private:
  using stored = typename encoding_type::stored_type;
  struct run {
    explicit run(index_t kv_heads) : begins(std::size_t(kv_heads), 0), capacities(std::size_t(kv_heads), 0) {}
    host_vector<stored> k, v;
    host_vector<float> k_scales, v_scales;
    host_vector<offset_t> begins;  // by head, in tokens
    host_vector<index_t> capacities;

    void clear() {
      host_vector<stored>().swap(k);
      host_vector<stored>().swap(v);
      host_vector<float>().swap(k_scales);
      host_vector<float>().swap(v_scales);
      std::fill(begins.begin(), begins.end(), 0);
      std::fill(capacities.begin(), capacities.end(), 0);
    }
  };

  run& at(std::size_t place) {
    while (runs_.size() <= place) runs_.emplace_back(heads_);
    return runs_[place];
  }

  view_type view(run& here, const host_vector<index_t>& lengths) const {
    view_type view;
    view.k = here.k.data();
    view.v = here.v.data();
    view.k_strides = {0, 0, Layout::k_dim, 1};
    view.v_strides = {0, 0, Layout::v_dim, 1};
    view.sequences = 1;
    view.kv_heads = heads_;
    view.lengths = lengths.data();
    view.length_strides = {0, 1};
    view.table = {here.begins.data(), heads_};
    if constexpr (encoding_type::scaled) view.scales = {here.k_scales.data(), here.v_scales.data(), 0, 0, 1};
    return view;
  }

  /// Fresh memory of the given capacities for the chosen slots.
  void move(run& here, const host_vector<index_t>& lengths, const host_vector<index_t>& capacities,
            const selection& chosen, executor& workers) {
    run fresh(heads_);
    offset_t total = 0;
    for (std::size_t h = 0; h < capacities.size(); ++h) {
      fresh.begins[h] = total;
      fresh.capacities[h] = capacities[h];
      total += capacities[h];
    }
    fresh.k.resize(std::size_t(total) * Layout::k_dim);
    fresh.v.resize(std::size_t(total) * Layout::v_dim);
    if constexpr (encoding_type::scaled) {
      fresh.k_scales.resize(std::size_t(total));
      fresh.v_scales.resize(std::size_t(total));
    }
    pack(view(here, lengths), chosen.view(), view(fresh, chosen.counts), workers);
    here = std::move(fresh);
  }

  index_t heads_;
  host_vector<run> runs_;
};

}  // namespace cpu
TESSERA_NAMESPACE_END
