// What the last decode step of every layer and sequence read: bytes, and on request the positions.
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

  /// Room for the notes of a batch of so many sequences.
  void begin(index_t sequences) {
    if (fresh_.size() < std::size_t(sequences)) fresh_.resize(std::size_t(sequences));
  }
  /// A step of sequence `b` of the batch attended `read` of a view, null for all of it, at `token_bytes` each; choosing
  /// it took `bytes`. It counts from `commit` on. Where query heads of a group read apart, each of `members` places in
  /// the group is noted by itself, in order; a token that several read counts once.
  template <class View>
  void note(index_t b, const View& view, const selection_view* read, offset_t token_bytes, offset_t bytes,
            index_t member = 0, index_t members = 1) {
    entry& fresh = fresh_[std::size_t(b)];
    const auto count = [&](index_t h) { return read ? read->count(h) : view.length(0, h); };
    if (member == 0) fresh.bytes = fresh.tokens = 0;
    fresh.bytes += bytes;
    for (index_t h = 0; members == 1 && h < view.kv_heads; ++h) fresh.tokens += count(h);
    if (member == 0) fresh.bytes += fresh.tokens * token_bytes;
    if (!tracing_ && members == 1) return;
    if (member == 0) fresh.attended.assign(std::size_t(view.kv_heads * members), {});
    for (index_t h = 0; h < view.kv_heads; ++h) {
      auto& attended = fresh.attended[std::size_t(h * members + member)];
      for (index_t i = 0; i < count(h); ++i) attended.push_back(view.position(0, h, read ? read->row(h)[i] : i));
    }
    if (members == 1 || member + 1 < members) return;
    host_vector<index_t> distinct;
    for (index_t h = 0; h < view.kv_heads; ++h) {
      distinct.clear();
      for (index_t m = 0; m < members; ++m) {
        const auto& one = fresh.attended[std::size_t(h * members + m)];
        distinct.insert(distinct.end(), one.begin(), one.end());
      }
      std::sort(distinct.begin(), distinct.end());
      fresh.tokens += std::unique(distinct.begin(), distinct.end()) - distinct.begin();
    }
    fresh.bytes += fresh.tokens * token_bytes;
  }
  /// The step read all keys that are stored, those too that it did not attend.
  void note_keys(index_t b, const host_vector<index_t>& lengths, offset_t key_bytes) {
    entry& fresh = fresh_[std::size_t(b)];
    for (const index_t length : lengths) fresh.bytes += length * key_bytes;
    fresh.bytes -= fresh.tokens * key_bytes;
  }
  void add_bytes(index_t b, offset_t bytes) { fresh_[std::size_t(b)].bytes += bytes; }
  void commit(index_t b, sequence_layer owner) {
    entries_[owner].bytes = fresh_[std::size_t(b)].bytes;
    if (tracing_) entries_[owner].attended.swap(fresh_[std::size_t(b)].attended);
  }

  /// Positions by kv_head, or by query head where those of a group read apart.
  const host_vector<host_vector<index_t>>& attended(sequence_layer owner) const { return entries_[owner].attended; }
  /// All layers.
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
  host_vector<entry> fresh_;  // by sequence of a batch, until the step is done
};

}  // namespace cpu
TESSERA_NAMESPACE_END
