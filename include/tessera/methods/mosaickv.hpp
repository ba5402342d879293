// MosaicKV: every token stays, a quarter of each vector is stored, and a step reads the best blocks of tokens.
#pragma once

#include "../attention/gathered_decode.hpp"
#include "../channels/top_groups.hpp"
#include "../layout/dense.hpp"
#include "../layout/packed/full_tails.hpp"
#include "../layout/packed/rotated.hpp"
#include "../layout/packed/searched_strategy.hpp"
#include "../layout/packed_rows.hpp"
#include "../recipe.hpp"
#include "../runtime/eigen.hpp"
#include "../schedule/once.hpp"
#include "../scorer/block_mean.hpp"
#include "../selector/whole_blocks.hpp"

TESSERA_NAMESPACE_BEGIN

/// MosaicKV's rows where `Layout` places them; its tail lies as `Layout` says. Any method takes them as its layout.
template <class Layout>
using mosaic_rows =
    stored<packed_rows<typename Layout::rows_type, top_groups, top_groups, rotated, full_tails, searched_strategy>,
           typename Layout::placement_type>;

/// Budget t: a step reads t packed tokens of each kv_head, rounded up to whole blocks, and the tail of at most 32
/// newest ones. K and V of a segment are rotated; of each vector a quarter of the elements stays.
/// Paper    Qiang et al., MosaicKV: Serving Long-Context LLM with Dynamic Two-D KV Cache Compression, arXiv:2607.00760,
///          Sec. 4.1 (two dimensions), 4.3 (strategies), 5.1 (packed rows), 5.3 (attention), 5.4 (tails),
///          5.5 (segments of answers).
/// Differs  one choice of blocks over all segments of a (sequence, kv_head), by the sum over its query heads; the first
///          and the last packed block are always read; a rotation for each kv_head. `strategy=searched` searches
///          `channels`, `group` and `block` for each segment, as the paper does. A prompt stays whole until it ends,
///          unless `prefill=packed`; rows wait for a basis that fits them (packed_rows). On the device full tails are
///          packed between two steps.
template <element T, int D, int Dv = D, layout_of<T, D, Dv> Layout = dense<T, D, Dv>>
struct mosaickv : recipe<retain_all, mosaic_rows<Layout>, retrieve<block_mean, whole_blocks>, gathered_decode, once> {
  static constexpr const char* name = "mosaickv";
  static constexpr const char* paper = "MosaicKV, arXiv:2607.00760";
};

TESSERA_NAMESPACE_END
