// Scores by what future queries will be like, on the GPU: mean and variance of each key's logits by tensor cores.
#pragma once

#include <algorithm>

#include "../../device/tuning.cuh"
#include "../score_problem.cuh"
#include "moments.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {
namespace detail {

/// The exponentials of some logits, beside the largest of them. A NaN has no part in it.
struct exp_sum {
  float most, sum;  // of none: -infinity and 0

  __device__ void add(float logit) {
    if (!(logit > -infinity)) return;
    if (logit > most) {
      sum = sum * expf(most - logit) + 1;
      most = logit;
    } else {
      sum += expf(logit - most);
    }
  }
  __device__ void add(const exp_sum& other) {
    if (other.most == -infinity) return;
    const float larger = fmaxf(most, other.most);
    sum = (most == -infinity ? 0 : sum * expf(most - larger)) + other.sum * expf(other.most - larger);
    most = larger;
  }
};

template <class View>
struct expected_problem {
  using T = typename View::element_type;
  View view;  // values are not read
  moment_rows<T> moments;
  float scale;
  float* logits;      // [sequences, q_heads, capacity]
  exp_sum* partials;  // [sequences, q_heads, blocks]
  index_t group, capacity;
};

/// A block takes a share of a head's keys for one query head, whose covariance stays in shared memory; a warp's keys stay in
/// registers, and so do the products: a key's elements and the products that they meet lie on the same lane.
template <class View, class Scorer>
struct expected_kernel {
  using T = typename View::element_type;
  static constexpr int D = View::k_dim, warps = 4, threads = warps * 32;
  static constexpr int key_tiles = D <= 128 ? 2 : 1, warp_tokens = key_tiles * 16, tile = warps * warp_tokens;
  static constexpr int panel = D <= 128 ? D : 64, panels = (D + panel - 1) / panel;  // columns that shared memory holds
  static constexpr int row_bytes = score_rows_staged<D>().bytes();
  static constexpr int panel_bytes = panel * row_bytes, key_bytes = warp_tokens * row_bytes;
  static constexpr std::size_t shared_bytes = std::size_t(2 * panel_bytes + warps * key_bytes);
  static_assert(D % 16 == 0, "tessera: products take head dims in steps of 16");

  /// Two neighbours of a row as fp32.
  __device__ static float2 pair(std::uint32_t bits) {
    if constexpr (std::is_same_v<T, bf16>) {
      return {__uint_as_float(bits << 16), __uint_as_float(bits & 0xffff0000u)};
    } else {
      return __half22float2(reinterpret_cast<const __half2&>(bits));
    }
  }

  __device__ static void load_panel(const expected_problem<View>& p, index_t row, int first, std::uint32_t to) {
    constexpr int chunks = D / 8;
    for (int id = threadIdx.x; id < 2 * panel * chunks; id += threads) {
      const int part = id / (panel * chunks), r = id / chunks % panel, chunk = id % chunks;
      const T* from = (part ? p.moments.low : p.moments.high) + offset_t(row) * D * D + (first + r) * D + chunk * 8;
      const bool valid = first + r < D;
      copy_async16(to + std::uint32_t(part * panel_bytes) + score_rows_staged<D>().place(r, chunk),
                   valid ? from : p.moments.high, valid);
    }
  }

  __device__ static void run(const expected_problem<View>& p, const Scorer& scorer) {
    extern __shared__ __align__(128) unsigned char memory[];
    __shared__ float mean[D];
    __shared__ exp_sum parts[threads];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, matrix = lane / 8, in_matrix = lane % 8;
    const index_t q_heads = p.view.kv_heads * p.group,
                  row = index_t(blockIdx.y);  // of the query heads of all sequences
    scored_head at{};
    at.sequence = row / q_heads;
    at.head = row % q_heads / p.group;
    at.tokens = min(p.view.length(at.sequence, at.head), p.capacity);
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
          load_matrices(k[m][s], keys + score_rows_staged<D>().place(m * 16 + lane % 16, s * 2 + lane / 16));
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
  /// What columns first .. first + panel - 1 of the covariance give to the keys. Rows above the diagonal are zeros.
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
                               score_rows_staged<D>().place(c * 16 + matrix / 2 * 8 + in_matrix, s * 2 + matrix % 2));
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
          const float2 key = pair(own[m][n * 2 + half]);
          along[m][half] += middle.x * key.x + middle.y * key.y;
          spread[m][half] += product[m][n][half * 2] * key.x + product[m][n][half * 2 + 1] * key.y;
        }
      }
    }
  }
};

template <class View, class Scorer>
__global__ void __launch_bounds__(128, 2)
    expected_entry(const __grid_constant__ expected_problem<View> problem, Scorer scorer) {
  expected_kernel<View, Scorer>::run(problem, scorer);
}

inline constexpr int expected_groups = 64;  // query heads of a kv_head

/// x a share of the slots, y a (sequence, kv_head): softmaxes over the slots, averaged over the group; sinks before all others.
template <class View, class Scorer, int Threads>
__global__ void __launch_bounds__(Threads)
    average_entry(const __grid_constant__ expected_problem<View> p, Scorer scorer, index_t blocks, float* scores,
                  offset_t row_stride) {
  __shared__ float most[expected_groups], total[expected_groups];
  const index_t row = index_t(blockIdx.y), b = row / p.view.kv_heads, h = row % p.view.kv_heads;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  for (int g = warp; g < p.group; g += Threads / 32) {
    const exp_sum* parts = p.partials + (offset_t(row) * p.group + g) * blocks;
    float largest = -infinity;
    for (index_t i = lane; i < blocks; i += 32) largest = fmaxf(largest, parts[i].most);
    largest = warp_max(largest);
    float sum = 0;
    for (index_t i = lane; i < blocks; i += 32) {
      if (parts[i].most > -infinity) sum += parts[i].sum * expf(parts[i].most - largest);
    }
    sum = warp_sum(sum);
    if (lane == 0) most[g] = largest, total[g] = sum > 0 ? sum : 1;
  }
  __syncthreads();
  const index_t tokens = min(p.view.length(b, h), p.capacity);
  for (index_t slot = index_t(blockIdx.x * Threads + threadIdx.x); slot < tokens;
       slot += index_t(gridDim.x) * Threads) {
    float score = 0;
    for (int g = 0; g < p.group; ++g) {
      const float logit = p.logits[(offset_t(row) * p.group + g) * p.capacity + slot];
      score += (logit == -infinity ? 0.0f : expf(logit - most[g])) / total[g] / float(p.group);
    }
    scores[row * row_stride + slot] = p.view.position(b, h, slot) < scorer.sinks ? infinity : score;
  }
}

}  // namespace detail

/// Writes the scores of all stored slots of a batch: the device's cpu::score_expected, to rounding; the same bits in every call.
/// Shapes   scores [rows, row_stride], row = sequence * kv_heads + head; statistics, next [sequences], frequencies [k_dim / 2],
///          all on the device.
/// Errors   rows that do not begin on 16 bytes, more query heads than 64 a kv_head, more than the limits: tessera::error.
/// Workspace  logits of every query head, and their covariances.   Cost  K once for each query head of the group, most of it from the
///          L2; k_dim squared products a token and query head on the tensor cores.
template <class View, statistical_scorer Scorer>
class score_expected {
  using T = typename View::element_type;
  static constexpr int D = View::k_dim;
  using kernel = detail::expected_kernel<View, Scorer>;
  static_assert(sizeof(T) == 2, "tessera: the tensor-core scoring kernels take fp16 and bf16");

 public:
  score_expected(index_t sequences, index_t kv_heads, index_t q_heads, index_t capacity, const device_info& device)
      : sequences_(sequences), kv_heads_(kv_heads), q_heads_(q_heads), capacity_(capacity) {
    require(sequences >= 1 && kv_heads >= 1 && q_heads % kv_heads == 0 && q_heads / kv_heads <= detail::expected_groups,
            "q_heads", q_heads, "a multiple of kv_heads, at most 64 for each", "pass the model's head counts");
    require(offset_t(sequences) * q_heads <= 65535, "sequences * q_heads", offset_t(sequences) * q_heads,
            "at most 65535", "split the batch");
    entry_ = detail::expected_entry<View, Scorer>;
    check(cudaFuncSetAttribute(entry_, cudaFuncAttributeMaxDynamicSharedMemorySize, int(kernel::shared_bytes)),
          "cudaFuncSetAttribute");
    int resident = 0;
    check(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&resident, entry_, kernel::threads, kernel::shared_bytes),
          "cudaOccupancyMaxActiveBlocksPerMultiprocessor");
    blocks_ = std::clamp(std::max(1, resident) * device.multiprocessors / (sequences * q_heads), 1,
                         ceil_div(capacity, kernel::tile));
  }

  std::size_t workspace_bytes() const { return shift_at() + array_bytes<int>(rows()); }

  void run(const View& view, const Scorer& scorer, const query_statistics* statistics, const float* frequencies,
           const index_t* next, const logit_rule& rule, float* scores, offset_t row_stride, void* workspace,
           cudaStream_t stream) const {
    require(view.sequences <= sequences_ && view.kv_heads == kv_heads_, "sequences and kv_heads",
            std::to_string(view.sequences) + " and " + std::to_string(view.kv_heads),
            "at most " + std::to_string(sequences_) + " and " + std::to_string(kv_heads_),
            "construct score_expected for the largest batch");
    require_rows_on_16_bytes("K", view.k, view.k_strides);
    if (view.sequences == 0) return;
    auto* bytes = static_cast<unsigned char*>(workspace);
    detail::expected_problem<View> p;
    p.view = view;
    p.moments = {reinterpret_cast<float*>(bytes + mean_at()), reinterpret_cast<T*>(bytes + high_at()),
                 reinterpret_cast<T*>(bytes + low_at()), reinterpret_cast<int*>(bytes + shift_at())};
    p.scale = rule.scale_for(D);
    p.logits = reinterpret_cast<float*>(bytes);
    p.partials = reinterpret_cast<detail::exp_sum*>(bytes + partials_at());
    p.group = q_heads_ / kv_heads_;
    p.capacity = capacity_;
    make_moments<T, D>(statistics, frequencies, next, scorer.future, view.sequences, q_heads_,
                       reinterpret_cast<double2*>(bytes + turns_at()), p.moments, stream);
    entry_<<<dim3(unsigned(blocks_), unsigned(view.sequences * q_heads_)), kernel::threads, kernel::shared_bytes,
             stream>>>(p, scorer);
    const dim3 grid{unsigned(std::clamp(ceil_div(capacity_, 1024), 1, 128)), unsigned(view.sequences * kv_heads_)};
    detail::average_entry<View, Scorer, 256><<<grid, 256, 0, stream>>>(p, scorer, blocks_, scores, row_stride);
    check(cudaGetLastError(), "launch of score_expected");
  }

 private:
  // The workspace: logits; their sums by block; turns; means; covariances.
  std::size_t rows() const { return std::size_t(sequences_) * std::size_t(q_heads_); }
  std::size_t partials_at() const { return array_bytes<float>(rows() * std::size_t(capacity_)); }
  std::size_t turns_at() const { return partials_at() + array_bytes<detail::exp_sum>(rows() * std::size_t(blocks_)); }
  std::size_t mean_at() const { return turns_at() + array_bytes<double2>(std::size_t(sequences_) * D / 2); }
  std::size_t high_at() const { return mean_at() + array_bytes<float>(rows() * D); }
  std::size_t low_at() const { return high_at() + array_bytes<T>(rows() * D * D); }
  std::size_t shift_at() const { return low_at() + array_bytes<T>(rows() * D * D); }

  index_t sequences_, kv_heads_, q_heads_, capacity_;
  int blocks_ = 1;
  // What was configured is what is launched: nvcc gives every source file a kernel of its own.
  void (*entry_)(detail::expected_problem<View>, Scorer) = nullptr;
};

namespace detail {

/// score_expected where a scorer goes by statistics; else nothing.
struct no_expected_score {
  no_expected_score(index_t, index_t, index_t, index_t, const device_info&) {}
  std::size_t workspace_bytes() const { return 0; }
};
template <class View, class Scorer>
struct expected_score {
  using type = no_expected_score;
};
template <class View, statistical_scorer Scorer>
struct expected_score<View, Scorer> {
  using type = score_expected<View, Scorer>;
};

}  // namespace detail
}  // namespace cuda
TESSERA_NAMESPACE_END
