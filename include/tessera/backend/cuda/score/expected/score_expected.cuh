// Scores by an estimate of future queries, on the GPU: mean and variance of each key's logits, by tensor cores.
#pragma once

#include <algorithm>

#include "../../device/kernel.cuh"
#include "../../device/workspace.cuh"
#include "detail/expected_kernel.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {
namespace detail {

/// Selects the kernel by the architecture that the code was compiled for. The host reads the bound on a block's
/// threads, in which the two kernels differ.
template <class View, class Scorer, bool Wide = compiled_for_hopper && fits_wide_products<View::k_dim>>
using expected_kernel_of =
    std::conditional_t<Wide, expected_hopper_kernel<View, Scorer>, expected_kernel<View, Scorer>>;

template <class View, class Scorer>
__global__ void __launch_bounds__((expected_kernel_of<View, Scorer>::threads),
                                  (expected_kernel_of<View, Scorer>::resident))
    expected_entry(const __grid_constant__ expected_problem<View> problem, Scorer scorer) {
  expected_kernel_of<View, Scorer>::run(problem, scorer);
}

/// The kernel whose blocks every device has shared memory for; the usual one where that is so of it.
template <class View, class Scorer, class Usual = expected_kernel<View, Scorer>>
using small_expected_kernel_of =
    std::conditional_t<(Usual::shared_bytes + sizeof(typename Usual::static_memory) <= least_shared_memory), Usual,
                       expected_kernel<View, Scorer, true>>;

/// Code for Hopper alone has none of it: there the usual kernel fits.
template <class View, class Scorer>
__global__ void __launch_bounds__(compiled_for_hopper ? 32 : expected_kernel<View, Scorer>::threads)
    small_expected_entry(const __grid_constant__ expected_problem<View> problem, Scorer scorer) {
  if constexpr (!compiled_for_hopper) small_expected_kernel_of<View, Scorer>::run(problem, scorer);
}

inline constexpr int expected_groups = 64;  // query heads of a kv_head

/// blockIdx: x a share of the slots, y a (sequence, kv_head). Averages the softmaxes over the slots of the group's
/// query heads. Sinks rank before all others.
template <class View, class Scorer, int Threads>
__global__ void __launch_bounds__(Threads)
    average_entry(const __grid_constant__ expected_problem<View> p, Scorer scorer, index_t blocks, float* scores,
                  offset_t row_stride) {
  __shared__ float group_largest[expected_groups], total[expected_groups];
  const index_t row = index_t(blockIdx.y), b = row / p.view.kv_heads, h = row % p.view.kv_heads;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  for (int g = warp; g < p.group; g += Threads / 32) {
    const exp_sum* parts = p.partials + (offset_t(row) * p.group + g) * blocks;
    float largest = -infinity;
    for (index_t i = lane; i < blocks; i += 32) largest = fmaxf(largest, parts[i].largest);
    largest = warp_max(largest);
    float sum = 0;
    for (index_t i = lane; i < blocks; i += 32) {
      if (parts[i].largest > -infinity) sum += parts[i].sum * expf(parts[i].largest - largest);
    }
    sum = warp_sum(sum);
    if (lane == 0) group_largest[g] = largest, total[g] = sum > 0 ? sum : 1;
  }
  __syncthreads();
  const index_t tokens = (min)(p.view.length(b, h), p.capacity);
  for (index_t slot = index_t(blockIdx.x * Threads + threadIdx.x); slot < tokens;
       slot += index_t(gridDim.x) * Threads) {
    float score = 0;
    for (int g = 0; g < p.group; ++g) {
      const float logit = p.logits[(offset_t(row) * p.group + g) * p.capacity + slot];
      score += (logit == -infinity ? 0.0f : expf(logit - group_largest[g])) / total[g] / float(p.group);
    }
    scores[row * row_stride + slot] = p.view.position(b, h, slot) < scorer.sinks ? infinity : score;
  }
}

}  // namespace detail

/// Writes the scores of all stored slots of a batch: the device's cpu::score_expected, to rounding. Every call gives
/// the same bits.
/// Shapes   scores [rows, row_stride], row = sequence * kv_heads + head; statistics, next [sequences], frequencies
///          [k_dim / 2], all on the device.
/// Errors   rows that do not begin on 16 bytes, more than 64 query heads a kv_head, more than the limits:
///          tessera::error.
/// Workspace  logits of every query head, and their covariances.
/// Cost     K is read once for each query head of the group (on Hopper, once for each two of them), most of it from the
///          L2; k_dim squared products a token and query head on the tensor cores.
template <class View, statistical_scorer Scorer>
class score_expected {
  static_assert(check_device_rows<View>());
  using T = typename View::element_type;
  static constexpr int D = View::k_dim;
  static_assert(sizeof(T) == 2, "tessera: the tensor-core scoring kernels take fp16 and bf16");

 public:
  score_expected(index_t sequences, index_t kv_heads, index_t q_heads, index_t capacity, const device_info& device)
      : sequences_(sequences), kv_heads_(kv_heads), q_heads_(q_heads), capacity_(capacity) {
    require(sequences >= 1 && kv_heads >= 1 && q_heads % kv_heads == 0 && q_heads / kv_heads <= detail::expected_groups,
            "q_heads", q_heads, "a multiple of kv_heads, at most 64 for each", "pass the model's head counts");
    require(offset_t(sequences) * q_heads <= 65535, "sequences * q_heads", offset_t(sequences) * q_heads,
            "at most 65535", "split the batch");
    const auto take = [&]<class Kernel>(const Kernel*) {
      if (entry_.max_threads() != Kernel::threads) return false;
      rounds_ = ceil_div(q_heads / kv_heads, Kernel::heads), threads_ = Kernel::threads, tile_ = Kernel::tile;
      shared_bytes_ = Kernel::shared_bytes;
      return true;
    };
    const bool usual = take(static_cast<const detail::expected_kernel_of<View, Scorer, false>*>(nullptr));
    using small_kernel = detail::small_expected_kernel_of<View, Scorer>;
    if constexpr (!std::is_same_v<small_kernel, detail::expected_kernel<View, Scorer>>) {
      if (usual && shared_bytes_ > entry_.shared_limit(device)) {
        entry_ = {detail::small_expected_entry<View, Scorer>};
        require(take(static_cast<const small_kernel*>(nullptr)), "threads of a block of Expected Attention",
                entry_.max_threads(), std::to_string(small_kernel::threads),
                "compile for this device's compute capability");
      }
    }
    if constexpr (fits_wide_products<D>)
      take(static_cast<const detail::expected_kernel_of<View, Scorer, true>*>(nullptr));
    entry_.require_shared(shared_bytes_, device, "Expected Attention", "use a device with more of it");
    blocks_ = std::clamp(entry_.resident_blocks(threads_, shared_bytes_, device) / (sequences * kv_heads * rounds_), 1,
                         ceil_div(capacity, tile_));
  }

  std::size_t workspace_bytes() const { return memory(*this, nullptr).bytes(); }

  void run(const View& view, const Scorer& scorer, const query_statistics* statistics, const float* frequencies,
           const index_t* next, const logit_rule& rule, float* scores, offset_t row_stride, void* workspace,
           cudaStream_t stream) const {
    require(view.sequences <= sequences_ && view.kv_heads == kv_heads_, "sequences and kv_heads",
            std::to_string(view.sequences) + " and " + std::to_string(view.kv_heads),
            "at most " + std::to_string(sequences_) + " and " + std::to_string(kv_heads_),
            "construct score_expected for the largest batch");
    require_rows_on_16_bytes("K", view.k, view.k_strides);
    if (view.sequences == 0) return;
    const memory arrays(*this, workspace);
    detail::expected_problem<View> p;
    p.view = view;
    p.moments = arrays.moments;
    p.scale = rule.scale_for(D);
    p.logits = arrays.logits;
    p.partials = arrays.partials;
    p.group = q_heads_ / kv_heads_;
    p.capacity = capacity_;
    make_moments<T, D>(statistics, frequencies, next, scorer.future, view.sequences, q_heads_, arrays.turns, p.moments,
                       stream);
    entry_.launch({.blocks = dim3(unsigned(blocks_), unsigned(view.sequences * kv_heads_ * rounds_)),
                   .threads = dim3(unsigned(threads_)),
                   .shared_bytes = shared_bytes_},
                  stream, "launch of expected_logits", p, scorer);
    const dim3 grid{unsigned(std::clamp(ceil_div(capacity_, 1024), 1, 128)), unsigned(view.sequences * kv_heads_)};
    detail::average_entry<View, Scorer, 256><<<grid, 256, 0, stream>>>(p, scorer, blocks_, scores, row_stride);
    check(cudaGetLastError(), "launch of score_expected");
  }

 private:
  struct memory : workspace_cut {
    const score_expected& op;
    memory(const score_expected& owner, void* begin) : workspace_cut(begin), op(owner) {}
    const std::size_t rows = std::size_t(op.sequences_) * std::size_t(op.q_heads_);
    float* logits = array<float>(rows * std::size_t(op.capacity_));
    exp_sum* partials = array<exp_sum>(rows * std::size_t(op.blocks_));
    double2* turns = array<double2>(std::size_t(op.sequences_) * D / 2);
    detail::moment_rows<T> moments{array<float>(rows * D), array<T>(rows* D* D), array<T>(rows* D* D),
                                   array<int>(rows)};
  };

  index_t sequences_, kv_heads_, q_heads_, capacity_;
  int blocks_ = 1, rounds_ = 1, threads_ = 0, tile_ = 1;
  std::size_t shared_bytes_ = 0;
  device_kernel<detail::expected_problem<View>, Scorer> entry_{detail::expected_entry<View, Scorer>};
};

namespace detail {

/// Used instead of score_expected where a scorer does not use statistics.
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
