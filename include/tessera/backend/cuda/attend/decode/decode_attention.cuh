// Decode attention on the GPU: the host's calls.
#pragma once

#include <algorithm>
#include <string>

#include "../../../../core/model_shape.hpp"
#include "../../device/alignment.cuh"
#include "../../device/kernel.cuh"
#include "../../device/tuning.cuh"
#include "../../device/workspace.cuh"
#include "../../store/slot_order.cuh"
#include "../latent/latent_attention.cuh"
#include "detail/decode_kernel.cuh"
#include "detail/decode_short.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {

/// Decode attention of 1 to 8 tokens a sequence over all stored tokens or a selection.
///
/// Call `workspace_bytes` and `prepare` once, then `run` any number of times on one stream. `run` neither allocates nor
/// synchronises, and the host needs no length, so a captured graph can be replayed while lengths grow. `sequences` and
/// `tokens` are upper bounds: a problem may have fewer of both. From sm_90 on, a launch begins while the previous
/// launch on the stream is ending. It waits for that launch to end before it reads or writes anything.
/// If `usual_row` or the selection's `row_stride` says that rows are short, a cluster of blocks reads each row (sm_90).
/// Rows of K and V may be encoded. e4m3 is read as stored and multiplied as fp16, which represents it exactly. Any
/// other encoding is decoded to the element type on its way to shared memory.
/// Errors   tessera::error from `run` for more sequences or tokens than the constructor was given, for other head
///          counts, and for rows of q, K or V that do not begin on 16 bytes or whose elements are not contiguous.
template <class View, class Out = float, decode_split Split = decode_split::each_step>
class decode_attention {
  static_assert(sizeof(typename View::element_type) == 2,
                "tessera: the tensor-core decode kernel takes queries in fp16 and bf16");
  static_assert(element<Out>, "tessera: decode attention writes float, fp16 or bf16");

 public:
  using problem_type = decode_problem<View, Out>;

  decode_attention(index_t sequences, index_t kv_heads, index_t q_heads, index_t tokens, const device_info& device)
      : sequences_(sequences),
        kv_heads_(kv_heads),
        q_heads_(q_heads),
        tokens_(tokens),
        rows_(sequences * kv_heads),
        clusters_(device) {
    require(sequences > 0, "sequences", sequences, "at least 1", "pass the largest batch");
    require(tokens > 0, "tokens", tokens, "at least 1", "pass the most tokens of a step");
    require_head_counts(q_heads, kv_heads);
    require(rows_ <= detail::max_rows, "sequences * kv_heads", rows_, "at most " + std::to_string(detail::max_rows),
            "split the batch");
    query_blocks_ = ceil_div(tokens * (q_heads / kv_heads), detail::rows_per_block<View>);
    const decode_tuning tuning = decode_tuning_for<View>(entry_.architecture());
    threads_ = tuning.warps * 32;
    shared_bytes_ = detail::decode_shared_bytes<View>(tuning);
    entry_.require_shared(std::size_t(shared_bytes_), device, "decode attention",
                          "compile for this device's compute capability");
    blocks_ = (std::min)(detail::max_blocks, entry_.resident_blocks(threads_, std::size_t(shared_bytes_), device));
  }

  std::size_t workspace_bytes() const { return memory(*this, nullptr).bytes(); }

  /// Clears the counters. Call it once per workspace.
  void prepare(void* workspace, cudaStream_t stream) const {
    check(cudaMemsetAsync(workspace, 0, memory(*this, nullptr).cleared, stream), "cudaMemsetAsync");
  }

  void run(const problem_type& problem, void* workspace, cudaStream_t stream) const {
    check_problem(problem);
    if (problem.view.sequences == 0 || problem.q.tokens == 0) return;
    watch_order(problem.view, stream);
    const index_t query_blocks = ceil_div(problem.q.tokens * (q_heads_ / kv_heads_), detail::rows_per_block<View>);
    if constexpr (Split == decode_split::each_step) {
      const index_t rows = problem.view.sequences * kv_heads_;
      const offset_t stride = problem.chosen.indices ? problem.chosen.row_stride : 0;
      const int shift =
          clusters_.shift_of(offset_t(rows) * query_blocks, problem.usual_row > 0 ? problem.usual_row : stride);
      if (shift >= 0) return clusters_.run(problem, rows, query_blocks, shift, stream);
    }
    const memory arrays(*this, workspace);
    const detail::decode_scratch scratch{arrays.pieces, arrays.arrived, arrays.out,
                                         arrays.state,  rows_,          slots_of_block()};
    // Blocks of all query rows run at the same time: what one of them reads of K and V the others find in the L2. A
    // split made ahead has its number of blocks.
    const index_t pieces = Split == decode_split::ahead ? blocks_ : (std::max<index_t>)(1, blocks_ / query_blocks);
    entry_.launch({.blocks = dim3(unsigned(pieces), unsigned(query_blocks)),
                   .threads = dim3(unsigned(threads_)),
                   .shared_bytes = std::size_t(shared_bytes_),
                   .overlapping = entry_.overlaps()},
                  stream, "launch of decode attention", problem, scratch);
  }

  /// Splits the rows among the blocks by the problem's present lengths and by `rule`, in one small launch. Later runs
  /// with this workspace use the split whatever their lengths. Call it when a prompt has ended, and when sequences were
  /// added or removed. It need not be called while answers grow.
  void split(const problem_type& problem, void* workspace, cudaStream_t stream,
             split_rule rule = split_rule::shortest) const requires(Split == decode_split::ahead) {
    check_problem(problem);
    if (problem.view.sequences == 0 || problem.q.tokens == 0) return;
    launch(detail::split_entry<View, Out>, {.blocks = dim3(1), .threads = dim3(32)}, stream,
           "launch of the split of decode attention", problem, memory(*this, workspace).pieces, blocks_, rule);
  }

  /// `run` over one of several parts of the stored tokens. It ignores sink logits: `merge_parts` adds them, and needs
  /// the lse.
  void run_part(problem_type problem, void* workspace, cudaStream_t stream) const {
    static_assert(std::is_same_v<Out, float>, "tessera: a part of decode attention is written in fp32");
    require(problem.lse.data != nullptr, "lse of a part", "null", "device memory", "merge_parts weighs parts by it");
    problem.rule.sink_logits = nullptr;
    run(problem, workspace, stream);
  }

 private:
  index_t slots_of_block() const { return blocks_ + rows_; }
  struct memory : workspace_cut {
    const decode_attention& op;
    memory(const decode_attention& owner, void* begin) : workspace_cut(begin), op(owner) {}
    const std::size_t rows =
        std::size_t(op.query_blocks_) * std::size_t(op.slots_of_block()) * detail::rows_per_block<View>;
    unsigned* arrived = array<unsigned>(std::size_t(op.query_blocks_ * op.rows_));
    detail::split_piece* pieces =
        array<detail::split_piece>(Split == decode_split::ahead ? std::size_t(op.blocks_) : 0);
    const std::size_t cleared = bytes();
    float* out = array<float>(rows * View::v_dim);
    float2* state = array<float2>(rows);
  };

  void check_problem(const problem_type& p) const {
    require(p.view.sequences >= 0 && p.view.sequences <= sequences_, "sequences", p.view.sequences,
            "at most " + std::to_string(sequences_), "construct decode_attention for the largest batch");
    require(p.q.tokens >= 0 && p.q.tokens <= tokens_, "tokens", p.q.tokens, "at most " + std::to_string(tokens_),
            "construct decode_attention for the most tokens of a step");
    require(p.view.kv_heads == kv_heads_, "kv_heads", p.view.kv_heads, std::to_string(kv_heads_),
            "construct decode_attention with the view's head count");
    require(p.q.heads == q_heads_, "q_heads", p.q.heads, std::to_string(q_heads_),
            "construct decode_attention with the query's head count");
    require_rows_on_16_bytes("q", p.q);
    if (p.view.sequences > 0) check_rows(p);
    if constexpr (View::encoding_type::scaled) {
      require(p.view.scales.k && p.view.scales.v, "scales of K and V", "null", "device memory",
              "point the view at the scales of its rows");
    }
    if constexpr (detail::decode_format<View>::decoded) {
      require(p.view.k_strides.dim == 1 && p.view.v_strides.dim == 1, "dim strides of K and V", "not 1", "1",
              "store the elements of a row side by side");
    } else if constexpr (detail::decode_format<View>::groups) {
      require_chunks("K", p.view.k, p.view.k_strides, detail::decode_format<View>::k_rows.chunk_bytes);
      require_chunks("V", p.view.v, p.view.v_strides, detail::decode_format<View>::v_rows.chunk_bytes);
    } else {
      require_rows_on_16_bytes("K", p.view.k, p.view.k_strides);
      require_rows_on_16_bytes("V", p.view.v, p.view.v_strides);
    }
  }

  /// A row of groups is copied in chunks of so many bytes.
  template <class Group>
  static void require_chunks(const char* name, const Group* data, const row_strides& strides, int chunk_bytes) {
    require_aligned(name, data, std::size_t(chunk_bytes));
    require_aligned_rows(name, data, strides, chunk_bytes / 4);
  }

  static void check_rows(const problem_type& p) {
    require_dim(p.q, View::k_dim, "q");
    require_dim(p.out, View::v_dim, "out");
    require(p.q.sequences == p.view.sequences, "sequences of q", p.q.sequences, "those of the view",
            "pass queries for every sequence of the view");
    if (p.q.tokens == 0) return;
    require_same_shape("out", p.out, p.q);
    if (p.lse.data) require_same_shape("lse", p.lse, p.q);
    require(p.view.k && p.view.v && p.view.lengths && p.q.data && p.first_position, "memory of the problem", "null",
            "keys, values, lengths, q and first_position", "pass device memory");
  }

  device_kernel<problem_type, detail::decode_scratch> entry_{detail::decode_entry<View, Out, Split>};
  index_t sequences_, kv_heads_, q_heads_, tokens_, rows_;
  detail::decode_clusters<View, Out> clusters_;
  index_t query_blocks_ = 1, blocks_ = 1;
  int threads_ = 0, shared_bytes_ = 0;
};

/// Latent rows have a kernel of their own.
template <class View, class Out>
requires View::is_latent
class decode_attention<View, Out, decode_split::each_step> : public latent_attention<View, Out> {
 public:
  using latent_attention<View, Out>::latent_attention;
};

}  // namespace cuda
TESSERA_NAMESPACE_END
