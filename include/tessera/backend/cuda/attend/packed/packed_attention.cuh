// Decode attention over packed rows on the device.
#pragma once

#include <algorithm>
#include <string>

#include "../../device/tuning.cuh"
#include "packed_merge.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {

/// Attends chosen units of packed rows, each segment in its own basis, and all whole rows.
///
/// Keys are multiplied as they lie, in fp32, 4 rows of queries at a time; values are spread out in shared memory, 32
/// rows at a time, and multiplied by matrix instructions, for which weights are rounded to 16 bits. Packed elements of
/// 16 bits are of the type that `Tile` names; fp8 and int4 become it exactly.
/// It follows `rotate_queries` on the stream, or what itself followed that.
/// Errors   before the launch: more rows, segments or sequences than it was made for, rows not on 16 bytes.
/// Limits   whole rows are raw; a value that is NaN shows in rows of the step that may not see its token if others of 8
///          rows may.
/// Cost     two launches besides `rotate_queries`; chosen rows are read once for 8 query rows, bases once a step.
///          Recordable.
template <class View, class Out, class Tile = typename View::element_type>
class attend_packed {
  using T = typename View::element_type;
  static constexpr int D = View::k_dim, Dv = View::v_dim;
  static_assert(View::whole_type::is_raw, "tessera: packed attention on the device takes raw whole rows");
  static_assert(sizeof(T) == 2 && sizeof(Tile) == 2, "tessera: packed attention on the device takes fp16 and bf16");

 public:
  /// `k`, `v`: the formats with the longest values and the most channels that segments have.
  attend_packed(index_t sequences, index_t kv_heads, index_t q_heads, index_t tokens, index_t most_segments,
                const packed_format& k, const packed_format& v, const device_info& device)
      : lanes_(sequences * kv_heads),
        rows_(tokens * (q_heads / kv_heads)),
        lengths_(k, v),
        shape_(rows_, most_segments, lengths_),
        most_segments_(most_segments) {
    attend_entry_ = detail::attend_packed_entry<View, Tile, Out>;
    merge_entry_ = detail::merge_packed_entry<View, Out>;
    const std::string segments = " over " + std::to_string(most_segments) + " segments";
    allow_shared(attend_entry_, std::size_t(shape_.bytes), device, "packed attention" + segments);
    // All blocks run at once: a second wave would take as long as the first.
    int together = 0;
    check(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&together, attend_entry_, detail::packed_threads,
                                                        std::size_t(shape_.bytes)),
          "cudaOccupancyMaxActiveBlocksPerMultiprocessor");
    splits_ = std::clamp<index_t>(together * device.multiprocessors / (std::max)(1, lanes_), 1, 128);
    parts_ = splits_ + most_segments + 1;
    allow_shared(merge_entry_, merge_bytes(), device, "the merge of packed attention" + segments);
    overlapping_ = can_overlap(attend_entry_) && can_overlap(merge_entry_);
  }

  index_t parts() const { return parts_; }
  std::size_t workspace_bytes() const {
    return segment_bytes() + state_bytes() + array_bytes<float>(lines() * std::size_t(rows_) * Dv);
  }
  /// What `rotate_queries` sets to "none", at the workspace's beginning.
  index_t* part_segments(void* workspace) const { return static_cast<index_t*>(workspace); }

  void run(const packed_problem<View, Out>& problem, const rotated_rows& rotated, void* workspace,
           cudaStream_t stream) const {
    const index_t lanes = problem.view.whole.sequences * problem.view.whole.kv_heads;
    if (lanes == 0 || problem.q.tokens == 0) return;
    require(lanes <= lanes_ && rotated.rows <= rows_ && problem.view.most_segments == most_segments_,
            "rows of packed attention", std::to_string(lanes) + " x " + std::to_string(rotated.rows),
            "at most " + std::to_string(lanes_) + " x " + std::to_string(rows_) + " in a table of " +
                std::to_string(most_segments_) + " segments",
            "make the operation for the largest batch and step");
    require(problem.unit >= 0, "unit", problem.unit, "0 or more",
            "pass the rows of a chosen block, 0: of segments' own");
    require_rows_on_16_bytes("whole keys", problem.view.whole.k, problem.view.whole.k_strides);
    require_rows_on_16_bytes("whole values", problem.view.whole.v, problem.view.whole.v_strides);
    auto* bytes = static_cast<unsigned char*>(workspace);
    const detail::packed_parts to{reinterpret_cast<float*>(bytes + segment_bytes() + state_bytes()),
                                  reinterpret_cast<float*>(bytes + segment_bytes()),
                                  part_segments(workspace),
                                  splits_,
                                  parts_,
                                  rotated.rows};
    launch(attend_entry_,
           {.blocks =
                dim3(unsigned(lanes), unsigned(splits_), unsigned(ceil_div(rotated.rows, detail::query_rows_together))),
            .threads = dim3(detail::packed_threads),
            .shared_bytes = std::size_t(shape_.bytes),
            .overlapping = overlapping_},
           stream, "launch of attend_packed", problem, rotated, to, lengths_);
    launch(merge_entry_,
           {.blocks = dim3(unsigned(lanes), unsigned(ceil_div(Dv, detail::merged_columns)),
                           unsigned(ceil_div(rotated.rows, detail::merged_rows))),
            .threads = dim3(detail::merging_threads),
            .shared_bytes = merge_bytes(),
            .overlapping = overlapping_},
           stream, "launch of merge_packed", problem, to);
  }

 private:
  std::size_t merge_bytes() const {
    return std::size_t(detail::merge_memory<Dv>(parts_, most_segments_).words) * sizeof(float);
  }
  std::size_t lines() const { return std::size_t(lanes_) * std::size_t(parts_); }
  std::size_t segment_bytes() const { return array_bytes<index_t>(lines()); }
  std::size_t state_bytes() const { return array_bytes<float>(lines() * std::size_t(rows_) * 2); }

  index_t lanes_, rows_;
  detail::packed_lengths<D, Dv> lengths_;
  detail::packed_memory<D, Dv> shape_;
  index_t most_segments_, splits_ = 1, parts_ = 1;
  bool overlapping_ = false;
  // What was configured is what is launched: nvcc gives every source file a kernel of its own.
  void (*attend_entry_)(packed_problem<View, Out>, rotated_rows, detail::packed_parts,
                        detail::packed_lengths<D, Dv>) = nullptr;
  void (*merge_entry_)(packed_problem<View, Out>, detail::packed_parts) = nullptr;
};

}  // namespace cuda
TESSERA_NAMESPACE_END
