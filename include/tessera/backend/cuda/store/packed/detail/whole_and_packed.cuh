// The whole rows of a store of packed rows, and its segments.
#pragma once

#include <algorithm>
#include <tuple>
#include <utility>

#include "../../kv_store.cuh"
#include "segment_maker.cuh"
#include "segment_store.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {

/// Where the segments of a layout lie: in planes, or, where whole rows lie in pages, in pages of the same pool.
template <class Whole, class Placement = typename Whole::placement_type>
struct segment_memory_of {
  using type = packed_planes;
};
template <class Whole, int Page>
struct segment_memory_of<Whole, fixed_pages<Page>> {
  using type = packed_pages<placed_rows<Whole>>;
};

/// What a store of packed rows holds: whole rows and segments, and what can be asked of both. Copies are independent.
template <packing_layout Layout>
class whole_and_packed {
 public:
  using whole_store = kv_store<whole_layout<Layout>>;
  using memory_type = typename segment_memory_of<whole_layout<Layout>>::type;
  using segments_type = segment_store<memory_type>;
  using view_type = packed_view<typename whole_store::view_type, segments_type::rows_in>;

  whole_and_packed(index_t layers, index_t sequences, index_t kv_heads, index_t tokens, offset_t rows,
                   const column_set& with, const typename Layout::placement_type& where, const Layout& layout,
                   const layer_roles& roles)
      : layout_(layout),
        heads_(kv_heads),
        tokens_(tokens),
        with_(with),
        packing_(layers, roles),
        whole_(layers, sequences, kv_heads, tokens, pool_rows(where, layers, sequences, rows), with, where),
        packed_(formats(), packing_.count, sequences, kv_heads, segments(),
                memory_type(formats(), packing_.count, sequences, kv_heads, tokens, segments())) {
    packed_.use(whole_.rows());
  }
  whole_and_packed(const whole_and_packed& other)
      : layout_(other.layout_),
        heads_(other.heads_),
        tokens_(other.tokens_),
        with_(other.with_),
        packing_(other.packing_),
        whole_(other.whole_),
        packed_(other.packed_) {
    packed_.use(whole_.rows());
    packed_.point_tables_here();
  }
  whole_and_packed(whole_and_packed&& other) noexcept
      : stream_beside_(std::move(other.stream_beside_)),
        layout_(std::move(other.layout_)),
        heads_(other.heads_),
        tokens_(other.tokens_),
        with_(other.with_),
        packing_(std::move(other.packing_)),
        whole_(std::move(other.whole_)),
        packed_(std::move(other.packed_)) {
    packed_.use(whole_.rows());
  }
  whole_and_packed& operator=(const whole_and_packed& other) { return *this = whole_and_packed(other); }
  whole_and_packed& operator=(whole_and_packed&& other) noexcept {
    stream_beside_ = std::move(other.stream_beside_);  // waits for the old one before memory is released
    layout_ = std::move(other.layout_), heads_ = other.heads_, tokens_ = other.tokens_, with_ = other.with_;
    packing_ = std::move(other.packing_), whole_ = std::move(other.whole_), packed_ = std::move(other.packed_);
    packed_.use(whole_.rows());
    return *this;
  }
  ~whole_and_packed() { stream_beside_.drain(); }

  index_t kv_heads() const { return heads_; }
  token_bound bound(sequence_layer owner) const {
    token_bound whole = whole_.bound(owner);
    const index_t packed = packed_rows_of(owner);
    return {whole.longest + packed, whole.total + offset_t(heads_) * packed};
  }
  index_t always_read(sequence_layer owner) const { return whole_.bound(owner).longest; }
  index_t* lengths(sequence_layer owner) const { return whole_.lengths(owner); }
  const id_column<index_t>& length_column() const { return whole_.length_column(); }
  host_vector<index_t> held_by_head(sequence_layer owner) const { return whole_.held_by_head(owner); }
  const auto& rows() const { return whole_.rows(); }
  auto& rows() { return whole_.rows(); }

  view_type view(sequence_layer owner) const {
    view_type made;
    made.whole = whole_.view(owner);
    if (packs(owner.layer)) packed_.show(made, packed_owner(owner));
    return made;
  }
  view_type batch_view(index_t layer, index_t batch) const {
    view_type made;
    made.whole = whole_.batch_view(layer, batch);
    if (packs(layer)) packed_.show_batch(made, packing_.number[std::size_t(layer)]);
    return made;
  }
  host_vector<detail::gathered_column> gathered() const {
    auto all = whole_.gathered();
    all.push_back(packed_.gathered());
    return all;
  }
  std::tuple<whole_store&, segments_type&, const packing_layers&> parts() { return {whole_, packed_, packing_}; }

  /// Logical positions by kv_head, ascending. The position of a packed row is its slot. Synchronises.
  host_vector<host_vector<index_t>> downloaded_positions(sequence_layer owner) const {
    return with_packed_positions(whole_.downloaded_positions(owner), packed_rows_of(owner), with_.positions);
  }
  /// The slots of a head's chosen blocks, and those behind them.
  host_vector<index_t> slots_of_blocks(sequence_layer owner, index_t head, const host_vector<index_t>& blocks) const {
    const index_t whole = with_.drops ? whole_.stored(owner, head) : whole_.bound(owner).longest;
    return packed_.slots_of_blocks(packed_owner(owner), head, blocks, whole);
  }
  offset_t peak_bytes() const { return whole_.peak_bytes() + packed_.bytes(); }
  capacity available() const {
    capacity all = whole_.available();
    all.pages += packed_.planned_pages();
    return all;
  }
  /// Bytes that a step reads of a head when it attends `attended` tokens. Blocks are scored whatever the budget.
  offset_t step_bytes(sequence_layer owner, offset_t attended) const {
    const offset_t whole = (std::min<offset_t>)(attended, always_read(owner));
    const offset_t total = whole * whole_layout<Layout>::token_bytes();
    if (!packs(owner.layer) || attended == whole) return total;
    return total + packed_.read_bytes(packed_owner(owner), attended - whole, with_.mean_block > 0);
  }

 protected:
  bool packs(index_t layer) const { return packing_.number[std::size_t(layer)] >= 0; }
  /// The same owner, with its layer's number among the layers that pack.
  sequence_layer packed_owner(sequence_layer owner) const { return packing_.owner(owner); }
  index_t packed_rows_of(sequence_layer owner) const {
    return packs(owner.layer) ? packed_.rows(packed_owner(owner)) : 0;
  }
  stream_beside stream_beside_;  // of the layer that is packed beside the caller's stream
  Layout layout_;
  index_t heads_, tokens_;
  column_set with_;
  packing_layers packing_;
  whole_store whole_;
  segments_type packed_;

 private:
  /// Rows of the pool; `rows` 0: enough for everything.   Errors   the memory's check_pool.
  offset_t pool_rows(const typename Layout::placement_type& where, index_t layers, index_t sequences,
                     offset_t rows) const {
    if (rows == 0) {
      rows = whole_store::rows_type::rows_for(where, layers * sequences, heads_, tokens_) +
             memory_type::pool_rows(formats(), packing_.count * sequences, heads_, tokens_, segments());
    }
    memory_type::check_pool(rows * whole_layout<Layout>::token_bytes());
    return rows;
  }
  segment_formats formats() const { return formats_of(layout_, with_.mean_block, with_.drops); }
  index_t segments() const { return max_device_segments(layout_, tokens_, with_.mean_block, with_.drops); }
};

}  // namespace cuda
TESSERA_NAMESPACE_END
