// The format of packed rows to and from an archive.
#pragma once

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

TESSERA_NAMESPACE_END
