// The first phases of a choice by a cluster, and the shared memory of its blocks: queries are loaded, channels are
// ranked, and columns of the index are laid out.
#pragma once

#include "../../../device/cluster.cuh"
#include "page_items.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {
namespace detail {

inline constexpr int max_cluster_blocks = 8, cluster_threads = 512, cluster_warps = cluster_threads / 32;
inline constexpr int cluster_rows = 8;  // query rows of a matrix product; its other eight rows stay empty

inline constexpr int tile_width = 32, step_columns = 16;  // pages and columns of a warp's products
inline constexpr int staged_columns = 64, stages = 3;
inline constexpr int usual_ring = 384, widest_ring = cluster_warps * tile_width;  // pages staged at a time

/// The blocks that share one row: a cluster, synchronised by counting the bytes that blocks send.
template <bool Alone>
struct block_group {
  static __device__ int rank() { return int(blockIdx.x); }
  static __device__ int blocks() { return int(gridDim.x); }
  static __device__ int log_blocks() { return 31 - __clz(blocks()); }

  /// Called at the beginning, so that all blocks are running before one writes to another.
  static __device__ void say_started() { cluster_arrive_relaxed(); }
  static __device__ void wait_for_start() { cluster_wait(); }
  /// A barrier of all threads, in two parts. Earlier writes to device memory are visible after it too.
  static __device__ void arrive() { cluster_arrive(); }
  static __device__ void wait() { cluster_wait(); }

  static __device__ void begin(arrivals& at) { at.begin(); }
  static __device__ void expect(arrivals& at, index_t bytes) { at.expect(std::uint32_t(bytes)); }
  template <class V>
  static __device__ void send(V* mine, int of, const V& value, const arrivals& at) {
    cuda::send(mine, of, value, at);
  }
  static __device__ void store(index_t* mine, int of, index_t value) { store_cluster(mine, of, value); }
  /// Waits until all expected data has arrived from the other blocks, and from this one if it sends to itself.
  static __device__ void wait_for(const arrivals& at) { at.wait(); }
};

/// A block that has a row alone is no cluster, and outside a cluster `st.async` is an illegal instruction (H200, CUDA
/// 13.0). So it uses plain stores, and its own barrier instead of counting.
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

/// A block's shared memory after the storage, as the host lays it out: where arrays begin, in bytes.
struct cluster_layout {
  index_t share = 0;  // pages that a block has room for, a multiple of 32; longer rows go through device memory
  index_t ring = 0;   // of those, the pages staged at a time
  std::uint32_t columns = 0, weights = 0, q = 0, parts = 0, logits = 0, bytes = 0;
};

template <class T, int D>
struct cluster_shared {
  // A channel has a column for each side; either half is padded to whole products.
  static constexpr int max_columns = 2 * ((D + 15) / 16 * 16);
  static constexpr int pitch = max_columns + 8;  // of a query row's weights: rows begin in different banks
  /// Bytes of a staged column: neighbours begin in different banks.
  TESSERA_HD static constexpr int staged_pitch(index_t ring) { return int(ring) * int(sizeof(T)) + 16; }

  /// For rows of `pages` pages over `blocks` blocks, the ring at most `widest` pages.
  static cluster_layout lay_out(index_t rows, index_t pages, int blocks, index_t widest) {
    cluster_layout at;
    at.share = ceil_div(ceil_div(pages, index_t(blocks)), tile_width) * tile_width;
    at.ring = at.share < widest ? at.share : widest;
    // Staged columns; later the keys of all pages.
    const std::size_t ring = std::size_t(stages) * staged_columns * std::size_t(staged_pitch(at.ring));
    const std::size_t keys = (std::size_t(blocks) * std::size_t(at.share) + page_rows::max_cuts) * sizeof(unsigned);
    std::size_t end = ring > keys ? ring : keys;
    const auto take = [&](std::size_t bytes) {
      const std::size_t begin = end;
      end += bytes;
      return std::uint32_t(begin < ~0u ? begin : ~0u);  // the check of the sum refuses sizes that overflow
    };
    at.columns = take(max_columns * sizeof(int));
    at.weights = take(std::size_t(cluster_rows) * pitch * sizeof(T));
    at.q = take(std::size_t(rows) * D * sizeof(T));
    at.parts = take((std::size_t(rows) + 1) * std::size_t(blocks) * cluster_warps * sizeof(float2));
    at.logits = take(std::size_t(rows) * std::size_t(at.share) * sizeof(float));
    at.bytes = take(0);
    return at;
  }

  /// The same as pointers.
  struct pointers {
    unsigned* keys;  // of all pages; valid once nothing is staged any more
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

/// A row's queries as the index needs them, in shared memory.
template <int D>
struct cluster_query {
  alignas(16) unsigned weight[D];  // ordered bits of the sum of |q| over the usable rows
  float total[D];                  // sum of q over them
  bool taken[D];
  float scale[max_query_rows];
  bool usable[max_query_rows];           // whether every element of the row is finite; other rows are left out
  arrivals parts, keys, slots, outputs;  // from the blocks of the cluster
};

/// One row and this block's share of its pages.
struct cluster_share {
  index_t head, sequence, row, group, rows;  // `rows`: of queries, step tokens times query heads of the group
  index_t n, page, begin, end;               // slots of the row; pages [begin, end) are this block's
  bool fits;                                 // into shared memory; otherwise logits and keys go through device memory
};

/// What every block of a cluster computes from its row's queries. Each block computes it for itself, and nothing of it
/// is sent. The methods are called in their order. A thread keeps in registers what later methods need.
template <class View, class Scorer>
struct cluster_columns {
  using T = typename View::element_type;
  using shared = cluster_shared<T, View::k_dim>;
  static constexpr int D = View::k_dim, chunks = D / 8, threads = cluster_threads, warps = cluster_warps;
  // q is read twice: by channel for the sums (a thread has `held_rows` of one), by the other threads as it lies.
  static constexpr int sum_threads = (D + 31) / 32 * 32, rest = threads - sum_threads, held_rows = 4;
  // A channel is ranked by neighbouring threads: each compares it with a part of the others.
  static constexpr int ranked_by = D <= 64 ? 8 : D <= 128 ? 4 : 2, quads = D / 4 / ranked_by;
  static_assert(D % (4 * ranked_by) == 0 && D * ranked_by <= threads);

  const page_problem<View>& p;
  const Scorer& scorer;
  const page_choice& c;
  cluster_query<D>& queries;
  const int thread, lane, warp, first_chunk, d, part;  // d, part: the channel that this thread ranks
  const bool ranks;
  T row_elements[held_rows];
  uint4 chunk = make_uint4(0, 0, 0, 0);
  int second = 0;        // columns of the first half, padded: where the second one begins
  int channel_rank = D;  // rank of channel d
  bool chosen = false;   // channel d is read
  unsigned sides = 0;    // the sides that some row reads: 1 the smaller values, 2 the larger ones
  bool single = false;   // pages of one slot have one side
  float total = 0;       // of channel d

  __device__ cluster_columns(const page_problem<View>& p_, const Scorer& scorer_, const page_choice& c_,
                             cluster_query<D>& queries_, int thread_, int lane_, int warp_)
      : p(p_),
        scorer(scorer_),
        c(c_),
        queries(queries_),
        thread(thread_),
        lane(lane_),
        warp(warp_),
        first_chunk(thread_ - sum_threads),
        d(thread_ / ranked_by),
        part(thread_ % ranked_by),
        ranks(thread_ / ranked_by < D) {}

  __device__ const T* query(const cluster_share& at, index_t r) const {
    const index_t token = c.by_group.quotient(r);
    return p.q.row(at.sequence, token, at.head * at.group + r - token * at.group);
  }
  __device__ uint4 query_chunk(const cluster_share& at, int i) const {
    return __ldg(reinterpret_cast<const uint4*>(query(at, i / chunks) + i % chunks * 8));
  }

  /// Starts to load the queries, without waiting for them.
  __device__ void load(const cluster_share& at) {
    if (thread < D) {
#pragma unroll
      for (int r = 0; r < held_rows; ++r) row_elements[r] = r < at.rows ? query(at, r)[thread] : T(0.0f);
    } else if (first_chunk >= 0 && first_chunk < at.rows * chunks) {
      chunk = query_chunk(at, first_chunk);
    }
  }

  /// Writes the queries to shared memory and their sums by channel to `queries`, in the CPU's order of the rows.
  __device__ void sum(const cluster_share& at, T* q) {
    bool bad = false;
    if (first_chunk >= 0) {
#pragma unroll 1
      for (int i = first_chunk; i < at.rows * chunks; i += rest) {
        if (i != first_chunk) chunk = query_chunk(at, i);
        reinterpret_cast<uint4*>(q)[i] = chunk;
      }
    }
    if (thread < D) {
      float weight = 0, sum = 0;
      const auto add = [&](const T& element) {
        const float x = float(element);
        bad |= !is_finite(x);
        weight += std::abs(x), sum += x;
      };
#pragma unroll
      for (int r = 0; r < held_rows; ++r) add(row_elements[r]);  // a zero where there is no row
#pragma unroll 1
      for (index_t r = held_rows; r < at.rows; ++r) add(query(at, r)[thread]);
      queries.weight[thread] = ordered_bits(weight), queries.total[thread] = sum;
    }
    // After this barrier all queries and sums are complete.
    if (__syncthreads_or(bad)) sum_usable(at, q);
  }

  /// Repeats the sums without the rows that are not finite.
  __device__ void sum_usable(const cluster_share& at, const T* q) {
#pragma unroll 1
    for (index_t r = warp; r < at.rows; r += warps) {
      bool finite = true;
      for (int i = lane; i < D; i += 32) finite &= is_finite(float(q[r * D + i]));
      if (!finite) queries.usable[r] = false;
    }
    __syncthreads();  // every row is judged
    if (thread < D) {
      float weight = 0, sum = 0;
#pragma unroll 1
      for (index_t r = 0; r < at.rows; ++r) {
        const float x = queries.usable[r] ? float(q[r * D + thread]) : 0.0f;
        weight += std::abs(x), sum += x;
      }
      queries.weight[thread] = ordered_bits(weight), queries.total[thread] = sum;
    }
    __syncthreads();  // the sums are there
  }

  /// Ranks channels by falling weight; of equal weights the lower channel comes first.
  __device__ void rank(int channels) {
    second = (channels + 15) / 16 * 16;
    channel_rank = ranks ? d : D;
    if (channels < D) {
      int earlier = 0;
      if (ranks) {
        // Channels below d count if their weight is at least d's own. Channels above d count only if theirs is larger.
        const unsigned weight = queries.weight[d];
#pragma unroll
        for (int i = 0; i < quads; ++i) {
          const int at = part * quads + (i + part) % quads;  // parts begin in different banks
          const uint4 others = reinterpret_cast<const uint4*>(queries.weight)[at];
          const unsigned least = weight + unsigned(at >= d / 4);
          earlier += (others.x >= least) + (others.y >= least) + (others.z >= least) + (others.w >= least);
        }
#pragma unroll 1
        for (int at = d / 4 * 4 + part; at < d; at += ranked_by)
          earlier += queries.weight[at] == weight;  // its own four
      }
      earlier = lanes_sum<ranked_by>(earlier);
      if (ranks) channel_rank = earlier;
    }
    chosen = ranks && channel_rank < channels;
    total = ranks ? queries.total[d] : 0.0f;
  }

  __device__ bool takes_upper(float x) const { return !single && scorer.takes_upper(x, total); }

  /// Lays out the columns of a channel: in the first half the side that some row reads, in the second half the other
  /// side if rows differ. Either half is padded to whole products. `room`: pages between columns.
  __device__ void lay_out(const cluster_share& at, const typename shared::pointers& memory, int channels,
                          index_t room) {
    single = at.page == 1;
    bool lower = false, upper = false;
    if (chosen) {
#pragma unroll 1
      for (index_t r = part; r < at.rows; r += ranked_by) {
        const bool above = takes_upper(float(memory.q[r * D + d]));
        lower |= queries.usable[r] && !above;
        upper |= queries.usable[r] && above;
      }
    }
    sides = unsigned(lower) | unsigned(upper) << 1;
#pragma unroll
    for (int step = 1; step < ranked_by; step *= 2) sides |= __shfl_xor_sync(~0u, sides, step);
    if (chosen && part == 0) {
      memory.columns[channel_rank] = ((sides & 1) != 0 || single ? d : D + d) * room;
      memory.columns[second + channel_rank] = sides == 3 ? (D + d) * room : -1;
    }
    if (ranks && part == 0) queries.taken[d] = chosen;
#pragma unroll 1
    for (int i = thread; i < (second - channels) * cluster_rows; i += threads) {
      const int column = channels + i / cluster_rows;
      T* const weights = memory.weights + i % cluster_rows * shared::pitch;
      memory.columns[column] = memory.columns[second + column] = -1;
      weights[column] = weights[second + column] = T(0.0f);  // for all groups of rows
    }
  }

  /// Writes the weights of this thread's channel for the rows from `from` on.
  __device__ void weigh(const cluster_share& at, const typename shared::pointers& memory, index_t from) const {
    if (!chosen) return;
#pragma unroll 1
    for (index_t r = part; r < (min)(index_t(cluster_rows), at.rows - from); r += ranked_by) {
      const T x = queries.usable[from + r] ? memory.q[(from + r) * D + d] : T(0.0f);
      const bool first = takes_upper(float(x)) ? (sides & 1) == 0 : (sides & 1) != 0 || single;
      memory.weights[r * shared::pitch + channel_rank] = first ? x : T(0.0f);
      memory.weights[r * shared::pitch + second + channel_rank] = first ? T(0.0f) : x;
    }
  }

  /// Computes every row's scale from the share of it that the chosen channels cover. Each warp takes one row, beginning
  /// with the last warp.
  __device__ void scale_rows(const cluster_share& at, const T* q) const {
#pragma unroll 1
    for (index_t r = warps - 1 - warp; r < at.rows; r += warps) {
      float some = 0, whole = 0;  // added in the same order: bitwise equal if all channels are chosen
#pragma unroll 1
      for (int i = lane; i < D; i += 32) {
        const float x = std::abs(float(q[r * D + i]));
        whole += x;
        some += queries.taken[i] ? x : 0.0f;
      }
      const float2 sums = warp_sum(make_float2(some, whole));
      const float scale = scorer.row_scale(p.rule.scale_for(D), sums.x, sums.y);
      if (lane == 0) queries.scale[r] = scale;
    }
  }
};

}  // namespace detail
}  // namespace cuda
TESSERA_NAMESPACE_END
