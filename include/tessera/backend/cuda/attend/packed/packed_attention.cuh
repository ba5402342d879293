// Decode attention over packed rows on the device.
#pragma once

#include <algorithm>
#include <string>

#include "../../device/copy.cuh"
#include "../../device/tuning.cuh"
#include "../../device/workspace.cuh"
#include "detail/packed_kernel.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {

// Merges parts of attention over packed rows to outputs. Each segment's sum is rotated back once, then all sums are
// added.

namespace detail {

inline constexpr int merging_groups = 8, merging_threads = 1024, merging_warps = merging_threads / 32;
inline constexpr int merged_columns = 32, merged_rows = 8, warps_of_group = merging_warps / merging_groups;

/// Where a block that merges has its tables of parts, which grow with the segments that a sequence may have. In the
/// workspace there is room for any number; bases are then read from memory too.
enum class merge_tables { shared, workspace };

/// A block's memory, in words. Shared: sums in segments' bases, one per group of warps; the warps' shares of the
/// output; the rows' factors; columns of one segment's basis per group. Its tables: weights of parts and the segment
/// number of each; where each segment's parts begin and end.
template <int Dv, merge_tables Tables>
struct merge_memory {
  static constexpr int sums = 0, shares = merging_groups * merged_rows * Dv;
  static constexpr int factors = shares + merging_warps * merged_rows * merged_columns, bases = factors + merged_rows;
  // Longer bases do not fit into a block's memory.
  static constexpr bool holds_bases = Tables == merge_tables::shared && Dv <= 128;
  static constexpr int basis = holds_bases ? Dv * merged_columns : 0;  // of one segment
  static constexpr int weights = 0;
  int tables;                       // where the tables begin in shared memory
  int segments, runs, table_words;  // where these begin among the tables, and the words of all tables
  TESSERA_HD merge_memory(index_t parts, index_t max_segments)
      : tables(bases + (max_segments < merging_groups ? int(max_segments) : merging_groups) * basis),
        segments(weights + int(parts) * merged_rows),
        runs(segments + int(parts)),
        table_words(runs + 2 * (int(max_segments) + 1)) {}
  std::size_t shared_bytes() const {
    return std::size_t(tables + (Tables == merge_tables::shared ? table_words : 0)) * sizeof(float);
  }
};

/// A thread block writes down the segment of every part and where the parts of each segment begin and end. Whole rows
/// count as segment `whole_rows`, behind the segments that exist. At the end the block sees all that was written.
/// Shapes   part_segments [parts.parts], segments [parts.parts], runs [whole_rows + 1, 2].
__device__ __forceinline__ void find_part_runs(const packed_parts& parts, const index_t* part_segments,
                                               index_t max_segments, index_t whole_rows, index_t* segments,
                                               index_t* runs) {
#pragma unroll 1
  for (index_t i = index_t(threadIdx.x); i < parts.parts; i += merging_threads) {
    const index_t segment = part_segments[i];
    segments[i] = segment == max_segments ? whole_rows : segment;
  }
#pragma unroll 1
  for (index_t i = index_t(threadIdx.x); i < 2 * (whole_rows + 1); i += merging_threads) runs[i] = 0;
  __syncthreads();
#pragma unroll 1
  for (index_t i = index_t(threadIdx.x); i < parts.parts; i += merging_threads) {
    if (segments[i] == no_index) continue;
    if (i == 0 || segments[i - 1] != segments[i]) runs[2 * segments[i]] = i;
    if (i + 1 == parts.parts || segments[i + 1] != segments[i]) runs[2 * segments[i] + 1] = i + 1;
  }
}

/// A row's softmax over all of its parts: the largest logit, and the sum relative to it.
struct merged_state {
  float top, sum;
};
/// A warp weighs the parts of one row. The state of part i is the two numbers from states + i * stride on. Its weight
/// goes to weights[i * merged_rows].
__device__ __forceinline__ merged_state weigh_parts(const float* states, offset_t stride, const index_t* segments,
                                                    index_t count, float* weights) {
  const int lane = int(threadIdx.x) % 32;
  float top = -infinity, sum = 0;
#pragma unroll 2
  for (index_t i = lane; i < count; i += 32) {
    const float largest = states[i * stride];
    if (segments[i] != no_index) top = fmaxf(top, largest);
  }
  top = lanes_max<32>(top);
  const float reference = softmax_reference(top);
#pragma unroll 2
  for (index_t i = lane; i < count; i += 32) {
    float weight = 0;
    if (segments[i] != no_index) {
      weight = exp2f(states[i * stride] - reference);
      sum += states[i * stride + 1] * weight;
    }
    weights[i * merged_rows] = weight;
  }
  return {top, warp_sum(sum)};
}

/// A block merges 8 query rows of one (sequence, kv_head), 32 columns of the output. One group of warps adds a
/// segment's parts, which are contiguous, in the segment's basis. The groups add their results in a fixed order, so
/// that the same input gives the same bits.
template <class View, class Out, merge_tables Tables>
__global__ void __launch_bounds__(merging_threads)
    merge_packed_entry(const __grid_constant__ packed_problem<View, Out> p, packed_parts parts) {
  constexpr int Dv = View::v_dim;
  extern __shared__ uint4 shared_memory[];
  const index_t heads = p.view.whole.kv_heads, max_segments = p.view.max_segments;
  const merge_memory<Dv, Tables> memory(parts.parts, max_segments);
  float* shared = reinterpret_cast<float*>(shared_memory);
  float* tables = shared + memory.tables;
  if constexpr (Tables == merge_tables::workspace) {
    const offset_t block = (offset_t(blockIdx.z) * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
    tables = parts.tables + block * memory.table_words;
  }
  float *factor = shared + memory.factors, *weights = tables + memory.weights;
  auto* segments = reinterpret_cast<index_t*>(tables + memory.segments);
  auto* runs = reinterpret_cast<index_t*>(tables + memory.runs);  // [segments and whole rows, 2]
  const index_t lane_row = index_t(blockIdx.x), first = index_t(blockIdx.z) * merged_rows;
  const index_t sequence = lane_row / heads, head = lane_row % heads, group = p.q.heads / heads;
  const int count = int((min)(index_t(merged_rows), parts.rows - first));
  const int warp = int(threadIdx.x) / 32, lane = int(threadIdx.x) % 32,
            column = int(blockIdx.y) * merged_columns + lane;
  const offset_t begin = offset_t(lane_row) * parts.parts * parts.rows;
  const int own_group = warp / warps_of_group, own_warp = warp % warps_of_group;
  const float* directions = shared + memory.bases + own_group * memory.basis;
  // Begins to copy the columns of a segment's basis, and returns how many channels it has. 0: values are not rotated.
  const float* basis = nullptr;
  const auto fetch_basis = [&](index_t segment) {
    int channels = 0;
    if (segment < p.view.count(sequence)) {
      const packed_vectors& values = p.view.segment(sequence, segment).v;
      basis = values.basis_of(head, Dv);
      channels = basis ? int(values.format.channels) : 0;
      const int copied = memory.holds_bases ? channels * (merged_columns / 4) : 0;
      for (int i = own_warp * 32 + lane; i < copied; i += warps_of_group * 32) {
        const int from = int(blockIdx.y) * merged_columns + i % (merged_columns / 4) * 4;
        copy_async16(shared_address(directions + i * 4),
                     basis + offset_t(i / (merged_columns / 4)) * Dv + (from < Dv ? from : 0), from < Dv);
      }
    }
    commit_copies();
    return channels;
  };
  // Bases existed before the queries were rotated, so they can be copied while attention ends.
  int turned = fetch_basis(own_group);
  wait_for_earlier();
  let_later_begin();
  // The table may have room for hundreds of segments, so whole rows come directly behind the existing ones.
  const index_t whole_rows = p.view.count(sequence);
  find_part_runs(parts, parts.segment + offset_t(lane_row) * parts.parts, max_segments, whole_rows, segments, runs);
  if (warp < count) {
    const int r = warp;
    const auto [top, sum] = weigh_parts(parts.states + (begin + first + r) * 2, offset_t(parts.rows) * 2, segments,
                                        parts.parts, weights + r);
    if (lane == 0) {
      const index_t row = first + r, q_head = head * group + row % group;
      float* lse = p.lse.data && blockIdx.y == 0 ? p.lse.row(sequence, row / group, q_head) : nullptr;
      factor[r] = output_weight(p.rule, q_head, top, sum, lse);
    }
  }
  __syncthreads();

  float total[merged_rows] = {};
  float* acc = shared + memory.sums + own_group * merged_rows * Dv;
  for (index_t round = 0; round <= whole_rows; round += merging_groups) {
    const index_t segment = round + own_group;
    const bool there = segment <= whole_rows && runs[2 * segment + 1] > 0;
    if (round > 0) turned = fetch_basis(segment);
    const int channels = turned > 0 ? turned : Dv;
    if (there) {
      const index_t from = runs[2 * segment], end = runs[2 * segment + 1];
      constexpr int fours = Dv / 4;
      for (int i = own_warp * 32 + lane; i < count * fours; i += warps_of_group * 32) {
        const int r = i / fours, c = i % fours * 4;
        if (c >= channels) continue;
        float4 sum{};
#pragma unroll 8
        for (index_t one = from; one < end; ++one) {
          const float weight = weights[one * merged_rows + r];
          const float4 x =
              *reinterpret_cast<const float4*>(parts.out + (begin + offset_t(one) * parts.rows + first + r) * Dv + c);
          if (weight == 0) continue;  // nothing was visible: the memory is arbitrary
          sum.x += x.x * weight, sum.y += x.y * weight, sum.z += x.z * weight, sum.w += x.w * weight;
        }
        *reinterpret_cast<float4*>(acc + r * Dv + c) = sum;
      }
    }
    wait_copies<0>();
    __syncthreads();
    if (there && column < Dv && turned > 0) {
#pragma unroll 4
      for (int c = own_warp; c < channels; c += warps_of_group) {
        const float direction =
            memory.holds_bases ? directions[c * merged_columns + lane] : basis[offset_t(c) * Dv + column];
#pragma unroll
        for (int r = 0; r < merged_rows; ++r) {
          if (r < count) total[r] += acc[r * Dv + c] * direction;
        }
      }
    } else if (there && column < Dv && own_warp == 0) {
#pragma unroll
      for (int r = 0; r < merged_rows; ++r) {
        if (r < count) total[r] += acc[r * Dv + column];
      }
    }
    __syncthreads();
  }
  float* shares = shared + memory.shares;  // [warps, 8, 32]
#pragma unroll
  for (int r = 0; r < merged_rows; ++r) shares[(warp * merged_rows + r) * merged_columns + lane] = total[r];
  __syncthreads();
  if (column >= Dv || warp >= count) return;
  float sum = 0;
#pragma unroll 8
  for (int w = 0; w < merging_warps; ++w) sum += shares[(w * merged_rows + warp) * merged_columns + lane];
  const index_t row = first + warp;
  p.out.row(sequence, row / group, head * group + row % group)[column] = Out(sum * factor[warp]);
}

}  // namespace detail

/// Attends chosen units of packed rows, each segment in its own basis, and all whole rows.
///
/// Keys are multiplied as they are stored, in fp32, with 4 rows of queries at a time. Values are unpacked in shared
/// memory, 32 rows at a time, and multiplied by matrix instructions, for which weights are rounded to 16 bits. Packed
/// 16-bit elements have the type that `Tile` names; fp8 and int4 convert to it exactly.
/// It follows `rotate_queries` on the stream, directly or after launches that follow it.
/// Errors   before the launch: more rows, segments or sequences than it was made for, rows not on 16 bytes.
/// Limits   whole rows are raw. A NaN in a value reaches rows of the step that must not see its token, if another of
///          the same 8 rows sees it.
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
  attend_packed(index_t sequences, index_t kv_heads, index_t q_heads, index_t tokens, index_t max_segments,
                const packed_format& k, const packed_format& v, const device_info& device)
      : lanes_(sequences * kv_heads),
        rows_(tokens * (q_heads / kv_heads)),
        lengths_(k, v),
        shape_(rows_, max_segments, lengths_),
        max_segments_(max_segments) {
    const std::string segments = " over " + std::to_string(max_segments) + " segments";
    attend_entry_.require_shared(std::size_t(shape_.bytes), device, "packed attention" + segments,
                                 "store fewer channels of packed rows, lower cache_options::tokens, or use a device "
                                 "with more of it");
    // All blocks run at the same time: a second wave would take as long as the first.
    const int together = attend_entry_.resident_blocks(detail::packed_threads, std::size_t(shape_.bytes), device);
    splits_ = std::clamp<index_t>(together / (std::max)(1, lanes_), 1, 128);
    whole_ = (std::min)(splits_, detail::whole_splits);
    parts_ = splits_ + max_segments + whole_;
    if (shared_tables().shared_bytes() > merge_entry_.shared_limit(device)) {
      tables_ = detail::merge_tables::workspace;
      merge_entry_ = detail::merge_packed_entry<View, Out, detail::merge_tables::workspace>;
    }
    merge_entry_.require_shared(merge_bytes(), device, "the merge of packed attention" + segments);
  }

  index_t parts() const { return parts_; }
  std::size_t workspace_bytes() const { return memory(*this, nullptr).bytes(); }
  /// The array at the workspace's beginning that `rotate_queries` sets to "none".
  index_t* part_segments(void* workspace) const { return static_cast<index_t*>(workspace); }

  void run(const packed_problem<View, Out>& problem, const rotated_rows& rotated, void* workspace,
           cudaStream_t stream) const {
    const index_t lanes = problem.view.whole.sequences * problem.view.whole.kv_heads;
    if (lanes == 0 || problem.q.tokens == 0) return;
    require(lanes <= lanes_ && rotated.rows <= rows_ && problem.view.max_segments == max_segments_,
            "rows of packed attention", std::to_string(lanes) + " x " + std::to_string(rotated.rows),
            "at most " + std::to_string(lanes_) + " x " + std::to_string(rows_) + " in a table of " +
                std::to_string(max_segments_) + " segments",
            "make the operation for the largest batch and step");
    require(problem.unit >= 0, "unit", problem.unit, "0 or more",
            "pass the rows of a chosen block, 0: of segments' own");
    require_rows_on_16_bytes("whole keys", problem.view.whole.k, problem.view.whole.k_strides);
    require_rows_on_16_bytes("whole values", problem.view.whole.v, problem.view.whole.v_strides);
    const memory arrays(*this, workspace);
    const detail::packed_parts to{arrays.out, arrays.states, arrays.segment, arrays.tables,
                                  splits_,    whole_,        parts_,         rotated.rows};
    attend_entry_.launch({.blocks = dim3(unsigned(lanes), unsigned(splits_),
                                         unsigned(ceil_div(rotated.rows, detail::query_rows_together))),
                          .threads = dim3(detail::packed_threads),
                          .shared_bytes = std::size_t(shape_.bytes),
                          .overlapping = attend_entry_.overlaps()},
                         stream, "launch of attend_packed", problem, rotated, to, lengths_);
    merge_entry_.launch({.blocks = dim3(unsigned(lanes), unsigned(ceil_div(Dv, detail::merged_columns)),
                                        unsigned(ceil_div(rotated.rows, detail::merged_rows))),
                         .threads = dim3(detail::merging_threads),
                         .shared_bytes = merge_bytes(),
                         .overlapping = merge_entry_.overlaps()},
                        stream, "launch of merge_packed", problem, to);
  }

 private:
  using shared_memory = detail::merge_memory<Dv, detail::merge_tables::shared>;
  using workspace_memory = detail::merge_memory<Dv, detail::merge_tables::workspace>;
  shared_memory shared_tables() const { return {parts_, max_segments_}; }
  workspace_memory workspace_tables() const { return {parts_, max_segments_}; }
  std::size_t merge_bytes() const {
    return tables_ == detail::merge_tables::shared ? shared_tables().shared_bytes() : workspace_tables().shared_bytes();
  }
  /// Words of the tables of all blocks that merge.
  std::size_t table_words() const {
    if (tables_ == detail::merge_tables::shared) return 0;
    return std::size_t(lanes_) * std::size_t(ceil_div(Dv, detail::merged_columns)) *
           std::size_t(ceil_div(rows_, detail::merged_rows)) * std::size_t(workspace_tables().table_words);
  }
  struct memory : workspace_cut {
    const attend_packed& op;
    memory(const attend_packed& owner, void* begin) : workspace_cut(begin), op(owner) {}
    const std::size_t parts = std::size_t(op.lanes_) * std::size_t(op.parts_), rows = parts * std::size_t(op.rows_);
    index_t* segment = array<index_t>(parts);
    float* states = array<float>(rows * 2);
    float* out = array<float>(rows * Dv);
    float* tables = array<float>(op.table_words());
  };

  index_t lanes_, rows_;
  detail::packed_lengths<D, Dv> lengths_;
  detail::packed_memory<D, Dv, View::rows_in> shape_;
  index_t max_segments_, splits_ = 1, whole_ = 1, parts_ = 1;
  device_kernel<packed_problem<View, Out>, rotated_rows, detail::packed_parts, detail::packed_lengths<D, Dv>>
      attend_entry_{detail::attend_packed_entry<View, Tile, Out>};
  detail::merge_tables tables_ = detail::merge_tables::shared;
  device_kernel<packed_problem<View, Out>, detail::packed_parts> merge_entry_{
      detail::merge_packed_entry<View, Out, detail::merge_tables::shared>};
};

}  // namespace cuda
TESSERA_NAMESPACE_END
