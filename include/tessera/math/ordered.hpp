// Floats as integers that sort alike: the tie rule of every selector in one key.
#pragma once

#include "../core/config.hpp"
#include "../core/types.hpp"

TESSERA_NAMESPACE_BEGIN

/// An unsigned integer that orders as the score does; NaN orders as -infinity, -0 as +0.
TESSERA_HD inline std::uint32_t ordered_bits(float score) {
  if (score != score) score = -infinity;
  const auto word = bits_as<std::uint32_t>(score + 0.0f);
  return word & 0x80000000u ? ~word : word | 0x80000000u;
}

/// Larger key = kept first: by score, then the lower index.
TESSERA_HD inline std::uint64_t rank_key(float score, index_t index) {
  return std::uint64_t(ordered_bits(score)) << 32 | (0xffffffffu - std::uint32_t(index));
}

/// The index that a key was made from.
TESSERA_HD inline index_t rank_index(std::uint64_t key) { return index_t(0xffffffffu - std::uint32_t(key)); }

TESSERA_NAMESPACE_END
