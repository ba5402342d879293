// Sequences as bytes in memory.
#pragma once

#include <algorithm>
#include <cstring>
#include <vector>

#include <tessera/core/types.hpp>

namespace support {

/// What write(sink) gives to its sink.
template <class Write>
std::vector<unsigned char> collected(const Write& write) {
  std::vector<unsigned char> bytes;
  write([&](const void* data, std::size_t count) {
    const auto* const first = static_cast<const unsigned char*>(data);
    bytes.insert(bytes.end(), first, first + count);
  });
  return bytes;
}
/// What `save` of a cache writes.
template <class Cache>
std::vector<unsigned char> saved(Cache& cache, tessera::index_t id) {
  return collected([&](auto sink) { cache.save(id, sink); });
}
/// The bytes of a saved sequence in memory of its own.
template <class Saved>
std::vector<unsigned char> bytes_of(const Saved& sequence) {
  return collected([&](auto sink) { sequence.write(sink); });
}

/// The id that `load` of a cache gives to such bytes.
template <class Cache>
tessera::index_t loaded(Cache& cache, const std::vector<unsigned char>& bytes) {
  std::size_t read = 0;
  return cache.load([&](void* data, std::size_t wanted) {
    const std::size_t count = std::min(wanted, bytes.size() - read);
    std::memcpy(data, bytes.data() + read, count);
    read += count;
    return count;
  });
}

}  // namespace support
