// Layout: how tokens are stored. It has two parts: the format of a token's rows, and the placement of rows in memory.
#pragma once

#include <concepts>

#include "../core/encoding.hpp"
#include "../core/types.hpp"

TESSERA_NAMESPACE_BEGIN

/// The format of the rows of one token of one kv_head.
///   name
///   encoding_type        how elements lie in memory (core/encoding.hpp)
///   k_dim, v_dim         of a K and of a V row
template <class R>
concept row_format = written_encoding<typename R::encoding_type> && requires {
  { R::name } -> std::convertible_to<const char*>;
  { R::k_dim } -> std::convertible_to<int>;
  { R::v_dim } -> std::convertible_to<int>;
};

/// The placement of the rows of a (layer, sequence, kv_head). Kernels see only its table, which maps slots to
/// addresses; the store owns the memory (backend/*/store).
///   name
///   table_type           what `kv_view` finds a slot by (core/views.hpp)
template <class P>
concept placement = requires {
  { P::name } -> std::convertible_to<const char*>;
  typename P::table_type;
};

/// A row format at a placement: `stored<Rows, Where>` (layout/stored.hpp).
template <class L>
concept layout = row_format<typename L::rows_type> && placement<typename L::placement_type> && requires {
  { L::token_bytes() } -> std::same_as<offset_t>;
};

/// A layout whose rows hold K and V of these dims, handed over as `T`.
template <class L, class T, int D, int Dv>
concept layout_of = layout<L> && std::same_as<typename L::element_type, T> && L::k_dim == D && L::v_dim == Dv;

/// Whether a type is a row format. A sentence says what it lacks.
template <class R>
constexpr bool check_row_format() {
  static_assert(requires { R::name; }, "tessera: a row format must name itself: static constexpr const char* name");
  static_assert(requires { R::k_dim + R::v_dim; }, "tessera: a row format must give k_dim and v_dim");
  static_assert(
      requires { typename R::encoding_type; },
      "tessera: a row format must say how its elements lie in memory: using encoding_type = ...");
  static_assert(written_encoding<typename R::encoding_type>,
                "tessera: an encoding needs element_type (fp32, fp16, bf16), a stored_type that is made from a float "
                "and converts to one, scaled, and, where rows are scaled, static float scale_of(float largest)");
  static_assert(
      !static_scales<typename R::encoding_type>,
      "tessera: a cache gives each row a scale of its own; static scales are for views of an engine's memory");
  constexpr bool is_latent = latent_encoding<typename R::encoding_type>;
  static_assert(!is_latent || supported_latent_dims<R::k_dim, R::v_dim>,
                "tessera: latent rows take keys of 576 elements, of which 512 are the value");
  static_assert(is_latent || (supported_head_dim<R::k_dim> && supported_head_dim<R::v_dim>),
                "tessera: a row format takes head dims 64, 80, 96, 128, 192, 256 and 512");
  static_assert(row_format<R>, "tessera: a row format's name, k_dim and v_dim must be static constants");
  return row_format<R>;
}

/// Whether a type is a layout. A sentence says what it lacks.
template <class L>
constexpr bool check_layout() {
  static_assert(
      requires {
        typename L::rows_type;
        typename L::placement_type;
      },
      "tessera: a layout is a row format at a placement: stored<dense_rows<T, D>, runs>; labels alone store nothing");
  static_assert(check_row_format<typename L::rows_type>());
  static_assert(placement<typename L::placement_type>,
                "tessera: a placement needs a name and a table_type that finds slots");
  static_assert(layout<L>, "tessera: a layout needs static offset_t token_bytes(); take stored<row format, placement>");
  return layout<L>;
}

TESSERA_NAMESPACE_END
