// Archives whose arrays the device writes to page-locked memory, or reads from it, checksums included.
#pragma once

#include <algorithm>
#include <array>
#include <cstring>
#include <type_traits>

#include "saved_sequence.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {
namespace detail {

using device_sum = unsigned long long;

/// Where the parts of a head begin in the arrays of a layer, in bytes; -1: there is no such column.
inline constexpr int saved_columns = 3;  // positions, scores, segments
struct saved_head {
  offset_t columns[saved_columns];
  offset_t k, v, k_scales, v_scales;
  index_t rows;
};

/// The bytes from `begin` to `end` of an array, on the device, and where their checksum is added up.
struct saved_slice {
  std::byte* data;
  offset_t begin, end;
  device_sum* sum;
};

template <class Sum>
__global__ void finish_sum_entry(const Sum* sum, std::uint64_t end, std::uint64_t* written) {
  *written = *sum + end;
}
template <class Sum>
__global__ void compare_sum_entry(const Sum* sum, std::uint64_t end, std::uint64_t expected, index_t* differs) {
  if (*sum + end != expected) *differs = 1;
}

}  // namespace detail

/// Memory on the device through which a cache saves and loads sequences, one behind the other, on any streams. Arrays
/// pass it in slices: while one is copied, on a stream of its own, the next one is gathered or the last one scattered.
/// The copy engines have the bus, and steps have the device.
class transfer_buffer {
 public:
  explicit transfer_buffer(index_t kv_heads) : heads_(std::size_t(kv_heads)) {
    for (slice_memory& each : slices_) each.data = device_buffer<std::byte>::not_cleared(std::size_t(slice_bytes));
    check(cudaStreamCreateWithFlags(&copies_, cudaStreamNonBlocking), "cudaStreamCreate");
  }
  transfer_buffer(const transfer_buffer&) = delete;
  transfer_buffer& operator=(const transfer_buffer&) = delete;
  ~transfer_buffer() { cudaStreamDestroy(copies_); }

  /// Lets `stream` wait for the save before.
  void hold(cudaStream_t stream) const { used_.hold(stream); }
  /// Forgets the differences that another load found.
  void begin_load(cudaStream_t stream) const {
    hold(stream);
    check(cudaMemsetAsync(differs_.data(), 0, sizeof(index_t), stream), "cudaMemsetAsync");
  }
  /// On the device: whether an array of this load has another checksum than it should.
  index_t* differs() const { return differs_.data(); }
  /// Lets `stream` wait for the copies of this one.
  void finish(cudaStream_t stream) {
    for (const slice_memory& each : slices_) each.used.hold(stream);
    used_.set(stream);
  }
  /// Waits for everything that was enqueued here and on `stream`.
  void wait(cudaStream_t stream) const noexcept {
    cudaStreamSynchronize(copies_);
    cudaStreamSynchronize(stream);
  }
  /// The heads of a layer, on the device. Comes before the layer's arrays; `stream` waits for the save before.
  const detail::saved_head* upload(const host_vector<detail::saved_head>& heads, cudaStream_t stream) const {
    hold(stream);
    check(cudaMemcpyAsync(heads_.data(), heads.data(), heads.size() * sizeof(detail::saved_head),
                          cudaMemcpyHostToDevice, stream),
          "cudaMemcpyAsync");
    return heads_.data();
  }
  /// The device's part of an array at `image` in page-locked memory: launch(slice) for each slice, on `stream`, and the
  /// copies. Returns the sum of the checksum's terms, on `stream`.
  template <bool Loads, class Launch>
  detail::device_sum* move(std::byte* image, std::size_t bytes, const Launch& launch, cudaStream_t stream) {
    check(cudaMemsetAsync(sum_.data(), 0, sizeof(detail::device_sum), stream), "cudaMemsetAsync");
    for (offset_t begin = 0; begin < offset_t(bytes); begin += slice_bytes) {
      const offset_t end = (std::min)(offset_t(bytes), begin + slice_bytes);
      slice_memory& lane = slices_[turn_++ % slices_.size()];
      std::byte* const slice = lane.data.data();
      const auto enqueue = [](cudaStream_t own, const stream_mark& awaited, stream_mark& reached, const auto& work) {
        awaited.hold(own);
        work();
        reached.set(own);
      };
      const auto copy = [&] {
        check(cudaMemcpyAsync(Loads ? slice : image + begin, Loads ? image + begin : slice, std::size_t(end - begin),
                              Loads ? cudaMemcpyHostToDevice : cudaMemcpyDeviceToHost, copies_),
              "cudaMemcpyAsync");
      };
      const auto launched = [&] { launch(detail::saved_slice{slice, begin, end, sum_.data()}); };
      if constexpr (Loads) {
        enqueue(copies_, lane.used, lane.filled, copy);
        enqueue(stream, lane.filled, lane.used, launched);
      } else {
        enqueue(stream, lane.used, lane.filled, launched);
        enqueue(copies_, lane.filled, lane.used, copy);
      }
    }
    return sum_.data();
  }

 private:
  static constexpr offset_t slice_bytes = offset_t(8) << 20;
  struct slice_memory {
    device_buffer<std::byte> data;
    stream_mark filled, used;
  };
  std::array<slice_memory, 2> slices_;
  std::size_t turn_ = 0;
  cudaStream_t copies_{};
  device_buffer<detail::device_sum> sum_{1};
  device_buffer<index_t> differs_{1};
  device_buffer<detail::saved_head> heads_;
  stream_mark used_;
};

namespace detail {

/// Where a sequence is saved: a saved_sequence, or a sink that has each layer's bytes when they have arrived.
template <class Sink>
class sequence_output {
 public:
  static constexpr bool keeps = std::is_same_v<Sink, saved_sequence>;

  sequence_output(Sink& sink, transfer_buffer& buffer, cudaStream_t stream)
      : sink_(sink), buffer_(buffer), stream_(stream) {
    if (staged().is_whole_) staged().wait();
    staged().is_whole_ = false;
    staged().pieces_.clear();
  }
  sequence_output(const sequence_output&) = delete;
  sequence_output& operator=(const sequence_output&) = delete;
  /// Where a save failed, waits for what it began.
  ~sequence_output() {
    if (!keeps || !staged().is_whole_) buffer_.wait(stream_);
  }

  /// Takes bytes of the host.
  void operator()(const void* data, std::size_t bytes) {
    std::byte* const to = staged().pieces_.append(bytes);
    if (bytes > 0) std::memcpy(to, data, bytes);
  }
  /// Takes bytes and their checksum from launch(slice).
  template <class Launch>
  void array(std::size_t bytes, const Launch& launch) {
    saved_sequence& to = staged();
    std::byte* const image = to.pieces_.append(bytes);
    auto* const written = reinterpret_cast<std::uint64_t*>(to.pieces_.append(sizeof(std::uint64_t)));
    const device_sum* const sum = buffer_.template move<false>(image, bytes, launch, stream_);
    finish_sum_entry<<<1, 1, 0, stream_>>>(sum, checksum_end(bytes), written);
    check(cudaGetLastError(), "launch of finish_sum");
    pour();
  }
  const saved_head* upload(const host_vector<saved_head>& heads) { return buffer_.upload(heads, stream_); }
  void end() {
    pour();
    buffer_.finish(stream_);
    if constexpr (keeps) {
      sink_.written_.set(stream_);
      sink_.is_whole_ = true;
    }
  }

 private:
  struct nothing {};
  saved_sequence& staged() {
    if constexpr (keeps) {
      return sink_;
    } else {
      return staged_;
    }
  }
  void pour() {
    if constexpr (!keeps) {
      buffer_.finish(stream_);
      check(cudaStreamSynchronize(stream_), "cudaStreamSynchronize");
      for (const auto& piece : staged_.pieces_.all()) {
        if (piece.bytes > 0) sink_(static_cast<const void*>(piece.data), piece.bytes);
      }
      staged_.pieces_.clear();
    }
  }

  Sink& sink_;
  transfer_buffer& buffer_;
  cudaStream_t stream_;
  std::conditional_t<keeps, nothing, saved_sequence> staged_;
};

/// Where a sequence comes from: a saved_sequence, or a source of bytes.
template <class Source>
class sequence_input {
 public:
  static constexpr bool keeps = std::is_same_v<std::remove_const_t<Source>, saved_sequence>;

  sequence_input(Source& source, transfer_buffer& buffer, cudaStream_t stream)
      : source_(source), buffer_(buffer), stream_(stream) {
    if constexpr (keeps) source.wait();
    buffer.begin_load(stream);
  }
  sequence_input(const sequence_input&) = delete;
  sequence_input& operator=(const sequence_input&) = delete;
  /// Waits for the device, which may still read. Then the buffer is free.
  ~sequence_input() { buffer_.wait(stream_); }

  /// Gives bytes to the host, and returns how many it had.
  std::size_t operator()(void* data, std::size_t bytes) {
    if constexpr (!keeps) {
      return source_(data, bytes);
    } else {
      std::size_t had = 0;
      for (; had < bytes && piece_ < all().size(); ++piece_, used_ = 0) {
        const std::size_t count = (std::min)(bytes - had, all()[piece_].bytes - used_);
        std::memcpy(static_cast<std::byte*>(data) + had, all()[piece_].data + used_, count);
        had += count, used_ += count;
        if (used_ < all()[piece_].bytes) break;
      }
      return had;
    }
  }
  /// The next bytes, in page-locked memory until the next array. Null: there are fewer.
  std::byte* image(std::size_t bytes) {
    if constexpr (keeps) {
      if (piece_ == all().size() || used_ > 0 || all()[piece_].bytes != bytes) return nullptr;
      return all()[piece_++].data;
    } else {
      check(cudaStreamSynchronize(stream_), "cudaStreamSynchronize");  // the array before this one
      staged_.clear();
      std::byte* const image = staged_.append(bytes);
      return bytes == 0 || source_(static_cast<void*>(image), bytes) == bytes ? image : nullptr;
    }
  }
  /// Gives an array to launch(slice), and remembers it if its checksum is not the expected one.
  template <class Launch>
  void array(std::byte* image, std::size_t bytes, std::uint64_t expected, const Launch& launch) {
    const device_sum* const sum = buffer_.template move<true>(image, bytes, launch, stream_);
    compare_sum_entry<<<1, 1, 0, stream_>>>(sum, checksum_end(bytes), expected, buffer_.differs());
    check(cudaGetLastError(), "launch of compare_sum");
  }
  /// Waits, and returns whether all checksums were right.
  bool is_whole() const {
    index_t differs = 0;
    check(cudaMemcpyAsync(&differs, buffer_.differs(), sizeof(differs), cudaMemcpyDeviceToHost, stream_),
          "cudaMemcpyAsync");
    check(cudaStreamSynchronize(stream_), "cudaStreamSynchronize");
    return differs == 0;
  }
  const saved_head* upload(const host_vector<saved_head>& heads) { return buffer_.upload(heads, stream_); }

 private:
  const auto& all() const { return source_.pieces_.all(); }

  Source& source_;
  transfer_buffer& buffer_;
  cudaStream_t stream_;
  std::size_t piece_ = 0, used_ = 0;  // of a saved_sequence
  pinned_pieces staged_;              // of a source
};

}  // namespace detail

/// A saved_writer whose arrays come from the device.
template <class Sink>
class sequence_writer : private detail::sequence_output<Sink>, public saved_writer<detail::sequence_output<Sink>> {
  using output = detail::sequence_output<Sink>;
  using base = saved_writer<output>;

 public:
  sequence_writer(Sink& sink, transfer_buffer& buffer, cudaStream_t stream)
      : output(sink, buffer, stream), base(static_cast<output&>(*this)) {}

  /// An array that the device writes: launch(slice) enqueues what writes the slice's bytes and adds the terms of their
  /// checksum.
  template <class Inspect, class Launch>
  void device_array(std::size_t bytes, const Inspect&, const Launch& launch) {
    base::begin_array(bytes);
    output::array(bytes, launch);
  }
  using output::upload;
  void end() { base::end(), output::end(); }
};

/// A saved_reader whose arrays go to the device.
/// Errors   those of saved_reader; a damaged array is found at the end.
template <class Source>
class sequence_reader : private detail::sequence_input<Source>, public saved_reader<detail::sequence_input<Source>> {
  using input = detail::sequence_input<Source>;
  using base = saved_reader<input>;

 public:
  sequence_reader(Source& source, transfer_buffer& buffer, cudaStream_t stream)
      : input(source, buffer, stream), base(static_cast<input&>(*this)) {}

  /// An array that the device reads: launch(slice) enqueues what reads a slice and adds the terms of its checksum.
  /// inspect(image) is the host's look at the whole array before.
  template <class Inspect, class Launch>
  void device_array(std::size_t bytes, const Inspect& inspect, const Launch& launch) {
    base::begin_array(bytes);
    std::byte* const image = input::image(bytes);
    base::require(image != nullptr, "cut short");
    inspect(static_cast<const std::byte*>(image));
    input::array(image, bytes, base::read_sum(), launch);
  }
  using input::upload;
  void end() {
    base::end();
    base::require(input::is_whole(), "damaged");
  }
};

}  // namespace cuda
TESSERA_NAMESPACE_END
