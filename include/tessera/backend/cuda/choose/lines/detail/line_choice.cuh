// Which lines of a query head are chosen, on the device: the exact greedy in batches, and the heaviest of each kind.
#pragma once

#include "../../../device/cluster.cuh"
#include "line_sample.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {
namespace detail {

/// Counts of the lines that are chosen together. There are two such structs: one is filled while the other, of the
/// previous batch, is read for the last time.
struct line_batch {
  unsigned long long units;
  unsigned largest, listed[3], taken;
};
/// What the blocks of a head share, in device memory; all of it is written before it is read.
struct line_counters {
  unsigned long long all, covered, bins[256];
  line_batch batches[2];
};
/// The lists of a head: lines to judge in this turn, lines to judge in the next turn, and chosen lines of the batch.
struct line_lists {
  index_t *now, *next, *taken;
};

/// Sums are whole numbers in units of 2^-40, so that they do not depend on the order in which threads add. A sum of
/// weights is at most the number of sampled rows, which is at most 2^12.
__device__ __forceinline__ unsigned long long in_units(float weight) {
  return (unsigned long long)(double(weight) * double(1ull << 40));
}

/// Chooses lines of one query head, by one block or by a cluster of them.
///
/// The greedy method chooses one line after another: each time, the line with the largest uncovered weight per entry.
/// The order of two lines matters only where they cross. A line may come, in the greedy order, before every line that
/// crosses it in an uncovered entry. Then the greedy method chooses this line with the weight that it has now. All such
/// lines are chosen at once, batch after batch, among the lines above a threshold that falls by half. The lines of the
/// last batch are sorted and cut. The result is the greedy method's set, up to rounding. Lines are numbered: a slash by
/// its distance, a vertical by `stride` plus its slot.
template <int Blocks, int Threads>
struct line_chooser {
  using team = block_team<Blocks>;
  static constexpr index_t stride_of_threads = Blocks * Threads;

  line_sample::head_lines lines;
  line_counters& shared;
  line_lists queues;

  __device__ index_t rank() const { return team::rank() * Threads + index_t(threadIdx.x); }
  __device__ bool leads() const { return rank() == 0; }
  __device__ bool is_slash(index_t line) const { return line < lines.stride; }
  __device__ bool has(index_t line) const {
    return is_slash(line) ? lines.has_slash[line] : lines.has_vertical[line - lines.stride];
  }
  __device__ void set(index_t line, bool chosen) const {
    (is_slash(line) ? lines.has_slash[line] : lines.has_vertical[line - lines.stride]) = chosen;
  }
  __device__ float& gain(index_t line) const {
    return is_slash(line) ? lines.slashes[line] : lines.verticals[line - lines.stride];
  }
  __device__ index_t length_of(index_t line) const {
    return is_slash(line) ? lines.slash_length(line) : lines.vertical_length(line - index_t(lines.stride));
  }
  __device__ float per_entry(index_t line) const {
    const index_t length = length_of(line);
    return length > 0 ? gain(line) / float(length) : 0.0f;
  }
  /// Calls `visit(line)` for this thread's share of all lines.
  template <class Visit>
  __device__ void for_each_line(const Visit& visit) const {
    for (index_t distance = rank(); distance < lines.next; distance += stride_of_threads) visit(distance);
    for (index_t slot = rank(); slot < lines.slots; slot += stride_of_threads) visit(index_t(lines.stride) + slot);
  }
  struct entry {
    float weight;
    index_t crossing;
  };
  /// The uncovered weight, at sampled row r, of a line that is not chosen, and the line that crosses it there. There is
  /// no branch, so that the loads for many rows overlap; a choice waits mostly for these loads.
  __device__ entry entry_of(index_t line, index_t r) const {
    const bool slash = is_slash(line);
    const index_t own = slash ? line : line - index_t(lines.stride), row = lines.rows[r];
    const index_t at = slash ? row - own : lines.position(own), slot = slash ? lines.slot_at((max)(at, 0)) : own;
    const bool there = at >= 0 && at <= row && slot != no_index;
    const index_t crossing = !there ? 0 : slash ? index_t(lines.stride) + slot : row - at;
    const float weight = lines.weight(r, there ? slot : 0);
    const bool covered = has(crossing);
    return {there & !covered & (weight > 0) ? weight : 0.0f, crossing};
  }
  /// The uncovered weight of every `step`th sampled row from `r` on.
  __device__ float uncovered(index_t line, index_t r = 0, index_t step = 1) const {
    float sum = 0;
#pragma unroll 6
    for (; r < lines.row_count; r += step) sum += entry_of(line, r).weight;
    return sum;
  }
  /// Whether a line of `worth` per entry comes before all lines that cross it in an uncovered entry.
  __device__ bool comes_first(index_t line, float worth, index_t r, index_t step) const {
    bool first = true;
#pragma unroll 6
    for (; r < lines.row_count; r += step) {
      const entry here = entry_of(line, r);
      const bool before = comes_before(worth, line, per_entry(here.crossing), here.crossing);
      first = first & (here.weight == 0 || before);
    }
    return first;
  }
  /// Appends the lines of the lanes with `has_one`, side by side.
  __device__ static void append(index_t* list, unsigned& count, index_t line, bool has_one) {
    const unsigned with = __ballot_sync(~0u, has_one), lane = threadIdx.x % 32;
    unsigned first = 0;
    if (lane == 0 && with != 0) first = atomicAdd(&count, unsigned(__popc(with)));
    first = __shfl_sync(~0u, first, 0);
    if (has_one) list[first + unsigned(__popc(with & ((1u << lane) - 1)))] = line;
  }
  /// Joins a warp's largest value to the team's. Values are not negative, so their bits are in order.
  __device__ static void join_most(unsigned& most, float value) {
    const unsigned bits = __reduce_max_sync(~0u, __float_as_uint(fmaxf(value, 0.0f)));
    if (threadIdx.x % 32 == 0 && bits != 0) atomicMax(&most, bits);
  }
  __device__ static void add_units(unsigned long long& sum, unsigned long long units) {
#pragma unroll
    for (int step = 16; step > 0; step /= 2) units += __shfl_xor_sync(~0u, units, step);
    if (threadIdx.x % 32 == 0 && units != 0) atomicAdd(&sum, units);
  }

  /// Chooses lines, besides those that are chosen already, until they carry `share` of the sample's weight. Called once
  /// in a launch.
  __device__ void cover(float share) const {
    begin();
    const auto wanted = (unsigned long long)(double(load(shared.all)) * double(fminf(share, 1.0f)));
    unsigned long long covered = load(shared.covered);
    for (int i = 0;; i ^= 1) {
      line_batch &batch = shared.batches[i], &last = shared.batches[i ^ 1];
      const float most = __uint_as_float(load(last.largest));
      if (covered >= wanted || most <= 0) return;
      take_batch(most * 0.5f, batch, last);
      const unsigned long long more = load(batch.units);
      if (covered + more >= wanted) {
        cut_batch(wanted - covered, index_t(load(batch.taken)));
        return;
      }
      covered += more;
      team::sync();  // `last` is cleared
    }
  }

  /// Takes the `count` lines of a kind that weigh most, ties to the lower line. Lines that are chosen already come
  /// first.
  __device__ void take_heaviest(bool slashes, index_t count) const {
    const index_t begin = slashes ? 0 : index_t(lines.stride), size = slashes ? lines.next : lines.slots;
    const auto is_line = [&](index_t i) { return !slashes || lines.slash_length(i) > 0; };
    const auto key = [&](index_t i) { return key_of(has(begin + i) ? infinity : gain(begin + i), begin + i); };
    const unsigned long long least =
        select(size, (unsigned long long)((max)(count, 0)), [&](index_t i) { return is_line(i) ? 1ull : 0ull; }, key);
    for (index_t i = rank(); i < size; i += stride_of_threads) {
      if (is_line(i) && key(i) >= least) set(begin + i, true);
    }
    team::sync();
  }

 private:
  template <class T>
  __device__ static T load(const T& value) {
    return *static_cast<const volatile T*>(&value);
  }
  /// The greedy's order: larger first, then the lower line.
  __device__ static unsigned long long key_of(float value, index_t line) {
    return (unsigned long long)(__float_as_uint(fmaxf(value, 0.0f))) << 32 | ~unsigned(line);
  }
  __device__ bool comes_before(float a, index_t line, float b, index_t other) const {
    return a > b || (a == b && line < other);
  }

  /// Adds up the sample's weight and what forced lines cover; `most` of the second batch is the most that a line
  /// offers.
  __device__ void begin() const {
    if (leads()) shared.all = shared.covered = 0, shared.batches[0] = shared.batches[1] = {};
    team::sync();
    unsigned long long total = 0, covered = 0;
    float most = 0;
    for (index_t slot = rank(); slot < lines.slots; slot += stride_of_threads) total += in_units(lines.verticals[slot]);
    for_each_line([&](index_t line) {
      // Slashes hold what they carry, verticals what the slashes leave of theirs.
      if (has(line)) {
        covered += in_units(is_slash(line) ? gain(line) : uncovered(line));
      } else {
        most = fmaxf(most, per_entry(line));
      }
    });
    add_units(shared.all, total);
    add_units(shared.covered, covered);
    join_most(shared.batches[1].largest, most);
    team::sync();
  }

  /// Takes all lines that the greedy method takes at `threshold` per entry or more. Then `batch.largest` is the largest
  /// of the remaining gains. Clears `last`, which nobody reads behind the first barrier.
  __device__ void take_batch(float threshold, line_batch& batch, line_batch& last) const {
    list_all(threshold, batch);
    team::sync();
    if (leads()) last = {};
    index_t* list = queues.now;
    index_t* rest = queues.next;
    index_t before = 0;
    for (int turn = 0;; turn = (turn + 1) % 3) {
      const index_t count = index_t(load(batch.listed[turn]));
      if (count == 0) return;
      if (leads()) batch.listed[(turn + 2) % 3] = 0;  // every thread read it in the previous turn
      sort_out(list, count, threshold, rest, batch, batch.listed[(turn + 1) % 3]);
      team::sync();  // before it, no thread chooses a line that others still read
      const index_t taken = index_t(load(batch.taken));
      unsigned long long units = 0;
      for (index_t i = before + rank(); i < taken; i += stride_of_threads) {
        set(queues.taken[i], true);
        units += in_units(gain(queues.taken[i]));
      }
      add_units(batch.units, units);
      before = taken;
      index_t* const other = list;
      list = rest, rest = other;
      team::sync();
    }
  }

  /// Lists the lines that may be worth `threshold` per entry. It goes by what lines were worth when last looked at,
  /// because gains only fall.
  __device__ void list_all(float threshold, line_batch& batch) const {
    float most = 0;
    const index_t rounds = ceil_div((max)(lines.next, lines.slots), stride_of_threads);
    constexpr int together = 4;                                   // rounds whose loads are under way together
    for (index_t round = 0; round < rounds; round += together) {  // whole warps, for their ballots
      float worth[together][2];
#pragma unroll
      for (int i = 0; i < together * 2; ++i) {
        const index_t own = (round + i / 2) * stride_of_threads + rank();
        const bool there = own < (i % 2 == 0 ? lines.next : lines.slots);
        const index_t line = (there ? own : 0) + (i % 2 == 0 ? 0 : index_t(lines.stride));
        const float value = per_entry(line);
        worth[i / 2][i % 2] = there & !has(line) ? value : 0.0f;
      }
#pragma unroll
      for (int i = 0; i < together * 2; ++i) {
        const index_t own = (round + i / 2) * stride_of_threads + rank();
        const float value = worth[i / 2][i % 2];
        const bool listed = value > 0 && value >= threshold;
        if (!listed) most = fmaxf(most, value);
        append(queues.now, batch.listed[0], i % 2 == 0 ? own : index_t(lines.stride) + own, listed);
      }
    }
    join_most(batch.largest, most);
  }

  /// Looks at the listed lines once more. A line that comes before all lines that cross it is chosen. A line below the
  /// threshold waits for another batch. All others are listed again.
  __device__ void sort_out(const index_t* list, index_t count, float threshold, index_t* rest, line_batch& batch,
                           unsigned& rest_count) const {
    // Lists are short, and rows lie far apart in memory, so neighbouring threads share a line.
    constexpr index_t sharing = line_sharing, lines_at_once = stride_of_threads / sharing;
    const index_t part = rank() % sharing;
    float most = 0;
    const index_t rounds = ceil_div(count, lines_at_once);
    for (index_t round = 0; round < rounds; ++round) {  // whole warps, for their ballots
      const index_t i = round * lines_at_once + rank() / sharing;
      if (i - index_t(threadIdx.x % 32) / sharing >= count) break;  // no line for this warp, as for nine of ten
      const bool own = i < count;
      const index_t line = list[own ? i : 0];
      // Other threads see the old gain or the new one. Both are at least what the line is worth, so no other line is
      // chosen too early.
      const float left = lanes_sum<sharing>(uncovered(line, part, sharing));
      if (own && part == 0) gain(line) = left;
      const index_t length = length_of(line);
      const float worth = length > 0 ? left / float(length) : 0.0f;
      const bool again = own && worth > 0 && worth >= threshold;
      if (own && !again) most = fmaxf(most, worth);
      const unsigned later = __ballot_sync(~0u, again && !comes_first(line, worth, part, sharing));
      const bool first = again && (later >> (threadIdx.x % 32 / sharing * sharing) & ((1u << sharing) - 1)) == 0;
      append(queues.taken, batch.taken, line, first && part == 0);
      append(rest, rest_count, line, again && !first && part == 0);
    }
    join_most(batch.largest, most);
  }

  /// Of the batch's lines, keeps only the first ones in greedy order, until they add `wanted`.
  __device__ void cut_batch(unsigned long long wanted, index_t taken) const {
    if (taken <= Threads) {
      cut_few(wanted, taken);
      return;
    }
    const auto key = [&](index_t i) { return key_of(per_entry(queues.taken[i]), queues.taken[i]); };
    const unsigned long long least =
        select(taken, wanted, [&](index_t i) { return in_units(gain(queues.taken[i])); }, key);
    for (index_t i = rank(); i < taken; i += stride_of_threads) {
      if (key(i) < least) set(queues.taken[i], false);
    }
    team::sync();
  }

  /// The same for at most as many lines as a block has threads: each block has all keys and weights in shared memory. A
  /// line is dropped if the lines before it add enough. For so few lines, the selection by digits took 15 % of a choice
  /// (32K, H200, CUDA 13.0).
  __device__ void cut_few(unsigned long long wanted, index_t taken) const {
    __shared__ unsigned long long keys[Threads], weights[Threads];
    const index_t own = index_t(threadIdx.x);
    const index_t line = own < taken ? queues.taken[own] : 0;
    if (own < taken) keys[own] = key_of(per_entry(line), line), weights[own] = in_units(gain(line));
    __syncthreads();
    if (own < taken && own % Blocks == team::rank()) {
      unsigned long long before = 0;
#pragma unroll 8
      for (index_t i = 0; i < taken; ++i) before += keys[i] > keys[own] ? weights[i] : 0;
      if (before >= wanted) set(line, false);
    }
    team::sync();
  }

  /// The largest key such that all items from it upwards weigh `wanted` together; 0 if all items weigh less. Keys
  /// differ.
  template <class WeightOf, class KeyOf>
  __device__ unsigned long long select(index_t count, unsigned long long wanted, const WeightOf& weight_of,
                                       const KeyOf& key_of_item) const {
    if (wanted == 0) return ~0ull;
    unsigned long long prefix = 0;
    for (int shift = 56; shift >= 0; shift -= 8) {
      team::sync();  // all have read the bins
      for (index_t bin = rank(); bin < 256; bin += stride_of_threads) shared.bins[bin] = 0;
      team::sync();
      for (index_t i = rank(); i < count; i += stride_of_threads) {
        const unsigned long long key = key_of_item(i), weight = weight_of(i);
        if (weight != 0 && (shift == 56 || key >> (shift + 8) == prefix >> (shift + 8))) {
          atomicAdd(&shared.bins[key >> shift & 255], weight);
        }
      }
      team::sync();
      const int bin = bin_of(wanted);
      if (bin < 0) return 0;  // happens only in the first round
      prefix |= (unsigned long long)(bin) << shift;
    }
    return prefix;
  }

  /// The highest bin such that those from it on weigh `wanted`, less by those above it then; -1: all of them weigh
  /// less. By each warp: its loads are under way together.
  __device__ int bin_of(unsigned long long& wanted) const {
    constexpr int each = 256 / 32;
    const int lane = int(threadIdx.x % 32), top = 255 - lane * each;  // lanes go down the bins
    unsigned long long bins[each], sum = 0;
#pragma unroll
    for (int i = 0; i < each; ++i) bins[i] = load(shared.bins[top - i]);
#pragma unroll
    for (int i = 0; i < each; ++i) sum += bins[i];
    unsigned long long up_to = sum;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const unsigned long long other = __shfl_up_sync(~0u, up_to, step);
      if (lane >= step) up_to += other;
    }
    const unsigned enough = __ballot_sync(~0u, up_to >= wanted);
    if (enough == 0) return -1;
    const int first = __ffs(int(enough)) - 1;
    unsigned long long left = wanted - (up_to - sum);  // only lane `first` uses it
    int bin = top;
#pragma unroll
    for (int i = 0; i < each - 1; ++i) {
      if (bin == top - i && bins[i] < left) left -= bins[i], --bin;
    }
    wanted = __shfl_sync(~0u, left, first);
    return __shfl_sync(~0u, bin, first);
  }
};

}  // namespace detail
}  // namespace cuda
TESSERA_NAMESPACE_END
