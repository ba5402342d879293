// What decode steps read from beside the rows: candidates that a filter let through, and the index of their keys.
#pragma once

#include <algorithm>

#include "../../../core/page_extrema.hpp"
#include "../../../core/selection.hpp"
#include "../../../recipe.hpp"
#include "../device/memory.cuh"
#include "../read/extrema/mean_value.cuh"
#include "../read/extrema/page_index.cuh"

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

template <int Threads>
__global__ void __launch_bounds__(Threads) set_plan_entry(read_plan* to, const __grid_constant__ read_plan plan) {
  if (threadIdx.x == 0) *to = plan;
}

/// Places of one sequence's pages, one head after another from page `first` of the pool.
template <int Threads>
__global__ void __launch_bounds__(Threads)
    lay_out_pages_entry(const index_t* lengths, index_t heads, index_t more, index_t page, index_t step, offset_t first,
                        index_t k_dim, offset_t* begins, index_t* rooms) {
  if (threadIdx.x != 0) return;
  for (index_t h = 0; h < heads; ++h) {
    const index_t pages = (ceil_div(lengths[h] + more, page) + step - 1) / step * step;
    begins[h] = first;
    rooms[h] = pages;
    first += page_row_elements(page, k_dim, pages);
  }
}

}  // namespace detail

/// Candidates and page index of every (layer, sequence), the device's cpu::read_stage: each only where the recipe has a use
/// for it. Candidate lists lie where the store would keep positions: at the rows that they name or before them.
/// Bytes    4 a candidate; 2 * k_dim elements a page, k_dim where pages have one slot.
template <class Recipe>
class read_store {
 public:
  using layout = typename Recipe::layout_type;
  using T = typename layout::element_type;
  static constexpr int k_dim = layout::k_dim, v_dim = layout::v_dim;
  using all_view = kv_view<T, k_dim, ragged, v_dim>;
  using view_type = std::conditional_t<Recipe::filters, kv_view<T, k_dim, filtered<ragged>, v_dim>, all_view>;
  using index_type = page_extrema_view<T, k_dim>;
  static constexpr bool averages = [] {
    if constexpr (Recipe::estimates) return Recipe::retrieve_type::scorer_type::adds_mean_value;
    return false;
  }();
  static constexpr index_t room_step = 16;  // pages: vector loads stay inside a row

  /// `pages`: of the index, all layers and sequences together.
  read_store(index_t layers, index_t sequences, index_t kv_heads, offset_t pages)
      : sequences_(sequences),
        heads_(kv_heads),
        spans_(pages, "pages of the index", "raise cache_options::index_pages, or close a sequence"),
        places_(std::size_t(layers) * std::size_t(sequences)),
        counts_(Recipe::filters ? places_.size() * std::size_t(kv_heads) : 0),
        data_(std::size_t(pages) * 2 * k_dim),
        begins_(Recipe::estimates ? places_.size() * std::size_t(kv_heads) : 0),
        rooms_(begins_.size()),
        plans_(Recipe::retrieves ? std::size_t(sequences) : 0),
        sums_(averages ? places_.size() * std::size_t(kv_heads) * v_dim : 0),
        sums_scratch_(averages ? mean_value<view_type>(sequences * kv_heads).workspace_bytes() : 0) {}

  /// What steps may read of some sequences of a layer: `all`, or the candidates among it.
  view_type view(const all_view& all, index_t layer, index_t first, index_t* slots) const {
    if constexpr (Recipe::filters) {
      view_type view;
      view.k = all.k;
      view.v = all.v;
      view.k_strides = all.k_strides;
      view.v_strides = all.v_strides;
      view.sequences = all.sequences;
      view.kv_heads = all.kv_heads;
      view.lengths = counts_.data() + at(layer, first);
      view.length_strides = {heads_, 1};
      view.positions = slots;  // of a store that drops nothing, slots are positions
      view.position_begin = all.table.begin;
      view.table = {all.table, slots, all.table.begin, heads_};
      return view;
    } else {
      return all;
    }
  }

  index_type index(index_t layer, index_t first) const {
    return {data_.data(), 1, 0, begins_.data() + at(layer, first), rooms_.data() + at(layer, first)};
  }

  /// By sequence, on the device.
  const read_plan* plans(index_t first) const { return plans_.data() + first; }
  /// Launches read the plan from now on.
  void set_plan(index_t sequence, const read_plan& plan, cudaStream_t stream) {
    detail::set_plan_entry<32><<<1, 32, 0, stream>>>(plans_.data() + sequence, plan);
    check(cudaGetLastError(), "launch of set_plan");
  }

  /// The slots of each head that a filter has let through since the last prompt ended; at most `bound`.
  void pass(index_t layer, index_t sequence, const selection_view& chosen, const offset_t* begins, index_t* slots,
            index_t longest, offset_t total, cudaStream_t stream) {
    const unsigned blocks = unsigned(std::clamp(longest / 1024, 1, 64));
    detail::pass_entry<256><<<dim3(blocks, unsigned(heads_)), 256, 0, stream>>>(chosen, begins, slots,
                                                                                counts_.data() + at(layer, sequence));
    check(cudaGetLastError(), "launch of pass");
    place& here = places_[place_of(layer, sequence)];
    here.longest = longest;
    here.total = total;
  }

  /// Notes on the host that a step of `tokens` will join; makes room for their pages. `bound`: of what is stored.
  void make_room(index_t layer, index_t sequence, const view_type& view, index_t longest, offset_t total,
                 index_t tokens, index_t spare, cudaStream_t stream) {
    place& here = places_[place_of(layer, sequence)];
    if constexpr (Recipe::estimates) {
      if constexpr (Recipe::filters) {
        longest = here.longest;
        total = here.total;
      }
      if (here.room < tokens) {
        lay_out(layer, sequence, view, longest, total, here.page, tokens + spare, stream);
      }
      here.room -= tokens;
    }
    if constexpr (Recipe::filters) {
      here.longest += tokens;
      here.total += offset_t(heads_) * tokens;
    }
  }

  /// The newest `tokens` tokens of some sequences, which the store's view already counts, join the candidates. The index
  /// takes them in when a step chooses.
  void append(index_t layer, index_t first, const all_view& all, index_t tokens, index_t* slots,
              cudaStream_t stream) const {
    if constexpr (Recipe::filters) {
      const index_t rows = all.sequences * heads_;
      detail::join_entry<128><<<unsigned(ceil_div(rows, 128)), 128, 0, stream>>>(
          all.lengths, all.table.begin, slots, counts_.data() + at(layer, first), rows, tokens);
      check(cudaGetLastError(), "launch of join");
    }
  }

  /// Brings a sequence's index up to date when its prompt has ended. `moved`: slots are no longer what they were.
  void refresh(index_t layer, index_t sequence, const view_type& view, index_t longest, offset_t total, index_t page,
               index_t room, cudaStream_t stream) {
    if constexpr (Recipe::estimates) {
      const place& here = places_[place_of(layer, sequence)];
      if constexpr (Recipe::filters) {
        longest = here.longest;
        total = here.total;
      }
      lay_out(layer, sequence, view, longest, total, page, room, stream);
      sum_values(layer, sequence, view, stream);
    }
  }

  /// Gives what the attended tokens of a step lack of each row's mass to the mean of V.
  template <class Out>
  void add_mean_value(index_t layer, index_t first, const view_type& view, const float* mass, const rows_view<Out>& out,
                      cudaStream_t stream) const {
    mean_value_problem<view_type, Out> problem;
    problem.view = view;
    problem.sums = sums_.data() + at(layer, first) * v_dim;
    problem.mass = mass;
    problem.out = out;
    problem.tokens = out.tokens;
    mean_value<view_type, Out>(view.sequences * heads_).run(problem, nullptr, stream);
  }

  /// After slots have moved in place: every page of some sequences anew, recorded or not.
  void rebuild(index_t layer, index_t first, const view_type& view, index_t capacity, cudaStream_t stream) const {
    index_pages<view_type>{}.build(view, index(layer, first), plans(first), capacity, stream);
    sum_values(layer, first, view, stream);
  }

  void clear(index_t layers, index_t sequence) {
    for (index_t layer = 0; layer < layers; ++layer) {
      place& here = places_[place_of(layer, sequence)];
      spans_.give_back(here.first, here.pages);
      here = {};
    }
  }

  /// Candidates that a sequence's layer holds at most, all heads; bytes of its part of the index.
  offset_t bytes(index_t layer, index_t sequence) const {
    return places_[place_of(layer, sequence)].pages * 2 * k_dim * offset_t(sizeof(T)) +
           (averages ? offset_t(heads_) * v_dim * offset_t(sizeof(double)) : 0);
  }
  offset_t most_bytes() const { return spans_.most_used() * 2 * k_dim * offset_t(sizeof(T)); }
  std::vector<index_t> downloaded_counts(index_t layer, index_t sequence) const {
    return downloaded(counts_.data() + at(layer, sequence), std::size_t(heads_));
  }

 private:
  struct place {
    offset_t first = 0, pages = 0;  // its run of the index
    index_t page = 1;
    index_t room = 0;     // tokens that every head's pages can still take
    index_t longest = 0;  // candidates: no head has more
    offset_t total = 0;   // candidates: all heads together have no more
  };

  std::size_t place_of(index_t layer, index_t sequence) const {
    return std::size_t(layer) * std::size_t(sequences_) + std::size_t(sequence);
  }
  offset_t at(index_t layer, index_t sequence) const { return offset_t(place_of(layer, sequence)) * heads_; }

  void sum_values(index_t layer, index_t first, const view_type& view, cudaStream_t stream) const {
    if constexpr (averages) {
      mean_value<view_type>(view.sequences * heads_)
          .build(view, sums_.data() + at(layer, first) * v_dim, sums_scratch_.data(), stream);
    }
  }

  /// Room for what is there and `room` more tokens, and the pages of what is there built anew.
  void lay_out(index_t layer, index_t sequence, const view_type& view, index_t longest, offset_t total, index_t page,
               index_t room, cudaStream_t stream) {
    place& here = places_[place_of(layer, sequence)];
    spans_.give_back(here.first, here.pages);
    here.first = here.pages = 0;
    here.page = page;
    here.room = room;
    // In pages of two sides: those of one slot have one.
    offset_t pages = total / page + offset_t(heads_) * (room / page + 2 + room_step);
    if (page == 1) pages = (pages + 1) / 2;
    here.first = spans_.take(pages);
    here.pages = pages;
    detail::lay_out_pages_entry<32>
        <<<1, 32, 0, stream>>>(view.lengths, heads_, room, page, room_step, here.first * 2 * k_dim, k_dim,
                               begins_.data() + at(layer, sequence), rooms_.data() + at(layer, sequence));
    check(cudaGetLastError(), "launch of lay_out_pages");
    index_pages<view_type>{}.build(view, index(layer, sequence), plans(sequence), ceil_div(longest, page), stream);
  }

  index_t sequences_, heads_;
  row_spans spans_;
  std::vector<place> places_;
  device_buffer<index_t> counts_;
  device_buffer<T> data_;
  device_buffer<offset_t> begins_;
  device_buffer<index_t> rooms_;
  device_buffer<read_plan> plans_;  // by sequence
  device_buffer<double> sums_;      // of V by row, for a scorer that adds the mean value
  device_buffer<unsigned char> sums_scratch_;
};

}  // namespace cuda
TESSERA_NAMESPACE_END
