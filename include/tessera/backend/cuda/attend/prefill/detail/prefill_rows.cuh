// What all kernels of prefill attention share: everything except the matrix products.
#pragma once

#include "../../../../../math/softmax_state.hpp"
#include "../../../device/mma.cuh"
#include "../../../device/softmax.cuh"
#include "../../../device/warp.cuh"
#include "../../../device/whole_numbers.cuh"
#include "../../attention_problems.cuh"
#include "../../detail/tile_values.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {
namespace detail {

/// The parts of query blocks whose range of tokens is cut into `splits`, so that there are `items` in all: their
/// unnormalised outputs and softmax states. The index of a row is ((head's row * query blocks + query block) * splits +
/// part) * query rows of a block + row.
struct prefill_parts {
  index_t splits = 1, items = 0;
  index_t block_rows = 0;    // query rows of a block
  float* out = nullptr;      // [.., v_dim]
  float2* state = nullptr;   // reference (base 2) and sum
  index_t* taken = nullptr;  // items taken in all, beyond the first of each block; 0 at first; null: fixed order
};

/// A block of Warps * RowTiles * 16 query rows against tiles of Tile tokens, which Copiers warps fetch. A warp's
/// logits, weights and outputs lie in the fragments of 16-row matrix products, RowTiles of them.
template <class View, class Out, int Warps, int RowTiles, int Tile, int Copiers = Warps>
struct prefill_rows {
  using T = typename View::element_type;
  using problem_type = prefill_problem<View, Out>;
  static constexpr int D = View::k_dim, Dv = View::v_dim, warps = Warps, row_tiles = RowTiles, tile = Tile;
  static constexpr int threads = warps * 32, warp_rows = row_tiles * 16, block_rows = warps * warp_rows;

  /// Rows of query heads that read one (sequence, kv_head): row r is token r / group of query head q_head + r % group.
  struct item_rows {
    index_t sequence, head, q_head, group, stored, query_rows, item;
  };

  struct slot_range {
    index_t begin, end;
    __device__ bool meets(index_t first, index_t last) const { return first < end && last > begin; }
    __device__ bool covers(index_t first, index_t last) const { return first >= begin && last <= end; }
  };

  __device__ static index_t position_of(const problem_type& p, const item_rows& at, index_t row) {
    return p.first_position[at.sequence] + (min)(row, at.query_rows - 1) / at.group;
  }

  /// First slot whose key is newer than `position`. Positions ascend by slot.
  __device__ static index_t first_newer(const problem_type& p, const item_rows& at, index_t position) {
    if (!p.view.positions) return position < 0 ? 0 : (min)(position, at.stored - 1) + 1;
    return first_where_in_warp(at.stored, int(threadIdx.x % 32),
                               [&](index_t slot) { return p.view.position(at.sequence, at.head, slot) > position; });
  }
  /// The slots that any of some queries sees, where `oldest` is the oldest and `newest` the newest query. With the two
  /// exchanged, the slots that all of them see.
  __device__ static slot_range visible_range(const problem_type& p, const item_rows& at, index_t oldest,
                                             index_t newest) {
    return {p.rule.sliding_window > 0 ? first_newer(p, at, oldest - p.rule.sliding_window) : 0,
            first_newer(p, at, newest)};
  }

  static constexpr int chunk_slots = 32, tile_chunks = tile / chunk_slots;
  /// Bits [0, count) of a word; none for a negative count.
  __device__ __forceinline__ static std::uint32_t low_bits(index_t count) {
    return count >= 32 ? ~0u : count <= 0 ? 0u : (1u << count) - 1;
  }
  /// Bits of those of the 32 slots from `first` on that the rule shows to a query.
  __device__ static std::uint32_t visible_slots(const problem_type& p, const item_rows& at, index_t query,
                                                index_t first) {
    const std::uint32_t stored = low_bits(at.stored - first);
    if (!p.view.positions) {
      const index_t behind = query - first, window = p.rule.sliding_window;
      return stored & low_bits(behind + 1) & ~(window > 0 ? low_bits(behind + 1 - window) : 0u);
    }
    // Positions ascend: the slots that are not newer than a position are a run that begins at the first slot.
    const index_t slots = (min)(at.stored - first, chunk_slots);
    const auto not_newer = [&](index_t position) {
      index_t count = 0;
#pragma unroll
      for (index_t step = chunk_slots; step > 0; step /= 2) {
        const index_t next = count + step;
        if (next <= slots && p.view.position(at.sequence, at.head, first + next - 1) <= position) count = next;
      }
      return low_bits(count);
    };
    const std::uint32_t hidden = p.rule.sliding_window > 0 ? not_newer(query - p.rule.sliding_window) : 0u;
    return not_newer(query) & ~hidden;
  }

  /// logit_rule::cap to an absolute error of about 1e-7 soft caps, at a tenth of the library's cost.
  __device__ static float capped(float scaled, float soft_cap) {
    return soft_cap - __fdividef(2 * soft_cap, power_of_two(scaled * (2 * log2e / soft_cap)) + 1);
  }

  /// A warp copies `Rows` rows of `Chunks` chunks of 16 bytes to `to(row, chunk)`. Lane i knows where row i lies. Rows
  /// that are not valid become zeros.
  template <int Rows, int Chunks, class To>
  __device__ static void copy_rows(const T* row, bool row_valid, int lane, const To& to) {
    constexpr int copies = Rows * Chunks;
    constexpr int at_once = Copiers == Warps ? copies / 32 + 1 : 8;  // warps that only copy have few registers
    const unsigned valid_rows = __ballot_sync(~0u, row_valid);
#pragma unroll at_once
    for (int i = 0; i < (copies + 31) / 32; ++i) {
      const int id = i * 32 + lane, r = id / Chunks, chunk = id % Chunks;
      const T* from = reinterpret_cast<const T*>(__shfl_sync(~0u, reinterpret_cast<unsigned long long>(row), r));
      if (copies % 32 == 0 || id < copies) copy_async16(to(r, chunk), from + chunk * 8, valid_rows >> r & 1);
    }
  }
  /// The same for encoded rows, which are decoded at once.
  template <int Rows, int Chunks, class Stored, class To>
  __device__ static void decode_rows(const Stored* row, float scale, bool row_valid, int lane, const To& to) {
    constexpr int copies = Rows * Chunks;
#pragma unroll 4
    for (int i = 0; i < (copies + 31) / 32; ++i) {
      const int id = i * 32 + lane, r = id / Chunks % Rows, chunk = id % Chunks;
      const auto from = __shfl_sync(~0u, reinterpret_cast<unsigned long long>(row), r);
      const float of_row = __shfl_sync(~0u, scale, r);
      const bool valid = __shfl_sync(~0u, int(row_valid), r);
      if (copies % 32 == 0 || id < copies) {
        store_decoded<T>(to(r, chunk), row_elements(reinterpret_cast<const Stored*>(from), chunk * 8), valid, of_row);
      }
    }
  }
  /// Copies a warp's share of a tile's keys or values, with zeros where nothing is stored. `mine` is the slot of the
  /// tile's row `warp_share * warp + lane % warp_share`. Rows are numbered within the tile.
  static constexpr int warp_share = tile / Copiers;
  template <class To>
  __device__ static void copy_keys(const problem_type& p, const item_rows& at, index_t mine, int warp, int lane,
                                   const To& to) {
    const bool valid = mine < at.stored;
    const index_t slot = valid ? mine : 0;
    const auto* row = p.view.key(at.sequence, at.head, slot);
    const auto key_at = [&](int r, int chunk) { return to(warp * warp_share + r, chunk); };
    if constexpr (View::is_raw) {
      copy_rows<warp_share, D / 8>(row, valid, lane, key_at);
    } else {
      decode_rows<warp_share, D / 8>(row, p.view.key_scale(at.sequence, at.head, slot), valid, lane, key_at);
    }
  }
  template <class To>
  __device__ static void copy_values(const problem_type& p, const item_rows& at, index_t mine, int warp, int lane,
                                     const To& to) {
    const bool valid = mine < at.stored;
    const index_t slot = valid ? mine : 0;
    const auto* row = p.view.value(at.sequence, at.head, slot);
    const auto value_at = [&](int r, int chunk) { return to(warp * warp_share + r, chunk); };
    if constexpr (View::is_raw) {
      copy_rows<warp_share, Dv / 8>(row, valid, lane, value_at);
    } else {
      decode_rows<warp_share, Dv / 8>(row, p.view.value_scale(at.sequence, at.head, slot), valid, lane, value_at);
    }
  }
  /// A warp copies `Rows` query rows, which begin at `first_row`.
  template <int Rows, class To>
  __device__ static void copy_queries(const problem_type& p, const item_rows& at, index_t first_row, int lane,
                                      const To& to) {
    const index_t mine = first_row + lane % Rows;
    const bool valid = mine < at.query_rows;
    const index_t row = valid ? mine : 0;
    copy_rows<Rows, D / 8>(p.q.row(at.sequence, row / at.group, at.q_head + row % at.group), valid, lane, to);
  }

  /// For query rows lane / 4 + {0, 8} of each row tile: outputs, the exponents' reference (base 2), and this lane's
  /// sum.
  struct running {
    float out[row_tiles][Dv / 8][4];
    float reference[row_tiles * 2], sum[row_tiles * 2];
  };

  using logits = float[row_tiles][tile / 8][4];
  __device__ static void clear(running& state) {
#pragma unroll
    for (int r = 0; r < row_tiles * 2; ++r) {
      state.reference[r] = -infinity, state.sum[r] = 0;
#pragma unroll
      for (int n = 0; n < Dv / 8; ++n) state.out[r / 2][n][r % 2 * 2] = state.out[r / 2][n][r % 2 * 2 + 1] = 0;
    }
  }
  /// Masks what rows do not see. `seen(r, c)` has the bits of slots [32 c, 32 c + 32) of the tile for row lane / 4 + 8
  /// r of the warp.
  template <class Seen>
  __device__ static void mask(logits& s, int lane, const Seen& seen) {
#pragma unroll
    for (int c = 0; c < tile_chunks; ++c) {
#pragma unroll
      for (int r = 0; r < row_tiles * 2; ++r) {
        const std::uint32_t mine = seen(r, c) >> (lane % 4 * 2);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          float& x = s[r / 2][c * 4 + i / 2][r % 2 * 2 + i % 2];
          x = mine >> (i / 2 * 8 + i % 2) & 1 ? x : -infinity;
        }
      }
    }
  }
  using weights = std::uint32_t[row_tiles][tile / 16][4];

  /// The cap and the scale, where they must be applied before the maximum: for capped logits and for a negative scale.
  struct logit_scale {
    float scale, soft_cap, factor;  // factor: the scale that remains, in base 2
    bool first;

    __device__ explicit logit_scale(const logit_rule& rule)
        : scale(rule.scale_for(D)), soft_cap(rule.soft_cap), first(rule.soft_cap > 0 || scale < 0) {
      factor = first ? log2e : scale * log2e;
    }
    __device__ void apply(logits& s) const {
      if (!first) return;
#pragma unroll
      for (int i = 0; i < row_tiles * tile / 2; ++i) {
        float& x = s[i / (tile / 2)][i / 4 % (tile / 8)][i % 4];
        x = soft_cap > 0 ? capped(x * scale, soft_cap) : x * scale;
      }
    }
  };

  /// What outputs are multiplied by when a row's reference grows.
  struct shrinking {
    float by[row_tiles * 2];
    bool any;
  };
  /// Turns logits into weights relative to the reference, which follows the maximum. Outputs are rescaled later, by
  /// `shrink`. There are no branches, because products may be running.
  __device__ static shrinking normalise(float factor, logits& s, running& state) {
    shrinking result;
    result.any = false;
#pragma unroll
    for (int r = 0; r < row_tiles * 2; ++r) {
      float top = -infinity;
#pragma unroll
      for (int n = 0; n < tile / 8; ++n) top = fmaxf(top, fmaxf(s[r / 2][n][r % 2 * 2], s[r / 2][n][r % 2 * 2 + 1]));
      top = lanes_max<4>(top);
      // Weights up to 2^8 are harmless, so outputs are rescaled only a few times in all, not once a tile. Each row
      // decides for itself: its bits depend neither on neighbouring rows nor on how a prompt is cut into chunks.
      top *= factor;
      const float next = top > state.reference[r] + 8 ? top : state.reference[r];
      // Nothing was visible so far: outputs are 0 and stay so.
      const bool same = next == state.reference[r];
      result.by[r] = same ? 1.0f : power_of_two(state.reference[r] - next);
      result.any = result.any || !same;
      state.reference[r] = next;
    }
#pragma unroll
    for (int r = 0; r < row_tiles * 2; ++r) {
      const float reference = softmax_reference(state.reference[r]);
      state.sum[r] *= result.by[r];
#pragma unroll
      for (int n = 0; n < tile / 8; ++n) {
        float &low = s[r / 2][n][r % 2 * 2], &high = s[r / 2][n][r % 2 * 2 + 1];
        low = power_of_two(fmaf(low, factor, -reference)), high = power_of_two(fmaf(high, factor, -reference));
        state.sum[r] += low + high;
      }
    }
    return result;
  }
  __device__ static void shrink(const shrinking& asked, running& state) {
    if (!__any_sync(~0u, asked.any)) return;
#pragma unroll
    for (int r = 0; r < row_tiles * 2; ++r) {
#pragma unroll
      for (int n = 0; n < Dv / 8; ++n) {
        state.out[r / 2][n][r % 2 * 2] *= asked.by[r];
        state.out[r / 2][n][r % 2 * 2 + 1] *= asked.by[r];
      }
    }
  }
  /// Weights as the product with values takes them.
  __device__ static void pack(const logits& s, weights& w) {
#pragma unroll
    for (int r = 0; r < row_tiles * 2; ++r) {
#pragma unroll
      for (int n = 0; n < tile / 8; ++n) {
        w[r / 2][n / 2][n % 2 * 2 + r % 2] = pack_pair<T>(s[r / 2][n][r % 2 * 2], s[r / 2][n][r % 2 * 2 + 1]);
      }
    }
  }

  /// Whether the tile's values are finite; `chunk(token, i)` points at 16 bytes of them.
  template <class Chunk>
  __device__ static bool all_finite(const Chunk& chunk, int lane) {
    return special_values<T>::template all_finite<tile, Dv / 8>(chunk, lane);
  }
  /// The product of weights and values where some values are masked and not finite. `fragment(k, pair)` is the lane's
  /// address of tokens [16 k, 16 k + 16), dims [16 pair, 16 pair + 16).
  template <class Fragment>
  __device__ static void multiply_visible_values(const weights& w, const Fragment& fragment, running& state) {
    const auto load = [&](int k, int pair, std::uint32_t(&b)[4]) { load_matrices_transposed(b, fragment(k, pair)); };
    detail::multiply_visible_values<T>(w, load, state.out);
  }

  struct row_result {
    float factor, lse;
  };
  /// The factor of a row's outputs, sink logit included, and the row's log-sum-exp.
  __device__ static row_result close(const problem_type& p, index_t q_head, float reference, float sum) {
    softmax_state total{reference * ln2, sum};
    const float factor = total.close(p.rule.sink_logits, q_head);
    return {factor, total.lse()};
  }

  __device__ static void write_two(Out* out, float low, float high) {
    if constexpr (std::is_same_v<Out, float>) {
      *reinterpret_cast<float2*>(out) = make_float2(low, high);
    } else {
      *reinterpret_cast<std::uint32_t*>(out) = pack_pair<Out>(low, high);
    }
  }

  /// Writes a warp's rows, or its part of them if the range is split.
  __device__ static void finish(const problem_type& p, const prefill_parts& parts, const item_rows& at,
                                index_t first_row, int lane, const running& state) {
#pragma unroll
    for (int r = 0; r < row_tiles * 2; ++r) {
      const float sum = lanes_sum<4>(state.sum[r]);
      const index_t row = first_row + r * 8 + lane / 4;
      if (row >= at.query_rows) continue;
      if (parts.splits > 1) {
        const offset_t slot = offset_t(at.item) * block_rows + row % block_rows;
        if (lane % 4 == 0) parts.state[slot] = make_float2(state.reference[r], sum);
        if (sum == 0) continue;  // the merge skips it
        float* out = parts.out + slot * Dv + lane % 4 * 2;
#pragma unroll
        for (int n = 0; n < Dv / 8; ++n) {
          *reinterpret_cast<float2*>(out + n * 8) =
              make_float2(state.out[r / 2][n][r % 2 * 2], state.out[r / 2][n][r % 2 * 2 + 1]);
        }
        continue;
      }
      const index_t token = row / at.group, q_head = at.q_head + row % at.group;
      const row_result result = close(p, q_head, state.reference[r], sum);
      Out* out = p.out.row(at.sequence, token, q_head) + lane % 4 * 2;
#pragma unroll
      for (int n = 0; n < Dv / 8; ++n) {
        write_two(out + n * 8, state.out[r / 2][n][r % 2 * 2] * result.factor,
                  state.out[r / 2][n][r % 2 * 2 + 1] * result.factor);
      }
      if (lane % 4 == 0) p.write_lse(at.sequence, token, q_head, result.lse);
    }
  }

  /// Merges the parts of row `row` of work item `item`, in order. A warp calls it.
  __device__ static void merge(const problem_type& p, const prefill_parts& parts, index_t item, index_t row,
                               index_t sequence, index_t token, index_t q_head, int lane) {
    const offset_t slot = offset_t(item) * parts.splits * parts.block_rows + row;
    const auto state_of = [&](index_t part) { return parts.state[slot + offset_t(part) * parts.block_rows]; };
    float top = -infinity;
    for (index_t part = lane; part < parts.splits; part += 32) top = fmaxf(top, state_of(part).x);
    top = lanes_max<32>(top);
    constexpr int pairs = (Dv / 2 + 31) / 32;
    float2 out[pairs] = {};
    float sum = 0;
    for (index_t part = 0; part < parts.splits; ++part) {
      const float2 state = state_of(part);
      if (state.y == 0) continue;
      const float weight = power_of_two(state.x - softmax_reference(top));
      sum += state.y * weight;
      const float* from = parts.out + (slot + offset_t(part) * parts.block_rows) * Dv;
#pragma unroll
      for (int i = 0; i < pairs; ++i) {
        if (i * 32 + lane >= Dv / 2) continue;
        const float2 two = reinterpret_cast<const float2*>(from)[i * 32 + lane];
        out[i].x += two.x * weight, out[i].y += two.y * weight;
      }
    }
    const row_result result = close(p, q_head, top, sum);
#pragma unroll
    for (int i = 0; i < pairs; ++i) {
      if (i * 32 + lane >= Dv / 2) continue;
      write_two(p.out.row(sequence, token, q_head) + (i * 32 + lane) * 2, out[i].x * result.factor,
                out[i].y * result.factor);
    }
    if (lane == 0) p.write_lse(sequence, token, q_head, result.lse);
  }
};

}  // namespace detail
}  // namespace cuda
TESSERA_NAMESPACE_END
