// Paged retrieval of one row by one cluster of thread blocks: logits, softmax and choice in a single launch.
#pragma once

#include "../../device/cluster.cuh"
#include "../../device/launch.cuh"
#include "../../device/mma.cuh"
#include "page_cluster_memory.cuh"
#include "page_select.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {
namespace detail {
/// Chooses by all blocks of a cluster. Each has a share of a row's pages and hands their keys to all others; all find the
/// cut, and each calls put(place, slot) for what is chosen of its own. Returns false in all blocks where the first one has
/// written the choice and nothing was put.
template <class View, class Scorer, class Put>
__device__ bool cluster_choose(const page_problem<View>& p, const Scorer& scorer, const page_choice& c,
                               const page_scratch& to, page_choice_storage& s, cluster_query<View::k_dim>& asked,
                               unsigned char* bytes, const Put& put) {
  using T = typename View::element_type;
  constexpr int D = View::k_dim, chunks = D / 8, threads = cluster_threads, warps = cluster_warps;
  using shared = cluster_shared<T, D>;
  const int thread = int(threadIdx.x), lane = thread % 32, warp = __shfl_sync(~0u, thread / 32, 0);
  if (thread == 0) asked.parts.begin(), asked.keys.begin(), asked.slots.begin(), asked.outputs.begin();
  cluster_arrive_relaxed();  // answered before anything is written to another block
  const int rank = int(blockIdx.x), blocks = int(gridDim.x);
  const index_t head = index_t(blockIdx.y), sequence = index_t(blockIdx.z), row = sequence * p.view.kv_heads + head;
  const index_t group = c.group, rows = c.tokens * group;
  const quick_divisor& by_group = c.by_group;
  const auto token_of = [&](index_t r) { return by_group.quotient(r); };
  touch_parameter(p), touch_parameter(c), touch_parameter(to);
  for (int bin = thread; bin < page_choice_storage::bins; bin += threads) s.histogram[bin] = 0;
  if (thread < rows) asked.usable[thread] = true;
  wait_for_earlier();
  let_later_begin();

  // All that must come from memory is asked for before the first of it is used: q by channel, for the sums, and by row.
  const auto q_of = [&](index_t r) {
    const index_t token = token_of(r);
    return p.q.row(sequence, token, head * group + r - token * group);
  };
  constexpr int sum_threads = (D + 31) / 32 * 32, rest = threads - sum_threads;
  constexpr int held_rows = 4;
  T own[held_rows];
  uint4 chunk = make_uint4(0, 0, 0, 0);
  const int first_chunk = thread - sum_threads;
  if (thread < D) {
#pragma unroll
    for (int r = 0; r < held_rows; ++r) own[r] = r < rows ? q_of(r)[thread] : T(0.0f);
  } else if (first_chunk >= 0 && first_chunk < rows * chunks) {
    chunk = __ldg(reinterpret_cast<const uint4*>(q_of(first_chunk / chunks) + first_chunk % chunks * 8));
  }
  const index_t n = p.view.length(sequence, head), page = p.index.page, position = p.first_position[sequence];
  const T* const first_column = p.index.lower(row, 0);
  const index_t room = p.index.pages_of_room(row);
  const index_t last = p.view.positions && n > 0 ? p.view.position(sequence, head, n - 1) : n - 1;

  const page_bounds bounds(c, to.read, n);
  const int log_blocks = 31 - __clz(blocks);
  const index_t share = (((bounds.pages + blocks - 1) >> log_blocks) + 31) / 32 * 32;
  const index_t begin = min(rank * share, bounds.pages), end = min(begin + share, bounds.pages);
  // Who has the newest slots' pages takes the slots in. What a single one needs is asked for now and used when it is there.
  const int channel = thread - (threads - D);
  const bool folds = p.unfolded > 0 && n > 0 && begin < end && offset_t(end) * page > n - p.unfolded && channel >= 0;
  T fresh{}, extremes[2]{};
  const index_t newest = c.by_page.quotient(max(n - 1, 0));
  if (folds && p.unfolded == 1) {
    fresh = p.view.key(sequence, head, n - 1)[channel * p.view.k_strides.dim];
    extremes[0] = p.index.lower(row, channel)[newest], extremes[1] = p.index.upper(row, channel)[newest];
  }
  const auto fold = [&] {
    if (!folds) return;
    if (p.unfolded == 1) {
      const bool first = newest * page == n - 1;
      const float with = float(fresh);
      p.index.lower(row, channel)[newest] = T(lower_with(first ? not_a_number : float(extremes[0]), with));
      p.index.upper(row, channel)[newest] = T(upper_with(first ? not_a_number : float(extremes[1]), with));
    } else {
      fold_slots(p.view, sequence, head, p.index, max(0, n - p.unfolded), n, begin, end, channel);
    }
  };
  unsigned* const keys = reinterpret_cast<unsigned*>(bytes);  // of all pages
  const auto columns =
      reinterpret_cast<int*>(bytes + shared::columns_at(share, blocks));  // elements from the first; or -1
  const auto weights = reinterpret_cast<T*>(bytes + shared::weights_at(share, blocks));         // [cluster_rows, pitch]
  T* const q = reinterpret_cast<T*>(bytes + shared::q_at(share, blocks));                       // [rows, D]
  const auto parts = reinterpret_cast<float2*>(bytes + shared::parts_at(rows, share, blocks));  // [rows, blocks, warps]
  float* const logits = reinterpret_cast<float*>(bytes + shared::logits_at(rows, share, blocks));  // [rows, share]
  const int parts_each = blocks * warps;
  uint2* const ranges = reinterpret_cast<uint2*>(parts + rows * parts_each);  // [blocks, warps], of keys

  bool bad = false;
  if (first_chunk >= 0) {
#pragma unroll 1
    for (int i = first_chunk; i < rows * chunks; i += rest) {
      if (i != first_chunk) chunk = __ldg(reinterpret_cast<const uint4*>(q_of(i / chunks) + i % chunks * 8));
      reinterpret_cast<uint4*>(q)[i] = chunk;
    }
  }
  if (thread < D) {
    float weight = 0, total = 0;  // with the CPU's order of the rows
    const auto add = [&](const T& element) {
      const float x = float(element);
      bad |= !is_finite(x);
      weight += std::abs(x), total += x;
    };
#pragma unroll
    for (int r = 0; r < held_rows; ++r) add(own[r]);  // a zero where there is no row
#pragma unroll 1
    for (index_t r = held_rows; r < rows; ++r) add(q_of(r)[thread]);
    asked.weight[thread] = ordered_bits(weight), asked.total[thread] = total;
  }
  if (__syncthreads_or(bad)) {  // again without the rows that are not finite
#pragma unroll 1
    for (index_t r = warp; r < rows; r += warps) {
      bool finite = true;
      for (int d = lane; d < D; d += 32) finite &= is_finite(float(q[r * D + d]));
      if (!finite) asked.usable[r] = false;
    }
    __syncthreads();
    if (thread < D) {
      float weight = 0, total = 0;
#pragma unroll 1
      for (index_t r = 0; r < rows; ++r) {
        const float x = asked.usable[r] ? float(q[r * D + thread]) : 0.0f;
        weight += std::abs(x), total += x;
      }
      asked.weight[thread] = ordered_bits(weight), asked.total[thread] = total;
    }
    __syncthreads();
  }

  // A channel's place is the number of those before it: `ranked_by` neighbouring threads compare it with a part each.
  constexpr int ranked_by = D <= 64 ? 8 : D <= 128 ? 4 : 2, quads = D / 4 / ranked_by;
  static_assert(D % (4 * ranked_by) == 0 && D * ranked_by <= threads);
  const int channels = min(int(scorer.channels), D), second = (channels + 15) / 16 * 16;
  const int d = thread / ranked_by, part = thread % ranked_by;
  const bool ranks = d < D;
  int place = ranks ? d : D;
  if (channels < D) {
    int before = 0;
    if (ranks) {
      // Of equal ones the lower channel comes first: those below d count from its own weight on, the others above it.
      const unsigned weight = asked.weight[d];
#pragma unroll
      for (int i = 0; i < quads; ++i) {
        const int at = part * quads + (i + part) % quads;  // parts begin in different banks
        const uint4 others = reinterpret_cast<const uint4*>(asked.weight)[at];
        const unsigned least = weight + unsigned(at >= d / 4);
        before += (others.x >= least) + (others.y >= least) + (others.z >= least) + (others.w >= least);
      }
#pragma unroll 1
      for (int at = d / 4 * 4 + part; at < d; at += ranked_by) before += asked.weight[at] == weight;  // in its own four
    }
#pragma unroll
    for (int step = 1; step < ranked_by; step *= 2) before += __shfl_xor_sync(~0u, before, step);
    if (ranks) place = before;
  }

  // The columns of a channel, and what each row makes of them: first the side that some row takes, then the other, where
  // rows differ. Either half is padded to whole products.
  const bool chosen = ranks && place < channels;
  bool lower = false, upper = false;
  const float total = ranks ? asked.total[d] : 0.0f;
  if (chosen) {
#pragma unroll 1
    for (index_t r = part; r < rows; r += ranked_by) {
      const bool above = scorer.takes_upper(float(q[r * D + d]), total);
      lower |= asked.usable[r] && !above;
      upper |= asked.usable[r] && above;
    }
  }
  unsigned sides = unsigned(lower) | unsigned(upper) << 1;
#pragma unroll
  for (int step = 1; step < ranked_by; step *= 2) sides |= __shfl_xor_sync(~0u, sides, step);
  const auto weigh_rows = [&](index_t from) {
#pragma unroll 1
    for (index_t r = part; r < min(index_t(cluster_rows), rows - from); r += ranked_by) {
      const T x = asked.usable[from + r] ? q[(from + r) * D + d] : T(0.0f);
      const bool first = scorer.takes_upper(float(x), total) ? (sides & 1) == 0 : (sides & 1) != 0;
      weights[r * shared::pitch + place] = first ? x : T(0.0f);
      weights[r * shared::pitch + second + place] = first ? T(0.0f) : x;
    }
  };
  if (chosen) {
    if (part == 0) {
      columns[place] = ((sides & 1) != 0 ? d : D + d) * room;
      columns[second + place] = sides == 3 ? (D + d) * room : -1;
    }
  }
  if (ranks && part == 0) asked.taken[d] = chosen;
#pragma unroll 1
  for (int i = thread; i < (second - channels) * cluster_rows; i += threads) {
    const int at = channels + i / cluster_rows;
    columns[at] = columns[second + at] = -1;
    weights[i % cluster_rows * shared::pitch + at] = T(0.0f);  // for all groups of rows
    weights[i % cluster_rows * shared::pitch + second + at] = T(0.0f);
  }
  fold();
  const int steps = (__syncthreads_or(sides == 3) ? 2 * second : second) / step_columns;
  if (n <= to.read) {
    if (rank == 0) choose_all(c, row, n);
    cluster_wait();
    return false;
  }

  // The block stages 64 columns of 384 pages at once, or more of fewer pages. A warp multiplies those of 32 pages.
  constexpr int steps_at_once = staged_columns / step_columns;
  // Of a unit: where one group of pages is all, it has all columns that the ring can hold.
  const int unit_steps = end - begin <= staged_pages && steps <= stages * steps_at_once ? steps : steps_at_once;
  const int pitch = shared::staged_pitch(share);
  const std::uint32_t ring = shared_address(bytes), ring_bytes = std::uint32_t(stages * staged_columns * pitch);
  struct staged_unit {
    index_t page;      // the first, from the block's first
    int step;          // the first
    std::uint32_t at;  // in the ring
  };
  const auto go_on = [&](staged_unit& unit) {
    unit.step += unit_steps;
    if (unit.step >= steps) unit.step = 0, unit.page += staged_pages;
    unit.at += std::uint32_t(staged_columns * pitch);
    if (unit.at == ring_bytes) unit.at = 0;
  };
  const auto stage = [&](staged_unit& unit) {
    const index_t from_page = begin + unit.page, pages = min(index_t(staged_pages), end - from_page);
    if (pages > 0) {
      const int from = unit.step * step_columns, count = min(unit_steps * step_columns, steps * step_columns - from);
#pragma unroll 2
      for (int at = warp; at < count; at += warps) {
        const int column = columns[from + at];
        const T* const source = first_column + max(column, 0) + from_page;
#pragma unroll 1
        for (int chunk = lane; chunk * 8 < pages; chunk += 32) {
          // Zeros where there is no column: memory may hold anything.
          copy_async16(ring + unit.at + std::uint32_t(at * pitch + chunk * 16), source + chunk * 8, column >= 0);
        }
      }
      go_on(unit);
    }
    commit_copies();
  };
  for (index_t from_row = 0; from_row < rows; from_row += cluster_rows) {
    const index_t held = min(index_t(cluster_rows), rows - from_row), r = from_row + lane / 4;
    if (from_row > 0) __syncthreads();
    staged_unit coming{0, 0, 0}, unit = coming;
#pragma unroll 1
    for (int i = 0; i < stages; ++i) stage(coming);
    // While they come: weights, scales and visible slots.
    if (chosen) weigh_rows(from_row);
    if (from_row == 0) {
#pragma unroll 1
      for (index_t of = warps - 1 - warp; of < rows; of += warps) {
        float some = 0, whole = 0;  // summed alike: equal to the bit where all channels are chosen
#pragma unroll 1
        for (int i = lane; i < D; i += 32) {
          const float x = std::abs(float(q[of * D + i]));
          whole += x;
          some += asked.taken[i] ? x : 0.0f;
        }
        const float2 sums = warp_sum(make_float2(some, whole));
        const float scale = scorer.row_scale(p.rule.scale_for(D), sums.x, sums.y);
        if (lane == 0) asked.scale[of] = scale;
      }
      if (warp < c.tokens) {
        const slot_run run = visible_run(p.view, sequence, head, p.rule, n, last, position + warp, lane);
        if (lane == 0) s.runs[warp] = run;
      }
      __syncthreads();
      if (warp == warps - 1) find_cuts(s, c, bounds.limit);
    }
    const bool mine = lane / 4 < held;
    const float scale = mine ? asked.scale[r] : 0.0f;
    const slot_run run = mine ? s.runs[token_of(r)] : slot_run{0, 0};
    const index_t last_slot = min(run.end, n);
    float top = -infinity, sum = 0;
    float acc[tile_width / 8][4] = {};
#pragma unroll 1
    for (; begin + unit.page < end; go_on(unit)) {
      const index_t local = unit.page + warp * tile_width;
      const bool works = warp < staged_pages / tile_width && begin + local < end;
      wait_copies<stages - 1>();
      __syncthreads();
      if (works) {  // all loads, then all products: neither waits for one of the other kind
        std::uint32_t here = ring + unit.at + std::uint32_t(lane % 16 * pitch) +
                             std::uint32_t((warp * tile_width + lane / 16 * 8) * int(sizeof(T)));
        const T* weight = weights + lane / 4 * shared::pitch + unit.step * step_columns + lane % 4 * 2;
#pragma unroll 1
        for (int count = min(unit_steps, steps - unit.step); count > 0; count -= steps_at_once) {
          unsigned a[steps_at_once][2], b[steps_at_once][tile_width / 16][4];
#pragma unroll
          for (int u = 0; u < steps_at_once; ++u) {
            if (u >= count) break;
            a[u][0] = *reinterpret_cast<const unsigned*>(weight + u * step_columns);
            a[u][1] = *reinterpret_cast<const unsigned*>(weight + u * step_columns + 8);
#pragma unroll
            for (int pair = 0; pair < tile_width / 16; ++pair) {
              // Columns 0 to 7 and 8 to 15 of eight pages, then of the next eight.
              load_matrices_transposed(b[u][pair], here + std::uint32_t(u * step_columns * pitch + pair * 32));
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
          here += std::uint32_t(staged_columns * pitch), weight += staged_columns;
        }
      }
      if (begin + coming.page < end) {
        __syncthreads();
        stage(coming);
      } else {
        commit_copies();
      }
      if (unit.step + unit_steps < steps || !works) continue;
      // A lane has pages 8 j + 2 (l % 4) and the next one, j < 4, of the row l / 4.
      const index_t first = local + lane % 4 * 2;
      if (mine) {
        // Whether all of the tile is there, whole, and seen.
        const bool plain = begin + local + tile_width <= end && run.begin <= (begin + local) * page &&
                           (begin + local + tile_width) * page <= last_slot;
        float x[tile_width / 4], seen[tile_width / 4];
        float highest = top;
#pragma unroll
        for (int j = 0; j < tile_width / 4; ++j) x[j] = scale * acc[j / 2][j % 2], seen[j] = float(page);
        if (Scorer::normalised && p.rule.soft_cap > 0) {
#pragma unroll
          for (int j = 0; j < tile_width / 4; ++j) x[j] = quick_cap(p.rule, x[j]);
        }
        if (!plain) {
#pragma unroll
          for (int j = 0; j < tile_width / 4; ++j) {
            const index_t of = begin + first + j / 2 * 8 + j % 2;
            seen[j] = of < end ? float(min(last_slot, (of + 1) * page) - max(run.begin, of * page)) : 0.0f;
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
          *reinterpret_cast<float2*>(logits + r * share + first + j * 8) = make_float2(x[j * 2], x[j * 2 + 1]);
        }
        if (Scorer::normalised && highest > -infinity) {
          sum *= fast_exp(top - highest);
#pragma unroll
          for (int j = 0; j < tile_width / 4; ++j) {
            const float weight = seen[j] * fast_exp(x[j] - highest);
            sum += seen[j] > 0 ? weight : 0.0f;
          }
        }
        top = highest;
      }
#pragma unroll
      for (int j = 0; j < tile_width / 8; ++j) acc[j][0] = acc[j][1] = 0;
    }
    if (from_row == 0) cluster_wait();
    const float highest = fmaxf(fmaxf(top, __shfl_xor_sync(~0u, top, 1)),
                                fmaxf(__shfl_xor_sync(~0u, top, 2), __shfl_xor_sync(~0u, top, 3)));
    float all = highest > -infinity ? sum * fast_exp(top - highest) : 0.0f;
    all += __shfl_xor_sync(~0u, all, 1);
    all += __shfl_xor_sync(~0u, all, 2);
    if (mine) {
      const float2 found = asked.usable[r] ? make_float2(highest, all) : make_float2(-infinity, 0);
#pragma unroll 1
      for (int of = lane % 4; of < blocks; of += 4)
        send(parts + r * parts_each + rank * warps + warp, of, found, asked.parts);
    }
  }
  if (thread == 0) asked.parts.expect(std::uint32_t(rows * parts_each) * std::uint32_t(sizeof(float2)));
  __syncthreads();  // what this block's warps have left for each other; then what the other blocks' have sent
  asked.parts.wait();
  const bool uniform = s.uniform;
  if (!uniform || c.mass) {  // whoever looks at single slots finds the logits in device memory
#pragma unroll 1
    for (index_t r = 0; r < rows; ++r) {
#pragma unroll 1
      for (index_t i = thread; begin + i < end; i += threads) to.logits_of(row, r)[begin + i] = logits[r * share + i];
    }
  }
#pragma unroll 1
  for (index_t r = warp; r < rows; r += warps) {
    float2 mine[most_cluster_blocks * warps / 32];
    float highest = -infinity;
#pragma unroll
    for (int i = 0; i < most_cluster_blocks * warps / 32; ++i) {
      mine[i] = i * 32 + lane < parts_each ? parts[r * parts_each + i * 32 + lane] : make_float2(-infinity, 0);
      highest = fmaxf(highest, mine[i].x);
    }
    finish_row(s, c, row, r, warp_max(highest), [&](float most) {
      float sum = 0;
#pragma unroll
      for (int i = 0; i < most_cluster_blocks * warps / 32; ++i) {
        if (mine[i].y > 0) sum += mine[i].y * fast_exp(mine[i].x - most);
      }
      return sum;
    });
  }
  __syncthreads();
  const even_items even(c, row, bounds);
  if (uniform) {
    unsigned low = ~0u, high = 0;
#pragma unroll 1
    for (index_t i = thread; i < end - begin; i += threads) {
      float sum = 0;
      bool any = false;
#pragma unroll 1
      for (index_t t = 0; t < c.tokens; ++t) {
        if (!s.sees[t]) continue;
        any = true;
#pragma unroll 4
        for (index_t r = t * group; r < (t + 1) * group; ++r) {
          const row_softmax of = s.softmax[r];
          const float weight = of.weigh(logits[r * share + i], Scorer::normalised);
          sum += of.speaks ? weight : 0.0f;
        }
      }
      const unsigned key = ordered_bits(any ? sum : -infinity);
      if (begin + i < even.items) low = min(low, key), high = max(high, key);
      keys[begin + i] = key;
    }
    __syncthreads();
#pragma unroll 1
    for (int i = thread; i < int(share / 4) << log_blocks; i += threads) {
      const int of = i & (blocks - 1);
      const index_t quad = i >> log_blocks;
      if (of != rank && begin + quad * 4 < end) {
        send(reinterpret_cast<uint4*>(keys + begin) + quad, of, reinterpret_cast<const uint4*>(keys + begin)[quad],
             asked.keys);
      }
    }
    if (thread == 0) {
      const index_t others = ceil_div(bounds.pages, 4) - ceil_div(end - begin, 4);
      asked.keys.expect(std::uint32_t(others) * std::uint32_t(sizeof(uint4)) +
                        std::uint32_t(parts_each) * std::uint32_t(sizeof(uint2)));
    }
    low = __reduce_min_sync(~0u, low), high = __reduce_max_sync(~0u, high);
    if (lane < blocks) send(ranges + rank * warps + warp, lane, make_uint2(low, high), asked.keys);
    asked.keys.wait();
  }
  if (!uniform || c.mass || bounds.whole() || bounds.room == 0) {
    cluster_arrive();  // logits in device memory are seen behind it
    cluster_wait();
    const page_items of{s,
                        c,
                        to,
                        row,
                        bounds.limit,
                        uniform ? even.items : even.items + (bounds.tokens ? s.cut_count : 0),
                        bounds.tokens};
    if (rank == 0) choose_row(s, of, bounds, keys, uniform);
    return false;
  }
  if (rank == 0) write_forced(bounds, put);
  if (begin < even.items) {
    unsigned low = ~0u, high = 0;
#pragma unroll
    for (int i = 0; i < most_cluster_blocks * warps / 32; ++i) {
      const uint2 range = i * 32 + lane < parts_each ? ranges[i * 32 + lane] : make_uint2(~0u, 0);
      low = min(low, range.x), high = max(high, range.y);
    }
    low = __reduce_min_sync(~0u, low), high = __reduce_max_sync(~0u, high);
    const key_range cut = find_cut(s, even, keys, low, high, unsigned(bounds.room));
    write_chosen(s, even, bounds, keys, cut, begin, min(end, even.items), put);
  }
  return true;
}

template <class View, class Scorer>
__global__ void __launch_bounds__(cluster_threads, 1)
    cluster_pages_entry(const __grid_constant__ page_problem<View> p, Scorer scorer,
                        const __grid_constant__ page_choice c, const __grid_constant__ page_scratch to) {
  extern __shared__ uint4 page_memory[];
  __shared__ page_choice_storage s;
  __shared__ cluster_query<View::k_dim> asked;
  index_t* const out = c.out + (index_t(blockIdx.z) * p.view.kv_heads + index_t(blockIdx.y)) * c.out_stride;
  cluster_choose(p, scorer, c, to, s, asked, reinterpret_cast<unsigned char*>(page_memory),
                 [&](index_t place, index_t slot) { out[place] = slot; });
}

}  // namespace detail
}  // namespace cuda
TESSERA_NAMESPACE_END
