// The first phases of a choice by a cluster: the queries are read, channels ranked, and columns of the index laid out.
#pragma once

#include "page_cluster_memory.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {
namespace detail {

/// What every block of a cluster finds out about its row's queries, each for itself: nothing of it is sent. The methods
/// are called in their order; a thread keeps in registers what the next one needs of it.
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
  cluster_query<D>& asked;
  const int thread, lane, warp, first_chunk, d, part;  // d, part: the channel that this thread ranks
  const bool ranks;
  T own[held_rows];
  uint4 chunk = make_uint4(0, 0, 0, 0);
  int second = 0;       // columns of the first half, padded: where the second one begins
  int place = D;        // of channel d
  bool chosen = false;  // it is one of those that are read
  unsigned sides = 0;   // which some row takes of it: 1 the smaller values, 2 the larger ones
  bool single = false;  // pages of one slot have one side
  float total = 0;      // of channel d

  __device__ cluster_columns(const page_problem<View>& p_, const Scorer& scorer_, const page_choice& c_,
                             cluster_query<D>& asked_, int thread_, int lane_, int warp_)
      : p(p_),
        scorer(scorer_),
        c(c_),
        asked(asked_),
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

  /// Asks for the queries; nothing waits for them.
  __device__ void load(const cluster_share& at) {
    if (thread < D) {
#pragma unroll
      for (int r = 0; r < held_rows; ++r) own[r] = r < at.rows ? query(at, r)[thread] : T(0.0f);
    } else if (first_chunk >= 0 && first_chunk < at.rows * chunks) {
      chunk = query_chunk(at, first_chunk);
    }
  }

  /// Queries go to shared memory, their sums by channel to `asked`, with the CPU's order of the rows.
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
      for (int r = 0; r < held_rows; ++r) add(own[r]);  // a zero where there is no row
#pragma unroll 1
      for (index_t r = held_rows; r < at.rows; ++r) add(query(at, r)[thread]);
      asked.weight[thread] = ordered_bits(weight), asked.total[thread] = sum;
    }
    // Behind it: all queries and sums are there.
    if (__syncthreads_or(bad)) sum_usable(at, q);
  }

  /// Again without the rows that are not finite.
  __device__ void sum_usable(const cluster_share& at, const T* q) {
#pragma unroll 1
    for (index_t r = warp; r < at.rows; r += warps) {
      bool finite = true;
      for (int i = lane; i < D; i += 32) finite &= is_finite(float(q[r * D + i]));
      if (!finite) asked.usable[r] = false;
    }
    __syncthreads();  // every row is judged
    if (thread < D) {
      float weight = 0, sum = 0;
#pragma unroll 1
      for (index_t r = 0; r < at.rows; ++r) {
        const float x = asked.usable[r] ? float(q[r * D + thread]) : 0.0f;
        weight += std::abs(x), sum += x;
      }
      asked.weight[thread] = ordered_bits(weight), asked.total[thread] = sum;
    }
    __syncthreads();  // the sums are there
  }

  /// A channel's place is the number of those before it: larger ones, and of equal ones those of lower number.
  __device__ void rank(int channels) {
    second = (channels + 15) / 16 * 16;
    place = ranks ? d : D;
    if (channels < D) {
      int before = 0;
      if (ranks) {
        // Those below d count from its own weight on, the others above it.
        const unsigned weight = asked.weight[d];
#pragma unroll
        for (int i = 0; i < quads; ++i) {
          const int at = part * quads + (i + part) % quads;  // parts begin in different banks
          const uint4 others = reinterpret_cast<const uint4*>(asked.weight)[at];
          const unsigned least = weight + unsigned(at >= d / 4);
          before += (others.x >= least) + (others.y >= least) + (others.z >= least) + (others.w >= least);
        }
#pragma unroll 1
        for (int at = d / 4 * 4 + part; at < d; at += ranked_by) before += asked.weight[at] == weight;  // its own four
      }
      before = lanes_sum<ranked_by>(before);
      if (ranks) place = before;
    }
    chosen = ranks && place < channels;
    total = ranks ? asked.total[d] : 0.0f;
  }

  __device__ bool takes_upper(float x) const { return !single && scorer.takes_upper(x, total); }

  /// The columns of a channel: first the side that some row takes, then the other, where rows differ. Either half is
  /// padded to whole products. `room`: pages between columns.
  __device__ void lay_out(const cluster_share& at, const typename shared::pointers& memory, int channels,
                          index_t room) {
    single = at.page == 1;
    bool lower = false, upper = false;
    if (chosen) {
#pragma unroll 1
      for (index_t r = part; r < at.rows; r += ranked_by) {
        const bool above = takes_upper(float(memory.q[r * D + d]));
        lower |= asked.usable[r] && !above;
        upper |= asked.usable[r] && above;
      }
    }
    sides = unsigned(lower) | unsigned(upper) << 1;
#pragma unroll
    for (int step = 1; step < ranked_by; step *= 2) sides |= __shfl_xor_sync(~0u, sides, step);
    if (chosen && part == 0) {
      memory.columns[place] = ((sides & 1) != 0 || single ? d : D + d) * room;
      memory.columns[second + place] = sides == 3 ? (D + d) * room : -1;
    }
    if (ranks && part == 0) asked.taken[d] = chosen;
#pragma unroll 1
    for (int i = thread; i < (second - channels) * cluster_rows; i += threads) {
      const int column = channels + i / cluster_rows;
      T* const weights = memory.weights + i % cluster_rows * shared::pitch;
      memory.columns[column] = memory.columns[second + column] = -1;
      weights[column] = weights[second + column] = T(0.0f);  // for all groups of rows
    }
  }

  /// What the rows from `from` on make of this thread's channel.
  __device__ void weigh(const cluster_share& at, const typename shared::pointers& memory, index_t from) const {
    if (!chosen) return;
#pragma unroll 1
    for (index_t r = part; r < (min)(index_t(cluster_rows), at.rows - from); r += ranked_by) {
      const T x = asked.usable[from + r] ? memory.q[(from + r) * D + d] : T(0.0f);
      const bool first = takes_upper(float(x)) ? (sides & 1) == 0 : (sides & 1) != 0 || single;
      memory.weights[r * shared::pitch + place] = first ? x : T(0.0f);
      memory.weights[r * shared::pitch + second + place] = first ? T(0.0f) : x;
    }
  }

  /// Every row's scale, by the share of it that the chosen channels cover; a row a warp, from the last warp on.
  __device__ void scale_rows(const cluster_share& at, const T* q) const {
#pragma unroll 1
    for (index_t r = warps - 1 - warp; r < at.rows; r += warps) {
      float some = 0, whole = 0;  // summed alike: equal to the bit where all channels are chosen
#pragma unroll 1
      for (int i = lane; i < D; i += 32) {
        const float x = std::abs(float(q[r * D + i]));
        whole += x;
        some += asked.taken[i] ? x : 0.0f;
      }
      const float2 sums = warp_sum(make_float2(some, whole));
      const float scale = scorer.row_scale(p.rule.scale_for(D), sums.x, sums.y);
      if (lane == 0) asked.scale[r] = scale;
    }
  }
};

}  // namespace detail
}  // namespace cuda
TESSERA_NAMESPACE_END
