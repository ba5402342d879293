// A saved sequence in page-locked memory, where the device writes it and reads it.
#pragma once

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

#include "../../../core/error.hpp"
#include "../../../core/host/host_vector.hpp"
#include "../../../runtime/saved/archive.hpp"
#include "../device/memory.cuh"
#include "../device/pinned.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {
namespace detail {

template <class Sink>
class sequence_output;
template <class Source>
class sequence_input;

/// Page-locked memory for bytes that come one behind the other, in pieces that never move.
class pinned_pieces {
 public:
  struct piece {
    std::byte* data;
    std::size_t bytes;
  };

  /// Memory for so many bytes, side by side. Errors: no memory.
  void reserve(std::size_t bytes) {
    if (chunks_.empty()) chunks_.push_back(pinned_buffer<std::byte>(bytes));
  }
  /// The next piece, which begins at a multiple of `part_alignment` and is never null, 0 bytes long too. Errors: no
  /// memory.
  std::byte* append(std::size_t bytes) {
    const auto begin = [&] { return std::size_t(padded_bytes(offset_t(used_))); };
    if (chunk_ < chunks_.size() && begin() + bytes > chunks_[chunk_].size()) ++chunk_, used_ = 0;
    if (chunk_ == chunks_.size()) chunks_.emplace_back();
    const std::size_t size = chunks_[chunk_].size();
    if (size == 0 || begin() + bytes > size) {  // it holds no piece yet: a larger one takes its place
      chunks_[chunk_] = {};
      chunks_[chunk_] = pinned_buffer<std::byte>((std::max)(bytes + bytes / 8, least_chunk));
    }
    std::byte* const data = chunks_[chunk_].data() + begin();
    used_ = begin() + bytes;
    pieces_.push_back({data, bytes});
    return data;
  }
  /// Forgets the pieces; the memory stays.
  void clear() {
    pieces_.clear();
    chunk_ = used_ = 0;
  }
  const host_vector<piece>& all() const { return pieces_; }
  /// Bytes of all memory.
  std::size_t capacity() const {
    std::size_t sum = 0;
    for (const auto& chunk : chunks_) sum += chunk.size();
    return sum;
  }
  std::size_t bytes() const {
    std::size_t sum = 0;
    for (const piece& each : pieces_) sum += each.bytes;
    return sum;
  }

 private:
  static constexpr std::size_t least_chunk = std::size_t(1) << 20;
  host_vector<pinned_buffer<std::byte>> chunks_;
  std::size_t chunk_ = 0, used_ = 0;
  host_vector<piece> pieces_;
};

}  // namespace detail

/// A saved sequence in page-locked memory of the host. `save` of a cache fills it without waiting, and `load` reads it:
/// so a server swaps a sequence out while others step. The bytes are those that `save` gives to a sink.
/// Device   make it where the cache's device is the current one.
/// Memory   of the host alone. It grows to that of the largest save and stays. To make a MiB takes some 0.3 ms.
/// Threads  one call at a time.
class saved_sequence {
 public:
  /// `bytes`: page-locked memory to make at once.
  explicit saved_sequence(std::size_t bytes = 0) {
    if (bytes > 0) pieces_.reserve(bytes);
  }
  saved_sequence(saved_sequence&& other) : saved_sequence() { swap(other); }
  saved_sequence& operator=(saved_sequence other) noexcept {
    swap(other);
    return *this;
  }
  /// Waits for the device, which may still write to the memory.
  ~saved_sequence() {
    if (is_whole_) written_.drain();
  }

  /// Whether a whole sequence was saved here; its bytes may be on their way.
  bool is_whole() const { return is_whole_; }
  /// The number of its bytes. Errors: there is none.
  std::size_t bytes() const {
    require_whole();
    return pieces_.bytes();
  }
  /// Bytes of page-locked memory.
  std::size_t capacity() const { return pieces_.capacity(); }
  /// Whether all bytes have arrived. The sequence that was saved may then change, and be closed.
  bool has_arrived() const {
    require_whole();
    return written_.is_past();
  }
  /// Waits for the bytes.
  void wait() const {
    require_whole();
    written_.wait();
  }
  /// Waits, and gives the bytes to sink(const void* data, std::size_t bytes): to a file, for example.
  template <class Sink>
  void write(Sink&& sink) const {
    wait();
    for (const auto& piece : pieces_.all()) sink(static_cast<const void*>(piece.data), piece.bytes);
  }

 private:
  template <class>
  friend class detail::sequence_output;
  template <class>
  friend class detail::sequence_input;

  void swap(saved_sequence& other) noexcept {
    std::swap(pieces_, other.pieces_);
    std::swap(written_, other.written_);
    std::swap(is_whole_, other.is_whole_);
  }
  void require_whole() const { require(is_whole_, "saved sequence", "none", "a whole one", "pass it to save first"); }

  detail::pinned_pieces pieces_;
  stream_mark written_;
  bool is_whole_ = false;
};

}  // namespace cuda
TESSERA_NAMESPACE_END
