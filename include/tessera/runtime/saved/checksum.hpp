// A checksum whose words may be added in any order, so that many threads, or a device, can compute it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "../../core/config.hpp"
#include "../../core/types.hpp"

TESSERA_NAMESPACE_BEGIN

/// Mixes a word; different words give different results.
TESSERA_HD TESSERA_INLINE std::uint64_t mixed_word(std::uint64_t word) {
  word ^= word >> 32;
  word *= 0xd6e8feb86659fd93u;
  word ^= word >> 32;
  word *= 0xd6e8feb86659fd93u;
  return word ^ word >> 32;
}
/// What the word at `index` adds to a checksum.
TESSERA_HD TESSERA_INLINE std::uint64_t checksum_term(std::uint64_t word, std::uint64_t index) {
  return mixed_word(word + (index + 1) * 0x9e3779b97f4a7c15u);
}

/// The sum of `checksum_term` over the 8-byte words of some bytes, modulo 2^64; the last word is filled with zeros, and
/// the number of bytes counts as one more word. Bytes that differ within one word have different checksums; others have
/// the same one with a chance of 2^-64. It protects against accidents, not against an attacker.
/// Cost     one pass over the bytes.
inline std::uint64_t checksum(const void* data, std::size_t bytes) {
  const auto* const first = static_cast<const unsigned char*>(data);
  const std::size_t words = bytes / 8;
  std::uint64_t sum = checksum_term(bytes, words + 1);
  for (std::size_t i = 0; i < words; ++i) {
    std::uint64_t word;
    std::memcpy(&word, first + i * 8, 8);
    sum += checksum_term(word, i);
  }
  if (bytes % 8 != 0) {
    std::uint64_t word = 0;
    std::memcpy(&word, first + words * 8, bytes % 8);
    sum += checksum_term(word, words);
  }
  return sum;
}

TESSERA_NAMESPACE_END
