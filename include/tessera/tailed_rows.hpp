// Rows of few bits behind a tail of whole ones.
#pragma once

#include "channels/all_channels.hpp"
#include "layout/packed/as_given.hpp"
#include "layout/packed/newest_whole.hpp"
#include "layout/packed_rows.hpp"
#include "layout/stored.hpp"

TESSERA_NAMESPACE_BEGIN

/// The rows of `Layout` where it places them, of which all but the newest `tail` tokens of a sequence become fp8 or
/// 4-bit elements (`element`: fp8, int4; 16-bit or as given, too), with one scale for each vector. Any method takes it
/// as its layout. A step looks most at its newest tokens: with 32 of them whole, predictions at 4 bits were 10 to 17
/// times nearer to those of whole rows than with `int4_rows` (docs/results.md, shipped model).
/// A prompt is whole until it ends; then, and after each step that fills a tail, what is older is packed.
/// Bytes    at 4 bits half a byte an element and 4 a vector: 0.266 of bf16 at 128; and `tail` to 2 * `tail` whole rows.
/// Paper    KIVI, arXiv:2402.02750: its residual of newest tokens. Differs: symmetric, and one scale a vector, K too.
template <class Layout>
using tailed_rows = stored<packed_rows<typename Layout::rows_type, all_channels, all_channels, as_given, newest_whole>,
                           typename Layout::placement_type>;

/// Whether rows are packed by a choice among their channels, or in a basis of their own.
template <class Layout>
inline constexpr bool chooses_among_channels = [] {
  if constexpr (packing_layout<Layout>) {
    using rows = typename Layout::rows_type;
    return !(std::is_same_v<typename rows::key_channels, all_channels> &&
             std::is_same_v<typename rows::value_channels, all_channels> && !rows::basis_type::rotates);
  } else {
    return false;
  }
}();

TESSERA_NAMESPACE_END
