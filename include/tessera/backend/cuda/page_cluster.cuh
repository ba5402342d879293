// Paged retrieval of one row by one cluster of thread blocks: logits, softmax and choice in a single launch.
#pragma once

#include "page_select.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {
namespace detail {

inline constexpr int cluster_blocks = 8, cluster_threads = 512;
inline constexpr int cluster_rows = 4;  // query rows whose products a thread holds

/// Shared memory of a block behind the storage, in bytes. `share`: pages of a block, a multiple of 8.
template <class T, int D, int Threads>
struct cluster_shared {
  static constexpr int row_warps = Threads / 32 / cluster_rows;  // that finish one query row
  TESSERA_HD static constexpr std::size_t columns_at(index_t rows) { return std::size_t(rows) * D * sizeof(T); }
  TESSERA_HD static constexpr std::size_t weights_at(index_t rows) { return columns_at(rows) + 2 * D * sizeof(T*); }
  TESSERA_HD static constexpr std::size_t parts_at(index_t rows) { return weights_at(rows) + 2 * D * sizeof(float4); }
  TESSERA_HD static constexpr std::size_t logits_at(index_t rows) {
    return parts_at(rows) + std::size_t(rows) * cluster_blocks * row_warps * sizeof(float2);
  }
  /// Products of all warps; later the keys of the whole row.
  TESSERA_HD static constexpr std::size_t sums_at(index_t rows, index_t share) {
    return logits_at(rows) + std::size_t(rows) * std::size_t(share) * sizeof(float);
  }
  TESSERA_HD static constexpr std::size_t bytes(index_t rows, index_t share) {
    const std::size_t sums = std::size_t(rows < cluster_rows ? rows : cluster_rows) * Threads * 8 * sizeof(float);
    const std::size_t keys = std::size_t(cluster_blocks * share + page_rows::most_cuts) * sizeof(unsigned);
    return sums_at(rows, share) + (sums > keys ? sums : keys);
  }
};

__device__ inline void cluster_arrive() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
#endif
}
__device__ inline void cluster_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}
__device__ inline void store_cluster(float2* mine, int of, float2 value) {
#if __CUDA_ARCH__ >= 900
  asm volatile("st.shared::cluster.v2.f32 [%0], {%1, %2};" ::"r"(block_team<cluster_blocks>::address(mine, of)),
               "f"(value.x), "f"(value.y)
               : "memory");
#endif
}
__device__ inline void store_cluster(uint4* mine, int of, uint4 value) {
#if __CUDA_ARCH__ >= 900
  asm volatile("st.shared::cluster.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(block_team<cluster_blocks>::address(mine, of)),
               "r"(value.x), "r"(value.y), "r"(value.z), "r"(value.w)
               : "memory");
#endif
}

/// Each block has an eighth of a row's pages and hands its keys to the first, which chooses.
template <class View, class Scorer, int Threads>
__global__ void __launch_bounds__(Threads, 1024 / Threads)
    cluster_pages_entry(const __grid_constant__ page_problem<View> p, Scorer scorer,
                        const __grid_constant__ page_choice c, const __grid_constant__ page_scratch to) {
  using T = typename View::element_type;
  constexpr int D = View::k_dim, warps = Threads / 32;
  using shared = cluster_shared<T, D, Threads>;
  using storage = page_choice_storage<Threads>;
  extern __shared__ uint4 page_memory[];
  __shared__ page_query_storage<D> asked;
  __shared__ storage s;
  cluster_arrive();  // answered before anything is written to another block
  auto* bytes = reinterpret_cast<unsigned char*>(page_memory);
  const int thread = int(threadIdx.x), lane = thread % 32, warp = thread / 32;
  const int rank = block_team<cluster_blocks>::rank();
  const index_t row = index_t(blockIdx.x) / cluster_blocks, sequence = row / p.view.kv_heads,
                head = row % p.view.kv_heads;
  const index_t n = p.view.length(sequence, head), page = p.index.page;
  const page_bounds bounds(c, to.read, n);
  const index_t share = (ceil_div(bounds.pages, cluster_blocks) + 7) / 8 * 8;
  const index_t begin = min(rank * share, bounds.pages), end = min(begin + share, bounds.pages);
  if (p.unfolded > 0 && begin < end && offset_t(end) * page > n - p.unfolded && thread < D) {
    fold_slots(p.view, sequence, head, p.index, max(0, n - p.unfolded), n, begin, end, thread);
  }
  if (n <= to.read) {
    if (rank == 0) choose_all<Threads>(c, row, n);
    cluster_wait();
    return;
  }
  for (int bin = thread; bin < storage::bins; bin += Threads) s.histogram[bin] = 0;
  const index_t group = c.group, rows = c.tokens * group;
  T* q = reinterpret_cast<T*>(bytes);
  read_page_query<Threads>(asked, q, p, scorer, sequence, head, n);
  if (thread < c.tokens) s.runs[thread] = asked.runs[thread];
  if (thread < 32) {
    __syncwarp();
    find_cuts(s, c, bounds.limit);
  }
  const auto columns = reinterpret_cast<const T**>(bytes + shared::columns_at(rows));
  const auto weights = reinterpret_cast<float4*>(bytes + shared::weights_at(rows));
  const auto parts = reinterpret_cast<float2*>(bytes + shared::parts_at(rows));       // [rows, blocks, row_warps]
  const auto logits = reinterpret_cast<float4*>(bytes + shared::logits_at(rows));     // [rows, share]
  const auto sums = reinterpret_cast<float4*>(bytes + shared::sums_at(rows, share));  // [groups, rows, share]
  constexpr int parts_each = cluster_blocks * shared::row_warps;
  const int channels = min(int(scorer.channels), D);
  // A thread has eight pages and every `teams`-th column.
  const int octets = int(share / 8), teams = Threads / octets, team = thread / octets, octet = thread % octets;
  for (index_t chunk = 0; chunk < rows; chunk += cluster_rows) {
    const index_t held = min(index_t(cluster_rows), rows - chunk);
    bool both = false;
    for (int d = thread; d < D; d += Threads) {
      const int place = asked.place[d];
      if (place >= channels) continue;
      both |= lay_out_column(asked, q, p.index, scorer, row, rows, chunk, held, d, columns[place],
                             columns[channels + place], weights[place], weights[channels + place]);
    }
    const int count = __syncthreads_or(both) ? 2 * channels : channels;
    if (team < teams) {
      float acc[cluster_rows][8] = {};
      const index_t at = begin + octet * 8;
      constexpr int in_flight = 5;
      for (int base = team; base < count && at < end; base += teams * in_flight) {
        uint4 raw[in_flight];
#pragma unroll
        for (int u = 0; u < in_flight; ++u) {
          const int e = base + u * teams;
          const T* column = e < count ? columns[e] : nullptr;
          raw[u] = column ? *reinterpret_cast<const uint4*>(column + at) : make_uint4(0, 0, 0, 0);
        }
#pragma unroll
        for (int u = 0; u < in_flight; ++u) {
          const int e = base + u * teams;
          if (e >= count) break;
          const float4 w = weights[e];
          float x[8];
          four_floats<T>(make_uint2(raw[u].x, raw[u].y), x);
          four_floats<T>(make_uint2(raw[u].z, raw[u].w), x + 4);
#pragma unroll
          for (int j = 0; j < 8; ++j) {
            acc[0][j] += w.x * x[j];
            acc[1][j] += w.y * x[j];
            acc[2][j] += w.z * x[j];
            acc[3][j] += w.w * x[j];
          }
        }
      }
#pragma unroll
      for (int r = 0; r < cluster_rows; ++r) {
        if (r >= held) break;
        float4* sum = sums + ((team * held + r) * octets + octet) * 2;
        sum[0] = make_float4(acc[r][0], acc[r][1], acc[r][2], acc[r][3]);
        sum[1] = make_float4(acc[r][4], acc[r][5], acc[r][6], acc[r][7]);
      }
    }
    if (chunk == 0) cluster_wait();
    __syncthreads();
    const index_t r = warp / shared::row_warps, part = warp % shared::row_warps;
    if (r < held) {
      const float scale = asked.scale[chunk + r];
      const slot_run run = asked.runs[(chunk + r) / group];
      float4* mine = logits + (chunk + r) * (share / 4);
      float top = -infinity, sum = 0;
      const auto seen = [&](index_t at, const float4& x, const auto& take) {
        const float values[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const index_t of = at + j, stop = of + 1 == bounds.pages ? n : (of + 1) * page;
          const index_t slots = of < end ? min(run.end, stop) - max(run.begin, of * page) : 0;
          if (slots > 0) take(values[j], slots);
        }
      };
      for (index_t quad = part * 32 + lane; quad < share / 4; quad += shared::row_warps * 32) {
        float4 x = sums[r * (share / 4) + quad];
        for (int i = 1; i < teams; ++i) {
          const float4 more = sums[(i * held + r) * (share / 4) + quad];
          x.x += more.x, x.y += more.y, x.z += more.z, x.w += more.w;
        }
        x = make_float4(page_logit<Scorer>(p.rule, scale, x.x), page_logit<Scorer>(p.rule, scale, x.y),
                        page_logit<Scorer>(p.rule, scale, x.z), page_logit<Scorer>(p.rule, scale, x.w));
        mine[quad] = x;
        seen(begin + quad * 4, x, [&](float logit, index_t) { top = fmaxf(top, logit); });  // not NaN
      }
      top = warp_max(top);
      if (Scorer::normalised && top > -infinity) {
        for (index_t quad = part * 32 + lane; quad < share / 4; quad += shared::row_warps * 32) {
          seen(begin + quad * 4, mine[quad], [&](float logit, index_t slots) {
            if (logit == logit) sum += float(slots) * fast_exp(logit - top);
          });
        }
        sum = warp_sum(sum);
      }
      const float2 found = asked.usable[chunk + r] ? make_float2(top, sum) : make_float2(-infinity, 0);
      if (lane < cluster_blocks) {
        store_cluster(parts + (chunk + r) * parts_each + rank * shared::row_warps + part, lane, found);
      }
    }
    __syncthreads();
  }
  const bool uniform = s.uniform;
  if (!uniform || c.mass) {  // whoever looks at single slots finds the logits in device memory
    for (index_t r = 0; r < rows; ++r) {
      for (index_t quad = thread; begin + quad * 4 < end; quad += Threads) {
        reinterpret_cast<float4*>(to.logits_of(row, r) + begin)[quad] = logits[r * (share / 4) + quad];
      }
    }
  }
  cluster_arrive();
  cluster_wait();
  for (index_t r = warp; r < rows; r += warps) {
    const float2 mine = lane < parts_each ? parts[r * parts_each + lane] : make_float2(-infinity, 0);
    finish_row(s, c, row, r, warp_max(mine.x),
               [&](float top) { return mine.y > 0 ? mine.y * fast_exp(mine.x - top) : 0.0f; });
  }
  __syncthreads();
  const page_items of{
      s, c, to, row, bounds.limit, ceil_div(bounds.limit, page) + (bounds.tokens ? s.cut_count : 0), bounds.tokens};
  uint4* keys = reinterpret_cast<uint4*>(sums);  // every block's sums are done with
  if (uniform) {
    const auto local = [&](index_t r, index_t quad) { return logits[r * (share / 4) + quad]; };
    for (index_t quad = thread; begin + quad * 4 < end; quad += Threads) {
      store_cluster(keys + begin / 4 + quad, 0, of.quad(quad, begin, local));
    }
  }
  cluster_arrive();
  cluster_wait();
  if (rank == 0) choose_row(s, of, bounds, reinterpret_cast<unsigned*>(keys), uniform);
}

}  // namespace detail
}  // namespace cuda
TESSERA_NAMESPACE_END
