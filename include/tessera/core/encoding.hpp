// How the elements of a K or V row lie in memory: raw, or encoded.
#pragma once

#include <concepts>
#include <initializer_list>
#include <type_traits>

#include "stored/element_blocks.hpp"
#include "types.hpp"

TESSERA_SHARED_NAMESPACE_BEGIN

/// Elements of a row in memory.
///   element_type            what engines hand over and kernels compute with: fp32, fp16 or bf16
///   stored_type             what lies in memory; made from a float, and converts to one
///   scaled                  whether a row has a scale of its own: an element is float(stored) * scale
///   scale_of(largest)       where scaled: the scale of a row whose largest finite magnitude this is; never 0
///   finite_only             where it is there and true: stored elements have no NaN. A row with an element that is not
///                           finite gets the scale NaN, so that all of it reads as NaN
///   static_scales           where it is there and true: scales are an engine's constants, of a tensor, of heads or of
///                           rows (strides may be 0). They are read and never written; `largest` is the largest stored
///                           magnitude, to which what is larger saturates
template <class E>
concept encoding_by_element =
    element<typename E::element_type> && std::is_trivially_copyable_v<typename E::stored_type> &&
    requires(typename E::stored_type stored, float x) {
      static_cast<float>(stored);
      static_cast<typename E::stored_type>(x);
      { E::scaled } -> std::convertible_to<bool>;
    } && (!E::scaled || requires { requires E::static_scales; } || requires(float x) {
      { E::scale_of(x) } -> std::same_as<float>;
    });

/// Rows of blocks that hold their scales (core/stored/element_blocks.hpp): `stored_type` is a block. Operations read
/// such rows. Where the block is a `made_block`, they write them too; other rows are the engine's.
template <class E>
concept encoding_by_block =
    element<typename E::element_type> && element_block<typename E::stored_type> && !bool(E::scaled);

template <class E>
concept encoding = encoding_by_element<E> || encoding_by_block<E>;

/// Whether rows can be made from the elements that engines hand over.
template <class E>
concept written_encoding = encoding_by_element<E> || (encoding_by_block<E> && made_block<typename E::stored_type>);

/// Raw elements: scorers and indexes may have pointers to them.
template <element T>
struct raw_elements {
  using element_type = T;
  using stored_type = T;
  static constexpr bool scaled = false;
};

/// Raw elements of latent rows (MLA): one row is a token's key, and its first elements are the token's value. A value
/// has no memory of its own: views read it from the key.
template <element T>
struct latent_elements {
  using element_type = T;
  using stored_type = T;
  static constexpr bool scaled = false, value_in_key = true;
};

/// e4m3 with one scale for each row: the largest element becomes 448. `T` is what is handed over and computed with.
template <element T>
struct fp8_elements {
  using element_type = T;
  using stored_type = fp8;
  static constexpr bool scaled = true;
  TESSERA_HD TESSERA_INLINE static float scale_of(float largest) {
    const float scale = largest / 448.0f;
    return scale > 1e-30f ? scale : 1.0f;  // a row of zeros; smaller than any element that matters
  }
};

/// e4m3 with scales that an engine has fixed beforehand, as one for a tensor or for each head: vLLM's fp8 caches, or
/// TensorRT-LLM's. What is larger than 448 scales, an infinity too, becomes 448 of them.
template <element T>
struct static_fp8_elements {
  using element_type = T;
  using stored_type = fp8;
  static constexpr bool scaled = true, static_scales = true;
  static constexpr float largest = 448;
};

/// Whole numbers of 8 bits with one scale for each row: the largest element becomes 127. `T` is what is handed over and
/// computed with.
template <element T>
struct int8_elements {
  using element_type = T;
  using stored_type = int8;
  static constexpr bool scaled = true, finite_only = true;
  TESSERA_HD TESSERA_INLINE static float scale_of(float largest) {
    const float scale = largest / 127.0f;
    return scale > 1e-30f ? scale : 1.0f;  // as of fp8
  }
};

/// Rows of int8_block: ggml's Q8_0.
template <element T>
struct block_int8_elements {
  using element_type = T;
  using stored_type = int8_block;
  static constexpr bool scaled = false;
};

/// Rows of int4_block: ggml's Q4_0.
template <element T>
struct block_int4_elements {
  using element_type = T;
  using stored_type = int4_block;
  static constexpr bool scaled = false;
};

/// Groups of elements in few bits, each with a lowest value and a step of its own. `T` is what is handed over and
/// computed with.
template <element T, int Bits, int Elements>
struct grouped_elements {
  using element_type = T;
  using stored_type = code_group<Bits, Elements>;
  static constexpr bool scaled = false;
};

/// How many elements of K and V rows share a group: 64 where that divides both dims.
constexpr int group_elements(int k_dim, int v_dim) {
  for (const int count : {64, 80, 96, 48, 32}) {
    if (k_dim % count == 0 && v_dim % count == 0) return count;
  }
  return 16;
}

/// The type that `encoding_of` names: of an encoding, itself.
template <class E>
struct encoding_or_raw {
  using type = E;
};
/// Of an element type, its raw encoding.
template <element T>
struct encoding_or_raw<T> {
  using type = raw_elements<T>;
};

/// The encoding that a view's first argument stands for: itself, or `raw_elements` of an element type.
template <class E>
using encoding_of = typename encoding_or_raw<std::remove_const_t<E>>::type;

/// The first argument of a view: the element type of a raw encoding, else the encoding.
template <encoding E>
using view_element =
    std::conditional_t<std::is_same_v<E, raw_elements<typename E::element_type>>, typename E::element_type, E>;

template <class E>
concept raw_encoding = encoding<E> && std::same_as<typename E::element_type, typename E::stored_type>;

/// Whether a token's value is the beginning of its key.
template <class E>
concept latent_encoding = encoding<E> && requires { requires E::value_in_key; };

/// Whether a row with an element that is not finite reads as NaN altogether.
template <class E>
inline constexpr bool finite_only = requires { requires E::finite_only; };

static_assert(encoding_by_element<raw_elements<fp32>> && encoding_by_element<fp8_elements<bf16>>);
static_assert(encoding_by_block<block_int8_elements<fp16>> && !encoding_by_element<block_int4_elements<fp16>>);

/// Whether scales are an engine's constants, which rows are stored by.
template <class E>
inline constexpr bool static_scales = requires { requires E::static_scales; };

/// The scale of a row that is encoded by its own. `largest` is its largest finite magnitude; of a `finite_only`
/// encoding infinity, where an element is not finite.
template <class E>
TESSERA_HD TESSERA_INLINE float row_scale(float largest) {
  if constexpr (finite_only<E>) {
    if (largest == infinity) return bits_as<float>(0x7fc00000u);
  }
  return E::scale_of(largest);
}

TESSERA_SHARED_NAMESPACE_END

TESSERA_NAMESPACE_BEGIN

/// One element of a row with this scale. NaN stays NaN where stored elements have it.
template <encoding_by_element E>
TESSERA_HD TESSERA_INLINE typename E::stored_type encode_element(float x, float scale) {
  float held = E::scaled && x == x ? x / scale : x;  // on a device, division would lose a NaN's sign
  if constexpr (static_scales<E>) held = held > E::largest ? E::largest : held < -E::largest ? -E::largest : held;
  return static_cast<typename E::stored_type>(held);
}

/// Encodes one row: writes source[d] to target[d * stride]. Returns the row's scale: where scales are static the given
/// one, 1 where rows have none.
template <encoding_by_element E, row_element Source>
TESSERA_HD float encode_row(const Source* source, int dim, typename E::stored_type* target, offset_t stride,
                            float given = 1) {
  float scale = given;
  if constexpr (E::scaled && !static_scales<E>) {
    float largest = 0;
    for (int d = 0; d < dim; ++d) {
      const float x = float(source[d]), size = x < 0 ? -x : x;
      if (size < infinity ? size > largest : finite_only<E>) largest = size < infinity ? size : infinity;
    }
    scale = row_scale<E>(largest);
  }
  for (int d = 0; d < dim; ++d) target[d * stride] = encode_element<E>(float(source[d]), scale);
  return scale;
}

/// The same of a row of blocks: `stride` is from block to block. Returns 1.
template <encoding_by_block E, row_element Source>
requires written_encoding<E>
float encode_row(const Source* source, int dim, typename E::stored_type* target, offset_t stride, float = 1) {
  using block = typename E::stored_type;
  for (int b = 0; b < dim / block::elements; ++b) {
    float values[block::elements];
    for (int i = 0; i < block::elements; ++i) values[i] = float(source[b * block::elements + i]);
    target[b * stride] = block::encode(values);
  }
  return 1;
}

TESSERA_NAMESPACE_END
