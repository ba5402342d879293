// What a block of a cluster that chooses pages keeps in shared memory, and where.
#pragma once

#include "../../device/cluster.cuh"
#include "page_items.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {
namespace detail {

inline constexpr int most_cluster_blocks = 8, cluster_threads = 512, cluster_warps = cluster_threads / 32;
inline constexpr int cluster_rows = 8;  // query rows of a matrix product, of which the other eight stay empty

inline constexpr int tile_width = 32, step_columns = 16;  // pages and columns of a warp's products
inline constexpr int staged_columns = 64, staged_pages = 384, stages = 3;

/// Shared memory of a block behind the storage, in bytes. `share`: pages of a block, a multiple of 32.
template <class T, int D>
struct cluster_shared {
  // A channel has a column for each side; either half is padded to whole products.
  static constexpr int most_columns = 2 * ((D + 15) / 16 * 16);
  static constexpr int pitch = most_columns + 8;  // of a query row's weights: rows begin in different banks
  /// Of staged columns: neighbours begin in different banks.
  TESSERA_HD static constexpr int staged_pitch(index_t share) {
    return int(share < staged_pages ? share : staged_pages) * int(sizeof(T)) + 16;
  }
  /// Staged columns; later the keys of all pages.
  TESSERA_HD static constexpr std::size_t columns_at(index_t share, int blocks) {
    const std::size_t rings = std::size_t(stages) * staged_columns * std::size_t(staged_pitch(share));
    const std::size_t keys = (std::size_t(blocks) * std::size_t(share) + page_rows::most_cuts) * sizeof(unsigned);
    return rings > keys ? rings : keys;
  }
  TESSERA_HD static constexpr std::size_t weights_at(index_t share, int blocks) {
    return columns_at(share, blocks) + most_columns * sizeof(int);
  }
  TESSERA_HD static constexpr std::size_t q_at(index_t share, int blocks) {
    return weights_at(share, blocks) + cluster_rows * pitch * sizeof(T);
  }
  TESSERA_HD static constexpr std::size_t parts_at(index_t rows, index_t share, int blocks) {
    return q_at(share, blocks) + std::size_t(rows) * D * sizeof(T);
  }
  TESSERA_HD static constexpr std::size_t logits_at(index_t rows, index_t share, int blocks) {
    return parts_at(rows, share, blocks) +
           (std::size_t(rows) + 1) * std::size_t(blocks) * cluster_warps * sizeof(float2);
  }
  TESSERA_HD static constexpr std::size_t bytes(index_t rows, index_t share, int blocks) {
    return logits_at(rows, share, blocks) + std::size_t(rows) * std::size_t(share) * sizeof(float);
  }
};

/// What a row's queries ask of the index, in shared memory.
template <int D>
struct cluster_query {
  alignas(16) unsigned weight[D];  // ordered bits of the sum of |q| over the usable rows
  float total[D];                  // sum of q over them
  bool taken[D];
  float scale[most_query_rows];
  bool usable[most_query_rows];          // whether every element of the row is finite; another row says nothing
  arrivals parts, keys, slots, outputs;  // from the blocks of the cluster
};

}  // namespace detail
}  // namespace cuda
TESSERA_NAMESPACE_END
