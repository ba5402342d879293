// Mean and variance of each key's logits, on the GPU, by products of single warps.
#pragma once

#include "../../score_problem.cuh"
#include "moments.cuh"
#include "wide_product.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {
namespace detail {

/// A block takes a share of a head's keys for one query head, whose covariance stays in shared memory. A warp's keys
/// and the products stay in registers: a key's elements and the products that they are multiplied with lie on the same
/// lane. `Small`: fewer keys or columns at a time, for any device.
template <class View, class Scorer, bool Small = false>
struct expected_kernel {
  using T = typename View::element_type;
  static constexpr int D = View::k_dim, warps = 4, threads = warps * 32, resident = 2, heads = 1;  // of one block
  static constexpr int key_tiles = D <= 128 && !Small ? 2 : 1, warp_tokens = key_tiles * 16, tile = warps * warp_tokens;
  static constexpr int panel = D <= 128 ? D
                               : Small  ? 32
                                        : 64,
                       panels = (D + panel - 1) / panel;  // columns that shared memory holds
  static constexpr int row_bytes = score_rows_staged<D>().bytes();
  static constexpr int panel_bytes = panel * row_bytes, key_bytes = warp_tokens * row_bytes;
  static constexpr std::size_t shared_bytes = std::size_t(2 * panel_bytes + warps * key_bytes);
  static_assert(D % 16 == 0, "tessera: products take head dims in steps of 16");
  struct static_memory {
    float mean[D];
    exp_sum parts[threads];
  };

  __device__ static void load_panel(const expected_problem<View>& p, index_t row, int first, std::uint32_t to) {
    constexpr int chunks = D / 8;
    for (int id = threadIdx.x; id < 2 * panel * chunks; id += threads) {
      const int part = id / (panel * chunks), r = id / chunks % panel, chunk = id % chunks;
      const T* from = (part ? p.moments.low : p.moments.high) + offset_t(row) * D * D + (first + r) * D + chunk * 8;
      const bool valid = first + r < D;
      copy_async16(to + std::uint32_t(part * panel_bytes) + score_rows_staged<D>().offset(r, chunk),
                   valid ? from : p.moments.high, valid);
    }
  }

  __device__ static void run(const expected_problem<View>& p, const Scorer& scorer) {
    extern __shared__ __align__(128) unsigned char memory[];
    __shared__ static_memory held;
    float(&mean)[D] = held.mean;
    exp_sum(&parts)[threads] = held.parts;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, matrix = lane / 8, in_matrix = lane % 8;
    const index_t q_heads = p.view.kv_heads * p.group,
                  row = index_t(blockIdx.y);  // of the query heads of all sequences
    scored_head at{};
    at.sequence = row / q_heads;
    at.head = row % q_heads / p.group;
    at.tokens = (min)(p.view.length(at.sequence, at.head), p.capacity);
    const std::uint32_t square = shared_address(memory),
                        keys = square + std::uint32_t(2 * panel_bytes + warp * key_bytes);
    const float variance_scale = scalbnf(p.scale * p.scale, p.moments.shift[row]);
    float* logits = p.logits + offset_t(row) * p.capacity;
    for (int d = threadIdx.x; d < D; d += threads) mean[d] = p.moments.mean[offset_t(row) * D + d];
    if constexpr (panels == 1) load_panel(p, row, 0, square);
    const auto put = [&](index_t first) {
      if (first < at.tokens) stage_keys<warp_tokens>(p.view, at, first, keys, lane);
      commit_copies();
    };
    const index_t step = index_t(gridDim.x) * tile, begin = index_t(blockIdx.x) * tile;
    put(begin + warp * warp_tokens);
    exp_sum own{-infinity, 0};
    for (index_t first = begin; first < at.tokens; first += step) {
      const index_t mine = first + warp * warp_tokens;
      wait_copies<0>();
      __syncthreads();  // the covariance is there, or the last panel has been read
      std::uint32_t k[key_tiles][D / 16][4];
#pragma unroll
      for (int m = 0; m < key_tiles; ++m) {
#pragma unroll
        for (int s = 0; s < D / 16; ++s)
          load_matrices(k[m][s], keys + score_rows_staged<D>().offset(m * 16 + lane % 16, s * 2 + lane / 16));
      }
      __syncwarp();
      put(mine + step);
      float along[key_tiles][2] = {}, spread[key_tiles][2] = {};
#pragma unroll
      for (int n = 0; n < panels; ++n) {
        if constexpr (panels > 1) {
          if (n > 0) __syncthreads();
          load_panel(p, row, n * panel, square);
          commit_copies();
          wait_copies<0>();
          __syncthreads();
        }
        add_panel(square, n * panel, k, mean, along, spread, matrix, in_matrix, lane);
      }
#pragma unroll
      for (int i = 0; i < key_tiles * 2; ++i) {
        const float mean_logit = lanes_sum<4>(along[i / 2][i % 2]) * p.scale;
        const float variance = lanes_sum<4>(spread[i / 2][i % 2]) * variance_scale;
        const index_t slot = mine + i / 2 * 16 + i % 2 * 8 + lane / 4;
        if (lane % 4 != 0 || slot >= at.tokens) continue;
        float logit = scorer.expect(mean_logit, variance);
        if (!(logit < infinity)) logit = nanf("");
        if (p.view.position(at.sequence, at.head, slot) < scorer.sinks) logit = -infinity;
        logits[slot] = logit;
        own.add(logit);
      }
    }
    wait_copies<0>();
    parts[threadIdx.x] = own;
    __syncthreads();
    for (int half = threads / 2; half > 0; half /= 2) {
      if (int(threadIdx.x) < half) parts[threadIdx.x].add(parts[threadIdx.x + half]);
      __syncthreads();
    }
    if (threadIdx.x == 0) p.partials[offset_t(row) * gridDim.x + blockIdx.x] = parts[0];
  }

 private:
  /// What columns first .. first + panel - 1 of the covariance contribute to the keys. Rows above the diagonal are
  /// zeros.
  template <class Keys, class Sums>
  __device__ __forceinline__ static void add_panel(std::uint32_t square, int first, const Keys& k, const float* mean,
                                                   Sums& along, Sums& spread, int matrix, int in_matrix, int lane) {
#pragma unroll
    for (int c = 0; c < panel / 16; ++c) {
      const int block = first / 16 + c;  // of 16 columns
      if (block * 16 >= D) break;
      float product[key_tiles][2][4] = {};
      std::uint32_t own[key_tiles][4];
#pragma unroll
      for (int s = 0; s < D / 16; ++s) {
        if (s == block) {
#pragma unroll
          for (int i = 0; i < key_tiles * 4; ++i) own[i / 4][i % 4] = k[i / 4][s][i % 4];
        }
        if (s < block) continue;
#pragma unroll
        for (int part = 0; part < 2; ++part) {
          std::uint32_t b[4];
          load_matrices(b, square + std::uint32_t(part * panel_bytes) +
                               score_rows_staged<D>().offset(c * 16 + matrix / 2 * 8 + in_matrix, s * 2 + matrix % 2));
#pragma unroll
          for (int m = 0; m < key_tiles; ++m) {
            multiply<T>(product[m][0], k[m][s], b[0], b[1]);
            multiply<T>(product[m][1], k[m][s], b[2], b[3]);
          }
        }
      }
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        const int column = block * 16 + n * 8 + lane % 4 * 2;
        const float2 middle{mean[column], mean[column + 1]};
#pragma unroll
        for (int i = 0; i < key_tiles * 2; ++i) {
          const int m = i / 2, half = i % 2;
          const float2 key = unpacked_pair<T>(own[m][n * 2 + half]);
          along[m][half] += middle.x * key.x + middle.y * key.y;
          spread[m][half] += product[m][n][half * 2] * key.x + product[m][n][half * 2 + 1] * key.y;
        }
      }
    }
  }
};

// Mean and variance of each key's logits, on the GPU, by products of four warps at a time (wgmma).

/// A block takes a share of a head's keys for some of its query heads, whose covariances stay in shared memory. Keys go
/// from device memory directly to the registers that products read: a lane's 16 bytes are eight neighbouring channels,
/// and place_of_channel orders channels as products expect them on one lane. Groups of four warps do not wait for each
/// other.
template <class View, class Scorer>
struct expected_hopper_kernel {
  using T = typename View::element_type;
  using wide = wide_product<T>;
  static constexpr int D = View::k_dim, groups = 3, threads = groups * 128, resident = 1, tile = groups * 64;
  static constexpr int heads = D == 64 ? 4 : 2;  // of one block
  static constexpr int part_bytes = D * D * 2, head_bytes = 2 * part_bytes, align = 1024;
  static constexpr std::size_t shared_bytes = std::size_t(heads * head_bytes + align);

  struct keys {
    std::uint32_t words[D / 16][4];

    /// Two rows of a lane, as a warp's products take them.
    __device__ void load(const View& view, const scored_head& at, index_t first, int lane) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const index_t slot = (min)(first + half * 8 + lane / 4, at.tokens - 1);
        const auto* row = view.key(at.sequence, at.head, slot);
        [[maybe_unused]] float scale = 1;
        if constexpr (!View::is_raw) scale = view.key_scale(at.sequence, at.head, slot);
#pragma unroll
        for (int c = 0; c < D / 32; ++c) {
          uint4 chunk;
          if constexpr (View::is_raw) {
            chunk = __ldg(reinterpret_cast<const uint4*>(row + lane % 4 * 8 + c * 32));
          } else {
            chunk = decoded_chunk<T>(row_elements(row, lane % 4 * 8 + c * 32), scale);
          }
          words[c * 2][half] = chunk.x, words[c * 2][half + 2] = chunk.y;
          words[c * 2 + 1][half] = chunk.z, words[c * 2 + 1][half + 2] = chunk.w;
        }
      }
    }
  };

  __device__ static void load_covariances(const expected_problem<View>& p, index_t row, int here, std::uint32_t to) {
    constexpr int chunks = D / 8, each = D * chunks;
    for (int id = threadIdx.x; id < here * 2 * each; id += threads) {
      const int head = id / (2 * each), part = id / each % 2, r = id / chunks % D, chunk = id % chunks;
      const T* from = (part ? p.moments.low : p.moments.high) + (offset_t(row) + head) * D * D + r * D + chunk * 8;
      copy_async16(to + std::uint32_t(head * head_bytes + part * part_bytes) + wide::offset(D, r, chunk), from, true);
    }
    commit_copies();
  }

  __device__ static void run(const expected_problem<View>& p, const Scorer& scorer) {
    extern __shared__ __align__(1024) unsigned char wide_memory[];
    __shared__ float2 mean[heads][D / 2];
    __shared__ exp_sum parts[threads];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const index_t rounds = ceil_div(p.group, heads), kv_row = index_t(blockIdx.y) / rounds;
    const int first_head = int(index_t(blockIdx.y) % rounds) * heads, here = (min)(heads, p.group - first_head);
    scored_head at{};
    at.sequence = kv_row / p.view.kv_heads;
    at.head = kv_row % p.view.kv_heads;
    at.tokens = (min)(p.view.length(at.sequence, at.head), p.capacity);
    const index_t row = kv_row * p.group + first_head;  // of the query heads of all sequences
    const std::uint32_t squares = (shared_address(wide_memory) + align - 1) / align * align;
    load_covariances(p, row, here, squares);
    for (int d = threadIdx.x; d < here * D; d += threads)
      reinterpret_cast<float*>(mean)[d] = p.moments.mean[offset_t(row) * D + d];
    const index_t step = index_t(gridDim.x) * tile, begin = index_t(blockIdx.x) * tile + warp * 16;
    keys now, next;
    if (at.tokens > 0) next.load(p.view, at, begin, lane);
    wait_copies<0>();
    wide::publish();
    __syncthreads();
    exp_sum own[heads];
    float variance_scale[heads];
#pragma unroll
    for (int e = 0; e < heads; ++e) {
      own[e] = {-infinity, 0};
      variance_scale[e] = scalbnf(p.scale * p.scale, e < here ? p.moments.shift[row + e] : 0);
    }
    // All four warps of a group continue while the first of them has keys.
    for (index_t first = begin; first - warp % 4 * 16 < at.tokens; first += step) {
      now = next;
      next.load(p.view, at, first + step, lane);
      const index_t slot = first + lane / 4 + lane % 2 * 8;
      const bool writes = lane % 4 < 2 && slot < at.tokens;
      const bool sink = writes && p.view.position(at.sequence, at.head, slot) < scorer.sinks;
#pragma unroll
      for (int e = 0; e < heads; ++e) {
        if (e >= here) break;
        float along[2] = {}, spread[2] = {};
        add_logits(squares + std::uint32_t(e * head_bytes), now, mean[e], along, spread, lane);
#pragma unroll
        for (int i = 0; i < 2; ++i) along[i] = lanes_sum<4>(along[i]), spread[i] = lanes_sum<4>(spread[i]);
        if (!writes) continue;
        const bool second = lane % 2;
        float logit = scorer.expect((second ? along[1] : along[0]) * p.scale,
                                    (second ? spread[1] : spread[0]) * variance_scale[e]);
        if (!(logit < infinity)) logit = nanf("");
        if (sink) logit = -infinity;
        p.logits[offset_t(row + e) * p.capacity + slot] = logit;
        own[e].add(logit);
      }
    }
#pragma unroll
    for (int e = 0; e < heads; ++e) {
      if (e >= here) break;
      __syncthreads();
      parts[threadIdx.x] = own[e];
      __syncthreads();
      for (int rest = threads; rest > 1; rest = ceil_div(rest, 2)) {
        const int half = ceil_div(rest, 2);
        if (int(threadIdx.x) < rest - half) parts[threadIdx.x].add(parts[threadIdx.x + half]);
        __syncthreads();
      }
      if (threadIdx.x == 0) p.partials[offset_t(row + e) * gridDim.x + blockIdx.x] = parts[0];
    }
  }

 private:
  /// What one query head contributes to the keys of a warp. Rows above the diagonal are zeros, so products skip squares
  /// of them.
  __device__ __forceinline__ static void add_logits(std::uint32_t square, const keys& k, const float2* mean,
                                                    float (&along)[2], float (&spread)[2], int lane) {
#pragma unroll
    for (int slice = 0; slice < D / 64; ++slice) {
      typename wide::sums product;
      wide::begin();
#pragma unroll
      for (int s = slice * 4; s < D / 16; ++s) {
#pragma unroll
        for (int part = 0; part < 2; ++part) {
          const std::uint32_t from =
              square + std::uint32_t(part * part_bytes + s % 4 * 32) + wide::offset(D, 0, s / 4 * 8);
          wide::multiply(product, k.words[s], wide::operand(from + std::uint32_t(slice * 64 * 128)),
                         s > slice * 4 || part > 0);
        }
      }
      wide::commit();
      const auto key = [&](int n, int half) { return unpacked_pair<T>(k.words[slice * 4 + n / 2][n % 2 * 2 + half]); };
#pragma unroll
      for (int n = 0; n < 8; ++n) {
        const float2 middle = mean[slice * 32 + n * 4 + lane % 4];
#pragma unroll
        for (int half = 0; half < 2; ++half) along[half] += middle.x * key(n, half).x + middle.y * key(n, half).y;
      }
      wide::finish(product);
#pragma unroll
      for (int n = 0; n < 8; ++n) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          spread[half] += product[n][half * 2] * key(n, half).x + product[n][half * 2 + 1] * key(n, half).y;
        }
      }
    }
  }
};

}  // namespace detail
}  // namespace cuda
TESSERA_NAMESPACE_END
