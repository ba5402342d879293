// A decode step over packed rows on the device: blocks are scored by their means, and the best are chosen and attended.
#pragma once

#include <algorithm>
#include <optional>
#include <string>

#include "../../../../selector/top_tokens.hpp"
#include "../../../../selector/whole_blocks.hpp"
#include "../../attend/packed/packed_attention.cuh"
#include "../../choose/top_k.cuh"
#include "detail/block_scores.cuh"
#include "detail/trim_blocks.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {

/// Bounds on segments, known before there are any.
struct segment_limits {
  packed_format k, v;   ///< the longest values and the most channels that one has
  index_t least_block;  ///< of any segment
  bool alike = true;    ///< all blocks have the selector's size and are whole, except the last
};

/// Reads `tokens` packed rows of each kv_head, rounded up to whole blocks, and all whole rows. The first and the last
/// block of the sequence are always among the packed rows. One choice covers all segments of a (sequence, kv_head).
///
/// If all segments have blocks of one size, the number of blocks to read is known in advance. Otherwise as many blocks
/// are chosen as might be needed, and the list is trimmed to the tokens. `run` does both `choose` and `attend`.
/// Errors   before the launch: a budget under two blocks, more rows than it was made for.
///          are read on the device.
template <class View, class Out, class Tile = typename View::element_type>
class decode_blocks {
  using T = typename View::element_type;

 public:
  /// `capacity`: an upper bound of the packed rows of a (sequence, kv_head).
  decode_blocks(const block_mean& scorer, const whole_blocks& selector, index_t tokens, index_t sequences,
                index_t kv_heads, index_t q_heads, index_t step_tokens, index_t capacity, index_t max_segments,
                const segment_limits& limits, const device_info& device)
      : scorer_(scorer),
        block_(checked_block(selector, tokens)),
        tokens_(tokens),
        lanes_(sequences * kv_heads),
        max_segments_(max_segments),
        // Every segment begins with a new block, so each may have one block that is not whole.
        capacity_((ceil_div(capacity, limits.least_block) + max_segments + 3) / 4 * 4),
        read_((std::min)(limits.alike ? ceil_div(tokens, block_)
                                      : trim_blocks<View>::max_chosen(tokens, limits.least_block, max_segments),
                         capacity_)),
        rotate_(sequences, kv_heads, q_heads, step_tokens, max_segments),
        score_(capacity_, max_segments),
        select_(top_tokens{}, lanes_, capacity_, device, read_),
        attend_(sequences, kv_heads, q_heads, step_tokens, max_segments, limits.k, limits.v, device) {
    if (!limits.alike) trim_.emplace(lanes_, read_, max_segments, device);
  }

  std::size_t workspace_bytes() const { return memory(*this, nullptr).bytes(); }

  void run(packed_problem<View, Out> problem, void* workspace, cudaStream_t stream) const {
    const rotated_rows rotated = choose(problem, workspace, stream);
    attend(problem, rotated, workspace, stream);
  }
  /// A budget of `tokens`, at most those that this was made for, as `choose` takes it from the device.
  block_reads reads(index_t tokens) const {
    return {tokens, trim_ ? read_ : (std::min)(ceil_div(tokens, block_), read_)};
  }
  /// Sets the problem's `chosen`, `unit` and `chosen_begins`; they lie in the workspace. `reads` [sequences], on the
  /// device: budgets by sequence, made by `reads`; null: the same for all.
  rotated_rows choose(packed_problem<View, Out>& problem, void* workspace, cudaStream_t stream,
                      const block_reads* reads = nullptr) const {
    const rotated_rows rotated = rotate(problem, workspace, stream);
    const memory arrays(*this, workspace);
    score_.run(problem.view, rotated, scorer_, arrays.scores, capacity_, arrays.units, stream);
    select_problem select;
    select.scores = arrays.scores, select.score_stride = capacity_;
    select.n = {arrays.units};
    select.keep = {nullptr, read_};
    if (reads) select.keep = {&reads->blocks, 0, problem.view.whole.kv_heads, sizeof(block_reads) / sizeof(index_t)};
    select.tail = {nullptr, 0};
    select.out = arrays.blocks, select.out_stride = read_;
    select.counts = arrays.counts;
    select.rows = problem.view.whole.sequences * problem.view.whole.kv_heads;
    select_.run(select, nullptr, stream);
    problem.chosen = select.chosen();
    problem.unit = trim_ ? 0 : block_;
    problem.chosen_begins = trim_ ? arrays.begins : nullptr;
    if (trim_) {
      trim_->run(
          {problem.view, arrays.scores, capacity_, tokens_, select.out, read_, select.counts, arrays.begins, reads},
          arrays.trimming, stream);
    }
    return rotated;
  }
  rotated_rows rotate(const packed_problem<View, Out>& problem, void* workspace, cudaStream_t stream) const {
    const memory arrays(*this, workspace);
    return rotate_.run(problem.view, problem.q, arrays.rotated, attend_.part_segments(arrays.attending),
                       attend_.parts(), stream);
  }
  void attend(const packed_problem<View, Out>& problem, const rotated_rows& rotated, void* workspace,
              cudaStream_t stream) const {
    attend_.run(problem, rotated, memory(*this, workspace).attending, stream);
  }

 private:
  static index_t checked_block(const whole_blocks& selector, index_t tokens) {
    selector.check();
    selector.check_budget("budget", tokens);
    return selector.block;
  }
  struct memory : workspace_cut {
    const decode_blocks& op;
    memory(const decode_blocks& owner, void* begin) : workspace_cut(begin), op(owner) {}
    const std::size_t lanes = std::size_t(op.lanes_);
    void* attending = block(op.attend_.workspace_bytes());
    void* rotated = block(op.rotate_.workspace_bytes());
    float* scores = array<float>(lanes * std::size_t(op.capacity_));
    index_t* blocks = array<index_t>(lanes * std::size_t(op.read_));  // chosen ones
    index_t* units = array<index_t>(lanes);                           // how many blocks there are
    index_t* counts = array<index_t>(lanes);
    index_t* begins = array<index_t>(op.trim_ ? lanes * std::size_t(op.max_segments_ + 1) : 0);
    void* trimming = block(op.trim_ ? op.trim_->workspace_bytes() : 0);
  };

  block_mean scorer_;
  index_t block_, tokens_, lanes_, max_segments_, capacity_, read_;
  rotate_queries<View> rotate_;
  score_blocks<View, Tile> score_;
  select_slots<top_tokens> select_;
  std::optional<trim_blocks<View>> trim_;  // where blocks differ
  attend_packed<View, Out, Tile> attend_;
};

}  // namespace cuda
TESSERA_NAMESPACE_END
