// The channel selector of docs/how_to/add_a_channel_selector.md.
#include <tessera/layout/dense.hpp>
#include <tessera/layout/packed/full_tails.hpp>
#include <tessera/layout/packed/rotated.hpp>
#include <tessera/layout/packed_rows.hpp>
#include <tessera/methods/snapkv.hpp>

TESSERA_NAMESPACE_BEGIN

// [channels]
/// The first quarter of the channels: the strongest ones of a segment, once its rows are rotated.
struct first_channels {
  static constexpr const char* name = "first_channels";
  static constexpr index_t window = 0;
  index_t stored_channels(int dim) const { return dim / 4; }
  index_t group_size() const { return 1; }
  void choose_for_head(const double*, const double*, const packed_format& format, std::uint8_t* bits) const {
    for (index_t i = 0; i < format.set_bytes(); ++i) bits[i] = 0;
    for (index_t c = 0; c < format.stored_channels; ++c) set_bit(bits, c);
  }
  void check() const {}
  template <class Self, class Visit>
  static void parameters(Self&, Visit&&) {}
};
static_assert(check_channels<first_channels>());

using thin_rows = stored<packed_rows<dense_rows<bf16, 64>, first_channels, first_channels, rotated, full_tails>, runs>;
static_assert(check_layout<thin_rows>());
// [channels]

TESSERA_NAMESPACE_END

tessera::snapkv<tessera::bf16, 64, 64, tessera::thin_rows> method;
