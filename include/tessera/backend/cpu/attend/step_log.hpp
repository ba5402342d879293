// What the last decode step of every layer and sequence read: bytes and, on request, positions.
#pragma once

#include <algorithm>

#include "../../../core/host/host_vector.hpp"
#include "../../../core/selection.hpp"
#include "../../../core/sequence_layer.hpp"
#include "../../../core/types.hpp"

TESSERA_NAMESPACE_BEGIN
namespace cpu {

class step_log {
 public:
  explicit step_log(index_t layers) : layers_(layers), entries_(layers) {}

  void open(index_t id) { entries_.open_empty(id); }
  void trace(bool on) { tracing_ = on; }

  /// Prepares the notes of a batch of `sequences`.
  void begin(index_t sequences) {
    if (pending_.size() < std::size_t(sequences)) pending_.resize(std::size_t(sequences));
  }
  /// Records that a step of sequence `b` of the batch attended the slots `read` of a view (null: all). A token has
  /// `token_bytes`; the choice of the slots read `bytes`. The record counts after `commit`. If the query heads of a
  /// group read separately, record each of the group's `members` in order. A token that several of them read counts
  /// once.
  template <class View>
  void note(index_t b, const View& view, const selection_view* read, offset_t token_bytes, offset_t bytes,
            index_t member = 0, index_t members = 1) {
    entry& pending = pending_[std::size_t(b)];
    const auto count = [&](index_t h) { return read ? read->count(h) : view.length(0, h); };
    if (member == 0) pending.bytes = pending.tokens = 0;
    pending.bytes += bytes;
    for (index_t h = 0; members == 1 && h < view.kv_heads; ++h) pending.tokens += count(h);
    if (member == 0) pending.bytes += pending.tokens * token_bytes;
    if (!tracing_ && members == 1) return;
    if (member == 0) pending.attended.assign(std::size_t(view.kv_heads * members), {});
    for (index_t h = 0; h < view.kv_heads; ++h) {
      auto& attended = pending.attended[std::size_t(h * members + member)];
      for (index_t i = 0; i < count(h); ++i) attended.push_back(view.position(0, h, read ? read->row(h)[i] : i));
    }
    if (members == 1 || member + 1 < members) return;
    host_vector<index_t> distinct;
    for (index_t h = 0; h < view.kv_heads; ++h) {
      distinct.clear();
      for (index_t m = 0; m < members; ++m) {
        const auto& positions = pending.attended[std::size_t(h * members + m)];
        distinct.insert(distinct.end(), positions.begin(), positions.end());
      }
      std::sort(distinct.begin(), distinct.end());
      pending.tokens += std::unique(distinct.begin(), distinct.end()) - distinct.begin();
    }
    pending.bytes += pending.tokens * token_bytes;
  }
  /// Notes that the step read all stored keys, also of tokens that it did not attend.
  void note_keys(index_t b, const host_vector<index_t>& lengths, offset_t key_bytes) {
    entry& pending = pending_[std::size_t(b)];
    for (const index_t length : lengths) pending.bytes += length * key_bytes;
    pending.bytes -= pending.tokens * key_bytes;
  }
  void add_bytes(index_t b, offset_t bytes) { pending_[std::size_t(b)].bytes += bytes; }
  void commit(index_t b, sequence_layer owner) {
    entries_[owner].bytes = pending_[std::size_t(b)].bytes;
    if (tracing_) entries_[owner].attended.swap(pending_[std::size_t(b)].attended);
  }

  /// Positions by kv_head, or by query head where those of a group read apart.
  const host_vector<host_vector<index_t>>& attended(sequence_layer owner) const { return entries_[owner].attended; }
  /// Bytes of all layers.
  offset_t bytes(index_t id) const {
    offset_t total = 0;
    for (index_t layer = 0; layer < layers_; ++layer) total += entries_[sequence_layer{layer, id}].bytes;
    return total;
  }

 private:
  struct entry {
    offset_t bytes = 0;
    offset_t tokens = 0;  // attended, each of a kv_head once
    host_vector<host_vector<index_t>> attended;
  };

  index_t layers_;
  bool tracing_ = false;
  sequence_table<entry> entries_;
  host_vector<entry> pending_;  // by sequence of a batch, until the step is done
};

}  // namespace cpu
TESSERA_NAMESPACE_END
