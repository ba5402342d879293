// The stored rows of a cache on the device: where every (layer, sequence, kv_head) lies, and how it moves.
#pragma once

#include <algorithm>
#include <numeric>
#include <vector>

#include "../../../core/views.hpp"
#include "../device/memory.cuh"
#include "pack.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {
namespace detail {

/// New beginnings of one sequence's heads: one after another from `first`, each with its tokens and `room` more.
template <int Threads>
__global__ void __launch_bounds__(Threads)
    lay_out_entry(const index_t* counts, index_t heads, index_t room, offset_t first, offset_t* begins) {
  if (threadIdx.x != 0) return;
  for (index_t h = 0; h < heads; ++h) {
    begins[h] = first;
    first += counts[h] + room;
  }
}

/// K, V and columns by row.
template <class T>
struct stored_rows {
  T *k, *v;
  index_t* positions;  // null: none
  float* scores;       // null: none
};

/// Copies the rows of one sequence's heads to other beginnings, which nothing else uses.
template <class T, int D, int Dv>
__global__ void __launch_bounds__(256)
    move_rows_entry(stored_rows<T> rows, const index_t* lengths, const offset_t* from, const offset_t* to) {
  constexpr int k_chunks = D * int(sizeof(T)) / 16, chunks = k_chunks + Dv * int(sizeof(T)) / 16;
  const index_t h = blockIdx.y;
  const offset_t length = lengths[h], old_row = from[h], new_row = to[h];
  for (offset_t i = offset_t(blockIdx.x) * 256 + threadIdx.x; i < length * chunks; i += offset_t(gridDim.x) * 256) {
    const offset_t token = i / chunks;
    const int part = int(i % chunks);
    if (part < k_chunks) {
      reinterpret_cast<uint4*>(rows.k)[(new_row + token) * k_chunks + part] =
          reinterpret_cast<const uint4*>(rows.k)[(old_row + token) * k_chunks + part];
    } else {
      constexpr int v_chunks = chunks - k_chunks;
      reinterpret_cast<uint4*>(rows.v)[(new_row + token) * v_chunks + part - k_chunks] =
          reinterpret_cast<const uint4*>(rows.v)[(old_row + token) * v_chunks + part - k_chunks];
    }
    if (part == 0) {
      if (rows.positions) rows.positions[new_row + token] = rows.positions[old_row + token];
      if (rows.scores) rows.scores[new_row + token] = rows.scores[old_row + token];
    }
  }
}

}  // namespace detail

/// Rows of all layers, sequences and kv_heads in one pool of device memory; a row is one token of one kv_head.
///
/// The device holds lengths and beginnings, so that launches which are recorded once follow them. The host holds bounds
/// only: of a (layer, sequence) the longest head, the sum over heads, and for how many more tokens there is room.
/// All calls of one store follow one another on one stream.
/// Bytes    k_dim + v_dim elements a row, 4 more for its position where tokens are dropped, 4 where scores are kept.
template <class Layout>
class row_store {
 public:
  using T = typename Layout::element_type;
  static constexpr int k_dim = Layout::k_dim, v_dim = Layout::v_dim;
  using view_type = kv_view<T, k_dim, ragged, v_dim>;

  /// `with_lists`: a slot number per row, for lists of candidates, in the place of positions.
  row_store(index_t layers, index_t sequences, index_t kv_heads, offset_t rows, bool with_positions, bool with_scores,
            bool with_lists = false)
      : layers_(layers),
        sequences_(sequences),
        heads_(kv_heads),
        with_positions_(with_positions),
        spans_(rows, "rows of the cache",
               "raise cache_options::rows, reserve a prompt's length before it comes, or close a sequence"),
        places_(std::size_t(layers) * std::size_t(sequences)),
        k_(std::size_t(rows) * k_dim),
        v_(std::size_t(rows) * v_dim),
        positions_(with_positions || with_lists ? std::size_t(rows) : 0),
        scores_(with_scores ? std::size_t(rows) : 0),
        lengths_(places_.size() * std::size_t(kv_heads)),
        begins_(places_.size() * std::size_t(kv_heads)),
        new_begins_(std::size_t(kv_heads)) {}

  /// What the host knows of one (layer, sequence).
  struct place {
    offset_t first = 0, rows = 0;  // its run of the pool
    index_t longest = 0;           // no head holds more
    offset_t total = 0;            // all heads together hold no more
    index_t room = 0;              // tokens that every head can still take
  };
  const place& at(index_t layer, index_t sequence) const { return places_[index(layer, sequence)]; }

  /// Sequences `first` ... `first + count - 1` of a layer.
  view_type view(index_t layer, index_t first, index_t count) const {
    view_type view;
    view.k = k_.data();
    view.v = v_.data();
    view.k_strides = {0, 0, k_dim, 1};
    view.v_strides = {0, 0, v_dim, 1};
    view.sequences = count;
    view.kv_heads = heads_;
    view.lengths = lengths(layer, first);
    view.length_strides = {heads_, 1};
    view.table = {begins(layer, first), heads_};
    if (with_positions_) {
      view.positions = positions_.data();
      view.position_begin = begins(layer, first);
    }
    return view;
  }
  index_t* lengths(index_t layer, index_t sequence) const {
    return lengths_.data() + offset_t(index(layer, sequence)) * heads_;
  }
  offset_t* begins(index_t layer, index_t sequence) const {
    return begins_.data() + offset_t(index(layer, sequence)) * heads_;
  }
  slot_column<index_t> positions(const offset_t* begins) const { return {positions_.data(), 0, 0, begins}; }
  slot_column<float> scores(const offset_t* begins) const { return {scores_.data(), 0, 0, begins}; }
  float* scores() const { return scores_.data(); }

  /// Makes room for `tokens` more in every head, and `spare` beyond where rows must move for it.
  void make_room(index_t layer, index_t sequence, index_t tokens, index_t spare, cudaStream_t stream) {
    place& here = places_[index(layer, sequence)];
    if (here.room >= tokens) return;
    const index_t room = tokens + spare;
    const offset_t rows = here.total + offset_t(heads_) * room, first = spans_.take(rows);
    offset_t* old = begins(layer, sequence);
    lay_out(lengths(layer, sequence), room, first, stream);
    if (here.longest > 0) {
      const unsigned blocks = unsigned(std::clamp<offset_t>(offset_t(here.longest) * (k_dim + v_dim) / 4096, 1, 1024));
      detail::move_rows_entry<T, k_dim, v_dim><<<dim3(blocks, unsigned(heads_)), 256, 0, stream>>>(
          detail::stored_rows<T>{k_.data(), v_.data(), positions_.data(), scores_.data()}, lengths(layer, sequence),
          old, new_begins_.data());
      check(cudaGetLastError(), "launch of move_rows");
    }
    adopt_begins(old, stream);
    spans_.give_back(here.first, here.rows);
    here.first = first;
    here.rows = rows;
    here.room = room;
  }

  /// Notes that every head took `tokens` more; `make_room` was called before.
  void took(index_t layer, index_t sequence, index_t tokens) {
    place& here = places_[index(layer, sequence)];
    here.longest += tokens;
    here.total += offset_t(heads_) * tokens;
    here.room -= tokens;
  }
  /// Notes that rows were dropped in place.
  void shrank(index_t layer, index_t sequence, index_t longest, offset_t total, index_t room_gained) {
    place& here = places_[index(layer, sequence)];
    here.longest = std::min(here.longest, longest);
    here.total = std::min(here.total, total);
    here.room += room_gained;
  }

  /// Keeps the chosen slots of one sequence in fresh rows and gives the old ones back. `longest` and `total` bound what
  /// is chosen.
  void keep(index_t layer, index_t sequence, const selection_view& chosen, index_t longest, offset_t total,
            index_t room, const pack<view_type, view_type>& mover, cudaStream_t stream) {
    place& here = places_[index(layer, sequence)];
    longest = std::min(longest, here.longest);
    total = std::min(total, here.total);
    const offset_t rows = total + offset_t(heads_) * room, first = spans_.take(rows);
    lay_out(chosen.counts, room, first, stream);
    const view_type from = view(layer, sequence, 1);
    view_type to = from;
    to.table.begin = to.position_begin = new_begins_.data();
    mover.run({from, chosen, to, positions(new_begins_.data()),
               slot_column<const float>{scores_.data(), 0, 0, from.table.begin}, scores(new_begins_.data()),
               lengths(layer, sequence)},
              nullptr, stream);
    adopt_begins(begins(layer, sequence), stream);
    spans_.give_back(here.first, here.rows);
    here = {first, rows, longest, total, room};
  }

  /// Forgets a sequence and gives its rows back.
  void clear(index_t sequence, cudaStream_t stream) {
    for (index_t layer = 0; layer < layers_; ++layer) {
      place& here = places_[index(layer, sequence)];
      spans_.give_back(here.first, here.rows);
      here = {};
      check(cudaMemsetAsync(lengths(layer, sequence), 0, std::size_t(heads_) * sizeof(index_t), stream),
            "cudaMemsetAsync");
    }
  }

  /// Logical positions by kv_head, ascending. Synchronises.
  std::vector<std::vector<index_t>> downloaded_positions(index_t layer, index_t sequence) const {
    const auto held = downloaded(lengths(layer, sequence), std::size_t(heads_));
    const auto first = downloaded(begins(layer, sequence), std::size_t(heads_));
    std::vector<std::vector<index_t>> all(held.size());
    for (std::size_t h = 0; h < held.size(); ++h) {
      if (with_positions_) {
        all[h] = downloaded(positions_.data() + first[h], std::size_t(held[h]));
      } else {
        all[h].resize(std::size_t(held[h]));
        std::iota(all[h].begin(), all[h].end(), 0);
      }
    }
    return all;
  }

  offset_t row_bytes() const {
    return Layout::token_bytes() + (positions_.size() > 0 ? 4 : 0) + (scores_.size() > 0 ? 4 : 0);
  }
  const row_spans& spans() const { return spans_; }
  index_t kv_heads() const { return heads_; }

 private:
  std::size_t index(index_t layer, index_t sequence) const {
    return std::size_t(layer) * std::size_t(sequences_) + std::size_t(sequence);
  }
  void lay_out(const index_t* counts, index_t room, offset_t first, cudaStream_t stream) {
    detail::lay_out_entry<32><<<1, 32, 0, stream>>>(counts, heads_, room, first, new_begins_.data());
    check(cudaGetLastError(), "launch of lay_out");
  }
  void adopt_begins(offset_t* to, cudaStream_t stream) {
    check(cudaMemcpyAsync(to, new_begins_.data(), new_begins_.bytes(), cudaMemcpyDeviceToDevice, stream),
          "cudaMemcpyAsync");
  }

  index_t layers_, sequences_, heads_;
  bool with_positions_;
  row_spans spans_;
  std::vector<place> places_;
  device_buffer<T> k_, v_;
  device_buffer<index_t> positions_;
  device_buffer<float> scores_;
  device_buffer<index_t> lengths_;
  device_buffer<offset_t> begins_, new_begins_;
};

}  // namespace cuda
TESSERA_NAMESPACE_END
