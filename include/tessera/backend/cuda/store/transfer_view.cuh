// Rows and columns of a layer to and from the host, head by head, wherever they lie on the device.
#pragma once

#include <algorithm>

#include "../../../core/host/host_vector.hpp"
#include "../../../core/views.hpp"
#include "../../../runtime/saved/rows.hpp"
#include "../device/memory.cuh"
#include "../device/pinned.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {

/// Which way bytes go: from the cache to the host, or from the host to the cache.
enum class transfer_way { to_host, to_cache };

namespace detail {

inline constexpr int transferred_columns = 3;  // positions, scores, segments

/// Where the parts of one head lie in the staged bytes of a layer; columns that there are not have the same place as
/// the next part.
struct staged_head {
  offset_t columns[transferred_columns], k, v, k_scales, v_scales;
  index_t rows;
};

template <transfer_way Way, class T>
__device__ __forceinline__ void move_words(T* cached, T* staged, int words, int lane) {
  for (int i = lane; i < words; i += 32) {
    if constexpr (Way == transfer_way::to_host) {
      staged[i] = cached[i];
    } else {
      cached[i] = staged[i];
    }
  }
}

/// blockIdx.y is a head; each warp moves whole rows.
template <transfer_way Way, class View, int Threads>
__global__ void __launch_bounds__(Threads) transfer_rows_entry(View view, const staged_head* heads, std::byte* staged) {
  using stored = typename View::stored_type;
  constexpr int k_words = View::k_dim * int(sizeof(stored)) / 16, v_words = View::v_dim * int(sizeof(stored)) / 16;
  const index_t head = blockIdx.y;
  const staged_head at = heads[head];
  const int lane = int(threadIdx.x) % 32;
  for (index_t row = index_t(blockIdx.x * (Threads / 32) + threadIdx.x / 32); row < at.rows;
       row += index_t(gridDim.x * (Threads / 32))) {
    move_words<Way>(reinterpret_cast<uint4*>(view.key(0, head, row)),
                    reinterpret_cast<uint4*>(staged + at.k) + offset_t(row) * k_words, k_words, lane);
    move_words<Way>(reinterpret_cast<uint4*>(view.value(0, head, row)),
                    reinterpret_cast<uint4*>(staged + at.v) + offset_t(row) * v_words, v_words, lane);
    if constexpr (View::encoding_type::scaled) {
      const offset_t index = view.scales.index(view.table.locate(0, head, row), head);
      move_words<Way>(view.scales.k + index, reinterpret_cast<float*>(staged + at.k_scales) + row, lane == 0, lane);
      move_words<Way>(view.scales.v + index, reinterpret_cast<float*>(staged + at.v_scales) + row, lane == 0, lane);
    }
  }
}

/// Columns of 4 bytes a token; null: there is no such column. Head h begins at begins[h].
struct cached_columns {
  std::uint32_t* data[transferred_columns];
  const offset_t* begins;
};
template <transfer_way Way, int Threads>
__global__ void __launch_bounds__(Threads)
    transfer_columns_entry(cached_columns cached, const staged_head* heads, std::byte* staged) {
  const index_t head = blockIdx.y;
  const staged_head at = heads[head];
  for (int c = 0; c < transferred_columns; ++c) {
    if (!cached.data[c]) continue;
    std::uint32_t* column = cached.data[c] + cached.begins[head];
    auto* words = reinterpret_cast<std::uint32_t*>(staged + at.columns[c]);
    for (index_t i = index_t(blockIdx.x * Threads + threadIdx.x); i < at.rows; i += index_t(gridDim.x * Threads)) {
      if constexpr (Way == transfer_way::to_host) {
        words[i] = column[i];
      } else {
        column[i] = words[i];
      }
    }
  }
}

}  // namespace detail

/// The staged bytes of one layer, on the device and in page-locked memory. Memory grows to that of the largest layer.
template <class View>
class layer_transfer {
  using stored = typename View::stored_type;
  static_assert(View::k_dim * sizeof(stored) % 16 == 0 && View::v_dim * sizeof(stored) % 16 == 0);

 public:
  /// Lays out the heads of a layer, which have `counts` rows, and columns where there are some.
  void lay_out(const host_vector<index_t>& counts, const detail::cached_columns& columns, cudaStream_t stream) {
    heads_.clear();
    longest_ = 0;
    offset_t end = 0;
    const auto place = [&](offset_t bytes) {
      const offset_t begin = end;
      end += (bytes + 15) / 16 * 16;
      return begin;
    };
    for (const index_t rows : counts) {
      detail::staged_head head{};
      head.rows = rows;
      for (int c = 0; c < detail::transferred_columns; ++c) head.columns[c] = place(columns.data[c] ? rows * 4 : 0);
      head.k = place(offset_t(rows) * View::k_dim * offset_t(sizeof(stored)));
      head.v = place(offset_t(rows) * View::v_dim * offset_t(sizeof(stored)));
      head.k_scales = place(View::encoding_type::scaled ? offset_t(rows) * 4 : 0);
      head.v_scales = place(View::encoding_type::scaled ? offset_t(rows) * 4 : 0);
      heads_.push_back(head);
      longest_ = (std::max)(longest_, rows);
    }
    bytes_ = std::size_t(end);
    if (bytes_ > host_.size()) {
      device_ = {}, host_ = {};
      device_ = device_buffer<std::byte>(bytes_);
      host_ = pinned_buffer<std::byte>(bytes_);
    }
    if (heads_.size() > on_device_.size()) on_device_ = device_buffer<detail::staged_head>(heads_.size());
    check(cudaMemcpyAsync(on_device_.data(), heads_.data(), heads_.size() * sizeof(detail::staged_head),
                          cudaMemcpyHostToDevice, stream),
          "cudaMemcpyAsync");
  }
  /// Brings the layer to the host, and waits for it.
  void fetch(const View& view, const detail::cached_columns& columns, cudaStream_t stream) {
    if (longest_ > 0) {
      launch<transfer_way::to_host>(view, columns, stream);
      check(cudaMemcpyAsync(host_.data(), device_.data(), bytes_, cudaMemcpyDeviceToHost, stream), "cudaMemcpyAsync");
    }
    check(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
  }
  /// Brings it to the cache, and waits for it.
  void store(const View& view, const detail::cached_columns& columns, cudaStream_t stream) {
    if (longest_ > 0) {
      check(cudaMemcpyAsync(device_.data(), host_.data(), bytes_, cudaMemcpyHostToDevice, stream), "cudaMemcpyAsync");
      launch<transfer_way::to_cache>(view, columns, stream);
    }
    check(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
  }

  /// A column of a head on the host.
  template <class T>
  T* column(index_t head, int which) {
    return reinterpret_cast<T*>(host_.data() + heads_[std::size_t(head)].columns[which]);
  }
  /// Saves or loads the rows of all heads, as transfer_view of the CPU does.
  template <class Archive>
  void transfer_rows_of(Archive& archive) {
    for (const detail::staged_head& head : heads_) {
      const auto rows = [&]<class T>(T*, offset_t at, index_t elements) {
        T* const begin = reinterpret_cast<T*>(host_.data() + at);
        transfer_rows(head.rows, elements, [&](index_t i) { return begin + offset_t(i) * elements; }, archive);
      };
      rows(static_cast<stored*>(nullptr), head.k, View::k_dim);
      rows(static_cast<stored*>(nullptr), head.v, View::v_dim);
      if constexpr (View::encoding_type::scaled) {
        rows(static_cast<float*>(nullptr), head.k_scales, 1);
        rows(static_cast<float*>(nullptr), head.v_scales, 1);
      }
    }
  }

 private:
  template <transfer_way Way>
  void launch(const View& view, const detail::cached_columns& columns, cudaStream_t stream) const {
    const unsigned blocks = unsigned(std::clamp(longest_ / 16, 1, 256));
    const dim3 grid{blocks, unsigned(heads_.size())};
    detail::transfer_rows_entry<Way, View, 128><<<grid, 128, 0, stream>>>(view, on_device_.data(), device_.data());
    check(cudaGetLastError(), "launch of transfer_rows");
    if (!columns.data[0] && !columns.data[1] && !columns.data[2]) return;
    detail::transfer_columns_entry<Way, 128><<<grid, 128, 0, stream>>>(columns, on_device_.data(), device_.data());
    check(cudaGetLastError(), "launch of transfer_columns");
  }

  host_vector<detail::staged_head> heads_;
  index_t longest_ = 0;
  std::size_t bytes_ = 0;
  device_buffer<std::byte> device_;
  pinned_buffer<std::byte> host_;
  device_buffer<detail::staged_head> on_device_;
};

}  // namespace cuda
TESSERA_NAMESPACE_END
