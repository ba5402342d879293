// expect: tessera: a channel selector needs choose(row, format, bits) for each vector, or, for all of a head, choose_for_head(queries, rows, format, bits) and window
#include <tessera/concepts/channels.hpp>

struct first_channels {
  static constexpr const char* name = "first_channels";
  tessera::index_t stored_channels(int dim) const { return dim / 4; }
  tessera::index_t group_size() const { return 1; }
  void check() const {}
};
static_assert(tessera::check_channels<first_channels>());
