// Every channel of a vector is stored.
#pragma once

#include "../concepts/channels.hpp"

TESSERA_NAMESPACE_BEGIN

/// Stores every element of a vector, and no bits.
struct all_channels {
  static constexpr const char* name = "all_channels";
  static constexpr index_t window = 0;

  index_t stored_channels(int dim) const { return dim; }
  index_t group_size() const { return 1; }
  void choose_for_head(const double*, const double*, const packed_format& format, std::uint8_t* bits) const {
    for (index_t i = 0; i < format.set_bytes(); ++i) bits[i] = 0;
    for (index_t c = 0; c < format.channels; ++c) set_bit(bits, c);
  }
  void check() const {}
  template <class Self, class Visit>
  static void parameters(Self&, Visit&&) {}
};

static_assert(check_channels<all_channels>());

TESSERA_NAMESPACE_END
