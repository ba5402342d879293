// Prefill attention on the GPU: the host's calls.
#pragma once

#include <algorithm>
#include <limits>
#include <string>

#include "../../../../core/model_shape.hpp"
#include "../../device/alignment.cuh"
#include "../../device/kernel.cuh"
#include "../../store/slot_order.cuh"
#include "../latent/latent_attention.cuh"
#include "detail/prefill_hopper.cuh"
#include "detail/prefill_kernel.cuh"
#include "detail/prefill_rows.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {

// The checks of a problem before anything is launched.

namespace detail {

/// Throws unless the parts of the problem fit together. Returns how many blocks of `block_rows` query rows to launch; a
/// block has the rows of `group` query heads.
template <class View, class Out>
index_t check_prefill(const prefill_problem<View, Out>& p, index_t sequences, index_t kv_heads, index_t q_heads,
                      index_t group, index_t block_rows) {
  require(p.view.sequences == sequences, "view.sequences", p.view.sequences, std::to_string(sequences),
          "pass the batch that the operation was made for");
  require(p.view.kv_heads == kv_heads, "view.kv_heads", p.view.kv_heads, std::to_string(kv_heads),
          "pass the model that the operation was made for");
  require(p.q.sequences == sequences && p.q.heads == q_heads && p.q.tokens >= 0, "q [sequences, tokens, q_heads]",
          shape_text(p.q), "[" + std::to_string(sequences) + ", any, " + std::to_string(q_heads) + "]",
          "pass one row per sequence, token and query head");
  require(same_shape(p.out, p.q), "out [sequences, tokens, q_heads]", shape_text(p.out), shape_text(p.q),
          "give out the shape of q");
  require(!p.lse.data || (p.lse.sequences == p.q.sequences && p.lse.heads == p.q.heads && p.lse.tokens >= 0 &&
                          p.lse.tokens <= p.q.tokens),
          "lse [sequences, tokens, q_heads]", shape_text(p.lse), shape_text(p.q) + ", or of fewer tokens",
          "give lse the shape of q or of its newest tokens, or no data");
  require_dim(p.q, View::k_dim, "q");
  require_dim(p.out, View::v_dim, "out");
  if (p.q.tokens == 0) return 0;
  require(p.view.k && p.view.v && p.view.lengths, "view", "null", "keys, values and lengths", "pass device memory");
  require(p.q.data && p.out.data && p.first_position, "problem", "null", "q, out and first_position",
          "pass device memory");
  require(p.view.k_strides.dim == 1 && p.view.v_strides.dim == 1, "stride of a row's elements",
          p.view.k_strides.dim != 1 ? p.view.k_strides.dim : p.view.v_strides.dim, "1", "transpose K and V back");
  if constexpr (View::encoding_type::scaled) {
    require(p.view.scales.k && p.view.scales.v, "scales of K and V", "null", "device memory",
            "point the view at the scales of its rows");
  }
  if constexpr (View::is_raw) {
    require_rows_on_16_bytes("keys", p.view.k, p.view.k_strides);
    require_rows_on_16_bytes("values", p.view.v, p.view.v_strides);
  }
  require_rows_on_16_bytes("q", p.q);
  require_aligned_rows("out", p.out, 2);
  const offset_t rows = offset_t(p.q.tokens) * group;
  const offset_t blocks = (rows + block_rows - 1) / block_rows * (offset_t(sequences) * (q_heads / group));
  constexpr offset_t most = (std::numeric_limits<index_t>::max)();
  require(rows <= most - block_rows && blocks <= most, "query rows of the chunk", rows * (q_heads / group) * sequences,
          "fewer than 2^31 for a head, in fewer than 2^31 blocks", "pass a shorter chunk");
  return index_t(blocks);
}

/// Selects the kernel by the architecture that the code was compiled for: sm_90a has more instructions. The host reads
/// the bound on a block's threads, in which the two kernels differ.
template <class View, class Out, bool Hopper = compiled_for_hopper && fits_hopper_prefill<View>>
using prefill_kernel_of = std::conditional_t<Hopper, prefill_hopper_kernel<View, Out>, prefill_kernel<View, Out>>;

/// The kernel whose blocks every device has shared memory for; the usual one where that is so of it.
template <class View, class Out>
using small_prefill_kernel_of =
    std::conditional_t<(prefill_kernel<View, Out>::shared_bytes <= least_shared_memory), prefill_kernel<View, Out>,
                       small_prefill_kernel<View, Out, small_prefill_warps<View>(0)>>;
/// Code for Hopper alone has none of it: there the usual kernel fits.
template <class Small>
inline constexpr int small_prefill_threads = compiled_for_hopper ? 32 : Small::threads;

/// What a kernel takes of a device.
struct prefill_size {
  int threads, shared_bytes;
  index_t block_rows;

  template <class Kernel>
  static constexpr prefill_size taken_by() {
    return {Kernel::threads, Kernel::shared_bytes, Kernel::block_rows};
  }
  /// Of the usual kernel where `limit` bytes hold its block, else of the small one.
  template <class Common, class Small>
  static constexpr prefill_size within(std::size_t limit) {
    return std::size_t(Common::shared_bytes) <= limit ? taken_by<Common>() : taken_by<Small>();
  }
};

/// What the prompt calls have in common: the kernel for Hopper or one for all devices, with its size, and the workspace
/// of splits. The workspace has at most one part for every block that the device runs at a time.
template <class Common, class Small, class Hopper, class... Params>
struct prefill_launch {
  device_kernel<Params...> entry;
  prefill_size size = prefill_size::taken_by<Common>();
  bool on_hopper = false;
  index_t resident = 1;

  /// `small_entry`: null where Small is Common.
  prefill_launch(void (*usual)(Params...), void (*small_entry)(Params...), const device_info& device) : entry(usual) {
    if constexpr (!std::is_void_v<Hopper>) {
      static_assert(Hopper::threads != Common::threads,
                    "tessera: prefill kernels differ in threads, by which the host knows them");
      on_hopper = entry.max_threads() == Hopper::threads;
    }
    size = on_hopper ? size_on_hopper() : prefill_size::within<Common, Small>(entry.shared_limit(device));
    if (small_entry && !on_hopper && size.shared_bytes != Common::shared_bytes) entry = small_entry;
    require(entry.max_threads() >= size.threads, "threads of a block of prefill attention", entry.max_threads(),
            std::to_string(size.threads), "compile for this device's compute capability");
    entry.require_shared(std::size_t(size.shared_bytes), device, "prefill attention",
                         "use a device with more of it, such as an H100 or H200");
    resident = entry.resident_blocks(size.threads, std::size_t(size.shared_bytes), device);
  }

  std::size_t workspace_bytes() const { return std::size_t(resident) * part_rows() * (Common::Dv + 2) * 4; }
  /// How `blocks` query blocks are cut: into parts if there are too few of them and there is a workspace. Blocks that
  /// process several items count the items already taken there.
  prefill_parts cut(index_t blocks, void* workspace, cudaStream_t stream) const {
    constexpr index_t max_splits = 32;  // enough to fill a large device from eight blocks
    prefill_parts parts;
    parts.items = blocks, parts.block_rows = size.block_rows;
    if (!workspace) return parts;
    parts.splits = std::clamp(resident / blocks, 1, max_splits);
    parts.items *= parts.splits;
    parts.out = static_cast<float*>(workspace);
    parts.state = reinterpret_cast<float2*>(parts.out + std::size_t(resident) * part_rows() * Common::Dv);
    if (on_hopper && parts.items > resident) {
      parts.taken = static_cast<index_t*>(workspace);  // items are not split
      check(cudaMemsetAsync(parts.taken, 0, sizeof(index_t), stream), "cudaMemsetAsync");
    }
    return parts;
  }
  template <class... Args>
  void run(const prefill_parts& parts, cudaStream_t stream, const char* call, const Args&... args) const {
    const index_t grid = on_hopper ? (std::min)(parts.items, resident) : parts.items;
    entry.launch({.blocks = dim3(unsigned(grid)),
                  .threads = dim3(unsigned(size.threads)),
                  .shared_bytes = std::size_t(size.shared_bytes)},
                 stream, call, args...);
  }

 private:
  static constexpr prefill_size size_on_hopper() {
    if constexpr (std::is_void_v<Hopper>)
      return prefill_size::taken_by<Common>();
    else
      return prefill_size::taken_by<Hopper>();
  }
  std::size_t part_rows() const { return std::size_t(size.block_rows); }
};

template <class View, class Out>
__global__ void __launch_bounds__((prefill_kernel_of<View, Out>::threads), (prefill_kernel_of<View, Out>::resident))
    prefill_entry(const __grid_constant__ prefill_problem<View, Out> problem, prefill_parts parts,
                  const __grid_constant__ row_maps maps) {
  using kernel = prefill_kernel_of<View, Out>;
  kernel::template run<dense_tiles<kernel>>(problem, parts, maps, {});
}

template <class View, class Out>
__global__ void __launch_bounds__((small_prefill_threads<small_prefill_kernel_of<View, Out>>))
    small_prefill_entry(const __grid_constant__ prefill_problem<View, Out> problem, prefill_parts parts,
                        const __grid_constant__ row_maps maps) {
  using kernel = small_prefill_kernel_of<View, Out>;
  if constexpr (!compiled_for_hopper) kernel::template run<dense_tiles<kernel>>(problem, parts, maps, {});
}

/// Merges parts: one warp per query row of every head; a head has `blocks` query blocks.
template <class View, class Out>
__global__ void __launch_bounds__(128)
    merge_prefill_entry(const __grid_constant__ prefill_problem<View, Out> p, prefill_parts parts, index_t blocks) {
  const index_t query_rows = p.q.tokens * (p.q.heads / p.view.kv_heads);
  const index_t item = index_t(blockIdx.x) * 4 + index_t(threadIdx.x) / 32;
  if (item >= query_rows * p.view.sequences * p.view.kv_heads) return;
  const index_t heads = p.view.sequences * p.view.kv_heads, group = p.q.heads / p.view.kv_heads;
  const index_t head_row = item / query_rows, row = item % query_rows, head = head_row % p.view.kv_heads;
  // In the order of dense_tiles: the last query rows of all heads first.
  prefill_kernel<View, Out>::merge(p, parts, (blocks - 1 - row / parts.block_rows) * heads + head_row,
                                   row % parts.block_rows, head_row / p.view.kv_heads, row / group,
                                   head * group + row % group, int(threadIdx.x % 32));
}

}  // namespace detail

/// Causal attention of a prompt chunk over the stored tokens, those of the chunk included.
///
/// Shapes   as prefill_problem; q_heads is a multiple of kv_heads. Rows of q, K and V are contiguous and begin at
///          multiples of 16 bytes; encoded rows of K and V, which are decoded on their way to shared memory, anywhere.
///          Chunks of any length.
/// Returns  output, and natural log-sum-exps of all tokens or of the newest ones. A row that sees nothing gives 0 and
///          -infinity, unless it has a sink logit.
/// Errors   shapes, alignment and null pointers are checked before the launch.
/// Cost     2 (k_dim + v_dim) flops for each query row and each stored token of the tiles of 64 that its block sees. K
///          and V are read once per 128 query rows (tokens times group); beyond head dim 128, on devices with less than
///          a block's usual shared memory, once per 64. The host needs no length. If a chunk has too few rows to fill
///          the device and there is a workspace, it is split along its tokens and merged by a second launch.
/// Same input, same bits. Without splits a row's bits do not depend on how the prompt is cut into chunks either.
/// Paper    FlashAttention-2, arXiv:2307.08691. Differs: query heads of a group share a block; outputs are rescaled
///          only when the maximum has grown by more than 8 in base 2.
template <class View, class Out = float>
class prefill_attention {
  using T = typename View::element_type;
  using kernel = detail::prefill_kernel<View, Out>;
  static_assert(std::is_same_v<T, fp16> || std::is_same_v<T, bf16>,
                "tessera: the tensor-core prefill kernel takes fp16 and bf16");
  static_assert(element<Out>, "tessera: prefill attention writes fp32, fp16 or bf16");

 public:
  prefill_attention(index_t sequences, index_t kv_heads, index_t q_heads, const device_info& device)
      : sequences_(sequences),
        kv_heads_(kv_heads),
        q_heads_(q_heads),
        launch_(detail::prefill_entry<View, Out>, small_entry(), device) {
    require(sequences > 0 && kv_heads > 0, "sequences * kv_heads", offset_t(sequences) * kv_heads, "at least 1",
            "pass the batch's and the model's counts");
    require_head_counts(q_heads, kv_heads);
  }

  std::size_t workspace_bytes() const { return launch_.workspace_bytes(); }

  /// `workspace`, aligned to 16 bytes, is scratch. Null: there are no splits, and blocks of the Hopper kernel process
  /// items in a fixed order instead of taking them as they become free. A chunk without tokens launches nothing.
  void run(const prefill_problem<View, Out>& problem, void* workspace, cudaStream_t stream) const {
    const index_t blocks =
        detail::check_prefill(problem, sequences_, kv_heads_, q_heads_, q_heads_ / kv_heads_, launch_.size.block_rows);
    if (blocks == 0) return;
    require_aligned("workspace", workspace, 16);
    watch_order(problem.view, stream);
    const detail::prefill_parts parts = launch_.cut(blocks, workspace, stream);
    row_maps maps;
    if (launch_.on_hopper) maps = map_rows_of(problem.view, hopper_tile);
    launch_.run(parts, stream, "launch of prefill attention", problem, parts, maps);
    if (parts.splits == 1) return;
    const index_t heads = sequences_ * kv_heads_, rows = problem.q.tokens * (q_heads_ / kv_heads_) * heads;
    detail::merge_prefill_entry<View, Out>
        <<<unsigned(ceil_div(rows, 4)), 128, 0, stream>>>(problem, parts, blocks / heads);
    check(cudaGetLastError(), "launch of prefill attention's merge");
  }

  /// `run` over one of several parts of the stored tokens. It ignores sink logits: `merge_parts` adds them, and needs
  /// the lse.
  void run_part(prefill_problem<View, Out> problem, void* workspace, cudaStream_t stream) const {
    static_assert(std::is_same_v<Out, float>, "tessera: a part of prefill attention is written in fp32");
    require(problem.lse.data != nullptr, "lse of a part", "null", "device memory", "merge_parts weighs parts by it");
    require(problem.lse.tokens == problem.q.tokens, "tokens of a part's lse", problem.lse.tokens,
            std::to_string(problem.q.tokens), "merge_parts weighs every row by it");
    problem.rule.sink_logits = nullptr;
    run(problem, workspace, stream);
  }

 private:
  static constexpr index_t hopper_tile = 128;  // in one box where rows lie side by side

  using small_kernel = detail::small_prefill_kernel_of<View, Out>;
  using hopper =
      std::conditional_t<detail::fits_hopper_prefill<View>, detail::prefill_kernel_of<View, Out, true>, void>;
  using launch_type =
      detail::prefill_launch<kernel, small_kernel, hopper, prefill_problem<View, Out>, detail::prefill_parts, row_maps>;
  static constexpr auto small_entry() -> decltype(&detail::prefill_entry<View, Out>) {
    if constexpr (std::is_same_v<small_kernel, kernel>)
      return nullptr;
    else
      return detail::small_prefill_entry<View, Out>;
  }
  index_t sequences_, kv_heads_, q_heads_;
  launch_type launch_;
};

/// Latent rows have a kernel of their own, for absorbed queries. A chunk has up to 2^20 tokens.
template <class View, class Out>
requires View::is_latent class prefill_attention<View, Out> {
 public:
  prefill_attention(index_t sequences, index_t kv_heads, index_t q_heads, const device_info& device)
      : attend_(sequences, kv_heads, q_heads, 1 << 20, device) {}

  std::size_t workspace_bytes() const { return attend_.workspace_bytes(); }
  /// Errors   as latent_attention's; no workspace.
  void run(const prefill_problem<View, Out>& p, void* workspace, cudaStream_t stream) const {
    require(workspace != nullptr, "workspace", "null", "workspace_bytes() bytes", "pass device memory");
    attend_.prepare(workspace, stream);
    attend_.run({p.view, p.q, p.first_position, p.rule, p.out, p.lse, {}}, workspace, stream,
                p.lse.data ? p.q.tokens - p.lse.tokens : 0);
  }

 private:
  latent_attention<View, Out> attend_;
};

}  // namespace cuda
TESSERA_NAMESPACE_END
