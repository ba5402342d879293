// Channels: which elements of a key or a value are stored.
#pragma once

#include <concepts>
#include <cstdint>
#include <type_traits>

#include "../core/stored/packed_row.hpp"
#include "../core/types.hpp"

TESSERA_NAMESPACE_BEGIN

/// Chooses the channels of one vector, in groups of neighbours.
///   choose(row, format, bits)            row [format.channels]: sets the bits of format.stored_channels / format.group
///                                        groups. TESSERA_HD
template <class C>
concept vector_channels = requires(const C c, const float* row, const packed_format& format, std::uint8_t* bits) {
  c.choose(row, format, bits);
};

/// Chooses the channels of a head once for all its vectors.
///   choose_for_head(queries, rows, format, bits)
///       queries [format.channels]: mean squares of the group's last `window` queries, null without queries;
///       rows [format.channels]: mean squares of the stored rows
///   window                               how many of a prompt's last queries are observed
template <class C>
concept head_channels_selector =
    requires(const C c, const double* squares, const packed_format& format, std::uint8_t* bits) {
      c.choose_for_head(squares, squares, format, bits);
      { C::window } -> std::convertible_to<index_t>;
    };

/// A policy that chooses which elements of a vector stay.
///   name
///   stored_channels(dim) -> index_t      how many elements of a vector of `dim` are stored
///   group_size() -> index_t              neighbours that are stored or dropped together
///   choose, or choose_for_head           see above
///   check(), parameters(self, visit)
template <class C>
concept channel_selector = std::is_trivially_copyable_v<C> && (vector_channels<C> || head_channels_selector<C>) &&
                           requires(const C c, int dim) {
                             { C::name } -> std::convertible_to<const char*>;
                             { c.stored_channels(dim) } -> std::same_as<index_t>;
                             { c.group_size() } -> std::same_as<index_t>;
                             c.check();
                           };

/// Whether a type is a channel selector. A sentence says what it lacks.
template <class C>
constexpr bool check_channels() {
  static_assert(std::is_trivially_copyable_v<C>, "tessera: a channel selector must be trivially copyable");
  static_assert(
      requires { C::name; }, "tessera: a channel selector must name itself: static constexpr const char* name");
  static_assert(
      requires(const C c, int dim) {
        { c.stored_channels(dim) } -> std::same_as<index_t>;
        { c.group_size() } -> std::same_as<index_t>;
      },
      "tessera: a channel selector must say how many elements stay: index_t stored_channels(dim), and index_t "
      "group_size()");
  static_assert(vector_channels<C> || head_channels_selector<C>,
                "tessera: a channel selector needs choose(row, format, bits) for each vector, or, for all of a head, "
                "choose_for_head(queries, rows, format, bits) and window");
  static_assert(channel_selector<C>, "tessera: a channel selector needs check()");
  return channel_selector<C>;
}

TESSERA_NAMESPACE_END
