// A sequence as bytes: a writer and a reader with the same calls, so that one function says what is saved.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <string>
#include <type_traits>

#include "../../core/error.hpp"
#include "../../core/host/host_vector.hpp"
#include "../../core/types.hpp"
#include "checksum.hpp"

TESSERA_NAMESPACE_BEGIN

/// The version of the format. A reader refuses others.
inline constexpr std::uint32_t saved_version = 2;

namespace detail {

// The bytes are blocks: three words (bytes of the payload, the block's number, a check of these), the payload, its
// checksum. Numbers are collected into blocks; an array is a block of its own, which no copy passes through.
struct saved_preamble {
  char mark[8] = {'T', 'E', 'S', 'S', 'E', 'R', 'A', 's'};
  std::uint32_t version = saved_version, byte_order = 0x01020304;
};
inline constexpr std::size_t collected_bytes = std::size_t(1) << 16;

struct block_header {
  std::uint64_t bytes = 0, number = 0, check = 0;
  static block_header describing(std::uint64_t bytes, std::uint64_t number) {
    return {bytes, number, checksum_term(bytes, number)};
  }
  bool operator==(const block_header&) const = default;
};

template <class T>
concept saved_number = std::is_arithmetic_v<T> && !std::is_same_v<T, bool>;

}  // namespace detail

/// Parts of an array begin at multiples of so many bytes, so that a device writes whole lines.
inline constexpr offset_t part_alignment = 128;
/// The bytes of a part with the zeros behind it.
TESSERA_HD constexpr offset_t padded_bytes(offset_t bytes) {
  return (bytes + part_alignment - 1) / part_alignment * part_alignment;
}

/// Writes to a sink: sink(const void* data, std::size_t bytes), whose exceptions pass through. Numbers lie in the
/// machine's order of bytes; a reader refuses the other one.
template <class Sink>
class saved_writer {
 public:
  static constexpr bool loads = false;

  explicit saved_writer(Sink& sink) : sink_(sink) {
    const detail::saved_preamble first;
    sink_(static_cast<const void*>(&first), sizeof(first));
  }

  template <detail::saved_number T>
  void number(const T& value) {
    collect(&value, sizeof(T));
  }
  void flag(const bool& value) { number(std::uint8_t(value)); }
  void text(const std::string& value) {
    number(std::uint64_t(value.size()));
    collect(value.data(), value.size());
  }
  /// An array that grows; a reader refuses more than `most` elements.
  template <class T>
  void numbers(const host_vector<T>& values, offset_t) {
    number(std::uint64_t(values.size()));
    rows(values.data(), values.size());
  }
  /// An array whose length the reader knows.
  template <class T>
  void rows(const T* data, std::size_t count) {
    static_assert(std::is_trivially_copyable_v<T>);
    if (count * sizeof(T) <= 1024) return collect(data, count * sizeof(T));
    begin_array(count * sizeof(T));
    part(data, count);
    end_array();
  }
  /// An array of so many bytes that comes in parts: then call `part` and `pad` for all of it, and `end_array`.
  void begin_array(std::size_t bytes) { flush(), begin_block(bytes); }
  template <class T>
  void part(const T* data, std::size_t count) {
    static_assert(std::is_trivially_copyable_v<T>);
    if (count == 0) return;
    sink_(static_cast<const void*>(data), count * sizeof(T));
    sum_.add(data, count * sizeof(T));
  }
  /// Zeros up to the next `part_alignment`.
  void pad() {
    const unsigned char zeros[part_alignment] = {};
    part(zeros, std::size_t(padded_bytes(offset_t(sum_.bytes()))) - std::size_t(sum_.bytes()));
  }
  void end_array() { end_block(); }
  /// What only a reader checks.
  void require(bool, const char*) const {}
  /// Call it last.
  void end() { flush(), begin_block(0), end_block(); }

 private:
  void collect(const void* data, std::size_t bytes) {
    if (bytes == 0) return;
    collected_.resize(collected_.size() + bytes);
    std::memcpy(collected_.data() + (collected_.size() - bytes), data, bytes);
    if (collected_.size() >= detail::collected_bytes) flush();
  }
  void flush() {
    if (collected_.empty()) return;
    begin_block(collected_.size());
    part(collected_.data(), collected_.size());
    end_block();
    collected_.clear();
  }
  void begin_block(std::size_t bytes) {
    const auto header = detail::block_header::describing(bytes, number_++);
    sink_(static_cast<const void*>(&header), sizeof(header));
    sum_ = {};
  }
  void end_block() {
    const std::uint64_t sum = sum_.value();
    sink_(static_cast<const void*>(&sum), sizeof(sum));
  }

  Sink& sink_;
  std::uint64_t number_ = 0;
  running_checksum sum_;
  host_vector<unsigned char> collected_;
};

/// Reads from a source: source(void* data, std::size_t bytes) fills the memory and returns the bytes that it had, fewer
/// only at the end.
/// Errors   bytes that no writer of this version wrote, or that were damaged or cut: tessera::error.
template <class Source>
class saved_reader {
 public:
  static constexpr bool loads = true;

  explicit saved_reader(Source& source) : source_(source) {
    const detail::saved_preamble expected;
    detail::saved_preamble found;
    read(&found, sizeof(found));
    if (std::memcmp(found.mark, expected.mark, sizeof(found.mark)) != 0)
      fail("saved sequence", "of another kind", "bytes that begin with TESSERAs", "pass what save wrote");
    if (found.byte_order != expected.byte_order)
      fail("order of a saved number's bytes", "another", "this machine's", "load the sequence where it was saved");
    if (found.version != expected.version)
      fail("version of a saved sequence", found.version, std::to_string(expected.version),
           "save the sequence again with this library");
  }

  template <detail::saved_number T>
  void number(T& value) {
    read_collected(&value, sizeof(T));
  }
  void flag(bool& value) {
    std::uint8_t byte = 0;
    number(byte);
    require(byte <= 1, "a flag that is neither 0 nor 1");
    value = byte == 1;
  }
  void text(std::string& value) {
    std::uint64_t bytes = 0;
    number(bytes);
    require(bytes <= detail::collected_bytes, "a text that is too long");
    value.resize(std::size_t(bytes));
    read_collected(value.data(), value.size());
  }
  template <class T>
  void numbers(host_vector<T>& values, offset_t most) {
    std::uint64_t count = 0;
    number(count);
    require(most >= 0 && count <= std::uint64_t(most), "more elements than the sequence can have");
    values.reserve(std::size_t(count));
    values.resize(std::size_t(count));
    rows(values.data(), values.size());
  }
  template <class T>
  void rows(T* data, std::size_t count) {
    static_assert(std::is_trivially_copyable_v<T>);
    if (count * sizeof(T) <= 1024) return read_collected(data, count * sizeof(T));
    begin_array(count * sizeof(T));
    part(data, count);
    end_array();
  }
  /// An array that comes in parts, as it was written.
  void begin_array(std::size_t bytes) {
    require(used_ == collected_.size(), "numbers that this cache does not expect");
    require(header(bytes) == bytes, "of other arrays than this cache's");
  }
  template <class T>
  void part(T* data, std::size_t count) {
    static_assert(std::is_trivially_copyable_v<T>);
    read(data, count * sizeof(T));
    if (count > 0) sum_.add(data, count * sizeof(T));
  }
  void pad() {
    unsigned char zeros[part_alignment];
    part(zeros, std::size_t(padded_bytes(offset_t(sum_.bytes()))) - std::size_t(sum_.bytes()));
  }
  void end_array() { require(read_sum() == sum_.value(), "damaged"); }
  /// The checksum behind an array, for callers that read and check the array themselves.
  std::uint64_t read_sum() {
    std::uint64_t sum = 0;
    read(&sum, sizeof(sum));
    return sum;
  }
  /// Errors   what the bytes say does not hold: tessera::error.
  void require(bool holds, const char* problem) const {
    if (!holds) fail("saved sequence", problem, "what save wrote", "save the sequence again");
  }
  /// Errors   numbers that nobody read, or no end: tessera::error.
  void end() {
    begin_array(0);
    end_array();
  }

 private:
  void read(void* data, std::size_t bytes) {
    if (bytes == 0) return;
    const std::size_t had = source_(data, bytes);
    require(had == bytes, "cut short");
  }
  std::size_t header(std::uint64_t most) {
    detail::block_header found;
    read(&found, sizeof(found));
    require(found == detail::block_header::describing(found.bytes, number_), "damaged");
    require(found.bytes <= most, "of other arrays than this cache's");
    ++number_;
    sum_ = {};
    return std::size_t(found.bytes);
  }
  void read_collected(void* data, std::size_t bytes) {
    if (bytes == 0) return;
    if (used_ == collected_.size()) {
      const std::size_t size = header(2 * detail::collected_bytes);
      collected_.resize(size);
      used_ = 0;
      part(collected_.data(), size);
      end_array();
    }
    require(bytes <= collected_.size() - used_, "of fewer numbers than this cache's");
    std::memcpy(data, collected_.data() + used_, bytes);
    used_ += bytes;
  }

  Source& source_;
  std::uint64_t number_ = 0;
  running_checksum sum_;
  host_vector<unsigned char> collected_;
  std::size_t used_ = 0;
};

TESSERA_NAMESPACE_END
