// ThinK: every token stays, without the key channels that a prompt's last queries look at least.
#pragma once

#include "../attention/dense_decode.hpp"
#include "../channels/all_channels.hpp"
#include "../channels/head_channels.hpp"
#include "../layout/dense.hpp"
#include "../layout/packed/as_given.hpp"
#include "../layout/packed/newest_whole.hpp"
#include "../layout/packed_rows.hpp"
#include "../recipe.hpp"
#include "../schedule/once.hpp"

TESSERA_NAMESPACE_BEGIN

/// ThinK's rows where `Layout` places them; the newest tokens lie as `Layout` says. Any method takes them as its
/// layout.
template <class Layout>
using think_rows = stored<packed_rows<typename Layout::rows_type, head_channels, all_channels, as_given, newest_whole>,
                          typename Layout::placement_type>;

/// Of every key 0.6 of the channels stay, the same for all keys of a kv_head; values stay as they are, and so do the
/// newest 32 keys. There is no budget.
/// Paper    Xu et al., ThinK: Thinner Key Cache by Query-Driven Pruning, arXiv:2407.21018.
/// Differs  one set of channels for a kv_head, by the mean over its query heads and over the keys that are thinned; the
///          published code counts the newest 32 as well. Decoded keys lose the same channels 32 at a time once 32 newer
///          ones are there; the published code leaves them whole. A later turn of at least 4,096 prompt tokens chooses
///          channels anew for its own keys.
template <element T, int D, int Dv = D, layout_of<T, D, Dv> Layout = dense<T, D, Dv>>
struct think : recipe<retain_all, think_rows<Layout>, retrieve_all, dense_decode, once> {
  static constexpr const char* name = "think";
  static constexpr const char* paper = "ThinK, arXiv:2407.21018";
};

TESSERA_NAMESPACE_END
