// Channels: which elements of a vector stay? Chooses the channels that are stored of a key or a value.
#pragma once

#include <concepts>
#include <cstdint>
#include <type_traits>

#include "../core/stored/packed_row.hpp"
#include "../core/types.hpp"

TESSERA_NAMESPACE_BEGIN

/// What one vector says of its channels, which stand in groups of neighbours.
///   choose(row, format, bits)            sets the bits of format.kept / format.group groups of row [format.channels].
///                                        TESSERA_HD
template <class C>
concept vector_channels = requires(const C c, const float* row, const packed_format& format, std::uint8_t* bits) {
  c.choose(row, format, bits);
};

/// One choice for all vectors of a head, from what a prompt's queries and the stored rows say of each channel.
///   choose_for_head(queries, rows, format, bits)
///       queries [format.channels]: mean squares of the last `window` queries of the group, null where none was seen;
///       rows [format.channels]: mean squares of the stored rows
///   window                               how many of a prompt's last queries it sees
template <class C>
concept head_channels_selector = requires(const C c, const double* squares, const packed_format& format,
                                          std::uint8_t* bits) {
  c.choose_for_head(squares, squares, format, bits);
  { C::window } -> std::convertible_to<index_t>;
};

/// A policy that chooses which elements of a vector stay.
///   name
///   kept(dim) -> index_t                 how many of a vector of `dim` elements
///   group_size() -> index_t              so many neighbours stay or go together
///   choose, or choose_for_head           see above
///   check(), parameters(self, visit)
template <class C>
concept channel_selector = std::is_trivially_copyable_v<C> &&
    (vector_channels<C> || head_channels_selector<C>)&&requires(const C c, int dim) {
  { C::name } -> std::convertible_to<const char*>;
  { c.kept(dim) } -> std::same_as<index_t>;
  { c.group_size() } -> std::same_as<index_t>;
  c.check();
};

/// Whether a type is a channel selector; what it lacks is said in a sentence.
template <class C>
constexpr bool check_channels() {
  static_assert(std::is_trivially_copyable_v<C>, "tessera: a channel selector must be trivially copyable");
  static_assert(
      requires { C::name; }, "tessera: a channel selector must name itself: static constexpr const char* name");
  static_assert(
      requires(const C c, int dim) {
        { c.kept(dim) } -> std::same_as<index_t>;
        { c.group_size() } -> std::same_as<index_t>;
      },
      "tessera: a channel selector must say how many elements stay: index_t kept(dim), and index_t group_size()");
  static_assert(vector_channels<C> || head_channels_selector<C>,
                "tessera: a channel selector needs choose(row, format, bits) for each vector, or, for all of a head, "
                "choose_for_head(queries, rows, format, bits) and window");
  static_assert(channel_selector<C>, "tessera: a channel selector needs check()");
  return channel_selector<C>;
}

TESSERA_NAMESPACE_END
