// What the last decode step of every layer and sequence read: bytes, and on request the positions.
#pragma once

#include <vector>

#include "../../../core/selection.hpp"
#include "../../../core/types.hpp"

TESSERA_NAMESPACE_BEGIN
namespace cpu {

class step_log {
 public:
  explicit step_log(index_t layers) : layers_(layers) {}

  void open(index_t id) {
    if (entries_.size() < (std::size_t(id) + 1) * std::size_t(layers_)) {
      entries_.resize((std::size_t(id) + 1) * std::size_t(layers_));
    }
    for (index_t layer = 0; layer < layers_; ++layer) at(layer, id) = {};
  }
  void trace(bool on) { tracing_ = on; }

  /// Room for the notes of a batch of so many sequences.
  void begin(index_t sequences) {
    if (fresh_.size() < std::size_t(sequences)) fresh_.resize(std::size_t(sequences));
  }
  /// A step of sequence `b` of the batch attended `read` of a view, null for all of it; that and choosing it took `bytes`.
  /// It counts from `commit` on.
  template <class View>
  void note(index_t b, const View& view, const selection_view* read, offset_t bytes) {
    fresh_[std::size_t(b)].bytes = bytes;
    if (!tracing_) return;
    auto& attended = fresh_[std::size_t(b)].attended;
    attended.assign(std::size_t(view.kv_heads), {});
    for (index_t h = 0; h < view.kv_heads; ++h) {
      const index_t count = read ? read->count(h) : view.length(0, h);
      for (index_t i = 0; i < count; ++i) {
        attended[std::size_t(h)].push_back(view.position(0, h, read ? read->row(h)[i] : i));
      }
    }
  }
  void add_bytes(index_t b, offset_t bytes) { fresh_[std::size_t(b)].bytes += bytes; }
  void commit(index_t b, index_t layer, index_t id) {
    at(layer, id).bytes = fresh_[std::size_t(b)].bytes;
    if (tracing_) at(layer, id).attended.swap(fresh_[std::size_t(b)].attended);
  }

  /// Positions by kv_head.
  const std::vector<std::vector<index_t>>& attended(index_t layer, index_t id) const {
    return entries_[index(layer, id)].attended;
  }
  /// All layers.
  offset_t bytes(index_t id) const {
    offset_t total = 0;
    for (index_t layer = 0; layer < layers_; ++layer) total += entries_[index(layer, id)].bytes;
    return total;
  }

 private:
  struct entry {
    offset_t bytes = 0;
    std::vector<std::vector<index_t>> attended;
  };
  std::size_t index(index_t layer, index_t id) const {
    return std::size_t(id) * std::size_t(layers_) + std::size_t(layer);
  }
  entry& at(index_t layer, index_t id) { return entries_[index(layer, id)]; }

  index_t layers_;
  bool tracing_ = false;
  std::vector<entry> entries_;
  std::vector<entry> fresh_;  // by sequence of a batch, until the step is done
};

}  // namespace cpu
TESSERA_NAMESPACE_END
