// Small arrays by sequence id. Once a step, the batch's entries are gathered side by side, for every layer.
#pragma once

#include <algorithm>
#include <utility>

#include "../../../core/host/host_vector.hpp"
#include "../../../core/sequence_layer.hpp"
#include "../device/copy.cuh"
#include "../device/kernel.cuh"
#include "../device/memory.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {
namespace detail {

inline constexpr int ids_at_a_time = 64, max_columns = 12;

struct some_ids {
  index_t ids[ids_at_a_time];
};
template <int Threads>
__global__ void __launch_bounds__(Threads)
    set_ids_entry(const __grid_constant__ some_ids given, index_t count, index_t* to) {
  if (index_t(threadIdx.x) < count) to[threadIdx.x] = given.ids[threadIdx.x];
}

/// Values of some ids.
template <class T, int Count>
struct some_values {
  index_t ids[Count];
  T values[Count];
};
template <class T, int Count>
__global__ void __launch_bounds__(Count)
    set_values_entry(const __grid_constant__ some_values<T, Count> given, index_t count, T* by_id) {
  if (index_t(threadIdx.x) < count) by_id[given.ids[threadIdx.x]] = given.values[threadIdx.x];
}

/// An array [layers, sequences, width] of words by id, and its copy for the batch.
struct gathered_column {
  const std::uint32_t* by_id;
  std::uint32_t* in_batch;
  index_t layers, width;
};
struct gathered_columns {
  gathered_column columns[max_columns];
};
template <int Threads>
__global__ void __launch_bounds__(Threads)
    gather_entry(const __grid_constant__ gathered_columns list, const index_t* ids, index_t sequences, bool back) {
  wait_for_earlier();
  let_later_begin();
  const gathered_column c = list.columns[blockIdx.z];
  const index_t b = blockIdx.x, layer = blockIdx.y;
  if (layer >= c.layers) return;
  const offset_t entry = (offset_t(layer) * sequences + ids[b]) * c.width;
  const offset_t packed = (offset_t(layer) * sequences + b) * c.width;
  for (index_t i = threadIdx.x; i < c.width; i += Threads) {
    if (back)
      const_cast<std::uint32_t*>(c.by_id)[entry + i] = c.in_batch[packed + i];
    else
      c.in_batch[packed + i] = c.by_id[entry + i];
  }
}

/// Adds the step's tokens to the numbers of all layers and heads, for every sequence of the batch. `lengths` [batch]:
/// tokens of each sequence; null: all have `tokens`. `noted`, by id like the numbers, gets a copy of the sums, for
/// readers that must not see later changes; null: no copy.
template <int Threads>
__global__ void __launch_bounds__(Threads)
    advance_entry_of_ids(index_t* numbers, const index_t* ids, index_t sequences, index_t width, index_t tokens,
                         const index_t* lengths, index_t* noted) {
  if (lengths) tokens = lengths[blockIdx.x];
  const offset_t entry = (offset_t(blockIdx.y) * sequences + ids[blockIdx.x]) * width;
  for (index_t i = threadIdx.x; i < width; i += Threads) {
    const index_t grown = numbers[entry + i] + tokens;
    numbers[entry + i] = grown;
    if (noted) noted[entry + i] = grown;
  }
}

}  // namespace detail

/// A small array [layers, sequences, width] by id, and its copy for the batch in the batch's order.
template <class T>
class id_column {
  static_assert(sizeof(T) % 4 == 0);

 public:
  id_column() = default;
  id_column(index_t layers, index_t sequences, index_t width)
      : layers_(layers),
        sequences_(sequences),
        width_(width),
        by_id_(std::size_t(layers) * std::size_t(sequences) * std::size_t(width)),
        in_batch_(by_id_.size()) {}

  T* entry(sequence_layer owner) const {
    return by_id_.data() + (offset_t(owner.layer) * sequences_ + owner.id) * width_;
  }
  T* batch(index_t layer) const { return in_batch_.data() + offset_t(layer) * sequences_ * width_; }
  /// Copies the numbers of one id to another one, in all layers.
  void copy(index_t id, index_t to, cudaStream_t stream) const {
    copy_in_layers(by_id_.data(), layers_, offset_t(sequences_) * width_, offset_t(id) * width_, offset_t(to) * width_,
                   width_, stream);
  }
  index_t width() const { return width_; }
  offset_t bytes() const { return offset_t(by_id_.bytes() + in_batch_.bytes()); }

  detail::gathered_column gathered() const {
    return {reinterpret_cast<const std::uint32_t*>(by_id_.data()), reinterpret_cast<std::uint32_t*>(in_batch_.data()),
            layers_, index_t(width_ * index_t(sizeof(T) / 4))};
  }

 private:
  index_t layers_ = 0, sequences_ = 0, width_ = 0;
  device_buffer<T> by_id_, in_batch_;
};

/// A value by id that the host sets between steps, and its copy for the batch. Values that stay the same are not
/// written again.
template <class T>
class id_values {
  static constexpr int at_a_time = 32;

 public:
  explicit id_values(index_t sequences) : column_(1, sequences, 1), known_(std::size_t(sequences)) {}

  /// `value_of(id)` for each of these ids. The host's part of a step: never record it.
  template <class ValueOf>
  void set(const host_vector<index_t>& ids, const ValueOf& value_of, cudaStream_t stream) {
    detail::some_values<T, at_a_time> some{};
    index_t count = 0;
    for (const index_t id : ids) {
      const T value = value_of(id);
      known& of_id = known_[std::size_t(id)];
      if (of_id.is_set && of_id.value == value) continue;
      of_id = {value, true};
      some.ids[count] = id, some.values[count] = value;
      if (++count == at_a_time) write(some, std::exchange(count, 0), stream);
    }
    if (count > 0) write(some, count, stream);
  }
  void set(index_t id, const T& value, cudaStream_t stream) {
    known& of_id = known_[std::size_t(id)];
    if (of_id.is_set && of_id.value == value) return;
    of_id = {value, true};
    set_number(column_.entry({0, id}), value, stream);
  }

  const T* entry(index_t id) const { return column_.entry({0, id}); }
  const T* batch() const { return column_.batch(0); }
  detail::gathered_column gathered() const { return column_.gathered(); }

 private:
  struct known {
    T value{};
    bool is_set = false;
  };
  void write(const detail::some_values<T, at_a_time>& some, index_t count, cudaStream_t stream) const {
    detail::set_values_entry<<<1, at_a_time, 0, stream>>>(some, count, column_.entry({}));
    check(cudaGetLastError(), "launch of set_values");
  }

  id_column<T> column_;
  host_vector<known> known_;  // what the device has, or will have once the streams have come so far
};

/// The ids of the batch on the device. Only `set` needs the host. All other launches of a step can be recorded, and
/// replayed for other ids.
class step_table {
 public:
  explicit step_table(index_t sequences)
      : sequences_(sequences), ids_(std::size_t(sequences)), lengths_(ids_.size()), begins_(ids_.size()) {}

  const index_t* ids() const { return ids_.data(); }
  /// The tokens of each sequence of the batch.
  const index_t* lengths() const { return lengths_.data(); }

  /// Where each sequence's rows begin among packed ones.
  const index_t* begins() const { return begins_.data(); }

  void set_begins(const host_vector<index_t>& begins, cudaStream_t stream) const {
    write(begins, begins_.data(), stream);
  }
  void set(const host_vector<index_t>& ids, cudaStream_t stream) const { write(ids, ids_.data(), stream); }
  /// Writes any numbers, such as `set` writes ids.
  static void write(const host_vector<index_t>& numbers, index_t* to, cudaStream_t stream) {
    for (std::size_t first = 0; first < numbers.size(); first += detail::ids_at_a_time) {
      detail::some_ids some{};
      const std::size_t count = (std::min)(numbers.size() - first, std::size_t(detail::ids_at_a_time));
      std::copy_n(numbers.begin() + offset_t(first), count, some.ids);
      detail::set_ids_entry<detail::ids_at_a_time>
          <<<1, detail::ids_at_a_time, 0, stream>>>(some, index_t(count), to + first);
      check(cudaGetLastError(), "launch of set_ids");
    }
  }
  /// Written only if they are not the last step's.
  void set_lengths(const host_vector<index_t>& lengths, cudaStream_t stream) {
    if (lengths == known_lengths_) return;
    known_lengths_ = lengths;
    write(lengths, lengths_.data(), stream);
  }
  /// Copies the batch's entries of every column together.
  void gather(index_t batch, const host_vector<detail::gathered_column>& columns, cudaStream_t stream) const {
    if (columns.empty()) return;
    detail::gathered_columns list{};
    require(columns.size() <= detail::max_columns, "columns of a step", columns.size(), "at most 12",
            "raise max_columns");
    std::copy(columns.begin(), columns.end(), list.columns);
    index_t layers = 1;
    for (const detail::gathered_column& column : columns) layers = (std::max)(layers, column.layers);
    launch_overlapping<detail::gather_entry<64>>(dim3(unsigned(batch), unsigned(layers), unsigned(columns.size())), 64,
                                                 stream, "launch of gather", list, ids_.data(), sequences_, false);
  }
  /// Copies one layer's entries of one column back to their ids.
  template <class T>
  void scatter(const id_column<T>& column, index_t layer, index_t batch, cudaStream_t stream) const {
    detail::gathered_columns column_list;
    column_list.columns[0] = column.gathered();
    const offset_t skip = offset_t(layer) * sequences_ * column_list.columns[0].width;
    column_list.columns[0].by_id += skip;
    column_list.columns[0].in_batch += skip;
    launch_overlapping<detail::gather_entry<64>>(dim3(unsigned(batch)), 64, stream, "launch of scatter", column_list,
                                                 ids_.data(), sequences_, true);
  }
  /// Adds `tokens` to the arrays by id in every layer, not to the batch's copy. `noted`: see advance_entry_of_ids.
  void advance(const id_column<index_t>& column, index_t layers, index_t batch, index_t tokens, const index_t* lengths,
               cudaStream_t stream, index_t* noted = nullptr) const {
    detail::advance_entry_of_ids<64><<<dim3(unsigned(batch), unsigned(layers)), 64, 0, stream>>>(
        column.entry({}), ids_.data(), sequences_, column.width(), tokens, lengths, noted);
    check(cudaGetLastError(), "launch of advance");
  }

 private:
  index_t sequences_;
  device_buffer<index_t> ids_, lengths_, begins_;
  host_vector<index_t> known_lengths_;  // what `lengths_` has
};

}  // namespace cuda
TESSERA_NAMESPACE_END
