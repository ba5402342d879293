// Paged retrieval over an engine's own blocks on the GPU: what a step reads of every row of a batch.
#pragma once

#include <algorithm>
#include <string>

#include "../../../../core/selection.hpp"
#include "../../device/alignment.cuh"
#include "../../device/kernel.cuh"
#include "../../device/workspace.cuh"
#include "../../store/slot_order.cuh"
#include "detail/block_logits.cuh"
#include "detail/page_select.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {

/// The shapes that one object takes.
struct block_choice_limits {
  index_t sequences = 1, kv_heads = 1, q_heads = 1;
  index_t tokens = 1;    ///< of a step, 1 to 8
  index_t capacity = 0;  ///< tokens of a row
  index_t read = 0;      ///< tokens that a step attends
};

/// Chooses what a step reads of an engine's blocks: the device's cpu::choose_by_blocks. The choice equals that of
/// choose_pages over an index of its own, except for scores that differ by rounding alone.
///
/// Call `workspace_bytes` once, then `run` any number of times. `run` neither allocates nor synchronises; tables,
/// lengths, `reads` and `channels` are read on the device, so a captured graph can be replayed while they change. A row
/// of no tokens chooses none. Repeated calls give the same bits.
/// Shapes   as choose_by_blocks_problem says; lengths at most `capacity`; rows of `out` hold `max_chosen()` slots. Keys
///          of bf16, fp16 or fp32.
/// Errors   shapes that the kernels cannot take: tessera::error before anything is launched.
/// Cost     two launches. Of every stored page the extrema are read, without the 16 bytes none of whose channels a
///          scorer takes.
template <class View, paged_scorer Scorer>
class choose_by_blocks {
  using T = typename View::element_type;
  static constexpr int D = View::k_dim;
  static_assert(!Scorer::adds_mean_value,
                "tessera: an index by block has no sums of values, which this scorer adds for what is not attended");
  static_assert(check_device_rows<View>());

 public:
  using problem_type = choose_by_blocks_problem<View>;

  /// `scorer` is fitted: its page is the index's.
  choose_by_blocks(const Scorer& scorer, selection_unit unit, const block_choice_limits& limits,
                   const device_info& device)
      : scorer_(scorer), unit_(unit), limits_(limits), rows_(limits.sequences * limits.kv_heads) {
    check_limits();
    query_rows_ = limits.tokens * (limits.q_heads / limits.kv_heads);
    const index_t pages = ceil_div(limits.capacity, scorer.page), tiles = ceil_div(pages, index_t(detail::tile_pages));
    stride_ = tiles * detail::tile_pages;
    key_stride_ = (pages + detail::page_rows::max_cuts + 3) / 4 * 4;
    // All blocks of a launch run at a time, if there are rows for no more: each reads the queries once.
    const index_t resident = device.multiprocessors * detail::block_logits_blocks;
    tiles_each_ = ceil_div(tiles, std::clamp(resident / rows_, index_t(1), tiles));
    tile_blocks_ = ceil_div(tiles, tiles_each_);
    logits_shared_ = detail::block_shared<View, Scorer>::bytes(query_rows_);
    logits_entry_.require_shared(logits_shared_, device, "scores of blocks", "split the step");
    select_shared_ = std::size_t(key_stride_) * 4;
    resident_ = select_entry_.allow_shared(select_shared_, device);
    if (!resident_) {
      select_entry_ = {detail::choose_pages_entry<false>};
      select_shared_ = 0;
    }
  }

  std::size_t workspace_bytes() const { return memory(*this, nullptr).bytes(); }

  /// An upper bound of the slots that are chosen of a row.
  index_t max_chosen() const {
    const index_t tail = (std::max)(limits_.tokens, scorer_.protected_tail(limits_.read));
    return max_chosen_slots(limits_.read, scorer_.page, tail, limits_.capacity);
  }

  void run(const problem_type& p, void* workspace, cudaStream_t stream) const {
    check_problem(p);
    const index_t rows = p.view.sequences * p.view.kv_heads;
    if (rows <= 0) return;
    watch_order(p.view, stream);
    const memory arrays(*this, workspace);
    const index_t group = limits_.q_heads / limits_.kv_heads;
    const detail::page_scratch scratch{arrays.logits, arrays.partials,    arrays.runs,
                                       stride_,       p.q.tokens * group, tiles_each_};
    logits_entry_.launch({dim3(unsigned(tile_blocks_), unsigned(rows)), dim3(detail::page_threads), logits_shared_},
                         stream, "launch of block logits", p, scorer_, read_plan::fitted_to(scorer_, p.read),
                         arrays.plans, scratch);
    detail::page_choice choice{};
    choice.lengths = p.view.lengths;
    choice.sequence_stride = p.view.length_strides.sequence;
    choice.head_stride = p.view.length_strides.head;
    choice.plans = arrays.plans;
    choice.kv_heads = limits_.kv_heads;
    choice.group = group;
    choice.tokens = p.q.tokens;
    choice.by_group = quick_divisor(group);
    choice.unit = unit_;
    choice.normalised = Scorer::normalised;
    choice.sink_logits = p.rule.sink_logits;
    choice.out = p.out;
    choice.out_stride = p.out_stride;
    choice.counts = p.counts;
    choice.keys = arrays.keys;
    choice.key_stride = key_stride_;
    select_entry_.launch({dim3(unsigned(rows)), dim3(detail::choose_threads), select_shared_}, stream,
                         "launch of choose_pages", choice, scratch);
  }

 private:
  struct memory : workspace_cut {
    const choose_by_blocks& op;
    memory(const choose_by_blocks& owner, void* begin) : workspace_cut(begin), op(owner) {}
    const std::size_t rows = std::size_t(op.rows_), query_rows = rows * std::size_t(op.query_rows_);
    float* logits = array<float>(query_rows * std::size_t(op.stride_));
    float2* partials = array<float2>(query_rows * std::size_t(op.stride_ / detail::tile_pages));
    detail::slot_run* runs = array<detail::slot_run>(rows * detail::max_step_tokens);
    read_plan* plans = array<read_plan>(std::size_t(op.limits_.sequences));
    unsigned* keys = array<unsigned>(op.resident_ ? 0 : rows * std::size_t(op.key_stride_));
  };

  void check_limits() const {
    require(scorer_.page >= 1, "page of the scorer", scorer_.page, "at least 1", "fit the scorer first");
    require(limits_.read >= 1, "read", limits_.read, "at least 1", "pass the most tokens that a step attends");
    require(limits_.capacity >= 1, "capacity", limits_.capacity, "at least 1", "pass the most tokens of a row");
    require(limits_.sequences >= 1 && limits_.kv_heads >= 1 && rows_ <= 65535, "sequences * kv_heads", rows_,
            "1 to 65535", "split the batch");
    require_head_counts(limits_.q_heads, limits_.kv_heads);
    require(limits_.tokens >= 1 && limits_.tokens <= detail::max_step_tokens, "tokens", limits_.tokens,
            "1 to " + std::to_string(detail::max_step_tokens), "split the step");
    const index_t rows = limits_.tokens * (limits_.q_heads / limits_.kv_heads);
    require(rows <= detail::max_query_rows, "tokens * query heads of a group", rows,
            "at most " + std::to_string(detail::max_query_rows), "split the step");
  }
  void check_problem(const problem_type& p) const {
    p.check(max_chosen());
    require(p.view.sequences <= limits_.sequences && p.view.kv_heads == limits_.kv_heads &&
                p.q.heads == limits_.q_heads && p.q.tokens <= limits_.tokens && p.read <= limits_.read,
            "shape of a call",
            std::to_string(p.view.sequences) + " sequences, " + std::to_string(p.view.kv_heads) + " kv_heads, " +
                std::to_string(p.q.heads) + " q_heads, " + std::to_string(p.q.tokens) + " tokens, of which " +
                std::to_string(p.read) + " read",
            "what this object was made for", "make one object per shape");
    require(p.index.page == scorer_.page, "page of the index", p.index.page,
            std::to_string(scorer_.page) + ", the scorer's", "index pages of the scorer's size");
    require_rows_on_16_bytes("q", p.q);
    require_rows_on_16_bytes("the index", p.index.data, p.index.strides);
    require_rows_on_16_bytes("the larger values of the index", p.index.data, {p.index.side, 0, 0, 1});
  }

  Scorer scorer_;
  selection_unit unit_;
  block_choice_limits limits_;
  index_t rows_, query_rows_ = 1, stride_ = 0, tiles_each_ = 1, tile_blocks_ = 1, key_stride_ = 0;
  bool resident_ = true;
  std::size_t logits_shared_ = 0, select_shared_ = 0;
  device_kernel<problem_type, Scorer, read_plan, read_plan*, detail::page_scratch> logits_entry_{
      detail::block_logits_entry<View, Scorer>};
  device_kernel<detail::page_choice, detail::page_scratch> select_entry_{detail::choose_pages_entry<true>};
};

}  // namespace cuda
TESSERA_NAMESPACE_END
