// A checksum whose words may be added in any order, so that many threads, or a device, can compute it.
#pragma once

#include <algorithm>
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

/// What the number of bytes adds to a checksum.
TESSERA_HD TESSERA_INLINE std::uint64_t checksum_end(std::uint64_t bytes) {
  return checksum_term(bytes, bytes / 8 + 1);
}

/// The sum of `checksum_term` over the 8-byte words of some bytes, modulo 2^64; the last word is filled with zeros, and
/// the number of bytes counts as one more word. Bytes that differ within one word have different checksums; others have
/// the same one with a chance of 2^-64. It protects against accidents, not against an attacker.
/// Cost     one pass over the bytes.
class running_checksum {
 public:
  /// Adds the next bytes.
  void add(const void* data, std::size_t bytes) {
    const auto* first = static_cast<const unsigned char*>(data);
    if (const std::size_t begun = std::size_t(bytes_ % 8); begun > 0) {
      const std::size_t taken = (std::min)(bytes, 8 - begun);
      std::memcpy(reinterpret_cast<unsigned char*>(&word_) + begun, first, taken);
      bytes_ += taken;
      if (bytes_ % 8 != 0) return;
      sum_ += checksum_term(word_, bytes_ / 8 - 1);
      word_ = 0;
      first += taken, bytes -= taken;
    }
    const std::uint64_t words = bytes_ / 8;
    for (std::size_t i = 0; i < bytes / 8; ++i) {
      std::uint64_t word;
      std::memcpy(&word, first + i * 8, 8);
      sum_ += checksum_term(word, words + i);
    }
    if (bytes % 8 != 0) std::memcpy(&word_, first + bytes / 8 * 8, bytes % 8);
    bytes_ += bytes;
  }
  std::uint64_t bytes() const { return bytes_; }
  std::uint64_t value() const {
    return sum_ + checksum_end(bytes_) + (bytes_ % 8 != 0 ? checksum_term(word_, bytes_ / 8) : 0);
  }

 private:
  std::uint64_t sum_ = 0, bytes_ = 0, word_ = 0;
};

/// The checksum of bytes that lie side by side.
inline std::uint64_t checksum(const void* data, std::size_t bytes) {
  running_checksum sum;
  if (bytes > 0) sum.add(data, bytes);
  return sum.value();
}

TESSERA_NAMESPACE_END
