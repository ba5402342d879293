// Segments of packed rows, made of whole ones: their bases, the sets that their rows share, and the rows.
#pragma once

#include <algorithm>
#include <memory>
#include <optional>
#include <utility>

#include "../../../../core/host/host_vector.hpp"
#include "../../../../runtime/kept_lengths.hpp"
#include "../searched/possible_segments.cuh"
#include "../searched/rows_before.cuh"
#include "bases/segment_bases.cuh"
#include "drop_oldest.cuh"
#include "encode_rows.cuh"
#include "head_sets.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {

/// Bases and sets of segments that begin, one behind the other.
struct segment_rooms {
  std::shared_ptr<device_buffer<float>> bases;
  std::shared_ptr<device_buffer<std::uint32_t>> sets;
};

/// What becomes segments when `commit_packing` is called.
template <class View>
struct packing_plan {
  sequence_layers owners, ended;                           // with rows that are due; whose prompts end
  host_vector<kept_bound> left;                            // of the whole rows, by owner
  host_vector<index_t> due, shares;              // rows; and those of a segment of their own, 0: they join the last one
  host_vector<host_vector<rows_before>> before;  // by owner: where rows that join others are kept
  bool prompt_ends = false;
  host_vector<segment_span<View>> own;  // segments that begin
  segment_rooms room;
  // Empty, with room for what carrying it out notes: that needs no memory on the host.
  host_vector<joining_rows> joining;
  host_vector<encode_problem<View>> problems;
  host_vector<oldest_rows<typename View::whole_type>> oldest;
  void make_room() {
    joining.reserve(own.size() + owners.size()), problems.reserve(own.size() + owners.size());
    oldest.reserve(owners.size());
  }
};

/// What a layout's own segments need. Layers are counted among those that pack. Calls on one stream follow each other;
/// a caller with two lets one wait for the other.
template <packing_layout Layout, class View>
class segment_maker {
  using T = typename Layout::element_type;
  static constexpr bool rotates = Layout::rows_type::basis_type::rotates;

 public:
  using spans = host_vector<segment_span<View>>;

  segment_maker(const Layout& layout, const segment_formats& formats, index_t block, index_t layers, index_t sequences,
                index_t kv_heads, index_t tokens)
      : formats_(formats),
        heads_(kv_heads),
        sets_(formats, layers, sequences, kv_heads, Layout::window),
        encode_(encoded_block(layout, block), (std::max)(formats.k.channels, formats.v.channels), formats.least_block) {
    if constexpr (rotates) {
      // Between steps a segment begins with a whole tail, which may be longer than a prompt's segments.
      const index_t share = (std::min)(layout.rows.segment, tokens);
      const index_t longest = (std::max)(share, (std::min)(layout.rows.tail.tail, tokens));
      bases_.emplace(formats, kv_heads, layers * ceil_div(tokens, share), longest, device_info::current());
    }
  }

  /// The last queries of a prompt chunk, by which sets are chosen, until the prompt ends.
  void observe(sequence_layer owner, const rows_view<const T>& q, cudaStream_t stream) {
    sets_.observe(owner, q, stream);
  }
  void forget(sequence_layer owner) { sets_.forget(owner); }

  /// Not cleared, which would wait for the stream: all of it is written. Errors: no memory, tessera::error.
  segment_rooms room_for(std::size_t segments) const {
    segment_rooms made;
    if (segments == 0) return made;
    if (sets_.each() > 0)
      made.sets = std::make_shared<device_buffer<std::uint32_t>>(
          device_buffer<std::uint32_t>::not_cleared(segments * sets_.each()));
    if (bases_)
      made.bases = std::make_shared<device_buffer<float>>(
          device_buffer<float>::not_cleared(segments * std::size_t((*bases_).each())));
    return made;
  }
  /// Finds the bases of segments. Waits for the device. Errors: rows have none, tessera::error.
  void find_bases(const spans& segments, const segment_rooms& room, cudaStream_t stream) {
    if (room.bases) (*bases_).run(segments, room.bases->data(), stream);
  }
  /// The same without waiting, but where groups of channels are put in order; behind it `have_bases` says whether rows
  /// have any.
  void start_bases(const spans& segments, const segment_rooms& room, cudaStream_t stream) {
    if (room.bases) (*bases_).start(segments, room.bases->data(), stream);
  }
  bool have_bases() const { return !bases_ || (*bases_).are_finite(); }

  /// The i-th of the segments in `room`, of those rows of a sequence; its set is chosen.
  segment_record begin(const segment_rooms& room, std::size_t i, const segment_span<View>& of,
                       sequence_layer owner, cudaStream_t stream) const {
    segment_record begun{.k = formats_.k, .v = formats_.v, .block = formats_.block};
    if (room.sets) {
      std::uint32_t* sets = room.sets->data() + i * sets_.each();
      sets_.choose(of.view, owner, of.first, of.count, sets, stream);
      begun.sets = room.sets;
      begun.k_set = sets, begun.v_set = sets + sets_.k_words();
    }
    if (room.bases) {
      begun.bases = room.bases;
      begun.k_basis = room.bases->data() + offset_t(i) * (*bases_).each();
      begun.v_basis = begun.k_basis + heads_ * formats_.k_basis();
    }
    return begun;
  }
  /// Packs whole rows: each problem is of one sequence and layer.
  void encode(const host_vector<encode_problem<View>>& problems, cudaStream_t stream) const {
    encode_.run(problems.data(), problems.size(), stream);
  }

 private:
  segment_formats formats_;
  index_t heads_;
  head_sets<View, typename Layout::rows_type> sets_;
  encode_rows<View> encode_;
  std::optional<find_segment_bases<View>> bases_;
};

}  // namespace cuda
TESSERA_NAMESPACE_END
