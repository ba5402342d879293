// What a block of a cluster that chooses pages keeps in shared memory, and how the blocks of a cluster meet.
#pragma once

#include "../../device/cluster.cuh"
#include "page_items.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {
namespace detail {

inline constexpr int most_cluster_blocks = 8, cluster_threads = 512, cluster_warps = cluster_threads / 32;
inline constexpr int cluster_rows = 8;  // query rows of a matrix product, of which the other eight stay empty

inline constexpr int tile_width = 32, step_columns = 16;  // pages and columns of a warp's products
inline constexpr int staged_columns = 64, stages = 3;
inline constexpr int usual_ring = 384, widest_ring = cluster_warps * tile_width;  // pages that are staged at once

/// The blocks that have one row: a cluster, which meets by what it sends and counts.
template <bool Alone>
struct block_group {
  static __device__ int rank() { return int(blockIdx.x); }
  static __device__ int blocks() { return int(gridDim.x); }
  static __device__ int log_blocks() { return 31 - __clz(blocks()); }

  /// At the beginning, so that all blocks are there before one writes to another, and before the first write.
  static __device__ void say_started() { cluster_arrive_relaxed(); }
  static __device__ void wait_for_start() { cluster_wait(); }
  /// A barrier of all threads, in two parts: also what was written to device memory is seen behind it.
  static __device__ void arrive() { cluster_arrive(); }
  static __device__ void wait() { cluster_wait(); }

  static __device__ void begin(arrivals& at) { at.begin(); }
  static __device__ void expect(arrivals& at, index_t bytes) { at.expect(std::uint32_t(bytes)); }
  template <class V>
  static __device__ void send(V* mine, int of, const V& value, const arrivals& at) {
    cuda::send(mine, of, value, at);
  }
  static __device__ void store(index_t* mine, int of, index_t value) { store_cluster(mine, of, value); }
  /// Until all that was expected of the other blocks, and of this one where it sends to itself, is there.
  static __device__ void wait_for(const arrivals& at) { at.wait(); }
};

/// A block that has a row alone is no cluster, where `st.async` is an illegal instruction (H200, CUDA 13.0): it stores
/// plainly, and its own barrier takes the place of counting.
template <>
struct block_group<true> {
  static constexpr __device__ int rank() { return 0; }
  static constexpr __device__ int blocks() { return 1; }
  static constexpr __device__ int log_blocks() { return 0; }
  static __device__ void say_started() {}
  static __device__ void wait_for_start() {}
  static __device__ void arrive() {}
  static __device__ void wait() { __syncthreads(); }
  static __device__ void begin(arrivals&) {}
  static __device__ void expect(arrivals&, index_t) {}
  template <class V>
  static __device__ void send(V* mine, int, const V& value, const arrivals&) {
    *mine = value;
  }
  static __device__ void store(index_t* mine, int, index_t value) { *mine = value; }
  static __device__ void wait_for(const arrivals&) { __syncthreads(); }
};

/// Shared memory of a block behind the storage, as the host lays it out: where things begin, in bytes.
struct cluster_layout {
  index_t share = 0;  // pages that a block has room for, a multiple of 32; rows of more go through device memory
  index_t ring = 0;   // of those, what is staged at once
  std::uint32_t columns = 0, weights = 0, q = 0, parts = 0, logits = 0, bytes = 0;
};

template <class T, int D>
struct cluster_shared {
  // A channel has a column for each side; either half is padded to whole products.
  static constexpr int most_columns = 2 * ((D + 15) / 16 * 16);
  static constexpr int pitch = most_columns + 8;  // of a query row's weights: rows begin in different banks
  /// Bytes of a staged column: neighbours begin in different banks.
  TESSERA_HD static constexpr int staged_pitch(index_t ring) { return int(ring) * int(sizeof(T)) + 16; }

  /// For rows of `pages` pages over `blocks` blocks, the ring at most `widest` pages.
  static cluster_layout lay_out(index_t rows, index_t pages, int blocks, index_t widest) {
    cluster_layout at;
    at.share = ceil_div(ceil_div(pages, index_t(blocks)), tile_width) * tile_width;
    at.ring = at.share < widest ? at.share : widest;
    // Staged columns; later the keys of all pages.
    const std::size_t ring = std::size_t(stages) * staged_columns * std::size_t(staged_pitch(at.ring));
    const std::size_t keys = (std::size_t(blocks) * std::size_t(at.share) + page_rows::most_cuts) * sizeof(unsigned);
    std::size_t end = ring > keys ? ring : keys;
    const auto take = [&](std::size_t bytes) {
      const std::size_t begin = end;
      end += bytes;
      return std::uint32_t(begin < ~0u ? begin : ~0u);  // too much is refused by its sum
    };
    at.columns = take(most_columns * sizeof(int));
    at.weights = take(std::size_t(cluster_rows) * pitch * sizeof(T));
    at.q = take(std::size_t(rows) * D * sizeof(T));
    at.parts = take((std::size_t(rows) + 1) * std::size_t(blocks) * cluster_warps * sizeof(float2));
    at.logits = take(std::size_t(rows) * std::size_t(at.share) * sizeof(float));
    at.bytes = take(0);
    return at;
  }

  /// The same as pointers.
  struct pointers {
    unsigned* keys;  // of all pages, once nothing is staged any more
    std::uint32_t ring;
    int* columns;   // where they begin, in elements from the row's first; -1: a column of zeros
    T* weights;     // [cluster_rows, pitch]
    T* q;           // [rows, D]
    float2* parts;  // [rows, blocks, warps]: largest logit, and sum of exp(logit - largest)
    uint2* ranges;  // [blocks, warps], of keys
    float* logits;  // [rows, share]
    __device__ pointers(unsigned char* bytes, const cluster_layout& at, index_t rows, int blocks)
        : keys(reinterpret_cast<unsigned*>(bytes)),
          ring(shared_address(bytes)),
          columns(reinterpret_cast<int*>(bytes + at.columns)),
          weights(reinterpret_cast<T*>(bytes + at.weights)),
          q(reinterpret_cast<T*>(bytes + at.q)),
          parts(reinterpret_cast<float2*>(bytes + at.parts)),
          ranges(reinterpret_cast<uint2*>(parts + rows * blocks * cluster_warps)),
          logits(reinterpret_cast<float*>(bytes + at.logits)) {}
  };
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

/// One row and this block's share of its pages.
struct cluster_share {
  index_t head, sequence, row, group, rows;  // `rows`: of queries, step tokens times query heads of the group
  index_t n, page, begin, end;               // slots of the row; pages [begin, end) are this block's
  bool fits;                                 // into shared memory; otherwise logits and keys go through device memory
};

}  // namespace detail
}  // namespace cuda
TESSERA_NAMESPACE_END
