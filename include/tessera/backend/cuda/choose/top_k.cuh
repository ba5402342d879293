// Exact radix selection on the GPU of the tokens or blocks that stay or are read. One thread block or one cluster
// selects in one row.
#pragma once

#include <algorithm>

#include "../../../concepts/selector.hpp"
#include "../../../core/selection.hpp"
#include "../device/kernel.cuh"
#include "../device/tuning.cuh"
#include "detail/held_select.cuh"
#include "detail/row_select.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {

// The input and output of a selection on the GPU.

/// One number a row, on the device: `data[row / rows_per_entry * stride]`, or `value` for every row where `data` is
/// null.
struct row_numbers {
  const index_t* data = nullptr;
  index_t value = 0;
  index_t rows_per_entry = 1;
  index_t stride = 1;  ///< between entries, which may lie in structs
  __device__ index_t number(index_t row) const {
    return data ? data[offset_t(rows_per_entry == 1 ? row : row / rows_per_entry) * stride] : value;
  }
};

/// Rows of scores, and where their chosen slots go. Every pointer is a device pointer. Row r of scores begins at
/// `score_offsets[r]`, or at r * score_stride without offsets; `out` likewise.
struct select_problem {
  const float* scores = nullptr;
  offset_t score_stride = 0;
  const offset_t* score_offsets = nullptr;
  row_numbers n;     ///< slots of a row
  row_numbers keep;  ///< slots to choose, the tail included; above n chooses all
  row_numbers tail;  ///< newest slots that are always chosen
  const index_t* skip =
      /// [rows]: how many first slots the selection skips. `n` and `keep` include them; chosen slots count from behind
      /// them. Null: none.
      nullptr;
  index_t* out = nullptr;
  offset_t out_stride = 0;
  const offset_t* out_offsets = nullptr;
  index_t* counts = nullptr;  ///< [rows], min(keep, n), without skipped slots
  index_t rows = 0;           ///< 0: as many as the operation was made for
  index_t pad_to = 0;         ///< fills out with -1 from a row's count up to here

  __device__ const float* score_row(index_t row) const {
    return scores + (score_offsets ? score_offsets[row] : row * score_stride) + skipped(row);
  }
  __device__ index_t* out_row(index_t row) const {
    return out + (out_offsets ? out_offsets[row] : row * out_stride) + skipped(row);
  }
  __device__ index_t skipped(index_t row) const { return skip ? skip[row] : 0; }
  /// How many slots a row has, how many of them are chosen, and how many of the newest are chosen whatever their score.
  struct bounds {
    index_t n, keep, tail;
  };
  __device__ bounds bounds_of(index_t row) const {
    const index_t before = skipped(row), stored = (max)(n.number(row) - before, 0);
    const index_t kept = (min)((max)(keep.number(row) - before, 0), stored);
    return {stored, kept, (min)((max)(tail.number(row), 0), kept)};
  }

  /// The chosen slots as a selection.
  selection_view chosen() const { return {out, counts, out_offsets, out_stride}; }
};

/// How a row is searched.
enum class row_search {
  resident,  ///< one block holds the row's keys in shared memory, or every block of a cluster a part of them
  /// One block holds up to 8,192 keys in registers. It reads a longer row once, and keeps the keys that may still be
  /// chosen in shared memory. Only for single tokens.
  streamed,
};

/// How a selection is launched.
struct select_tuning {
  int cluster;       ///< thread blocks of one row
  index_t resident;  ///< keys that a block holds in shared memory; the rest are read again in every pass
  row_search search = row_search::resident;
};

namespace detail {

template <int Blocks>
inline constexpr int select_threads = Blocks == 1 ? 1024 : 512;

template <int Blocks, row_search Search>
inline constexpr int block_threads_of = Search == row_search::streamed ? stream_threads : select_threads<Blocks>;

/// One row by one team of thread blocks. `block` is 1 for tokens.
template <int Blocks, class Keys, row_search Search>
__device__ void select_row(const select_problem& p, index_t block, index_t resident) {
  extern __shared__ uint4 cache[];
  constexpr int block_threads = block_threads_of<Blocks, Search>;
  using storage = select_storage<block_threads, Blocks>;
  __shared__ storage s;
  using select = row_select<storage, Blocks>;
  for (int bin = threadIdx.x; bin < radix_bins; bin += block_threads) s.histogram[bin] = 0;
  if (threadIdx.x == 0) s.trimmed = no_index, s.listed = s.few_listed = 0;
  __syncthreads();
  wait_for_earlier();  // the work above needs no earlier launch
  let_later_begin();
  const int rank = block_team<Blocks>::rank();
  const index_t row = index_t(blockIdx.x) / Blocks;
  const auto [n, keep, tail] = p.bounds_of(row);
  const float* scores = p.score_row(row);
  index_t* out = p.out_row(row);
  const index_t candidates = n - tail, room = keep - tail;

  const bool all = room == candidates;
  const index_t thread = rank * block_threads + index_t(threadIdx.x), threads = Blocks * block_threads;
  for (index_t slot = (all ? 0 : candidates) + thread; slot < n; slot += threads) out[keep - n + slot] = slot;
  for (index_t i = keep + thread; i < p.pad_to; i += threads) out[i] = no_index;
  if (thread == 0) p.counts[row] = keep;
  if (all || room == 0) return;  // the same in every block of the team

  if constexpr (Search == row_search::streamed) {
    if (candidates <= register_threads * register_keys)
      return register_row(s, token_keys(scores, candidates), room, out);
    return stream_row(s, cache, scores, candidates, room, resident, out);
  }
  const auto make_keys = [&] {
    if constexpr (Keys::single)
      return Keys(scores, candidates);
    else
      return Keys(scores, candidates, block);
  };
  const Keys keys = make_keys();
  const index_t share = (ceil_div(keys.count, Blocks) + 3) / 4 * 4;
  const index_t begin = (min)(rank * share, keys.count), count = (min)(share, keys.count - begin);
  const row_part<Keys> part{keys, begin, count, cache, (min)((count + 3) / 4 * 4, resident)};
  if constexpr (Keys::single) {
    using held = held_select<storage, Blocks>;
    if (share <= (min)(resident, held::max_keys)) return held::run(s, part, cache, room, out);
    select::load(s, part);
    const cut at = select::template threshold<false>(s, part, room, true);
    select::compact(s, part, at, [&](index_t to, index_t slot, index_t, bool) { out[to] = slot; });
  } else {
    select::load(s, part);
    // All blocks but the last have the same length, so only the last one decides how many blocks are touched.
    const index_t last = keys.count - 1, short_length = candidates - last * block;
    const unsigned short_key = keys.key(last);
    index_t touched = ceil_div(room, block);
    cut at = select::template threshold<true>(s, part, touched, true);
    const auto touches_last = [&] {  // among equal scores the last block ranks last
      return short_key > at.key || (short_key == at.key && at.ties == at.equal);
    };
    if (touches_last() && (touched - 1) * block + short_length < room) {
      at = select::template threshold<true>(s, part, ++touched, false);
    }
    const bool last_is_whole = touches_last() && short_key != at.key;
    // The lowest-ranked touched block (the last tie) gets the tokens that remain after the others.
    const index_t left = room - (touched - 1) * block + (last_is_whole ? block - short_length : 0);
    select::compact(s, part, at, [&](index_t to, index_t b, index_t equal_before, bool is_equal) {
      const index_t at_token = to * block - (equal_before >= at.ties ? block - left : 0);
      if (is_equal && equal_before == at.ties - 1) {
        s.trimmed = b;
        s.trimmed_at = at_token;
      } else {
        const index_t length = b == last ? short_length : block;
        for (index_t i = 0; i < length; ++i) out[at_token + i] = b * block + i;
      }
    });
    __syncthreads();
    if (s.trimmed == no_index) return;
    const index_t from = s.trimmed * block, length = s.trimmed == last ? short_length : block, to = s.trimmed_at;
    if (left == length) {
      for (index_t i = threadIdx.x; i < length; i += block_threads) out[to + i] = from + i;
      return;
    }
    using trim = row_select<storage, 1>;
    const row_part<token_keys> inside{token_keys(scores + from, length), 0, length, cache, 0};
    const cut best = trim::template threshold<false>(s, inside, left, false);
    trim::compact(s, inside, best, [&](index_t i, index_t token, index_t, bool) { out[to + i] = from + token; });
  }
}

/// Blocks that must fit on a multiprocessor at a time, which limits the registers.
template <int Blocks, class Keys, row_search Search>
inline constexpr int blocks_together = Search == row_search::streamed ? 2
                                       : Blocks == 1                  ? 1
                                       : Keys::single                 ? 3
                                                                      : 2;

template <int Blocks, class Keys, row_search Search>
__global__ void __launch_bounds__(block_threads_of<Blocks, Search>, blocks_together<Blocks, Keys, Search>)
    select_entry(const __grid_constant__ select_problem problem, index_t block, index_t resident) {
  select_row<Blocks, Keys, Search>(problem, block, resident);
}

}  // namespace detail

/// Launch shape of a selection over rows of up to `capacity` tokens, single or in blocks of `block` tokens. `keep`: how
/// many a row usually keeps; results are right for more too. Measured on an H200, CUDA 13.0: see the notes of the
/// benchmark.
inline select_tuning tune_select(index_t rows, index_t capacity, bool single, index_t block, index_t keep,
                                 const device_info& device) {
  constexpr index_t max_share = 16384;  // 64 KB: three blocks of a cluster fit on an sm_90
  const index_t units = ceil_div(capacity, block);
  const bool clusters = device.compute_capability >= 90, many = rows > device.multiprocessors;
  if (single) {
    if (capacity <= detail::register_threads * detail::register_keys) return {1, 0, row_search::streamed};
    // One block against clusters of 8 (us): 32,768 tokens, 8 rows 9.9 / 9.4, 32 rows 10 / 14; 50,000 tokens, 8 rows 13
    // / 10, 32 rows 13 / 15.
    constexpr index_t for_few = 40960;
    const index_t max_held = device.shared_memory / 4 - 3072;  // beside histogram and lists
    if (capacity <= (rows > 16 || !clusters ? max_held : (std::min)(for_few, max_held)))
      return {1, (capacity + 3) / 4 * 4};
    // Streams against clusters of 8, 131,072 tokens (us, H100): 32 rows 38 / 24, 64 rows 39 / 45.
    const index_t survivors = device.shared_memory > 160 * 1024 ? 12288 : 4096;  // two blocks fit on a multiprocessor
    if (!clusters || (5 * rows > 2 * device.multiprocessors && keep <= survivors / 2))
      return {1, survivors, row_search::streamed};
  }
  int cluster = 1;
  if (clusters && capacity > max_share && !(many && units <= max_share))
    cluster = capacity > 4 * max_share || (single && rows <= 32) ? 8 : 4;
  return {cluster, (std::min<index_t>)(max_share, (ceil_div(units, cluster) + 3) / 4 * 4)};
}

/// Runs a selector of the best tokens or blocks over rows of scores, with the results of its CPU body. Selectors with a
/// body of their own have a specialisation below.
/// n, keep and tail are read on the device, so a captured launch can be replayed while they grow. A row longer than
/// `capacity` gives the right result too, more slowly.
/// Cost     one read of the scores where a cluster's shared memory holds them (131,072 tokens). With more rows than
///          clusters pay for: one read and a sample, and up to six more reads where too many scores tie at the cut.
/// Errors   none on the device; any score is defined (NaN ranks last).   Workspace  none.
template <class Selector>
class select_slots {
  static_assert(check_device_selector<Selector>());
  static constexpr bool single = std::is_same_v<typename Selector::unit, token_unit>;
  using keys = std::conditional_t<single, detail::token_keys, detail::block_keys>;

 public:
  select_slots(Selector selector, index_t rows, index_t capacity, const device_info& device, index_t usual_keep = 2048)
      : select_slots(selector, rows, capacity,
                     tune_select(rows, capacity, single, block_of(selector), usual_keep, device)) {}

  select_slots(Selector selector, index_t rows, index_t capacity, const select_tuning& tuning)
      : rows_(rows), block_(block_of(selector)), tuning_(tuning) {
    require(rows >= 0, "rows", rows, "0 or more", "pass sequences * kv_heads");
    require(capacity >= 0, "capacity", capacity, "0 or more", "pass the longest row that may come");
    require(tuning.cluster == 1 || tuning.cluster == 4 || tuning.cluster == 8, "cluster", tuning.cluster, "1, 4 or 8",
            "take the numbers of tune_select");
    require(tuning.search == row_search::resident || (single && tuning.cluster == 1),
            "cluster of a selection by one block", tuning.cluster, "1, and single tokens",
            "take the numbers of tune_select");
    entry_ = entry_of(tuning);
    const device_info device = device_info::current();
    require(
        tuning.resident >= 0 && tuning.resident % 4 == 0 && entry_.allow_shared(std::size_t(shared_bytes()), device),
        "resident", tuning.resident, "a multiple of 4 up to " + std::to_string(entry_.shared_limit(device) / 4),
        "take the numbers of tune_select");
  }

  std::size_t workspace_bytes() const { return 0; }
  const select_tuning& tuning() const { return tuning_; }

  void run(const select_problem& problem, void*, cudaStream_t stream) const {
    const index_t rows = problem.rows > 0 ? problem.rows : rows_;
    require(rows <= rows_, "rows", rows, "at most " + std::to_string(rows_),
            "construct select_slots for the most rows");
    if (rows == 0) return;
    static_assert(detail::stream_threads == detail::select_threads<8> &&
                  detail::register_threads == detail::stream_threads);
    const bool alone = tuning_.cluster == 1 && tuning_.search == row_search::resident;
    entry_.launch({.blocks = dim3(unsigned(rows * tuning_.cluster)),
                   .threads = dim3(unsigned(alone ? detail::select_threads<1> : detail::select_threads<8>)),
                   .shared_bytes = std::size_t(shared_bytes()),
                   .cluster = unsigned(tuning_.cluster),
                   .overlapping = entry_.overlaps()},
                  stream, "launch of select", problem, block_, tuning_.resident);
  }

 private:
  static index_t block_of(const Selector& selector) {
    selector.check();  // before anything divides by it
    if constexpr (single)
      return 1;
    else
      return selector.unit_slots();
  }
  int shared_bytes() const {  // a candidate that survives has a slot beside its key
    return int(tuning_.resident) * (tuning_.search == row_search::streamed ? 8 : 4);
  }
  static device_kernel<select_problem, index_t, index_t> entry_of(const select_tuning& tuning) {
    if constexpr (single) {
      if (tuning.search == row_search::streamed) return detail::select_entry<1, keys, row_search::streamed>;
    }
    switch (tuning.cluster) {
      case 1:
        return detail::select_entry<1, keys, row_search::resident>;
      case 4:
        return detail::select_entry<4, keys, row_search::resident>;
      default:
        return detail::select_entry<8, keys, row_search::resident>;
    }
  }

  device_kernel<select_problem, index_t, index_t> entry_;
  index_t rows_, block_;
  select_tuning tuning_;
};

// Selectors with a body of their own, on the GPU: one thread per row runs the body.

namespace detail {

template <class Selector>
__global__ void __launch_bounds__(128) plain_select_entry(const __grid_constant__ select_problem p, Selector selector) {
  const index_t row = index_t(blockIdx.x);
  const auto [n, keep, tail] = p.bounds_of(row);
  index_t* out = p.out_row(row);
  for (index_t i = keep + index_t(threadIdx.x); i < p.pad_to; i += 128) out[i] = no_index;
  if (threadIdx.x == 0) p.counts[row] = selector.choose(p.score_row(row), n, tail, keep, out);
}

}  // namespace detail

/// `select_slots` for selectors with one body for all backends.
/// Cost     one thread per row: for cheap selections, and for those that do not yet need a kernel.
template <class Selector>
requires(plain_selector<Selector> && !best_units_selector<Selector>) class select_slots<Selector> {
 public:
  select_slots(Selector selector, index_t rows, index_t, const device_info&, index_t = 0)
      : selector_(selector), rows_(rows) {
    selector.check();
    require(rows >= 0, "rows", rows, "0 or more", "pass sequences * kv_heads");
  }

  std::size_t workspace_bytes() const { return 0; }

  void run(const select_problem& problem, void*, cudaStream_t stream) const {
    const index_t rows = problem.rows > 0 ? problem.rows : rows_;
    require(rows <= rows_, "rows", rows, "at most " + std::to_string(rows_),
            "construct select_slots for the most rows");
    if (rows == 0) return;
    detail::plain_select_entry<Selector><<<unsigned(rows), 128, 0, stream>>>(problem, selector_);
    check(cudaGetLastError(), "launch of plain_select");
  }

 private:
  Selector selector_;
  index_t rows_;
};

}  // namespace cuda
TESSERA_NAMESPACE_END
