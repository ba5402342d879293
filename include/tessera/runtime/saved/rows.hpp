// Rows, lengths and positions of heads to and from an archive.
#pragma once

#include <algorithm>
#include <type_traits>

#include "../../core/host/host_vector.hpp"
#include "../../core/parameters.hpp"
#include "../../core/types.hpp"
#include "archive.hpp"

TESSERA_NAMESPACE_BEGIN

/// Saves or loads a part of an array: `count` rows of `elements` elements, and zeros behind them; row i lies at
/// address(i). Rows side by side are not copied. The bytes do not depend on where rows lie.
template <class Address, class Archive>
void transfer_rows(index_t count, index_t elements, const Address& address, Archive& archive) {
  using T = std::remove_pointer_t<decltype(address(0))>;
  constexpr std::size_t block = std::size_t(1) << 18;
  if (elements == 0) return;
  const index_t most = (std::max)(index_t(1), index_t(block / (std::size_t(elements) * sizeof(T))));
  host_vector<std::remove_const_t<T>> copied;
  for (index_t first = 0; first < count; first += most) {
    const index_t rows = (std::min)(most, count - first);
    T* const begin = address(first);
    bool side_by_side = true;
    for (index_t i = 1; i < rows && side_by_side; ++i)
      side_by_side = address(first + i) == begin + offset_t(i) * elements;
    if (side_by_side) {
      archive.part(begin, std::size_t(rows) * std::size_t(elements));
      continue;
    }
    copied.resize(std::size_t(rows) * std::size_t(elements));
    if constexpr (Archive::loads) {
      archive.part(copied.data(), copied.size());
      for (index_t i = 0; i < rows; ++i)
        std::copy_n(copied.begin() + offset_t(i) * elements, elements, address(first + i));
    } else {
      for (index_t i = 0; i < rows; ++i)
        std::copy_n(address(first + i), elements, copied.begin() + offset_t(i) * elements);
      archive.part(copied.data(), copied.size());
    }
  }
  archive.pad();
}

/// Bytes of the saved rows of a head: keys, values and, of scaled rows, their scales.
template <class Stored, int D, int Dv, bool Scaled>
constexpr offset_t saved_bytes_of(index_t count) {
  const auto part = [&](offset_t row) { return padded_bytes(offset_t(count) * row); };
  return part(D * offset_t(sizeof(Stored))) + part(Dv * offset_t(sizeof(Stored))) + (Scaled ? 2 * part(4) : 0);
}

/// Saves or loads a count from 0 to `most`.
template <class Archive>
void transfer_count(index_t& count, index_t most, Archive& archive) {
  archive.number(count);
  archive.require(count >= 0 && count <= most, "with counts that cannot be");
}

/// Saves or loads lengths of heads, which are at most `next`, the layer's next position.
template <class Archive>
void transfer_lengths(host_vector<index_t>& lengths, index_t next, Archive& archive) {
  archive.rows(lengths.data(), lengths.size());
  const index_t most = (std::min)(next, max_tokens);
  for (const index_t length : lengths) archive.require(length >= 0 && length <= most, "with lengths that cannot be");
}

/// Errors   loaded numbers that do not ascend from 0 on, below `end`: tessera::error.
template <class Archive>
void require_ascending(const index_t* numbers, index_t count, index_t end, const Archive& archive) {
  for (index_t i = 0; Archive::loads && i < count; ++i)
    archive.require(numbers[i] > (i == 0 ? -1 : numbers[i - 1]) && numbers[i] < end, "with numbers that do not ascend");
}
/// Saves or loads ascending numbers from 0 on, below `end`: positions, slots or lines.
template <class Archive>
void transfer_ascending(index_t* numbers, index_t count, index_t end, Archive& archive) {
  archive.rows(numbers, std::size_t(count));
  require_ascending(numbers, count, end, archive);
}

TESSERA_NAMESPACE_END
