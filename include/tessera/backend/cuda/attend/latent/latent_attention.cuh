// Attention over latent rows (MLA) on the GPU: the host's calls.
#pragma once

#include <algorithm>
#include <string>

#include "../../../../core/model_shape.hpp"
#include "../../device/alignment.cuh"
#include "../../device/workspace.cuh"
#include "../../store/slot_order.cuh"
#include "detail/latent_kernel.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {

/// Causal attention of absorbed queries over latent rows: decode steps and prompt chunks alike, over all stored tokens
/// or a selection. `decode_attention` and `prefill_attention` of a view of latent rows are this operation.
///
/// Call `workspace_bytes` and `prepare` once, then `run` any number of times on one stream. `run` neither allocates nor
/// synchronises, and the host needs no length, so a captured graph can be replayed while lengths grow. `sequences` and
/// `tokens` are upper bounds. A launch begins while the previous launch on the stream is ending.
/// Shapes   as decode_problem says: q [sequences, tokens, q_heads, 576] -> out [sequences, tokens, q_heads, 512].
/// Limits   fp16 and bf16, on compute capability 9.0 alone. Blocks that share a row wait for each other, up to one on
///          each multiprocessor: launches on two streams of different priorities must not run at the same time.
/// Errors   another device; more sequences or tokens than the constructor was given; other head counts; rows that do
///          not begin on 16 bytes or whose elements are not contiguous: tessera::error before anything is launched.
/// Cost     2 * (576 + 512) flops for each query row and token, in blocks of 64 query rows; each block reads the latent
///          rows once. Workspace: 264 KiB for each multiprocessor.
/// Paper    DeepSeek-V2, arXiv:2405.04434; splits and merges as Flash-Decoding.
template <class View, class Out = float>
class latent_attention {
  using kernel = detail::latent_kernel<View, Out>;
  static_assert(View::is_latent, "tessera: latent_attention reads latent rows; take decode_attention for K and V");
  static_assert(sizeof(typename View::element_type) == 2,
                "tessera: the tensor-core kernel over latent rows takes fp16 and bf16");
  static_assert(element<Out>, "tessera: attention over latent rows writes float, fp16 or bf16");

 public:
  using problem_type = decode_problem<View, Out>;

  latent_attention(index_t sequences, index_t kv_heads, index_t q_heads, index_t tokens, const device_info& device)
      : sequences_(sequences), kv_heads_(kv_heads), q_heads_(q_heads), tokens_(tokens), rows_(sequences * kv_heads) {
    require(sequences > 0, "sequences", sequences, "at least 1", "pass the largest batch");
    require(tokens > 0, "tokens", tokens, "at least 1", "pass the most tokens of a call");
    require_head_counts(q_heads, kv_heads);
    require(rows_ <= kernel::max_rows, "sequences * kv_heads", rows_, "at most " + std::to_string(kernel::max_rows),
            "split the batch");
    require(entry_.max_threads() >= kernel::threads, "compute capability for latent rows", device.compute_capability,
            "90, with code for sm_90a", "use an H100 or H200 and compile for sm_90a, or the CPU");
    entry_.require_shared(kernel::shared_bytes, device, "attention over latent rows", "use an H100 or H200");
    blocks_ = (std::min)(max_pieces, entry_.resident_blocks(kernel::threads, kernel::shared_bytes, device));
  }

  std::size_t workspace_bytes() const { return memory(*this, nullptr).bytes(); }

  /// Clears the counters. Call it once per workspace.
  void prepare(void* workspace, cudaStream_t stream) const {
    check(cudaMemsetAsync(workspace, 0, memory(*this, nullptr).cleared, stream), "cudaMemsetAsync");
  }

  /// `first_lse`: the first token whose log-sum-exps are written, to the first rows of `lse`.
  void run(const problem_type& problem, void* workspace, cudaStream_t stream, index_t first_lse = 0) const {
    check_problem(problem, first_lse);
    if (problem.view.sequences == 0 || problem.q.tokens == 0) return;
    watch_order(problem.view, stream);
    const memory arrays(*this, workspace);
    const index_t query_blocks = ceil_div(problem.q.tokens * (q_heads_ / kv_heads_), index_t(kernel::block_rows));
    entry_.launch({.blocks = dim3(unsigned(query_blocks), unsigned(pieces_of(query_blocks))),
                   .threads = dim3(kernel::threads),
                   .shared_bytes = kernel::shared_bytes,
                   .overlapping = entry_.overlaps()},
                  stream, "launch of attention over latent rows", problem,
                  detail::latent_scratch{arrays.arrived, arrays.out, arrays.state, first_lse});
  }

  /// `run` over one of several parts of the stored tokens. It ignores sink logits: `merge_parts` adds them, and needs
  /// the lse.
  void run_part(problem_type problem, void* workspace, cudaStream_t stream) const {
    static_assert(std::is_same_v<Out, float>, "tessera: a part of attention over latent rows is written in fp32");
    require(problem.lse.data != nullptr, "lse of a part", "null", "device memory", "merge_parts weighs parts by it");
    problem.rule.sink_logits = nullptr;
    run(problem, workspace, stream);
  }

 private:
  /// Into how many pieces the rows of a query block are cut: all blocks of a launch that is cut run at a time, because
  /// those of one row wait for each other.
  index_t pieces_of(index_t query_blocks) const { return (std::max)(index_t(1), blocks_ / query_blocks); }
  struct memory : workspace_cut {
    const latent_attention& op;
    memory(const latent_attention& owner, void* begin) : workspace_cut(begin), op(owner) {}
    const index_t query_blocks = ceil_div(op.tokens_ * (op.q_heads_ / op.kv_heads_), index_t(kernel::block_rows));
    /// Launches with more query blocks are not cut, and so leave no parts.
    unsigned* arrived =
        array<unsigned>(std::size_t((std::min)(query_blocks, op.blocks_ / 2 + 1)) * std::size_t(op.rows_));
    const std::size_t cleared = bytes();
    float* out = array<float>(std::size_t(op.blocks_) * 2 * kernel::block_rows * View::v_dim);
    float2* state = array<float2>(std::size_t(op.blocks_) * 2 * kernel::block_rows);
  };

  void check_problem(const problem_type& p, index_t first_lse) const {
    require(p.view.sequences >= 0 && p.view.sequences <= sequences_, "sequences", p.view.sequences,
            "at most " + std::to_string(sequences_), "construct latent_attention for the largest batch");
    require(p.q.tokens >= 0 && p.q.tokens <= tokens_, "tokens", p.q.tokens, "at most " + std::to_string(tokens_),
            "construct latent_attention for the most tokens of a call");
    require(p.view.kv_heads == kv_heads_, "kv_heads", p.view.kv_heads, std::to_string(kv_heads_),
            "construct latent_attention with the view's head count");
    require(p.q.heads == q_heads_, "q_heads", p.q.heads, std::to_string(q_heads_),
            "construct latent_attention with the query's head count");
    require_rows_on_16_bytes("q", p.q);
    if (p.view.sequences == 0) return;
    require_dim(p.q, View::k_dim, "q");
    require_dim(p.out, View::v_dim, "out");
    require(p.q.sequences == p.view.sequences, "sequences of q", p.q.sequences, "those of the view",
            "pass queries for every sequence of the view");
    if (p.q.tokens == 0) return;
    require_same_shape("out", p.out, p.q);
    require(!p.lse.data || (p.lse.sequences == p.q.sequences && p.lse.heads == p.q.heads && first_lse >= 0 &&
                            p.lse.tokens + first_lse == p.q.tokens),
            "lse [sequences, tokens, q_heads]", shape_text(p.lse), shape_text(p.q) + ", or of its newest tokens",
            "give lse the shape of q or of its newest tokens, or no data");
    require(p.view.k && p.view.lengths && p.q.data && p.first_position, "memory of the problem", "null",
            "rows, lengths, q and first_position", "pass device memory");
    require_rows_on_16_bytes("latent rows", p.view.k, p.view.k_strides);
  }

  device_kernel<problem_type, detail::latent_scratch> entry_{detail::latent_entry<View, Out>};
  index_t sequences_, kv_heads_, q_heads_, tokens_, rows_;
  index_t blocks_ = 1;
};

}  // namespace cuda
TESSERA_NAMESPACE_END
