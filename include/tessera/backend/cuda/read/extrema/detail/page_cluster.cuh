// Paged retrieval of one row by one cluster of thread blocks, or by a block alone: logits, softmax and choice in a
// single launch.
#pragma once

#include "../../../device/kernel.cuh"
#include "../../../device/mma.cuh"
#include "cluster_query.cuh"
#include "page_select.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {

// Logits of a block's share of pages, by matrix products over staged columns of the index.

namespace detail {

/// What is staged at a time: `unit_steps` times 16 columns of `layout.ring` pages. A ring of three such units is filled
/// ahead of the products.
struct staged_unit {
  index_t page = 0;          // the first page, counted from the block's first
  int step = 0;              // the first step
  std::uint32_t offset = 0;  // in the ring, in bytes
};

template <class View, class Scorer>
struct cluster_products {
  using T = typename View::element_type;
  using shared = cluster_shared<T, View::k_dim>;
  using pointers = typename shared::pointers;
  static constexpr int steps_at_once = staged_columns / step_columns, warps = cluster_warps;

  const cluster_share& block_share;
  const pointers& memory;
  const T* const first_column;
  const index_t share, ring_pages;
  const int steps, unit_steps, pitch, lane, warp;
  const std::uint32_t ring_bytes;

  /// `steps`: of 16 columns, of all that is read.
  __device__ cluster_products(const cluster_share& block_share_, const pointers& memory_, const T* first_column_,
                              const cluster_layout& layout, int steps_, int lane_, int warp_)
      : block_share(block_share_),
        memory(memory_),
        first_column(first_column_),
        share(layout.share),
        ring_pages(layout.ring),
        steps(steps_),
        // If there is only one group of pages, a unit has all columns that the ring can hold.
        unit_steps(block_share_.end - block_share_.begin <= layout.ring && steps_ <= stages * steps_at_once
                       ? steps_
                       : steps_at_once),
        pitch(shared::staged_pitch(layout.ring)),
        lane(lane_),
        warp(warp_),
        ring_bytes(std::uint32_t(stages * staged_columns * pitch)) {}

  __device__ bool there(const staged_unit& unit) const { return block_share.begin + unit.page < block_share.end; }
  __device__ void go_on(staged_unit& unit) const {
    unit.step += unit_steps;
    if (unit.step >= steps) unit.step = 0, unit.page += ring_pages;
    unit.offset += std::uint32_t(staged_columns * pitch);
    if (unit.offset == ring_bytes) unit.offset = 0;
  }

  /// Starts to copy a unit, or nothing behind the last one.
  __device__ void stage(staged_unit& unit) const {
    const index_t from_page = block_share.begin + unit.page, pages = (min)(ring_pages, block_share.end - from_page);
    if (pages > 0) {
      const int from = unit.step * step_columns, count = (min)(unit_steps * step_columns, steps * step_columns - from);
#pragma unroll 2
      for (int i = warp; i < count; i += warps) {
        const int column = memory.columns[from + i];
        const T* const source = first_column + (max)(column, 0) + from_page;
#pragma unroll 1
        for (int chunk = lane; chunk * 8 < pages; chunk += 32) {
          // Zeros if there is no column: the memory may hold anything.
          copy_async16(memory.ring + unit.offset + std::uint32_t(i * pitch + chunk * 16), source + chunk * 8,
                       column >= 0);
        }
      }
      go_on(unit);
    }
    commit_copies();
  }

  /// Adds the products of a staged unit with this warp's 32 pages. All loads come first, then all products, so that
  /// neither kind waits for the other.
  __device__ void multiply_unit(const staged_unit& unit, float (&acc)[tile_width / 8][4]) const {
    std::uint32_t from = memory.ring + unit.offset + std::uint32_t(lane % 16 * pitch) +
                         std::uint32_t((warp * tile_width + lane / 16 * 8) * int(sizeof(T)));
    const T* weight = memory.weights + lane / 4 * shared::pitch + unit.step * step_columns + lane % 4 * 2;
#pragma unroll 1
    for (int count = (min)(unit_steps, steps - unit.step); count > 0; count -= steps_at_once) {
      unsigned a[steps_at_once][2], b[steps_at_once][tile_width / 16][4];
#pragma unroll
      for (int u = 0; u < steps_at_once; ++u) {
        if (u >= count) break;
        a[u][0] = *reinterpret_cast<const unsigned*>(weight + u * step_columns);
        a[u][1] = *reinterpret_cast<const unsigned*>(weight + u * step_columns + 8);
#pragma unroll
        for (int pair = 0; pair < tile_width / 16; ++pair) {
          // Columns 0 to 7 and 8 to 15 of eight pages, then of the next eight.
          load_matrices_transposed(b[u][pair], from + std::uint32_t(u * step_columns * pitch + pair * 32));
        }
      }
#pragma unroll
      for (int u = 0; u < steps_at_once; ++u) {
        if (u >= count) break;
        const unsigned row[4] = {a[u][0], 0u, a[u][1], 0u};
#pragma unroll
        for (int pair = 0; pair < tile_width / 16; ++pair) {
          multiply<T>(acc[pair * 2], row, b[u][pair][0], b[u][pair][1]);
          multiply<T>(acc[pair * 2 + 1], row, b[u][pair][2], b[u][pair][3]);
        }
      }
      from += std::uint32_t(staged_columns * pitch), weight += staged_columns;
    }
  }

  /// Turns products into logits and adds them to `found`: the largest visible logit, and the sum over visible slots of
  /// exp(logit - largest). A lane has pages 8 j + 2 (l % 4) and the next one, j < 4, of row l / 4. They belong to this
  /// warp's 32 pages, which begin `local` pages after the block's first.
  __device__ void finish_tile(const logit_rule& rule, float scale, const slot_run& run, index_t last_slot, index_t r,
                              index_t row_stride, float* row_logits, index_t local,
                              const float (&acc)[tile_width / 8][4], float2& found) const {
    const index_t first = local + lane % 4 * 2, page = block_share.page;
    // Whether all pages of the tile exist, are full, and are visible.
    const bool plain = block_share.begin + local + tile_width <= block_share.end &&
                       run.begin <= (block_share.begin + local) * page &&
                       (block_share.begin + local + tile_width) * page <= last_slot;
    float x[tile_width / 4], seen[tile_width / 4];
    float highest = found.x;
#pragma unroll
    for (int j = 0; j < tile_width / 4; ++j) x[j] = scale * acc[j / 2][j % 2], seen[j] = float(page);
    if (Scorer::normalised && rule.soft_cap > 0) {
#pragma unroll
      for (int j = 0; j < tile_width / 4; ++j) x[j] = quick_cap(rule, x[j]);
    }
    if (!plain) {
#pragma unroll
      for (int j = 0; j < tile_width / 4; ++j) {
        const index_t i = block_share.begin + first + j / 2 * 8 + j % 2;
        seen[j] = i < block_share.end ? float((min)(last_slot, (i + 1) * page) - (max)(run.begin, i * page)) : 0.0f;
      }
    }
#pragma unroll
    for (int j = 0; j < tile_width / 4; ++j) {
      x[j] = x[j] < infinity ? x[j] : not_a_number;
      seen[j] = x[j] == x[j] ? seen[j] : 0.0f;
      highest = seen[j] > 0 ? fmaxf(highest, x[j]) : highest;
    }
#pragma unroll
    for (int j = 0; j < tile_width / 8; ++j) {
      if (block_share.fits) {
        *reinterpret_cast<float2*>(memory.logits + r * share + first + j * 8) = make_float2(x[j * 2], x[j * 2 + 1]);
      } else if (block_share.begin + first + j * 8 < block_share.end) {  // to device memory; rows have an even stride
        *reinterpret_cast<float2*>(row_logits + r * row_stride + block_share.begin + first + j * 8) =
            make_float2(x[j * 2], x[j * 2 + 1]);
      }
    }
    if (Scorer::normalised && highest > -infinity) {
      found.y *= fast_exp(found.x - highest);
#pragma unroll
      for (int j = 0; j < tile_width / 4; ++j) {
        const float weight = seen[j] * fast_exp(x[j] - highest);
        found.y += seen[j] > 0 ? weight : 0.0f;
      }
    }
    found.x = highest;
  }

  /// Multiplies all of the block's pages with the rows from `from` on; a lane's row is `from` + l / 4. `coming` is the
  /// next unit to stage. `scales` and `runs` are read only after the first barrier in here. Returns a lane's largest
  /// logit and sum over its pages.
  __device__ float2 run(staged_unit coming, const logit_rule& rule, const page_choice& c, const float* scales,
                        const slot_run* runs, index_t from, const page_scratch& to) const {
    const index_t r = from + lane / 4;
    float2 found = make_float2(-infinity, 0);
    float acc[tile_width / 8][4] = {};
    float* const row_logits = to.logits_of(block_share.row, 0);
    staged_unit unit;
#pragma unroll 1
    for (; there(unit); go_on(unit)) {
      const index_t local = unit.page + warp * tile_width;
      const bool works = warp * tile_width < ring_pages && block_share.begin + local < block_share.end;
      wait_copies<stages - 1>();
      __syncthreads();  // every thread's copies of this unit are there; before the first, so are weights, scales, runs
      if (works) multiply_unit(unit, acc);
      if (there(coming)) {
        __syncthreads();  // all have read the unit that the next one overwrites
        stage(coming);
      } else {
        commit_copies();
      }
      if (unit.step + unit_steps < steps || !works) continue;
      if (r < block_share.rows) {
        const slot_run run = runs[c.by_group.quotient(r)];
        finish_tile(rule, scales[r], run, (min)(run.end, block_share.n), r, to.stride, row_logits, local, acc, found);
      }
#pragma unroll
      for (int j = 0; j < tile_width / 8; ++j) acc[j][0] = acc[j][1] = 0;
    }
    return found;
  }
};

/// Folds the newest slots into their pages, in the block that has those pages. A single slot's elements are loaded
/// along with all other loads from memory, and used when they have arrived.
template <class View>
struct newest_slots {
  using T = typename View::element_type;
  static constexpr int D = View::k_dim;
  int channel;  // the last D threads have one each
  bool folds;
  index_t page;  // of the newest slot
  T added{}, low{}, high{};

  __device__ newest_slots(const page_problem<View>& p, const read_plan& plan, const cluster_share& at, int thread)
      : channel(thread - (cluster_threads - D)),
        folds(p.unfolded > 0 && at.n > 0 && at.begin < at.end && offset_t(at.end) * plan.page > at.n - p.unfolded &&
              channel >= 0),
        page(plan.page_of((max)(at.n - 1, 0))) {
    if (!folds || p.unfolded != 1) return;
    added = p.view.key_element(at.sequence, at.head, at.n - 1, channel);
    if (plan.page == 1) return;
    low = p.index.lower(at.row, channel)[page], high = p.index.upper(at.row, channel)[page];
  }
  __device__ void fold(const page_problem<View>& p, const cluster_share& at) const {
    if (!folds) return;
    if (p.unfolded != 1) {
      fold_slots(p.view, at.sequence, at.head, p.index, p.plans[at.sequence], (max)(0, at.n - p.unfolded), at.n,
                 at.begin, at.end, channel);
    } else if (at.page == 1) {
      p.index.lower(at.row, channel)[page] = added;
    } else {
      const bool first = page * at.page == at.n - 1;
      p.index.lower(at.row, channel)[page] = T(lower_with(first ? not_a_number : float(low), float(added)));
      p.index.upper(at.row, channel)[page] = T(upper_with(first ? not_a_number : float(high), float(added)));
    }
  }
};

/// All blocks of a group (a cluster, or a block alone) choose together. Each block has a share of a row's pages and
/// sends their keys to all other blocks. Every block finds the cut, and calls put(index, slot) for the chosen slots of
/// its share. If the first block has written the choice and `put` was not called, `run` returns false in all blocks. It
/// sets `read` to the tokens that the row's plan attends, and `newest_position` to the position of the newest token.
/// `Attends`: the launch also attends the chosen slots. Rows then have at most `cluster_rows` queries, so nothing is
/// stored for a second group of queries.
template <class View, class Scorer, bool Alone, bool Attends = false>
struct cluster_choice {
  using T = typename View::element_type;
  using blocks_of = block_group<Alone>;
  using shared = cluster_shared<T, View::k_dim>;
  using pointers = typename shared::pointers;
  static constexpr int D = View::k_dim, threads = cluster_threads, warps = cluster_warps;
  // Parts and ranges of keys that a lane merges: one of each of the group's warps.
  static constexpr int merged = ((Alone ? 1 : max_cluster_blocks) * warps + 31) / 32;

  const page_problem<View>& p;
  const Scorer& scorer;
  const page_choice& c;
  const page_scratch& scratch;
  const cluster_layout& layout;
  page_choice_storage& s;
  cluster_query<D>& queries;
  const int thread = int(threadIdx.x), lane = thread % 32, warp = __shfl_sync(~0u, thread / 32, 0);
  const int rank = blocks_of::rank(), blocks = blocks_of::blocks();

  template <class Put>
  __device__ bool run(unsigned char* bytes, index_t& read, index_t& newest_position, const Put& put) const {
    begin();
    // --- everything that comes from memory is loaded before the first of it is used ---
    cluster_share at;
    at.head = index_t(blockIdx.y), at.sequence = index_t(blockIdx.z);
    at.row = at.sequence * p.view.kv_heads + at.head;
    at.group = c.group, at.rows = c.tokens * at.group;
    if (thread < at.rows) queries.usable[thread] = true;
    cluster_columns<View, Scorer> columns(p, scorer, c, queries, thread, lane, warp);
    const read_plan plan = load_plan(p.plans + at.sequence);
    at.n = p.view.length(at.sequence, at.head), at.page = plan.page;
    const index_t position = p.first_position[at.sequence], room = p.index.capacity_of(at.row);
    columns.load(at);
    const index_t last = p.view.positions && at.n > 0 ? p.view.position(at.sequence, at.head, at.n - 1) : at.n - 1;
    const page_bounds bounds(c, plan, at.n);
    const index_t share = (((bounds.pages + blocks - 1) >> blocks_of::log_blocks()) + 31) / 32 * 32;
    at.begin = (min)(rank * share, bounds.pages), at.end = (min)(at.begin + share, bounds.pages);
    at.fits = share <= layout.share;
    const newest_slots<View> newest(p, plan, at, thread);
    const pointers memory(bytes, layout, at.rows, blocks);

    // --- which channels, and where their columns lie ---
    const int channels = (min)(plan.channels, index_t(D));
    columns.sum(at, memory.q);
    columns.rank(channels);
    columns.lay_out(at, memory, channels, room);
    newest.fold(p, at);
    // Behind it: columns are laid out, and this block's pages are up to date.
    const bool both = __syncthreads_or(columns.sides == 3);
    read = plan.read, newest_position = last;
    if (at.n <= plan.read) {
      if (rank == 0) choose_all(c, at.row, at.n);
      blocks_of::wait_for_start();
      return false;
    }
    const even_items even(c, plan, at.row, bounds);
    estimate(at, memory, columns, bounds.limit, (both ? 2 : 1) * columns.second / step_columns, position, last);
    const bool uniform = s.uniform;
    if (at.fits && uniform) make_keys(at, memory, bounds, even);
    if (!at.fits || !uniform || c.mass || bounds.whole() || bounds.units_to_choose == 0) {
      blocks_of::arrive();  // logits in device memory are seen behind it
      blocks_of::wait();
      if (rank == 0) choose_by_first(at, memory, bounds, even, uniform);
      return false;
    }
    if (rank == 0) write_forced(bounds, put);
    if (at.begin < even.items) {
      const uint2 range = all_keys(memory);
      constexpr int at_once = Attends ? keys_at_once_with_attention : keys_at_once;
      const key_range cut = find_cut<at_once>(s, even, memory.keys, range.x, range.y, unsigned(bounds.units_to_choose));
      write_chosen<at_once>(s, even, bounds, plan.page, memory.keys, cut, at.begin, (min)(at.end, even.items), put);
    }
    return true;
  }

 private:
  /// Does the part that reads nothing an earlier launch may still write.
  __device__ void begin() const {
    if (thread == 0) {
      blocks_of::begin(queries.parts), blocks_of::begin(queries.keys);
      blocks_of::begin(queries.slots), blocks_of::begin(queries.outputs);
    }
    blocks_of::say_started();
    touch_parameter(p), touch_parameter(c), touch_parameter(scratch);
    for (int bin = thread; bin < page_choice_storage::bins; bin += threads) s.histogram[bin] = 0;
    wait_for_earlier();
    let_later_begin();
  }

  /// Logits of the block's pages, and every row's softmax over all blocks' pages.
  __device__ void estimate(const cluster_share& at, const pointers& memory,
                           const cluster_columns<View, Scorer>& columns, index_t limit, int steps, index_t position,
                           index_t last) const {
    const cluster_products<View, Scorer> products(at, memory, p.index.lower(at.row, 0), layout, steps, lane, warp);
    const int parts_each = blocks * warps;
    for (index_t from = 0; from < (Attends ? 1 : at.rows); from += cluster_rows) {
      const index_t r = from + lane / 4;
      const bool mine = r < at.rows;
      if (from > 0) __syncthreads();  // the previous rows' weights are no longer read
      staged_unit coming;
#pragma unroll 1
      for (int i = 0; i < stages; ++i) products.stage(coming);
      // While they come: weights, scales and visible slots. The products' first barrier lies before all who read these.
      columns.weigh(at, memory, from);
      if (from == 0) {
        columns.scale_rows(at, memory.q);
        if (warp < c.tokens) {
          const slot_run run = visible_run(p.view, at.sequence, at.head, p.rule, at.n, last, position + warp, lane);
          if (lane == 0) s.runs[warp] = run;
        }
        if (at.begin >= at.end) __syncthreads();  // no products: the same for what is done without them
      }
      const float2 found = products.run(coming, p.rule, c, queries.scale, s.runs, from, scratch);
      // The last warp does it: it has pages to multiply only if shares are long.
      if (from == 0 && warp == warps - 1) find_cuts(s, c, p.plans[at.sequence], limit);
      if (from == 0) blocks_of::wait_for_start();
      send_parts(memory, found, mine, r, parts_each);
    }
    if (thread == 0) blocks_of::expect(queries.parts, at.rows * parts_each * index_t(sizeof(float2)));
    __syncthreads();  // this block's logits, cuts and, of a block alone, parts are visible to its warps
    if constexpr (!Alone) blocks_of::wait_for(queries.parts);  // what the blocks have sent
    if (at.fits && (!s.uniform || c.mass)) {                   // pages of one slot are looked up in device memory
#pragma unroll 1
      for (index_t r = 0; r < at.rows; ++r) {
#pragma unroll 1
        for (index_t i = thread; at.begin + i < at.end; i += threads)
          scratch.logits_of(at.row, r)[at.begin + i] = memory.logits[r * layout.share + i];
      }
    }
    merge_parts(at, memory, parts_each);
    __syncthreads();  // every row's softmax is there
  }

  /// Sends to all blocks what a warp's lanes have found for a row; four lanes have one row.
  __device__ void send_parts(const pointers& memory, const float2& found, bool mine, index_t r, int parts_each) const {
    const float highest = fmaxf(fmaxf(found.x, __shfl_xor_sync(~0u, found.x, 1)),
                                fmaxf(__shfl_xor_sync(~0u, found.x, 2), __shfl_xor_sync(~0u, found.x, 3)));
    float all = highest > -infinity ? found.y * fast_exp(found.x - highest) : 0.0f;
    all += __shfl_xor_sync(~0u, all, 1);
    all += __shfl_xor_sync(~0u, all, 2);
    if (!mine) return;
    const float2 part = queries.usable[r] ? make_float2(highest, all) : make_float2(-infinity, 0);
#pragma unroll 1
    for (int of = lane % 4; of < blocks; of += 4)
      blocks_of::send(memory.parts + r * parts_each + rank * warps + warp, of, part, queries.parts);
  }

  __device__ void merge_parts(const cluster_share& at, const pointers& memory, int parts_each) const {
#pragma unroll 1
    for (index_t r = warp; r < at.rows; r += warps) {
      float2 mine[merged];
      float highest = -infinity;
#pragma unroll
      for (int i = 0; i < merged; ++i) {
        mine[i] = i * 32 + lane < parts_each ? memory.parts[r * parts_each + i * 32 + lane] : make_float2(-infinity, 0);
        highest = fmaxf(highest, mine[i].x);
      }
      finish_row(s, c, at.row, r, warp_max(highest), [&](float largest) {
        float sum = 0;
#pragma unroll
        for (int i = 0; i < merged; ++i) {
          if (mine[i].y > 0) sum += mine[i].y * fast_exp(mine[i].x - largest);
        }
        return sum;
      });
    }
  }

  /// Sends the keys of the block's pages, and their range, to all blocks. Each page is visible as a whole or not at
  /// all.
  __device__ void make_keys(const cluster_share& at, const pointers& memory, const page_bounds& bounds,
                            const even_items& even) const {
    unsigned low = ~0u, high = 0;
#pragma unroll 1
    for (index_t first = warp * 32; at.begin + first < at.end; first += threads) {
      const index_t i = first + lane;
      float sum = 0;
      bool any = false;
#pragma unroll 1
      for (index_t t = 0; t < c.tokens; ++t) {
        if (!s.sees[t]) continue;
        any = true;
#pragma unroll 4
        for (index_t r = t * at.group; r < (t + 1) * at.group; ++r) {
          const row_softmax of = s.softmax[r];
          const float weight = of.weigh(memory.logits[r * layout.share + i], Scorer::normalised);
          sum += of.speaks ? weight : 0.0f;
        }
      }
      const unsigned key = ordered_bits(any ? sum : -infinity);
      if (at.begin + i < even.items) low = (min)(low, key), high = (max)(high, key);
      memory.keys[at.begin + i] = key;  // shares are whole tiles of 32: what is behind the last page is never read
      if constexpr (!Alone) {
        __syncwarp();  // the warp's keys are there: it sends them by fours
#pragma unroll 1
        for (int j = lane; j < 8 << blocks_of::log_blocks(); j += 32) {
          const int of = j & (blocks - 1);
          const index_t four = first + (j >> blocks_of::log_blocks()) * 4;
          if (of == rank || at.begin + four >= at.end) continue;
          uint4* const mine = reinterpret_cast<uint4*>(memory.keys + at.begin + four);
          blocks_of::send(mine, of, *mine, queries.keys);
        }
      }
    }
    if (thread == 0) {
      const index_t others = ceil_div(bounds.pages, 4) - ceil_div(at.end - at.begin, 4);
      blocks_of::expect(queries.keys, others * index_t(sizeof(uint4)) + blocks * warps * index_t(sizeof(uint2)));
    }
    low = __reduce_min_sync(~0u, low), high = __reduce_max_sync(~0u, high);
    if (lane < blocks) blocks_of::send(memory.ranges + rank * warps + warp, lane, make_uint2(low, high), queries.keys);
    if constexpr (!Alone) __syncthreads();  // this block's keys are there
    blocks_of::wait_for(queries.keys);      // and those of the others, and the ranges of all warps
  }

  /// The smallest and the largest of all keys.
  __device__ uint2 all_keys(const pointers& memory) const {
    unsigned low = ~0u, high = 0;
#pragma unroll
    for (int i = 0; i < merged; ++i) {
      const uint2 range = i * 32 + lane < blocks * warps ? memory.ranges[i * 32 + lane] : make_uint2(~0u, 0);
      low = (min)(low, range.x), high = (max)(high, range.y);
    }
    return make_uint2(__reduce_min_sync(~0u, low), __reduce_max_sync(~0u, high));
  }

  /// The rare case: the first block chooses alone, by logits in device memory.
  __device__ void choose_by_first(const cluster_share& at, const pointers& memory, const page_bounds& bounds,
                                  const even_items& even, bool uniform) const {
    const index_t items = uniform ? even.items : even.items + (bounds.tokens ? s.cut_count : 0);
    const page_items of{s, c, scratch, p.plans[at.sequence], at.row, bounds.limit, items, bounds.tokens};
    unsigned* const keys = at.fits ? memory.keys : c.keys + at.row * c.key_stride;
    choose_row(s, of, bounds, keys, uniform && at.fits);
  }
};

template <class View, class Scorer, bool Alone>
__global__ void __launch_bounds__(cluster_threads, 1)
    cluster_pages_entry(const __grid_constant__ page_problem<View> p, Scorer scorer,
                        const __grid_constant__ page_choice c, const __grid_constant__ page_scratch to,
                        const __grid_constant__ cluster_layout layout) {
  extern __shared__ uint4 page_memory[];
  __shared__ page_choice_storage s;
  __shared__ cluster_query<View::k_dim> queries;
  index_t* const out = c.out + (index_t(blockIdx.z) * p.view.kv_heads + index_t(blockIdx.y)) * c.out_stride;
  const cluster_choice<View, Scorer, Alone> choice{p, scorer, c, to, layout, s, queries};
  index_t read, newest;
  choice.run(reinterpret_cast<unsigned char*>(page_memory), read, newest,
             [&](index_t place, index_t slot) { out[place] = slot; });
}

}  // namespace detail
}  // namespace cuda
TESSERA_NAMESPACE_END
