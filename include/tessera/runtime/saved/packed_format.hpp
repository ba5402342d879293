// The format of packed rows to and from an archive.
#pragma once

#include "../../core/host/host_vector.hpp"
#include "../../core/stored/packed_row.hpp"
#include "../../core/types.hpp"

TESSERA_NAMESPACE_BEGIN

/// Saves or loads the format of a segment's vectors of `dim` elements.
template <class Archive>
void transfer_format(packed_format& format, index_t dim, Archive& archive) {
  int element = int(format.element);
  archive.number(element);
  archive.require(element >= int(packed_element::same) && element <= int(packed_element::single),
                  "with rows of an unknown element");
  format.element = packed_element(element);
  for (index_t* number : {&format.channels, &format.group, &format.stored_channels}) archive.number(*number);
  archive.flag(format.own_bits);
  const bool groups = format.group == 1 || format.group == 2 || format.group == 4;
  archive.require(groups && format.channels >= 1 && format.channels <= dim && format.stored_channels >= 1 &&
                      format.stored_channels <= format.channels && format.channels % format.group == 0 &&
                      format.stored_channels % format.group == 0,
                  "with channels that cannot be");
}

/// Errors   a loaded set of a head that has not as many groups as the format stores: tessera::error.
template <class Archive>
void require_sets(const host_vector<std::uint8_t>& sets, const packed_format& format, const Archive& archive) {
  const index_t bytes = format.set_bytes();
  for (std::size_t first = 0; Archive::loads && first < sets.size(); first += std::size_t(bytes)) {
    index_t stored = 0;
    for (index_t g = 0; g < bytes * 8; ++g) stored += has_bit(sets.data() + first, g) ? 1 : 0;
    archive.require(stored * format.group == format.stored_channels, "with sets of other channels");
  }
}

TESSERA_NAMESPACE_END
