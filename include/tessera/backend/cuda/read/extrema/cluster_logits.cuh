// Logits of a block's share of pages, by matrix products over staged columns of the index.
#pragma once

#include "../../device/mma.cuh"
#include "page_cluster_memory.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {
namespace detail {

/// What is staged at once: `unit_steps` times 16 columns of `layout.ring` pages. A ring of three such units is filled
/// ahead of the products.
struct staged_unit {
  index_t page = 0;      // the first, from the block's first
  int step = 0;          // the first
  std::uint32_t at = 0;  // in the ring
};

template <class View, class Scorer>
struct cluster_products {
  using T = typename View::element_type;
  using shared = cluster_shared<T, View::k_dim>;
  using pointers = typename shared::pointers;
  static constexpr int steps_at_once = staged_columns / step_columns, warps = cluster_warps;

  const cluster_share& at;
  const pointers& memory;
  const T* const first_column;
  const index_t share, ring_pages;
  const int steps, unit_steps, pitch, lane, warp;
  const std::uint32_t ring_bytes;

  /// `steps`: of 16 columns, of all that is read.
  __device__ cluster_products(const cluster_share& at_, const pointers& memory_, const T* first_column_,
                              const cluster_layout& layout, int steps_, int lane_, int warp_)
      : at(at_),
        memory(memory_),
        first_column(first_column_),
        share(layout.share),
        ring_pages(layout.ring),
        steps(steps_),
        // Where one group of pages is all, a unit has all columns that the ring can hold.
        unit_steps(at_.end - at_.begin <= layout.ring && steps_ <= stages * steps_at_once ? steps_ : steps_at_once),
        pitch(shared::staged_pitch(layout.ring)),
        lane(lane_),
        warp(warp_),
        ring_bytes(std::uint32_t(stages * staged_columns * pitch)) {}

  __device__ bool there(const staged_unit& unit) const { return at.begin + unit.page < at.end; }
  __device__ void go_on(staged_unit& unit) const {
    unit.step += unit_steps;
    if (unit.step >= steps) unit.step = 0, unit.page += ring_pages;
    unit.at += std::uint32_t(staged_columns * pitch);
    if (unit.at == ring_bytes) unit.at = 0;
  }

  /// Starts a unit on its way, or nothing behind the last one.
  __device__ void stage(staged_unit& unit) const {
    const index_t from_page = at.begin + unit.page, pages = (min)(ring_pages, at.end - from_page);
    if (pages > 0) {
      const int from = unit.step * step_columns, count = (min)(unit_steps * step_columns, steps * step_columns - from);
#pragma unroll 2
      for (int i = warp; i < count; i += warps) {
        const int column = memory.columns[from + i];
        const T* const source = first_column + (max)(column, 0) + from_page;
#pragma unroll 1
        for (int chunk = lane; chunk * 8 < pages; chunk += 32) {
          // Zeros where there is no column: memory may hold anything.
          copy_async16(memory.ring + unit.at + std::uint32_t(i * pitch + chunk * 16), source + chunk * 8, column >= 0);
        }
      }
      go_on(unit);
    }
    commit_copies();
  }

  /// Adds the products of a staged unit with this warp's 32 pages. All loads, then all products: neither waits for one
  /// of the other kind.
  __device__ void multiply_unit(const staged_unit& unit, float (&acc)[tile_width / 8][4]) const {
    std::uint32_t from = memory.ring + unit.at + std::uint32_t(lane % 16 * pitch) +
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

  /// A lane's part of a row: pages 8 j + 2 (l % 4) and the next one, j < 4, of the row l / 4 of this warp's 32 pages,
  /// which begin `local` behind the block's first. Their products become logits, and `found` takes them in: the largest
  /// that is seen, and the sum over seen slots of exp(logit - largest).
  __device__ void finish_tile(const logit_rule& rule, float scale, const slot_run& run, index_t last_slot, index_t r,
                              index_t row_stride, float* row_logits, index_t local,
                              const float (&acc)[tile_width / 8][4], float2& found) const {
    const index_t first = local + lane % 4 * 2, page = at.page;
    // Whether all of the tile is there, whole, and seen.
    const bool plain = at.begin + local + tile_width <= at.end && run.begin <= (at.begin + local) * page &&
                       (at.begin + local + tile_width) * page <= last_slot;
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
        const index_t i = at.begin + first + j / 2 * 8 + j % 2;
        seen[j] = i < at.end ? float((min)(last_slot, (i + 1) * page) - (max)(run.begin, i * page)) : 0.0f;
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
      if (at.fits) {
        *reinterpret_cast<float2*>(memory.logits + r * share + first + j * 8) = make_float2(x[j * 2], x[j * 2 + 1]);
      } else if (at.begin + first + j * 8 < at.end) {  // to device memory; rows have an even stride
        *reinterpret_cast<float2*>(row_logits + r * row_stride + at.begin + first + j * 8) =
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

  /// All of the block's pages with the rows from `from` on, a lane's row being `from` + l / 4; `coming` is the next
  /// unit to stage. `scales` and `runs` are read behind the first barrier here. Returns what a lane has found in its
  /// pages.
  __device__ float2 run(staged_unit coming, const logit_rule& rule, const page_choice& c, const float* scales,
                        const slot_run* runs, index_t from, const page_scratch& to) const {
    const index_t r = from + lane / 4;
    float2 found = make_float2(-infinity, 0);
    float acc[tile_width / 8][4] = {};
    float* const row_logits = to.logits_of(at.row, 0);
    staged_unit unit;
#pragma unroll 1
    for (; there(unit); go_on(unit)) {
      const index_t local = unit.page + warp * tile_width;
      const bool works = warp * tile_width < ring_pages && at.begin + local < at.end;
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
      if (r < at.rows) {
        const slot_run run = runs[c.by_group.quotient(r)];
        finish_tile(rule, scales[r], run, (min)(run.end, at.n), r, to.stride, row_logits, local, acc, found);
      }
#pragma unroll
      for (int j = 0; j < tile_width / 8; ++j) acc[j][0] = acc[j][1] = 0;
    }
    return found;
  }
};

}  // namespace detail
}  // namespace cuda
TESSERA_NAMESPACE_END
