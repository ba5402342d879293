// Where a block that attends packed rows has its shared memory.
#pragma once

#include "spread_state.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {
namespace detail {

/// Four blocks a multiprocessor, of 128 registers. Three of 168 take 71 us where four take 64, two of 8 warps 64 and,
/// with the rest of a step, 2 us more (256K tokens, batch 4; H200, CUDA 13.0).
inline constexpr int packed_warps = 4, packed_blocks = 4, packed_threads = packed_warps * 32;

/// For what a kernel's memory is made: channels of rows, and bytes from one raw row to the next one, of the longest
/// rows.
template <int D, int Dv>
struct packed_lengths {
  int k_channels, v_channels, k_raw, v_raw;
  packed_lengths(const packed_format& k, const packed_format& v)
      : k_channels(int(whole_channels(k.channels))),
        v_channels(int(whole_channels(v.channels))),
        k_raw(int(row_places<D>::stride(unsigned(value_stride(k.value_bytes()) / 16)))),
        v_raw(int(row_places<Dv>::stride(unsigned(value_stride(v.value_bytes()) / 16)))) {}
};

/// Where a block's shared memory lies: tiles, raw values, queries, the warps' states, weights, positions of queries,
/// where rows lie, tables.
template <int D, int Dv>
struct packed_memory {
  TESSERA_HD static constexpr staged_rows k_rows() { return {D / 8}; }
  TESSERA_HD static constexpr staged_rows v_rows() { return {Dv / 8}; }
  static constexpr int warp_states = query_rows_together * 2 * 4;
  int parts, tile, k_raw, v_raw, raws, raw, queries, queries_part, states, weight, weights, softmax, softmaxes,
      positions, sources, begins, bytes;

  /// `rows`: of queries.
  TESSERA_HD packed_memory(index_t rows, index_t most_segments, const packed_lengths<D, Dv>& lengths)
      : parts(rows > queries_at_once ? 2 : 1),
        tile(larger(larger(lengths.v_channels * tile_tokens * 2, query_rows_together * Dv * 4),
                    k_rows().bytes() * whole_tokens)),
        k_raw(lengths.k_raw),
        v_raw(lengths.v_raw),
        raws(packed_warps * tile),
        raw(larger((k_raw + v_raw) * tile_tokens, v_rows().bytes() * whole_tokens)),
        queries(raws + packed_warps * raw),
        queries_part(lengths.k_channels * 128),
        states(queries + larger(parts * queries_part, k_rows().bytes() * 2 * query_rows_together)),
        weight(parts * queries_at_once * tile_tokens * 2),
        weights(states + packed_warps * warp_states),
        softmax(parts * (tile_tokens + 1) * 16),
        softmaxes(weights + packed_warps * weight),
        positions(softmaxes + packed_warps * softmax),
        sources(positions + query_rows_together * 4),
        begins(sources + int(sizeof(raw_rows<row_places<D>>) + sizeof(raw_rows<row_places<Dv>>))),
        bytes(begins + (int(most_segments + 1) * 3 + 2) * 4) {}

 private:
  TESSERA_HD static constexpr int larger(int a, int b) { return a > b ? a : b; }
};

}  // namespace detail
}  // namespace cuda
TESSERA_NAMESPACE_END
