// The memory of packed rows of every (layer, sequence) on the device, and the tables by which kernels find their
// segments.
#pragma once

#include <algorithm>
#include <memory>
#include <numeric>
#include <string>
#include <type_traits>
#include <utility>

#include "../../../../../channels/all_channels.hpp"
#include "../../../../../channels/head_channels.hpp"
#include "../../../../../channels/top_groups.hpp"
#include "../../../../../core/host/host_vector.hpp"
#include "../../../../../core/sequence_layer.hpp"
#include "../../../../../layout/as_given.hpp"
#include "../../../../../layout/packed_rows.hpp"
#include "../../../../../layout/rotated.hpp"
#include "../../../../../layout/stored.hpp"
#include "../../../../../runtime/layer_roles.hpp"
#include "../../step_table.cuh"
#include "../packed_view.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {

/// The formats of the segments of a layout.
struct segment_formats {
  packed_format k, v;
  int k_dim = 0, v_dim = 0;
  index_t block = 0;  ///< rows whose mean key lies beside them; 0: none
  bool rotates = false;
  packed_format widest_k = k, widest_v = v;  ///< the longest rows that a segment may have, of as many channels
  index_t least_block = block;               ///< of any segment
  bool alike = true;                         ///< all are made by `k`, `v` and `block`

  offset_t k_basis() const { return rotates ? offset_t(k.channels) * k_dim : 0; }  ///< floats of one head
  offset_t v_basis() const { return rotates ? offset_t(v.channels) * v_dim : 0; }
};

/// Bases and sets of channels that were made together, shared by everything that reads them.
using segment_bases = std::shared_ptr<const device_buffer<float>>;
using segment_sets = std::shared_ptr<const device_buffer<std::uint32_t>>;

/// What the host knows of a segment.
struct segment_record {
  index_t first_row = 0, rows = 0, slot = 0;  ///< slot: where the device counts its rows, as long as it exists
  packed_format k{}, v{};
  index_t block = 0;
  std::size_t home = 0;   ///< the entry in whose planes its rows lie, where they were packed
  segment_bases bases{};  ///< null: as the engine hands vectors over
  const float *k_basis = nullptr, *v_basis = nullptr;
  segment_sets sets{};  ///< null: every row has bits
  const std::uint32_t *k_set = nullptr, *v_set = nullptr;
};

namespace detail {

/// Writes a segment with `rows` rows to the table, and `counted` to the number of segments.
template <int Threads>
__global__ void __launch_bounds__(Threads)
    write_segment_entry(device_segment* to, const __grid_constant__ device_segment made, index_t kv_heads, index_t rows,
                        index_t* count, index_t counted) {
  if (threadIdx.x == 0) *to = made, *count = counted;
  for (index_t h = index_t(threadIdx.x); h < kv_heads; h += Threads) made.rows[h] = rows;
}

/// Copies the vectors of one kind of a head, in words of 32 bits. All blocks of a row of the grid share the work.
template <int Threads>
__device__ void copy_vectors(const packed_vectors& from, const packed_vectors& to, index_t head, index_t rows) {
  const auto copy = [&](const void* source, void* target, offset_t words) {
    for (offset_t i = offset_t(blockIdx.x) * Threads + threadIdx.x; i < words; i += offset_t(gridDim.x) * Threads)
      static_cast<std::uint32_t*>(target)[i] = static_cast<const std::uint32_t*>(source)[i];
  };
  const packed_format& format = to.format;
  copy(from.values_of(head, 0), to.values_of(head, 0), offset_t(rows) * value_stride(format.value_bytes()) / 4);
  if (format.own_bits) copy(from.own_bits_of(head, 0), to.own_bits_of(head, 0), offset_t(rows) * bit_words(format));
  if (format.scaled()) copy(from.scales + from.row(head, 0), to.scales + to.row(head, 0), rows);
}

/// Copies a segment that was made elsewhere to its window. blockIdx: part, head, kind.
template <int Threads>
__global__ void __launch_bounds__(Threads)
    move_segment_entry(const __grid_constant__ device_segment from, const __grid_constant__ device_segment to,
                       index_t rows, index_t blocks) {
  const index_t head = index_t(blockIdx.y);
  if (blockIdx.z == 0) copy_vectors<Threads>(from.k, to.k, head, rows);
  if (blockIdx.z == 1) copy_vectors<Threads>(from.v, to.v, head, rows);
  if (blockIdx.z == 2 && to.block > 0) copy_vectors<Threads>(from.means, to.means, head, blocks);
}

}  // namespace detail

/// The segments of every entry; an entry is a (layer, sequence). Its rows lie one behind the other in planes with room
/// for `tokens` of every kv_head, and segments are windows of them, so the last one grows within its window. Means lie
/// likewise: a segment begins with a new block. Heads of an entry are equally long. Windows have room for the longest
/// rows, so a segment that is packed anew fits into its window. What a forked sequence shares lies in another entry's
/// planes. When that entry is cleared, an entry that still reads the rows copies them to its own planes.
///
/// Memory   all of it when made, but for bases and sets. Copies are independent. They share bases, which are written
///          once.
class segment_store {
 public:
  segment_store(const segment_formats& formats, index_t layers, index_t sequences, index_t kv_heads, index_t tokens,
                index_t max_segments)
      : formats_(formats),
        layers_(layers),
        order_{sequences},
        heads_(kv_heads),
        max_segments_(max_segments),
        k_(formats.widest_k, entries() * std::size_t(kv_heads), tokens),
        v_(formats.widest_v, entries() * std::size_t(kv_heads), tokens),
        means_(formats.widest_k, entries() * std::size_t(kv_heads),
               formats.block > 0 ? ceil_div(tokens, formats.least_block) : 0),
        table_(entries() * std::size_t(max_segments)),
        counts_(entries()),
        rows_(table_.size() * std::size_t(kv_heads)),
        batch_(1, sequences, 1),
        records_(entries()) {
    host_vector<index_t> ids;
    for (index_t id = 0; id < sequences; ++id) ids.push_back(id);
    check(cudaMemcpy(batch_.entry({}), ids.data(), ids.size() * sizeof(index_t), cudaMemcpyHostToDevice), "cudaMemcpy");
  }
  segment_store(const segment_store& other)
      : formats_(other.formats_),
        layers_(other.layers_),
        order_(other.order_),
        heads_(other.heads_),
        max_segments_(other.max_segments_),
        k_(other.k_),
        v_(other.v_),
        means_(other.means_),
        table_(other.table_.size()),
        counts_(other.counts_),
        rows_(other.rows_),
        batch_(other.batch_),
        records_(other.records_) {
    point_table_here();
  }
  segment_store(segment_store&&) noexcept = default;
  segment_store& operator=(segment_store&&) noexcept = default;
  segment_store& operator=(const segment_store& other) { return *this = segment_store(other); }

  index_t max_segments() const { return max_segments_; }
  const segment_formats& formats() const { return formats_; }
  const host_vector<segment_record>& segments(sequence_layer owner) const { return records_[order_.index(owner)]; }
  index_t rows(sequence_layer owner) const {
    const auto& all = segments(owner);
    return all.empty() ? 0 : all.back().first_row + all.back().rows;
  }
  static index_t blocks(const segment_record& of) { return of.block > 0 ? ceil_div(of.rows, of.block) : 0; }

  /// Points a view to the segments of one sequence of a layer, or of the batch that the step table gathered.
  template <class View>
  void show(View& view, sequence_layer owner) const {
    point(view, order_.index(owner));
    view.packed = rows(owner);
  }
  template <class View>
  void show_batch(View& view, index_t layer) const {
    point(view, order_.index({layer, 0}));
    view.entries = batch_.batch(0);
  }
  detail::gathered_column gathered() const { return batch_.gathered(); }

  /// Begins a segment without rows. The record has its bases and sets; this sets where its rows will lie.
  void begin_segment(sequence_layer owner, segment_record record, cudaStream_t stream) {
    add_segment(owner, behind(owner, std::move(record), {}), stream);
  }
  /// Reserves memory on the host for `more` segments, so that `add_segment` allocates none.
  void make_room(sequence_layer owner, std::size_t more) {
    auto& all = records_[order_.index(owner)];
    all.reserve(all.size() + more);
  }
  /// Begins a segment behind `unseen` ones. No view counts it before `add_segment`, but rows may be packed into it.
  segment_record begin_unseen(sequence_layer owner, segment_record record, const host_vector<segment_record>& unseen,
                              cudaStream_t stream) const {
    segment_record begun = behind(owner, std::move(record), unseen);
    const std::size_t entry = order_.index(owner);
    write_entry(entry, records_[entry].size() + unseen.size(), begun, records_[entry].size(), stream);
    return begun;
  }
  void add_segment(sequence_layer owner, segment_record record, cudaStream_t stream) {
    const std::size_t entry = order_.index(owner);
    records_[entry].push_back(std::move(record));
    write_entry(entry, records_[entry].size() - 1, stream);
  }
  /// Adds a segment of `rows` rows, which the caller writes.
  void add_loaded(sequence_layer owner, segment_record record, index_t rows, cudaStream_t stream) {
    segment_record begun = behind(owner, std::move(record), {});
    begun.rows = rows;
    add_segment(owner, std::move(begun), stream);
  }
  /// Where the rows of the i-th segment lie.
  device_segment on_device(sequence_layer owner, std::size_t i) const { return segment(order_.index(owner), i); }
  /// Notes that the last segment grew by `rows`.
  void grew(sequence_layer owner, index_t rows) { records_[order_.index(owner)].back().rows += rows; }

  /// Reserves memory on the host for `commit_copy`, which gives an empty entry the segments of another one. The first
  /// `shared` segments are shared, the others are copied.
  void plan_copy(index_t layer, index_t from, index_t to) {
    records_[order_.index({layer, to})].reserve(records_[order_.index({layer, from})].size());
  }
  void commit_copy(index_t layer, index_t from, index_t to, std::size_t shared, cudaStream_t stream) {
    const std::size_t source = order_.index({layer, from}), entry = order_.index({layer, to});
    for (const segment_record& record : records_[source]) {
      records_[entry].push_back(record);
      const std::size_t i = records_[entry].size() - 1;
      i < shared ? write_entry(entry, i, stream) : take_over(entry, i, stream);
    }
  }

  void clear(sequence_layer owner, cudaStream_t stream) {
    const std::size_t left = order_.index(owner);
    records_[left].clear();
    for (index_t other = 0; other < order_.sequences; ++other)
      hand_over(left, order_.index({owner.layer, other}), owner.layer, stream);
    check(cudaMemsetAsync(counts_.data() + order_.index(owner), 0, sizeof(index_t), stream), "cudaMemsetAsync");
  }

  /// Replaces segments `first` to `last` - 1 by one. `made` has their rows in the record's formats, in other memory,
  /// which must live until the copy is done. Later reads on the stream see the new segment.
  void replace_segments(sequence_layer owner, std::size_t first, std::size_t last, segment_record record,
                        const device_segment& made, cudaStream_t stream) {
    const std::size_t entry = order_.index(owner);
    auto& all = records_[entry];
    record.first_row = all[first].first_row, record.slot = all[first].slot, record.rows = 0, record.home = entry;
    for (std::size_t i = first; i < last; ++i) record.rows += all[i].rows;
    all[first] = std::move(record);
    all.erase(all.begin() + offset_t(first) + 1, all.begin() + offset_t(last));
    move(made, entry, first, stream);
    const std::size_t end = last - first > 1 ? all.size() : first + 1;
    for (std::size_t i = first; i < end; ++i) write_entry(entry, i, stream);
  }

  /// Errors   a sequence cannot have so many segments: tessera::error.
  void require_segments(index_t wanted) const {
    require(wanted <= max_segments_, "segments of a sequence", wanted, "at most " + std::to_string(max_segments_),
            "raise cache_options::tokens");
  }

  /// The slots of chosen blocks, which are counted over all segments, and those of the whole rows behind them.
  host_vector<index_t> slots_of_blocks(sequence_layer owner, const host_vector<index_t>& chosen, index_t end) const {
    host_vector<index_t> slots;
    index_t first_block = 0;
    for (const segment_record& segment : segments(owner)) {
      for (index_t row = 0; row < segment.rows; ++row) {
        if (std::binary_search(chosen.begin(), chosen.end(), first_block + row / segment.block))
          slots.push_back(segment.first_row + row);
      }
      first_block += blocks(segment);
    }
    for (index_t slot = rows(owner); slot < end; ++slot) slots.push_back(slot);
    return slots;
  }

  /// An upper bound of the bytes that a step reads for `rows` rows of a head: rows of the longest format and the bases
  /// of all segments. Where blocks are scored, means and the bases of keys come on top.
  offset_t read_bytes(sequence_layer owner, offset_t rows, bool scored) const {
    offset_t longest = 0, total = 0;
    for (const segment_record& record : segments(owner)) {
      longest = (std::max)(longest, row_bytes(record));
      total += basis_bytes() + (scored ? mean_bytes(record) + k_basis_bytes() : 0);
    }
    return total + rows * longest;
  }
  /// Bytes of rows, means and bases of one entry.
  offset_t bytes(sequence_layer owner) const {
    offset_t total = 0;
    for (const segment_record& record : segments(owner))
      total += record.rows * row_bytes(record) + mean_bytes(record) + basis_bytes();
    return heads_ * total;
  }
  /// The most that a layer of `tokens` tokens takes in at most `segments` segments.
  offset_t upper_bound(offset_t tokens, offset_t segments) const {
    const offset_t blocks = formats_.block > 0 ? tokens / formats_.least_block + segments : 0;
    return heads_ * (tokens * (bytes_of(formats_.widest_k) + bytes_of(formats_.widest_v)) +
                     blocks * bytes_of(formats_.widest_k) + segments * basis_bytes());
  }
  /// Bytes of all memory for rows and means.
  offset_t bytes() const { return k_.bytes() + v_.bytes() + means_.bytes(); }
  static offset_t row_bytes(const segment_record& of) { return bytes_of(of.k) + bytes_of(of.v); }
  /// Bytes of the means of one head.
  static offset_t mean_bytes(const segment_record& of) { return blocks(of) * bytes_of(of.k); }
  /// Bytes of the bases of keys of one head.
  offset_t k_basis_bytes() const { return formats_.k_basis() * offset_t(sizeof(float)); }
  /// Bytes of all bases of one head and of the sets that its rows share.
  offset_t basis_bytes() const {
    return (formats_.k_basis() + formats_.v_basis()) * offset_t(sizeof(float)) + set_bytes(formats_.k) +
           set_bytes(formats_.v);
  }

 private:
  /// Rows of one kind: [lanes, capacity], of `format` or shorter ones.
  struct planes {
    packed_format format;
    index_t capacity;
    device_buffer<std::byte> values;
    device_buffer<std::uint32_t> bits;
    device_buffer<float> scales;
    planes(const packed_format& of, std::size_t lanes, index_t tokens)
        : format(of),
          capacity(tokens),
          values(lanes * std::size_t(tokens) * std::size_t(value_stride(of.value_bytes()))),
          bits(of.own_bits ? lanes * std::size_t(tokens) * std::size_t(bit_words(of)) : 0),
          scales(of.scaled() ? lanes * std::size_t(tokens) : 0) {}
    offset_t bytes() const { return offset_t(values.bytes() + bits.bytes() + scales.bytes()); }
    /// The rows of a lane from row `first` on, in format `made`.
    packed_vectors vectors(std::size_t lane, index_t first, const packed_format& made) const {
      const offset_t row = offset_t(lane) * capacity + first, stride = value_stride(format.value_bytes());
      return {made,
              capacity,
              values.data() + row * stride,
              format.own_bits ? bits.data() + row * bit_words(format) : nullptr,
              format.scaled() ? scales.data() + row : nullptr,
              nullptr,
              nullptr,
              capacity * stride,
              offset_t(capacity) * bit_words(format)};
    }
  };
  static offset_t set_bytes(const packed_format& format) { return format.own_bits ? 0 : bit_words(format) * 4; }
  static offset_t bytes_of(const packed_format& format) {
    return value_stride(format.value_bytes()) + (format.own_bits ? bit_words(format) * 4 : 0) + format.scale_bytes();
  }

  std::size_t entries() const { return std::size_t(layers_) * std::size_t(order_.sequences); }
  template <class View>
  void point(View& view, std::size_t first) const {
    view.segments = table_.data() + first * std::size_t(max_segments_);
    view.counts = counts_.data() + first;
    view.max_segments = max_segments_;
  }
  /// The record of a segment behind all others, with a slot that no other segment has.
  segment_record behind(sequence_layer owner, segment_record record, const host_vector<segment_record>& unseen) const {
    const std::size_t entry = order_.index(owner);
    record.first_row = unseen.empty() ? rows(owner) : unseen.back().first_row + unseen.back().rows;
    record.rows = 0, record.slot = 0, record.home = entry;
    const auto has = [&](const host_vector<segment_record>& all) {
      return std::any_of(all.begin(), all.end(),
                         [&](const segment_record& other) { return other.slot == record.slot; });
    };
    while (has(records_[entry]) || has(unseen)) ++record.slot;
    return record;
  }
  device_segment segment(std::size_t entry, std::size_t i) const { return segment(entry, records_[entry][i]); }
  device_segment segment(std::size_t entry, const segment_record& record) const {
    const std::size_t lane = record.home * std::size_t(heads_);
    const index_t first_mean = formats_.block > 0 ? record.first_row / formats_.least_block : 0;  // which divides it
    device_segment made{
        k_.vectors(lane, record.first_row, record.k), v_.vectors(lane, record.first_row, record.v),
        means_.vectors(lane, first_mean, record.k), record.block,
        rows_.data() + (entry * std::size_t(max_segments_) + std::size_t(record.slot)) * std::size_t(heads_)};
    made.k.basis = made.means.basis = record.k_basis;
    made.v.basis = record.v_basis;
    made.k.set = made.means.set = record.k_set;
    made.v.set = record.v_set;
    return made;
  }
  void write_entry(std::size_t entry, std::size_t i, cudaStream_t stream) const {
    write_entry(entry, i, records_[entry][i], records_[entry].size(), stream);
  }
  /// Writes the i-th segment to the table; views count `counted` segments.
  void write_entry(std::size_t entry, std::size_t i, const segment_record& record, std::size_t counted,
                   cudaStream_t stream) const {
    detail::write_segment_entry<128><<<1, 128, 0, stream>>>(table_.data() + entry * std::size_t(max_segments_) + i,
                                                            segment(entry, record), heads_, record.rows,
                                                            counts_.data() + entry, index_t(counted));
    check(cudaGetLastError(), "launch of write_segment");
  }
  /// Copies rows to a segment's window.
  void move(const device_segment& from, std::size_t entry, std::size_t i, cudaStream_t stream) const {
    const segment_record& to = records_[entry][i];
    detail::move_segment_entry<256>
        <<<dim3(32, unsigned(heads_), 3), 256, 0, stream>>>(from, segment(entry, i), to.rows, blocks(to));
    check(cudaGetLastError(), "launch of move_segment");
  }
  /// Copies a segment whose rows lie in another entry's planes to its own entry.
  void take_over(std::size_t entry, std::size_t i, cudaStream_t stream) {
    const device_segment elsewhere = segment(entry, i);
    records_[entry][i].home = entry;
    move(elsewhere, entry, i, stream);
    write_entry(entry, i, stream);
  }
  /// Copies to an entry what it shares with one that is cleared. Other entries that share it read it there from now
  /// on.
  void hand_over(std::size_t left, std::size_t entry, index_t layer, cudaStream_t stream) {
    for (std::size_t i = 0; i < records_[entry].size(); ++i) {
      if (records_[entry][i].home != left) continue;
      take_over(entry, i, stream);
      for (index_t other = 0; other < order_.sequences; ++other) {
        const std::size_t sharing = order_.index({layer, other});
        if (sharing == entry || i >= records_[sharing].size()) continue;
        segment_record& same = records_[sharing][i];
        if (same.home != left || same.first_row != records_[entry][i].first_row) continue;
        same.home = entry;
        write_entry(sharing, i, stream);
      }
    }
  }
  void point_table_here() {
    host_vector<device_segment> all(table_.size());
    for (std::size_t entry = 0; entry < records_.size(); ++entry) {
      for (std::size_t i = 0; i < records_[entry].size(); ++i)
        all[entry * std::size_t(max_segments_) + i] = segment(entry, i);
    }
    if (!all.empty()) {
      check(cudaMemcpy(table_.data(), all.data(), table_.bytes(), cudaMemcpyHostToDevice), "cudaMemcpy");
    }
  }

  segment_formats formats_;
  index_t layers_;
  layer_major order_;
  index_t heads_, max_segments_;
  planes k_, v_, means_;
  device_buffer<device_segment> table_;  // [entries, max_segments]
  device_buffer<index_t> counts_;        // [entries], segments
  device_buffer<index_t> rows_;          // [entries, max_segments, kv_heads]
  id_column<index_t> batch_;             // [sequences] by id: the id; the batch's copy maps sequences to entries
  host_vector<host_vector<segment_record>> records_;  // by entry
};

// Of which formats the segments of a layout are on the device.

/// The layout of the rows of a packing layout that are not packed.
template <packing_layout Layout>
using whole_layout = stored<typename Layout::rows_type::whole_rows, typename Layout::placement_type>;

template <class Channels>
inline constexpr bool knows_channels =
    std::is_same_v<Channels, top_groups> || std::is_same_v<Channels, head_channels> ||
    std::is_same_v<Channels, all_channels>;
/// Whether the device packs by a layout's policies; a static_assert says why where it does not.
template <packing_layout Layout>
constexpr bool check_device_packing() {
  static_assert(knows_channels<typename Layout::rows_type::key_channels> &&
                    knows_channels<typename Layout::rows_type::value_channels>,
                "tessera: the device packs by top_groups, head_channels and all_channels; let another channel selector "
                "say host_only");
  static_assert(std::is_same_v<typename Layout::rows_type::basis_type, rotated> ||
                    std::is_same_v<typename Layout::rows_type::basis_type, as_given>,
                "tessera: the device knows the bases rotated and as_given; let another one say host_only");
  static_assert(!Layout::rows_type::basis_type::rotates ||
                    !std::is_same_v<typename Layout::rows_type::key_channels, head_channels>,
                "tessera: the device chooses one set of channels for a head in the engine's basis; take as_given");
  return true;
}
/// Checks that the device packs a layout.   Errors   elements and lengths that it does not pack: tessera::error.
template <packing_layout Layout>
void require_packable(const Layout& layout, index_t block) {
  using T = typename Layout::element_type;
  const auto& rows = layout.rows;
  for (const packed_format& format : {rows.key_format(), rows.value_format()}) {
    require(format.element != (std::is_same_v<T, bf16> ? packed_element::fp16 : packed_element::bf16), "element",
            "the other type of 16 bits", "same, fp8 or int4 on the device", "take a cache of that type, or the CPU's");
  }
  if (block == 0) return;
  require(rows.segment % block == 0, "segment", rows.segment,
          "a multiple of the block on the device, which is " + std::to_string(block), "cut prompts into whole blocks");
  for (index_t whole = 0; whole <= 2 * rows.tail.tail; ++whole) {
    require(rows.tail.packed_after_prompt(whole) % block == 0, "tail", rows.tail.tail, "one that packs whole blocks",
            "take full_tails where a step reads blocks");
  }
}

/// Puts the positions of `packed` packed rows, which are their slots, before those of each head's whole rows.
/// `are_stored`: positions of whole rows come from a column; else they count from 0.
inline host_vector<host_vector<index_t>> with_packed_positions(host_vector<host_vector<index_t>> all, index_t packed,
                                                               bool are_stored) {
  for (host_vector<index_t>& head : all) {
    for (index_t& position : head) position += are_stored ? 0 : packed;
    head.insert(head.begin(), std::size_t(packed), 0);
    std::iota(head.begin(), head.begin() + packed, 0);
  }
  return all;
}

/// The number of each layer among those that pack, or no_index.
struct packing_layers {
  host_vector<index_t> number;
  index_t count = 0;
  packing_layers(index_t layers, const layer_roles& roles) {
    for (index_t layer = 0; layer < layers; ++layer) number.push_back(roles.follows_recipe(layer) ? count++ : no_index);
  }
  /// An owner's layer among those that pack.
  sequence_layer owner(sequence_layer of) const { return {number[std::size_t(of.layer)], of.id}; }
};

/// The formats of a layout's segments, with means of `block` rows; 0: without means.
template <packing_layout Layout>
segment_formats formats_of(const Layout& layout, index_t block) {
  segment_formats made{layout.rows.key_format(),
                       layout.rows.value_format(),
                       Layout::k_dim,
                       Layout::v_dim,
                       block,
                       Layout::rows_type::basis_type::rotates};
  if (!searches_strategies(layout)) return made;
  const auto widest = widest_rows(layout);
  made.widest_k = widest.key_format(), made.widest_v = widest.value_format();
  if (block > 0) made.least_block = std::gcd(block, strategy_blocks.back());
  made.alike = false;
  return made;
}

/// A common multiple of the blocks of all segments.
template <packing_layout Layout>
index_t encoded_block(const Layout& layout, index_t block) {
  return searches_strategies(layout) && block > 0 ? std::lcm(block, strategy_blocks.front()) : block;
}

}  // namespace cuda
TESSERA_NAMESPACE_END
