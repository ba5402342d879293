// Chooses, on the GPU, which lines the rows of a prompt chunk attend. The host calls it, and nothing returns to the
// host.
#pragma once

#include <algorithm>
#include <string>

#include "../../../../concepts/prefill.hpp"
#include "../../../../core/host/host_vector.hpp"
#include "../../../../core/model_shape.hpp"
#include "../../device/alignment.cuh"
#include "../../device/kernel.cuh"
#include "../../device/memory.cuh"
#include "../../device/tuning.cuh"
#include "../../device/workspace.cuh"
#include "../../store/slot_order.cuh"
#include "detail/line_choice.cuh"
#include "detail/published_cover.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {

// The lines of a prompt chunk as kernels read them. The choice of lines writes them; attention along lines reads them.

/// The lines of one sequence's chunk by query head, on the device. Columns are slots, so they are valid only until
/// slots move.
struct line_tables {
  index_t words = 0;  ///< 32 * words is above every position and slot
  const std::uint32_t* slash =
      nullptr;  ///< [q_heads, words + 1]: bit 32 * words - 1 - d is distance d; the last word is 0
  const std::uint32_t* vertical = nullptr;  ///< [q_heads, words]: bit s is slot s
  const index_t* columns = nullptr;         ///< [q_heads, 32 * words]: slots of vertical lines, ascending
  const index_t* column_counts = nullptr;   ///< [q_heads]
  const index_t* order = nullptr;  ///< [q_heads]: the heads with most entries first; null: as they are numbered
  index_t dense_rows = 0;          ///< how many of the chunk's last rows attend everything

  TESSERA_HD index_t positions() const { return words * 32; }
  TESSERA_HD const std::uint32_t* slash_of(index_t q_head) const { return slash + offset_t(q_head) * (words + 1); }
  TESSERA_HD const std::uint32_t* vertical_of(index_t q_head) const { return vertical + offset_t(q_head) * words; }
  TESSERA_HD const index_t* columns_of(index_t q_head) const { return columns + offset_t(q_head) * positions(); }
};

namespace detail {

/// Host numbers that are passed as a launch argument.
struct few_numbers {
  static constexpr index_t capacity = 512;
  index_t numbers[capacity];
};
template <int Threads>
__global__ void __launch_bounds__(Threads)
    set_numbers_entry(const __grid_constant__ few_numbers some, index_t count, index_t* to) {
  for (index_t i = index_t(threadIdx.x); i < count; i += Threads) to[i] = some.numbers[i];
}

/// Marks the lines that are chosen whatever their weight, by query head.
template <class Pattern, int Threads>
__global__ void __launch_bounds__(Threads)
    fixed_lines_entry(const __grid_constant__ Pattern pattern, const __grid_constant__ line_sample seen) {
  const line_sample::head_lines lines = seen.head(index_t(blockIdx.y));
  for (index_t i = index_t(blockIdx.x) * Threads + index_t(threadIdx.x); i < index_t(lines.stride);
       i += index_t(gridDim.x) * Threads) {
    lines.has_vertical[i] = i < lines.slots && pattern.takes_column(lines.position(i));
    lines.has_slash[i] = i < lines.next && pattern.takes_slash(i) && lines.slash_length(i) > 0;
  }
}

template <class Pattern, int Blocks, int Threads>
__global__ void __launch_bounds__(Threads)
    choose_lines_entry(const __grid_constant__ Pattern pattern, const __grid_constant__ line_sample seen,
                       line_counters* counters, index_t* lists) {
  const index_t head = index_t(blockIdx.x) / Blocks;
  index_t* const own = lists + offset_t(head) * 6 * seen.stride;
  const line_chooser<Blocks, Threads> chooser{
      seen.head(head), counters[head], {own, own + 2 * offset_t(seen.stride), own + 4 * offset_t(seen.stride)}};
  if constexpr (covering_pattern<Pattern>) {
    if (pattern.covered_share() > 0) chooser.cover(pattern.covered_share());
  }
  if constexpr (counted_pattern<Pattern>) {
    chooser.take_heaviest(false, pattern.columns());
    chooser.take_heaviest(true, pattern.diagonals());
  }
}

/// Packs 32 flags, 0 or 1 each, into bits. The flags are aligned to 16 bytes.
__device__ __forceinline__ std::uint32_t bits_of_flags(const std::uint8_t* flags) {
  std::uint32_t bits = 0;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const uint4 some = reinterpret_cast<const uint4*>(flags)[half];
    const std::uint32_t words[4] = {some.x, some.y, some.z, some.w};
#pragma unroll
    for (int i = 0; i < 4; ++i)
      bits |= (words[i] * 0x10204080u >> 28) << (half * 16 + i * 4);  // four bytes to four bits
  }
  return bits;
}

/// Writes a query head's tables from its flags. `entries`: how many entries its lines have.
template <int Threads>
__global__ void __launch_bounds__(Threads)
    write_lines_entry(const __grid_constant__ line_sample seen, index_t words, std::uint32_t* slash,
                      std::uint32_t* vertical, index_t* columns, index_t* counts, unsigned long long* entries) {
  __shared__ block_scan<Threads, index_t> scan;
  __shared__ unsigned long long total;
  const index_t q_head = index_t(blockIdx.x);
  const line_sample::head_lines lines = seen.head(q_head);
  slash += offset_t(q_head) * (words + 1), vertical += offset_t(q_head) * words,
      columns += offset_t(q_head) * words * 32;
  if (threadIdx.x == 0) total = 0, slash[words] = 0;
  unsigned long long mine = 0;
  index_t listed = 0;
  for (index_t first = 0; first < words; first += Threads) {
    const index_t word = first + index_t(threadIdx.x);
    std::uint32_t across = 0, down = 0;
    if (word < words) {
      across = bits_of_flags(lines.has_slash + word * 32), down = bits_of_flags(lines.has_vertical + word * 32);
      const auto add = [&](std::uint32_t left, const auto& length_of) {
        for (; left != 0; left &= left - 1) mine += (unsigned long long)(length_of(word * 32 + __ffs(int(left)) - 1));
      };
      add(across, [&](index_t at) { return lines.slash_length(at); });
      add(down, [&](index_t at) { return lines.vertical_length(at); });
    }
    index_t to = listed + scan.exclusive_sum(word < words ? index_t(__popc(down)) : 0);
    if (word < words) {
      slash[words - 1 - word] = __brev(across);  // distances fall as bits rise
      vertical[word] = down;
      for (std::uint32_t left = down; left != 0; left &= left - 1) columns[to++] = word * 32 + __ffs(int(left)) - 1;
    }
    listed += scan.total();
    __syncthreads();  // before the scan is used again
  }
  __syncthreads();
  atomicAdd(&total, mine);
  __syncthreads();
  if (threadIdx.x == 0) counts[q_head] = listed, entries[q_head] = total;
}

/// Sorts query heads by the number of their entries, largest first.
template <int Threads>
__global__ void __launch_bounds__(Threads)
    order_heads_entry(const unsigned long long* entries, index_t q_heads, index_t* order) {
  for (index_t head = index_t(threadIdx.x); head < q_heads; head += Threads) {
    const unsigned long long own = entries[head];
    index_t before = 0;
    for (index_t other = 0; other < q_heads; ++other) {
      before += entries[other] > own || (entries[other] == own && other < head);
    }
    order[before] = head;
  }
}

}  // namespace detail

/// The input of a choice. Every pointer is a device pointer.
template <class View>
struct choose_lines_problem {
  static_assert(check_device_rows<View>());
  using T = typename View::element_type;
  View view;             ///< one sequence, the chunk itself included
  rows_view<const T> q;  ///< [1, tokens, q_heads, k_dim]: all rows of the chunk
  index_t first = 0;     ///< position of the chunk's first row
  logit_rule rule;
};

/// Chooses the lines of a prompt chunk for every query head by a line pattern, and holds their tables.
/// The attention of the sampled rows is computed for as many kv_heads at a time as fit into the workspace. Then a
/// cluster of blocks chooses for each query head.
/// of blocks chooses for each query head.
/// Errors   shapes, alignment and null pointers are checked before the first launch; a chunk beyond `positions`.
/// Cost     one pass over K for the sampled rows; their logits are written once, where they see slots, and read twice
///          and where lines are looked at.
/// Memory   for each query head and position: 16 bytes of tables, flags and lists in this object, and 4.2 * rows + 32
///          bytes of workspace for heads that are looked at together.
/// Same input, same bits: sums are whole numbers, and no choice depends on the order of threads.
/// Paper    the host's greedy method (math/line_cover.hpp), in batches; where a pattern wants it as published, one line
///          after another.
template <device_line_pattern Pattern, class View>
class choose_lines {
  using T = typename View::element_type;
  using logits = detail::line_logits<View>;
  static constexpr bool asks_attention = covering_pattern<Pattern> || counted_pattern<Pattern>;
  static constexpr int threads = 1024, max_cluster = 4;

 public:
  /// `positions`: above every position and slot. `max_rows`: upper bound of the rows of a sample. `bytes`: the
  /// workspace's limit, unless a single kv_head needs more.
  choose_lines(index_t kv_heads, index_t q_heads, index_t positions, index_t max_rows, const device_info& device,
               std::size_t bytes = std::size_t(1) << 30)
      : kv_heads_(kv_heads), q_heads_(q_heads), words_((std::max)(1, ceil_div(positions, 32))), max_rows_(max_rows) {
    require_head_counts(q_heads, kv_heads);
    require(positions >= 0 && positions < (1 << 29) && max_rows >= 0, "positions", positions, "0 to 2^29",
            "pass how long a conversation becomes");
    at_once_ = index_t(std::clamp<std::size_t>(bytes / (std::max<std::size_t>)(1, memory(*this, nullptr, 1).bytes()), 1,
                                               std::size_t(kv_heads)));
    const std::size_t heads = std::size_t(q_heads), all = std::size_t(words_) * 32;
    slash_ = device_buffer<std::uint32_t>(heads * (std::size_t(words_) + 1));
    vertical_ = device_buffer<std::uint32_t>(heads * std::size_t(words_));
    columns_ = device_buffer<index_t>(heads * all);
    numbers_ = device_buffer<index_t>(2 * heads);
    entries_ = device_buffer<unsigned long long>(heads);
    flags_ = device_buffer<std::uint8_t>(2 * heads * all);
    rows_ = device_buffer<index_t>(std::size_t((std::max)(1, max_rows)));
    if constexpr (asks_attention) {
      clusters_ = may_cluster(device);
      logits_entry_ = {detail::line_logits_entry<View>};
      logits_entry_.require_shared(logits::shared_bytes, device, "the sample of lines", "use a device with more of it");
    }
  }

  index_t positions() const { return words_ * 32; }
  std::size_t workspace_bytes() const { return memory(*this, nullptr, at_once_).bytes(); }
  offset_t bytes() const {
    return offset_t(slash_.bytes() + vertical_.bytes() + columns_.bytes() + numbers_.bytes() + entries_.bytes() +
                    flags_.bytes() + rows_.bytes());
  }

  /// Enqueues the choice. The tables are valid until the next call. `sampled`: positions of the rows that `pattern`
  /// samples, on the host, ascending.
  line_tables run(const Pattern& pattern, const choose_lines_problem<View>& problem,
                  const host_vector<index_t>& sampled, void* workspace, cudaStream_t stream) const {
    check_problem(problem, sampled, workspace);
    watch_order(problem.view, stream);
    detail::line_sample seen{};
    const memory arrays(*this, workspace, at_once_);
    seen.first = problem.first, seen.next = problem.first + problem.q.tokens;
    seen.rows = rows_.data(), seen.row_count = index_t(sampled.size());
    seen.group = group(), seen.stride = positions();
    seen.lengths = problem.view.lengths, seen.length_stride = problem.view.length_strides.head;
    seen.has_vertical = flags_.data(),
    seen.has_slash = flags_.data() + std::size_t(q_heads_) * std::size_t(positions());
    if (problem.view.positions) {
      detail::line_positions_entry<View, 256><<<dim3(unsigned(blocks_of(256)), unsigned(kv_heads_)), 256, 0, stream>>>(
          problem.view, seen.next, seen.stride, arrays.positions, arrays.stored_before);
      check(cudaGetLastError(), "launch of line_positions");
      seen.positions = arrays.positions, seen.stored_before = arrays.stored_before;
    }
    detail::fixed_lines_entry<Pattern, 256>
        <<<dim3(unsigned(blocks_of(256)), unsigned(q_heads_)), 256, 0, stream>>>(pattern, seen);
    check(cudaGetLastError(), "launch of fixed_lines");
    if constexpr (asks_attention) {
      if (seen.row_count > 0 && looks(pattern)) {
        set_rows(sampled, stream);
        seen.logits = arrays.logits, seen.parts = arrays.parts, seen.states = arrays.states;
        seen.verticals = arrays.verticals, seen.slashes = arrays.slashes;
        for (index_t kv_head = 0; kv_head < kv_heads_; kv_head += at_once_) {
          const index_t some = (std::min)(at_once_, kv_heads_ - kv_head) * group();
          seen.first_head = kv_head * group();
          look(problem, seen, kv_head, some, stream);
          choose(pattern, seen, some, arrays.counters, arrays.candidates, stream);
        }
      }
    }
    seen.first_head = 0;
    detail::write_lines_entry<1024><<<unsigned(q_heads_), 1024, 0, stream>>>(
        seen, words_, slash_.data(), vertical_.data(), columns_.data(), numbers_.data(), entries_.data());
    check(cudaGetLastError(), "launch of write_lines");
    detail::order_heads_entry<256>
        <<<1, 256, 0, stream>>>(entries_.data(), q_heads_, numbers_.data() + std::size_t(q_heads_));
    check(cudaGetLastError(), "launch of order_heads");
    return {words_,
            slash_.data(),
            vertical_.data(),
            columns_.data(),
            numbers_.data(),
            numbers_.data() + std::size_t(q_heads_),
            (std::min)(problem.q.tokens, dense_rows_of(pattern))};
  }

 private:
  index_t group() const { return q_heads_ / kv_heads_; }
  static bool looks(const Pattern& pattern) {
    if constexpr (covering_pattern<Pattern>) return pattern.covered_share() > 0;
    return true;
  }
  index_t blocks_of(index_t threads_of_block) const {
    return (std::min)(1024, ceil_div(positions() + 1, threads_of_block));
  }

  struct memory : workspace_cut {
    const choose_lines& op;
    const index_t slice;  // in kv_heads; positions are those of all heads
    memory(const choose_lines& owner, void* begin, index_t heads) : workspace_cut(begin), op(owner), slice(heads) {}
    const std::size_t all = std::size_t(op.positions()), kv_heads = std::size_t(op.kv_heads_);
    const std::size_t heads = asks_attention ? std::size_t(slice) * std::size_t(op.group()) : 0;
    const std::size_t rows = heads * std::size_t(op.max_rows_);
    index_t* positions = array<index_t>(kv_heads * all);
    index_t* stored_before = array<index_t>(kv_heads * (all + 1));
    float* logits = array<float>(rows * all);
    float2* parts = array<float2>(rows * std::size_t(ceil_div(op.positions(), detail::line_sample::tile)));
    float* verticals = array<float>(heads * all);
    float* slashes = array<float>(heads * all);
    float2* states = array<float2>(rows);
    detail::line_counters* counters = array<detail::line_counters>(heads);
    index_t* candidates = array<index_t>(heads * 6 * all);
  };

  static bool may_cluster(const device_info& device) {
    return device.compute_capability >= 90 &&
           can_overlap(detail::choose_lines_entry<Pattern, max_cluster, threads>);  // compiled for sm_90 or newer
  }

  void set_rows(const host_vector<index_t>& sampled, cudaStream_t stream) const {
    for (std::size_t done = 0; done < sampled.size(); done += detail::few_numbers::capacity) {
      detail::few_numbers some{};
      const index_t count = index_t((std::min<std::size_t>)(detail::few_numbers::capacity, sampled.size() - done));
      std::copy_n(sampled.data() + done, count, some.numbers);
      detail::set_numbers_entry<128><<<1, 128, 0, stream>>>(some, count, rows_.data() + done);
      check(cudaGetLastError(), "launch of set_numbers");
    }
  }

  /// Computes the sampled rows' attention, and the weight of every line in it.
  void look(const choose_lines_problem<View>& problem, const detail::line_sample& seen, index_t kv_head, index_t heads,
            cudaStream_t stream) const {
    const dim3 tiles(unsigned(ceil_div(positions(), logits::tile)), unsigned(heads / group()),
                     unsigned(ceil_div(seen.row_count * group(), logits::tile)));
    logits_entry_.launch({tiles, dim3(logits::threads), logits::shared_bytes}, stream, "launch of line_logits",
                         problem.view, problem.q, problem.rule, seen, kv_head);
    detail::line_sums_entry<128>
        <<<dim3(unsigned(seen.row_count), unsigned(heads)), 128, 0, stream>>>(seen, problem.rule.sink_logits);
    check(cudaGetLastError(), "launch of line_sums");
    const dim3 columns(unsigned(ceil_div(positions(), 256 * detail::columns_of_thread)), unsigned(heads)),
        lines(unsigned(ceil_div(positions(), 256)), unsigned(heads));
    detail::line_columns_entry<256><<<columns, 256, 0, stream>>>(seen);
    check(cudaGetLastError(), "launch of line_columns");
    detail::line_slashes_entry<256><<<lines, 256, 0, stream>>>(seen);
    check(cudaGetLastError(), "launch of line_slashes");
  }

  void choose(const Pattern& pattern, const detail::line_sample& seen, index_t heads, detail::line_counters* counters,
              index_t* lists, cudaStream_t stream) const {
    if constexpr (published_pattern<Pattern>) {
      if (pattern.covers_as_published()) {
        detail::cover_as_published(pattern.covered_share(), seen, heads, lists, stream);
        return;
      }
    }
    const auto with = [&](auto entry, int blocks) {
      launch_shape shape;
      shape.blocks = dim3(unsigned(heads * blocks)), shape.threads = dim3(threads);
      shape.cluster = unsigned(blocks);
      launch(entry, shape, stream, "launch of choose_lines", pattern, seen, counters, lists);
    };
    if (clusters_)
      with(detail::choose_lines_entry<Pattern, max_cluster, threads>, max_cluster);
    else
      with(detail::choose_lines_entry<Pattern, 1, threads>, 1);
  }

  void check_problem(const choose_lines_problem<View>& p, const host_vector<index_t>& sampled,
                     const void* workspace) const {
    require(p.view.sequences == 1 && p.view.kv_heads == kv_heads_, "sequences, kv_heads of the view",
            std::to_string(p.view.sequences) + ", " + std::to_string(p.view.kv_heads),
            "1, " + std::to_string(kv_heads_), "choose lines one sequence at a time");
    require(p.q.sequences == 1 && p.q.heads == q_heads_ && p.q.tokens >= 1, "rows of q", p.q.tokens,
            "all rows of a chunk, of " + std::to_string(q_heads_) + " query heads",
            "pass the queries of the whole chunk");
    require(p.first >= 0 && p.first <= positions() - p.q.tokens, "position behind the chunk",
            offset_t(p.first) + p.q.tokens, "at most " + std::to_string(positions()), "make the operation for more");
    require(sampled.size() <= std::size_t(max_rows_), "sampled rows", sampled.size(),
            "at most " + std::to_string(max_rows_), "make the operation for more");
    for (std::size_t i = 0; i < sampled.size(); ++i) {
      require(sampled[i] >= (i == 0 ? p.first : sampled[i - 1] + 1) && sampled[i] < p.first + p.q.tokens, "sampled row",
              sampled[i], "ascending positions of the chunk", "sample rows of the chunk");
    }
    require(p.view.k && p.view.lengths && p.q.data && workspace, "problem", "null", "keys, lengths, q and a workspace",
            "pass device memory");
    require(p.view.k_strides.dim == 1, "stride of a row's elements", p.view.k_strides.dim, "1", "transpose K back");
    if constexpr (View::is_raw) require_rows_on_16_bytes("keys", p.view.k, p.view.k_strides);
    require_rows_on_16_bytes("q", p.q);
  }

  index_t kv_heads_, q_heads_, words_, max_rows_, at_once_ = 1;
  bool clusters_ = false;
  device_kernel<View, rows_view<const T>, logit_rule, detail::line_sample, index_t> logits_entry_;
  device_buffer<std::uint32_t> slash_, vertical_;
  device_buffer<index_t> columns_, numbers_, rows_;  // numbers: counts of columns, then the order of heads
  device_buffer<unsigned long long> entries_;
  device_buffer<std::uint8_t> flags_;
};

}  // namespace cuda
TESSERA_NAMESPACE_END
