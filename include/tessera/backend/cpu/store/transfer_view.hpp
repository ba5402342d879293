// Rows of a view to and from an archive.
#pragma once

#include "../../../core/views.hpp"
#include "../../../runtime/saved/rows.hpp"

TESSERA_NAMESPACE_BEGIN
namespace cpu {

/// Saves or loads the rows of all heads of a view, in one array: keys, values and, of encoded rows, their scales.
template <class T, int D, class Table, int Dv, class Archive>
void transfer_view(const kv_view<T, D, Table, Dv>& view, Archive& archive) {
  constexpr bool scaled = kv_view<T, D, Table, Dv>::encoding_type::scaled;
  using view_type = kv_view<T, D, Table, Dv>;
  using stored = typename view_type::stored_type;
  constexpr int k_units = view_type::k_units, v_units = view_type::v_units;
  offset_t bytes = 0;
  for (index_t h = 0; h < view.kv_heads; ++h)
    bytes += saved_bytes_of<stored, k_units, v_units, scaled>(view.length(0, h));
  archive.begin_array(std::size_t(bytes));
  for (index_t h = 0; h < view.kv_heads; ++h) {
    const index_t count = view.length(0, h);
    transfer_rows(count, k_units, [&](index_t i) { return view.key(0, h, i); }, archive);
    if constexpr (v_units > 0) transfer_rows(count, v_units, [&](index_t i) { return view.value(0, h, i); }, archive);
    if constexpr (scaled) {
      const auto scales = [&](float* all) {
        return [&view, h, all](index_t i) { return all + view.scales.index(view.table.locate(0, h, i), h); };
      };
      transfer_rows(count, 1, scales(view.scales.k), archive);
      transfer_rows(count, 1, scales(view.scales.v), archive);
    }
  }
  archive.end_array();
}

}  // namespace cpu
TESSERA_NAMESPACE_END
