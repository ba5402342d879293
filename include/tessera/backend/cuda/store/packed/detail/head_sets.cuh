// One set of channels for all rows of a head, chosen by a prompt's last queries and the rows that are packed.
#pragma once

#include <algorithm>

#include "../../../../../concepts/channels.hpp"
#include "../../../../../core/host/host_vector.hpp"
#include "../../../../../core/sequence_layer.hpp"
#include "../../../../../layout/packed_rows.hpp"
#include "../../../device/kernel.cuh"
#include "segment_store.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {
namespace detail {

/// Writes the squares of query row i, summed over the query heads of each kv_head, to row (seen + i) % window of an
/// entry. blockIdx: x a row, y a kv_head.
template <class T, int Threads>
__global__ void __launch_bounds__(Threads) note_squares_entry(rows_view<const T> q, index_t first, index_t kv_heads,
                                                              int dim, index_t observed, index_t window, float* to) {
  const index_t row = index_t(blockIdx.x), head = index_t(blockIdx.y), group = q.heads / kv_heads;
  float* own = to + (offset_t((observed + row) % window) * kv_heads + head) * dim;
  for (int d = int(threadIdx.x); d < dim; d += Threads) {
    float sum = 0;
    for (index_t g = 0; g < group; ++g) {
      const float x = float(q.row(0, first + row, head * group + g)[d]);
      const float square = __fmul_rn(x, x);
      if (square < infinity) sum = __fadd_rn(sum, square);  // others are left out
    }
    own[d] = sum;
  }
}

/// A block chooses the set of one head: the `kept` channels with the largest product of both mean squares, ties to the
/// lower one, NaN last. asked [rows, kv_heads, D] or null, the oldest row first_asked.
template <class View, int D>
__global__ void __launch_bounds__(1024)
    choose_set_entry(const __grid_constant__ View whole, bool keys, index_t first, index_t count, const float* asked,
                     index_t asked_rows, index_t oldest, index_t window, index_t kept, std::uint32_t* sets) {
  constexpr int together = 1024 / D;
  __shared__ double sums[together][D];
  __shared__ std::uint32_t bits[(D + 31) / 32];
  const index_t head = index_t(blockIdx.x);
  const int c = int(threadIdx.x) % D, part = int(threadIdx.x) / D;
  double sum = 0;
  if (part < together) {
    for (index_t i = part; i < count; i += together) {
      const auto* row = keys ? whole.key(0, head, first + i) : whole.value(0, head, first + i);
      const double x = double(float(row[c]));
      sum += x * x / double(count);
    }
    sums[part][c] = sum;
  }
  if (threadIdx.x < (D + 31) / 32) bits[threadIdx.x] = 0;
  __syncthreads();
  if (part == 0) {
    for (int p = 1; p < together; ++p) sum += sums[p][c];
    double queries = asked_rows > 0 ? 0 : 1;
    for (index_t i = 0; i < asked_rows; ++i) {
      queries += double(asked[(offset_t((oldest + i) % window) * whole.kv_heads + head) * D + c]);
    }
    const double score = queries * sum;  // not divided by the number of queries: only the order counts
    sums[0][c] = score == score ? score : -1;
  }
  __syncthreads();
  if (part == 0) {
    index_t before = 0;
    for (int o = 0; o < D; ++o) before += sums[0][o] > sums[0][c] || (sums[0][o] == sums[0][c] && o < c);
    if (before < kept) atomicOr(&bits[c / 32], 1u << (c % 32));
  }
  __syncthreads();
  if (threadIdx.x < (D + 31) / 32) sets[offset_t(head) * ((D + 31) / 32) + threadIdx.x] = bits[threadIdx.x];
}

}  // namespace detail

/// Stores the squares of a prompt's last `window` queries for every (layer, sequence), and chooses sets of channels by
/// them, for rows in the engine's basis.
/// Memory   layers * sequences * window * kv_heads * k_dim floats.
template <class View, packing_rows Rows>
class head_sets {
  using T = typename View::element_type;
  static constexpr int D = View::k_dim, Dv = View::v_dim;
  static constexpr bool keys_share = !vector_channels<typename Rows::key_channels>,
                        values_share = !vector_channels<typename Rows::value_channels>;

 public:
  head_sets(const segment_formats& formats, index_t layers, index_t sequences, index_t kv_heads, index_t window)
      : formats_(formats),
        order_{sequences},
        heads_(kv_heads),
        window_(window),
        observed_(std::size_t(layers) * std::size_t(sequences), 0),
        squares_(observed_.size() * std::size_t(window) * std::size_t(kv_heads) * D) {
    for (const packed_format& format : {formats.k, formats.v}) {
      require(format.own_bits || format.group == 1, "group", format.group, "1 where a head's rows share their channels",
              "take a group of 1");
    }
  }

  void observe(sequence_layer owner, const rows_view<const T>& q, cudaStream_t stream) {
    const index_t added = (std::min)(q.tokens, window_);
    if (added <= 0) return;
    if constexpr (keys_share || values_share) {
      index_t& observed = observed_[order_.index(owner)];
      detail::note_squares_entry<T, 128><<<dim3(unsigned(added), unsigned(heads_)), 128, 0, stream>>>(
          q, q.tokens - added, heads_, D, observed, window_, squares(owner));
      check(cudaGetLastError(), "launch of note_squares");
      observed += added;
    }
  }
  void forget(sequence_layer owner) { observed_[order_.index(owner)] = 0; }
  void copy(sequence_layer from, sequence_layer to, cudaStream_t stream) {
    const index_t observed = observed_[order_.index(to)] = observed_[order_.index(from)];
    if (observed > 0)
      copy_on_device(squares(to), squares(from), std::size_t(window_) * std::size_t(heads_) * D, stream);
  }

  /// Words of the sets of one segment: of keys, then of values, where rows share them.
  std::size_t segment_words() const { return words(formats_.k) + words(formats_.v); }
  std::size_t k_words() const { return words(formats_.k); }

  /// Chooses the sets of a segment of whole rows `first`, ... of one sequence.
  void choose(const View& view, sequence_layer owner, index_t first, index_t count, std::uint32_t* sets,
              cudaStream_t stream) const {
    const index_t observed = observed_[order_.index(owner)], rows = (std::min)(observed, window_);
    const auto choose_side = [&]<bool Keys, int Dim>(const packed_format& format, std::uint32_t* to) {
      detail::choose_set_entry<typename View::whole_type, Dim>
          <<<unsigned(heads_), 1024, 0, stream>>>(view.whole, Keys, first, count, squares(owner), Keys ? rows : 0,
                                                  observed - rows, (std::max)(1, window_), format.stored_channels, to);
      check(cudaGetLastError(), "launch of choose_set");
    };
    if constexpr (keys_share) choose_side.template operator()<true, D>(formats_.k, sets);
    if constexpr (values_share) choose_side.template operator()<false, Dv>(formats_.v, sets + k_words());
  }
  offset_t bytes_of_entry() const { return offset_t(window_) * heads_ * D * offset_t(sizeof(float)); }

 private:
  std::size_t words(const packed_format& format) const {
    return format.own_bits ? 0 : std::size_t(heads_) * std::size_t(bit_words(format));
  }
  float* squares(sequence_layer owner) const {
    return squares_.data() + order_.index(owner) * std::size_t(window_) * std::size_t(heads_) * D;
  }

  segment_formats formats_;
  layer_major order_;
  index_t heads_, window_;
  host_vector<index_t> observed_;  // by entry: queries of the turn's prompt
  device_buffer<float> squares_;
};

}  // namespace cuda
TESSERA_NAMESPACE_END
