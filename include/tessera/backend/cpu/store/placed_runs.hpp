// Rows in runs on the CPU.
#pragma once

#include <algorithm>

#include "../../../core/host/host_vector.hpp"
#include "../../../core/plan/capacity.hpp"
#include "../../../core/plan/layer_peak.hpp"
#include "../../../core/stored/room.hpp"
#include "../../../layout/runs.hpp"
#include "columns.hpp"
#include "pack.hpp"

TESSERA_NAMESPACE_BEGIN
namespace cpu {

/// Rows of runs, or of columns, for heads of these lengths.
inline offset_t rows_with_room(const host_vector<index_t>& lengths) {
  offset_t rows = 0;
  for (const index_t length : lengths) rows += offset_t(length) + spare_room(length);
  return rows;
}

/// The rows of a cache; specialised by placement. An entry is the number of a (layer, sequence). The caller has the
/// lengths.
///   view(entry, lengths)                     its rows, as one sequence; valid until the entry changes
///   make_room(entry, lengths, tokens)        allocates memory for `tokens` more in every head
///   plan_keep(entry, lengths, chosen)        allocates what `keep` needs; nothing visible changes
///   keep(entry, lengths, chosen, workers)    drops all but the chosen slots; needs no memory
///   truncate(entry, lengths)                 releases what heads of these lengths do not need; needs no memory
///   open(entry), clear(entry)                makes an empty entry; releases its memory, and needs none
///   copy(source, target)                     copies an entry to an empty one, which the caller clears where it throws;
///                                            in pages the two share what neither has written since
///   lay_out(entry, lengths)                  makes an empty entry one with memory for heads of these lengths
///   expect(id, tokens, moves_rows)           reserves memory for `tokens` more in every head of a sequence, 0: none,
///                                            and for stored rows that may move; throws where a pool has no more
///   bytes(entry)
///   upper_bound(peaks)                       upper bound of the memory of a sequence's rows; `peaks` by layer
///   available()                              memory that is neither used nor reserved; without a bound: unlimited
template <class Layout, class Placement = typename Layout::placement_type>
class placed_rows {
  static_assert(sizeof(Placement) == 0,
                "tessera: the CPU's store does not know this placement; include the header that specialises "
                "cpu::placed_rows for it");
};

/// The first slot of any head to which a choice moves another slot's row; without any, the end of a head.
inline index_t first_moved(const selection& chosen) {
  index_t first = no_index;
  for (std::size_t h = 0; h < chosen.counts.size(); ++h) {
    index_t same = 0;
    while (same < chosen.counts[h] && chosen.row(index_t(h))[same] == same) ++same;
    first = first == no_index ? same : (std::min)(first, same);
  }
  return first;
}

/// Each entry has memory of its own. It grows by `spare_room`; `keep` releases memory once a quarter is unused.
template <class Layout>
class placed_rows<Layout, runs> {
 public:
  using encoding_type = typename Layout::encoding_type;
  using view_type = kv_view<view_element<encoding_type>, Layout::k_dim, ragged, Layout::v_dim>;

  placed_rows(const runs&, index_t, index_t kv_heads) : heads_(kv_heads) {}

  view_type view(std::size_t entry, const host_vector<index_t>& lengths) { return view(run_of(entry), lengths); }

  void make_room(std::size_t entry, const host_vector<index_t>& lengths, index_t tokens) {
    run& here = run_of(entry);
    bool fits = true;
    for (std::size_t h = 0; h < lengths.size(); ++h) fits &= lengths[h] + tokens <= here.capacities[h];
    if (fits) return;
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

  void plan_keep(std::size_t, const host_vector<index_t>&, const selection&) {}
  void keep(std::size_t entry, const host_vector<index_t>& lengths, const selection& chosen, executor& workers) {
    run& here = run_of(entry);
    offset_t used = 0, capacity = 0;
    for (std::size_t h = 0; h < lengths.size(); ++h) {
      used += chosen.counts[h];
      capacity += here.capacities[h];
    }
    if (gives_back(used, capacity)) {
      try {
        return move(here, lengths, chosen.counts, chosen, workers);
      } catch (...) {  // no memory for a smaller run: the rows stay in the old one
      }
    }
    pack(view(here, lengths), chosen.view(), view(here, lengths), workers);
  }

  /// A run keeps its memory for the tokens that follow.
  void truncate(std::size_t, const host_vector<index_t>&) {}
  void expect(index_t, index_t, bool) {}
  void open(std::size_t entry) { run_of(entry).clear(); }
  void clear(std::size_t entry) { runs_[entry].clear(); }
  void copy(std::size_t source, std::size_t target) {
    run_of(target);  // so that the assignment moves no run
    runs_[target] = run_of(source);
  }
  void lay_out(std::size_t entry, const host_vector<index_t>& lengths) {
    run_of(entry).clear();
    if (*std::max_element(lengths.begin(), lengths.end()) == 0) return;
    host_vector<index_t> capacities;
    for (const index_t length : lengths) capacities.push_back(length + spare_room(length));
    selection none;
    none.reset(host_vector<index_t>(lengths.size(), 0));
    executor alone(1);
    move(run_of(entry), none.counts, capacities, none, alone);
  }
  offset_t bytes(std::size_t entry) const {
    if (entry >= runs_.size()) return 0;
    const run& here = runs_[entry];
    return offset_t((here.k.capacity() + here.v.capacity()) * sizeof(stored) +
                    (here.k_scales.capacity() + here.v_scales.capacity()) * sizeof(float));
  }
  /// The longest layer counts twice: a layer that grows has its old and its new run for a while.
  capacity upper_bound(const host_vector<layer_peak>& peaks) const {
    offset_t rows = 0, largest = 0;
    for (const layer_peak& peak : peaks) {
      const offset_t of_layer = rows_with_room(peak.stored.by_head);
      rows += of_layer;
      largest = (std::max)(largest, of_layer);
    }
    return {(rows + largest) * Layout::token_bytes(), 0};
  }
  capacity available() const { return {capacity::unlimited, 0}; }

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

  run& run_of(std::size_t entry) {
    while (runs_.size() <= entry) runs_.emplace_back(heads_);
    return runs_[entry];
  }

  view_type view(run& here, const host_vector<index_t>& lengths) const {
    view_type view;
    view.k = here.k.data();
    view.v = here.v.data();
    view.k_strides = {0, 0, view_type::k_units, 1};
    view.v_strides = {0, 0, view_type::v_units, 1};
    view.sequences = 1;
    view.kv_heads = heads_;
    view.lengths = lengths.data();
    view.length_strides = {0, 1};
    view.table = {here.begins.data(), heads_};
    if constexpr (encoding_type::scaled) view.scales = {here.k_scales.data(), here.v_scales.data(), 0, 0, 1};
    return view;
  }

  /// Moves the chosen slots to new memory of the given capacities.
  void move(run& here, const host_vector<index_t>& lengths, const host_vector<index_t>& capacities,
            const selection& chosen, executor& workers) {
    run moved(heads_);
    offset_t total = 0;
    for (std::size_t h = 0; h < capacities.size(); ++h) {
      moved.begins[h] = total;
      moved.capacities[h] = capacities[h];
      total += capacities[h];
    }
    moved.k.resize(std::size_t(total) * view_type::k_units);
    moved.v.resize(std::size_t(total) * view_type::v_units);
    if constexpr (encoding_type::scaled) {
      moved.k_scales.resize(std::size_t(total));
      moved.v_scales.resize(std::size_t(total));
    }
    pack(view(here, lengths), chosen.view(), view(moved, chosen.counts), workers);
    here = std::move(moved);
  }

  index_t heads_;
  host_vector<run> runs_;
};

}  // namespace cpu
TESSERA_NAMESPACE_END
