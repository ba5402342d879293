// LoopServe's published greedy method on the device: sorts the lines of both kinds, then chooses line after line.
#pragma once

#include "../../../../../math/published_walk.hpp"
#include "../../../device/check.cuh"
#include "line_choice.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {
namespace detail {

/// Memory of the published greedy method for a query head's lines: six numbers per position, as for line_lists.
struct published_lists {
  static constexpr index_t arrays = 6;
  index_t *slashes, *verticals;  // [2, stride] each: sorting alternates between the halves; the second ends sorted
  float *largest_of_slash, *largest_of_vertical;  // [stride] each
  offset_t stride;

  __device__ published_lists(index_t* lists, index_t head, offset_t of_stride)
      : slashes(lists + head * arrays * of_stride),
        verticals(slashes + 2 * of_stride),
        largest_of_slash(reinterpret_cast<float*>(slashes + 4 * of_stride)),
        largest_of_vertical(largest_of_slash + of_stride),
        stride(of_stride) {}
  __device__ index_t* in_order(bool slash) const { return (slash ? slashes : verticals) + stride; }
};

/// The largest entry of every line in the sampled rows; blockIdx.z: of columns, or of slashes.
template <int Threads>
__global__ void __launch_bounds__(Threads)
    largest_entries_entry(const __grid_constant__ line_sample seen, index_t* lists) {
  const line_sample::head_lines lines = seen.head(index_t(blockIdx.y));
  const published_lists own(lists, index_t(blockIdx.y), lines.stride);
  const bool is_slash = blockIdx.z != 0;
  const index_t line = index_t(blockIdx.x) * Threads + index_t(threadIdx.x);
  if (line >= (is_slash ? lines.next : lines.slots)) return;
  const index_t position = is_slash ? 0 : lines.position(line);
  float largest = 0;
  for (index_t r = 0; r < lines.row_count; ++r) {
    const index_t row = lines.rows[r];
    index_t slot = no_index;
    if (!is_slash)
      slot = position <= row ? line : no_index;
    else if (line <= row)
      slot = lines.slot_at(row - line);
    if (slot != no_index) largest = fmaxf(largest, lines.weight(r, slot));
  }
  (is_slash ? own.largest_of_slash : own.largest_of_vertical)[line] = largest;
}

/// One block sorts lines by falling weight. Among equal weights the lower line comes first. It makes four stable passes
/// over digits of 8 bits. Each warp has a range of the lines and moves 32 of them at a time. CUB's segmented sort took
/// 10.4 s more to compile, in each file with a cache (2 cores, CUDA 13.0).
template <int Threads>
struct line_sort {
  static constexpr int warps = Threads / 32, digits = 256, counters_per_thread = digits * warps / Threads;
  static_assert(digits * warps % Threads == 0 && warps % counters_per_thread == 0,
                "tessera: threads share the counters evenly");
  // How many lines with a digit a warp has, then where the next of them goes. The extra column avoids bank conflicts.
  index_t positions[digits][warps + 1];
  block_scan<Threads, index_t> scan;

  /// Sorts lines 0 to `count` - 1 by `weights`, which are not negative, into the second half of `lists`.
  __device__ void run(const float* weights, index_t count, index_t* lists, offset_t stride) {
    const index_t* from = nullptr;  // null: in the order of their numbers
    for (int pass = 0; pass < 4; ++pass) {
      index_t* const to = lists + (pass % 2) * stride;
      pass_over(weights, count, from, to, pass * 8);
      from = to;
    }
  }

 private:
  __device__ void pass_over(const float* weights, index_t count, const index_t* from, index_t* to, int shift) {
    const int warp = int(threadIdx.x) / 32, lane = int(threadIdx.x) % 32;
    const index_t stretch = ceil_div(ceil_div(count, warps), 32) * 32;
    const index_t begin = (min)(count, warp * stretch), end = (min)(count, begin + stretch);
    for (int i = int(threadIdx.x); i < digits * (warps + 1); i += Threads) (&positions[0][0])[i] = 0;
    __syncthreads();
    // Calls `see(line, digit, before)` for this lane's next line, if any; `before`: how many lower lanes have the same
    // digit. Then the digit's position advances by the number of lanes that have it.
    const auto for_each = [&](const auto& see) {
      for (index_t first = begin; first < end; first += 32) {
        const bool there = first + lane < end;
        const index_t at = there ? first + lane : begin;
        const index_t line = from ? from[at] : at;
        const int digit = there ? digits - 1 - int(__float_as_uint(weights[line]) >> shift & (digits - 1)) : digits;
        const unsigned same = __match_any_sync(~0u, digit);
        const int before = __popc(same & ((1u << lane) - 1));
        if (there) see(line, digit, before);
        __syncwarp();  // all have read the position before one of them moves it
        if (there && before == 0) positions[digit][warp] += __popc(same);
        __syncwarp();
      }
    };
    for_each([](index_t, int, int) {});
    __syncthreads();
    index_t* const own =
        &positions[int(threadIdx.x) * counters_per_thread / warps][int(threadIdx.x) * counters_per_thread % warps];
    index_t mine = 0;
    for (int i = 0; i < counters_per_thread; ++i) mine += own[i];
    index_t position = scan.exclusive_sum(mine);
    for (int i = 0; i < counters_per_thread; ++i) {
      const index_t some = own[i];
      own[i] = position;
      position += some;
    }
    __syncthreads();
    for_each([&](index_t line, int digit, int before) { to[positions[digit][warp] + before] = line; });
    __syncthreads();  // the next pass reads what others wrote, and clears the positions
  }
};

/// Sorts the slashes (blockIdx.x 0) or the columns of a query head.
template <int Threads>
__global__ void __launch_bounds__(Threads) sort_lines_entry(const __grid_constant__ line_sample seen, index_t* lists) {
  __shared__ line_sort<Threads> sort;
  const line_sample::head_lines lines = seen.head(index_t(blockIdx.y));
  const published_lists own(lists, index_t(blockIdx.y), lines.stride);
  if (blockIdx.x == 0)
    sort.run(lines.slashes, lines.next, own.slashes, own.stride);
  else
    sort.run(lines.verticals, lines.slots, own.verticals, own.stride);
}

/// Walks a query head's lists. All threads copy the next lines of both to shared memory, and one of them chooses, in
/// double. The chosen lines are the first ones of each list.
template <int Threads>
__global__ void __launch_bounds__(Threads)
    walk_lines_entry(const __grid_constant__ line_sample seen, float share, index_t* lists) {
  constexpr index_t tile = 512;
  __shared__ weighed_line tiles[2][tile];
  __shared__ published_walk walk;
  __shared__ unsigned long long total;
  __shared__ bool ended;
  const line_sample::head_lines lines = seen.head(index_t(blockIdx.x));
  const published_lists own(lists, index_t(blockIdx.x), lines.stride);
  if (threadIdx.x == 0) walk = {}, total = 0;
  __syncthreads();
  unsigned long long units = 0;
  for (index_t slot = index_t(threadIdx.x); slot < lines.slots; slot += Threads)
    units += in_units(lines.verticals[slot]);
  atomicAdd(&total, units);
  __syncthreads();
  const double wanted = double(total) / double(1ull << 40) * double(fminf(share, 1.0f));
  do {
    for (index_t i = index_t(threadIdx.x); i < 2 * tile; i += Threads) {
      const bool slash = i < tile;
      const index_t at = (slash ? walk.slashes : walk.verticals) + i % tile;
      weighed_line next{};
      if (at < (slash ? lines.next : lines.slots)) {
        const index_t line = own.in_order(slash)[at];
        next.weight = double((slash ? lines.slashes : lines.verticals)[line]);
        next.largest = double((slash ? own.largest_of_slash : own.largest_of_vertical)[line]);
        next.length = slash ? lines.slash_length(line) : lines.vertical_length(line);
      }
      tiles[slash ? 0 : 1][i % tile] = next;
    }
    __syncthreads();
    if (threadIdx.x == 0) {
      published_walk goes = walk;  // in registers
      ended = goes.go_on(wanted, tiles[0], tiles[1], tile);
      walk = goes;
    }
    __syncthreads();
  } while (!ended);  // only thread 0 writes it, after the next barrier
  for (index_t i = index_t(threadIdx.x); i < walk.slashes; i += Threads) lines.has_slash[own.in_order(true)[i]] = 1;
  for (index_t i = index_t(threadIdx.x); i < walk.verticals; i += Threads)
    lines.has_vertical[own.in_order(false)[i]] = 1;
}

/// Adds the lines that the published greedy method takes for `share` of the sample's weight to the chosen lines of the
/// `heads` query heads of a slice. Lines that are chosen already do not influence it. `lists`: published_lists::arrays
/// * stride numbers per head. It is a template, so that caches that never call it do not compile its kernels.
template <int Threads = 256>
void cover_as_published(float share, const line_sample& seen, index_t heads, index_t* lists, cudaStream_t stream) {
  const dim3 of_lines(unsigned(ceil_div(seen.stride, Threads)), unsigned(heads), 2);
  largest_entries_entry<Threads><<<of_lines, Threads, 0, stream>>>(seen, lists);
  check(cudaGetLastError(), "launch of largest_entries");
  sort_lines_entry<4 * Threads><<<dim3(2, unsigned(heads)), 4 * Threads, 0, stream>>>(seen, lists);
  check(cudaGetLastError(), "launch of sort_lines");
  walk_lines_entry<Threads><<<unsigned(heads), Threads, 0, stream>>>(seen, share, lists);
  check(cudaGetLastError(), "launch of walk_lines");
}

}  // namespace detail
}  // namespace cuda
TESSERA_NAMESPACE_END
