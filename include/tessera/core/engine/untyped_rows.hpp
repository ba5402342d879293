// Rows whose element type is known when a program runs.
#pragma once

#include <concepts>
#include <string>
#include <type_traits>

#include "../error.hpp"
#include "../views.hpp"

TESSERA_NAMESPACE_BEGIN

/// Element types of rows.
enum class element_kind { fp32, fp16, bf16 };
/// By `element_kind`.
inline constexpr const char* element_names[] = {"fp32", "fp16", "bf16"};

/// The kind of float, fp16 and bf16.
template <class T>
requires(std::is_same_v<T, float> || std::is_same_v<T, fp16> || std::is_same_v<T, bf16>)
inline constexpr element_kind element_kind_of = std::is_same_v<T, float>  ? element_kind::fp32
                                                : std::is_same_v<T, fp16> ? element_kind::fp16
                                                                          : element_kind::bf16;

/// A rows_view whose element type is a value. `Memory` is void, or const void for rows that are only read.
/// Shapes   as those of rows_view; strides in elements. Null data: no rows.
template <class Memory>
struct untyped_rows {
  Memory* data = nullptr;
  element_kind element = element_kind::fp32;
  offset_t sequence_stride = 0, token_stride = 0, head_stride = 0;
  index_t sequences = 1, tokens = 0, heads = 0, dim = 0;

  untyped_rows() = default;
  template <class T>
  requires std::convertible_to<T*, Memory*>
  untyped_rows(const rows_view<T>& rows) : untyped_rows(rows, element_kind_of<std::remove_const_t<T>>) {}
  /// Rows that may be written, only read.
  template <std::same_as<void> Written>
  requires std::is_const_v<Memory> untyped_rows(const untyped_rows<Written>& rows) : untyped_rows(rows, rows.element) {}

  /// The rows as what they are. Errors   another element type: tessera::error.
  template <class T>
  rows_view<T> as() const {
    require(!data || element == element_kind_of<std::remove_const_t<T>>, "element type of rows",
            element_names[int(element)], element_names[int(element_kind_of<std::remove_const_t<T>>)],
            "pass rows of this type, or make the cache for the other");
    return {static_cast<T*>(data), sequence_stride, token_stride, head_stride, sequences, tokens, heads, dim};
  }

 private:
  template <class Rows>
  untyped_rows(const Rows& rows, element_kind kind)
      : data(rows.data),
        element(kind),
        sequence_stride(rows.sequence_stride),
        token_stride(rows.token_stride),
        head_stride(rows.head_stride),
        sequences(rows.sequences),
        tokens(rows.tokens),
        heads(rows.heads),
        dim(rows.dim) {}
};

/// Rows that a call reads.
using untyped_input = untyped_rows<const void>;
/// Rows that a call writes.
using untyped_output = untyped_rows<void>;

TESSERA_NAMESPACE_END
