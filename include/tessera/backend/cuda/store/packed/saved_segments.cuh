// Segments of packed rows on the device to and from an archive, in the bytes that the CPU's segments have there.
#pragma once

#include <algorithm>
#include <cstring>
#include <utility>

#include "../../../../runtime/saved/packed_format.hpp"
#include "../saving.cuh"
#include "packed_store.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {
namespace detail {

/// Moves rows of `bytes` bytes, which have `stride` bytes in the cache, from row_of(row) on, and lie side by side in an
/// array. What a row has behind its bytes becomes 0 in the cache.
template <saved_way Way, class RowOf>
__device__ __forceinline__ device_sum move_bytes(const saving_thread& own, offset_t at, index_t rows, index_t bytes,
                                                 index_t stride, const RowOf& row_of) {
  const auto each = [&](offset_t word, const auto& visit) {
    index_t row = index_t(word * 8 / bytes), byte = index_t(word * 8 % bytes);
    std::byte* cached = row < rows ? row_of(row) : nullptr;
    for (int i = 0; i < 8 && row < rows; ++i) {
      visit(cached + byte, 8 * i, byte);
      if (++byte < bytes) continue;
      byte = 0;
      if (++row < rows) cached = row_of(row);
    }
  };
  return move_part<Way, uint2>(
      own, at, offset_t(rows) * bytes,
      [&](offset_t i) {
        std::uint64_t word = 0;
        each(i, [&](const std::byte* from, int shift, index_t) { word |= std::uint64_t(*from) << shift; });
        return uint2{unsigned(word), unsigned(word >> 32)};
      },
      [&](offset_t i, const uint2& moved) {
        const std::uint64_t word = moved.x | std::uint64_t(moved.y) << 32;
        each(i, [&](std::byte* to, int shift, index_t byte) {
          *to = std::byte(word >> shift & 255);
          for (index_t rest = 1; byte + 1 == bytes && byte + rest < stride; ++rest) to[rest] = std::byte(0);
        });
      });
}

/// The planes of rows, or with one kind those of means, as cpu::packed_plane orders them. rows [kv_heads]: of a
/// segment; `unit`: rows of a mean, 1 for the rows themselves. blockIdx.y: the head.
template <saved_way Way, int Threads>
__global__ void __launch_bounds__(Threads)
    move_planes_entry(const __grid_constant__ packed_vectors k, const __grid_constant__ packed_vectors v, int kinds,
                      const index_t* rows, index_t unit, saved_slice slice) {
  const index_t head = blockIdx.y, heads = gridDim.y;
  const saving_thread own{slice, int(blockIdx.x * Threads + threadIdx.x), int(gridDim.x * Threads)};
  offset_t at = 0;
  device_sum sum = 0;
  const auto plane = [&](index_t bytes, index_t stride, const auto& row_of) {
    if (bytes == 0) return;
    const auto place = [&](index_t first, index_t last) {
      for (index_t h = first; h < last; ++h) at += padded_bytes(offset_t(ceil_div(rows[h], unit)) * bytes);
    };
    place(0, head);
    sum += move_bytes<Way>(own, at, ceil_div(rows[head], unit), bytes, stride,
                           [&](index_t row) { return reinterpret_cast<std::byte*>(row_of(row)); });
    place(head, heads);
  };
  const auto kind = [&](const auto& visit) { visit(k), kinds > 1 ? visit(v) : void(); };
  kind([&](const packed_vectors& of) {
    plane(of.format.value_bytes(), value_stride(of.format.value_bytes()),
          [&](index_t row) { return of.values_of(head, row); });
  });
  kind([&](const packed_vectors& of) {
    plane(of.format.bit_bytes(), bit_words(of.format) * 4, [&](index_t row) { return of.own_bits_of(head, row); });
  });
  kind([&](const packed_vectors& of) {
    plane(of.format.scale_bytes(), 4, [&](index_t row) { return &of.scale_of(head, row); });
  });
  add_to_sum(sum, slice.sum);
}

/// Saves or loads rows of a segment, or, without `v`, its means. rows [kv_heads], on the host, and the same on the
/// device.
template <class Archive>
void transfer_planes(const packed_vectors& k, const packed_vectors* v, const index_t* rows, const index_t* on_device,
                     index_t unit, index_t kv_heads, Archive& archive, cudaStream_t stream) {
  offset_t bytes = 0;
  for (const packed_vectors* of : {&k, v}) {
    if (!of) continue;
    for (const index_t row : {of->format.value_bytes(), of->format.bit_bytes(), of->format.scale_bytes()}) {
      for (index_t h = 0; h < kv_heads; ++h) bytes += padded_bytes(offset_t(ceil_div(rows[h], unit)) * row);
    }
  }
  constexpr auto way = Archive::loads ? saved_way::to_cache : saved_way::to_slice;
  const index_t longest = ceil_div(*std::max_element(rows, rows + kv_heads), unit);
  const dim3 grid{unsigned(std::clamp(longest / 16, 1, (std::max)(1, saving_blocks / int(kv_heads)))),
                  unsigned(kv_heads)};
  archive.device_array(
      std::size_t(bytes), [](const std::byte*) {},
      [&](const saved_slice& slice) {
        move_planes_entry<way, saving_threads>
            <<<grid, saving_threads, 0, stream>>>(k, v ? *v : k, v ? 2 : 1, on_device, unit, slice);
        check(cudaGetLastError(), "launch of move_planes");
      });
}

/// The positions of all rows of a head, one part a head: of packed rows [kv_heads, capacity], then of whole ones.
/// blockIdx.y: the head.
template <saved_way Way, class View>
__global__ void __launch_bounds__(saving_threads)
    move_positions_entry(const __grid_constant__ View view, index_t* packed, index_t capacity, saved_slice slice) {
  const index_t head = blockIdx.y;
  const saving_thread own{slice, int(blockIdx.x * saving_threads + threadIdx.x), int(gridDim.x * saving_threads)};
  const auto rows_of = [&](index_t h) { return packed_rows_of(view, h) + view.whole.length(0, h); };
  offset_t at = 0;
  for (index_t h = 0; h < head; ++h) at += padded_bytes(offset_t(rows_of(h)) * 4);
  const index_t held = packed_rows_of(view, head);
  auto* const of_packed = reinterpret_cast<std::uint32_t*>(packed + offset_t(head) * capacity);
  auto* const of_whole =
      reinterpret_cast<std::uint32_t*>(const_cast<index_t*>(view.whole.positions)) + view.whole.position_row(0, head);
  add_to_sum(move_numbers<Way, 1>(own, at, rows_of(head),
                                  [&](index_t i) { return i < held ? of_packed + i : of_whole + (i - held); }),
             slice.sum);
}
/// Saves or loads the positions of heads that store `counts` rows.
template <class View, class Archive>
void transfer_positions(const View& view, index_t* packed, index_t capacity, const host_vector<index_t>& counts,
                        index_t next, Archive& archive, cudaStream_t stream) {
  constexpr auto way = Archive::loads ? saved_way::to_cache : saved_way::to_slice;
  offset_t bytes = 0;
  for (const index_t count : counts) bytes += padded_bytes(offset_t(count) * 4);
  archive.device_array(
      std::size_t(bytes),
      [&](const std::byte* image) {
        for (const index_t count : counts) {
          require_ascending(reinterpret_cast<const index_t*>(image), count, next, archive);
          image += padded_bytes(offset_t(count) * 4);
        }
      },
      [&](const saved_slice& slice) {
        move_positions_entry<way, View>
            <<<dim3(8, unsigned(counts.size())), saving_threads, 0, stream>>>(view, packed, capacity, slice);
        check(cudaGetLastError(), "launch of move_positions");
      });
}

/// Bases and sets of a segment on the host, as the CPU's segments have them.
struct host_bases {
  host_vector<float> k, v;
  host_vector<std::uint8_t> k_set, v_set;
};
template <class T>
void download(host_vector<T>& to, const void* from, std::size_t count, cudaStream_t stream) {
  to.resize(count);
  check(cudaMemcpyAsync(to.data(), from, count * sizeof(T), cudaMemcpyDeviceToHost, stream), "cudaMemcpyAsync");
  check(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
}
/// Sets on the device are words of a head, on the host bytes.
inline void download_set(host_vector<std::uint8_t>& to, const std::uint32_t* from, const packed_format& format,
                         index_t kv_heads, cudaStream_t stream) {
  if (format.own_bits) return;
  const std::size_t words = std::size_t(bit_words(format)), bytes = std::size_t(format.set_bytes());
  host_vector<std::uint32_t> all;
  download(all, from, std::size_t(kv_heads) * words, stream);
  to.resize(std::size_t(kv_heads) * bytes);
  for (std::size_t h = 0; h < std::size_t(kv_heads); ++h)
    std::memcpy(to.data() + h * bytes, all.data() + h * words, bytes);
}
inline host_bases downloaded_bases(const segment_record& of, const segment_formats& formats, index_t kv_heads,
                                   cudaStream_t stream) {
  host_bases made;
  if (of.bases) {
    download(made.k, of.k_basis, std::size_t(kv_heads * formats.k_basis()), stream);
    download(made.v, of.v_basis, std::size_t(kv_heads * formats.v_basis()), stream);
  }
  if (of.sets) {
    download_set(made.k_set, of.k_set, of.k, kv_heads, stream);
    download_set(made.v_set, of.v_set, of.v, kv_heads, stream);
  }
  return made;
}
/// Gives a record bases and sets of its own on the device.
inline void upload_bases(segment_record& to, const host_bases& given, index_t kv_heads, cudaStream_t stream) {
  const auto copy = [&](auto* device, const auto& host) {
    if (host.empty()) return;
    check(cudaMemcpyAsync(device, host.data(), host.size() * sizeof(host[0]), cudaMemcpyHostToDevice, stream),
          "cudaMemcpyAsync");
  };
  if (!given.k.empty()) {
    const auto bases =
        std::make_shared<device_buffer<float>>(device_buffer<float>::not_cleared(given.k.size() + given.v.size()));
    copy(bases->data(), given.k), copy(bases->data() + given.k.size(), given.v);
    to.k_basis = bases->data(), to.v_basis = bases->data() + given.k.size();
    to.bases = bases;
  }
  const auto words_of = [&](const host_vector<std::uint8_t>& set, const packed_format& format) {
    const std::size_t words = std::size_t(bit_words(format)), bytes = std::size_t(format.set_bytes());
    host_vector<std::uint32_t> all(set.empty() ? 0 : std::size_t(kv_heads) * words, 0u);
    for (std::size_t h = 0; !set.empty() && h < std::size_t(kv_heads); ++h)
      std::memcpy(all.data() + h * words, set.data() + h * bytes, bytes);
    return all;
  };
  const auto k = words_of(given.k_set, to.k), v = words_of(given.v_set, to.v);
  if (k.empty() && v.empty()) return;
  const auto sets =
      std::make_shared<device_buffer<std::uint32_t>>(device_buffer<std::uint32_t>::not_cleared(k.size() + v.size()));
  copy(sets->data(), k), copy(sets->data() + k.size(), v);
  to.k_set = sets->data(), to.v_set = sets->data() + k.size();
  to.sets = sets;
}

/// Saves or loads what the segments of a layer, which have packed[head] rows of each head, have beside their rows: see
/// cpu::transfer_segments. `capacity`: rows of the longest heads of all segments that there is memory for.
template <class Store, class Archive>
void transfer_segments(Store& store, sequence_layer owner, const host_vector<index_t>& packed, bool scattered,
                       index_t capacity, Archive& archive, cudaStream_t stream) {
  const segment_formats& formats = store.formats();
  const index_t kv_heads = index_t(packed.size());
  index_t count = Archive::loads ? 0 : index_t(store.segments(owner).size());
  host_vector<index_t> total(packed.size(), 0);
  transfer_count(count, max_tokens, archive);
  if (Archive::loads) store.require_segments(count);
  for (index_t i = 0; i < count; ++i) {
    const segment_record* const previous = i > 0 ? &store.segments(owner)[std::size_t(i - 1)] : nullptr;
    segment_record record;
    host_bases bases;
    bool shares = false;
    if constexpr (!Archive::loads) {
      record = store.segments(owner)[std::size_t(i)];
      shares = previous && previous->k_basis == record.k_basis && previous->k_set == record.k_set &&
               previous->v_set == record.v_set;
      if (!shares) bases = downloaded_bases(record, formats, kv_heads, stream);
    }
    transfer_format(record.k, formats.k_dim, archive);
    transfer_format(record.v, formats.v_dim, archive);
    archive.number(record.block);
    archive.require(record.k == formats.k && record.v == formats.v && record.block == formats.block,
                    "with packed rows of other formats");
    archive.flag(shares);
    archive.require(!shares || previous, "with a basis of no segment");
    if (shares) {
      if constexpr (Archive::loads) record = previous->without_rows();
    } else {
      const auto numbers = [&](auto& all, offset_t wanted) {
        archive.numbers(all, wanted);
        archive.require(offset_t(all.size()) == wanted, "with a part of a basis");
      };
      const auto set_bytes = [&](const packed_format& of) { return of.own_bits ? 0 : kv_heads * of.set_bytes(); };
      numbers(bases.k, kv_heads * formats.k_basis()), numbers(bases.v, kv_heads * formats.v_basis());
      numbers(bases.k_set, set_bytes(record.k)), numbers(bases.v_set, set_bytes(record.v));
      require_sets(bases.k_set, record.k, archive), require_sets(bases.v_set, record.v, archive);
      if constexpr (Archive::loads) upload_bases(record, bases, kv_heads, stream);
    }
    host_vector<index_t> lengths(std::size_t(kv_heads), 0);
    if constexpr (!Archive::loads) std::copy_n(store.rows_by_head(owner, record), kv_heads, lengths.begin());
    host_vector<double> losses(std::size_t(kv_heads), 0.0);  // known where strategies are searched
    transfer_lengths(lengths, max_tokens, archive);
    archive.rows(losses.data(), losses.size());
    archive.require(formats.block == 0 || scattered || total[0] % formats.block == 0,
                    "with segments that begin within a block");
    for (std::size_t h = 0; h < lengths.size(); ++h) {
      archive.require((scattered || lengths[h] == lengths[0]) && lengths[h] <= packed[h] - total[h],
                      "with segments of other rows");
      total[h] += lengths[h];
    }
    if constexpr (Archive::loads) {
      require_segment_rows(offset_t(store.end_row(owner)) + *std::max_element(lengths.begin(), lengths.end()),
                           capacity);
      store.add_loaded(owner, std::move(record), lengths, stream);
    }
  }
  archive.require(total == packed, "with segments of other rows");
}

}  // namespace detail

/// Saves the lengths and bases of a sequence of packed rows, or reads those of one that comes: see the plain store's.
template <packing_layout Layout, class Next, class Archive>
host_vector<saved_lengths> transfer_lengths_of(kv_store<Layout>& store, index_t id, index_t layers, const Next& next,
                                               Archive& archive, cudaStream_t stream) {
  auto [whole_rows, segments, packing] = store.parts();
  host_vector<saved_lengths> all = download_lengths<Archive::loads>(whole_rows, id, layers, stream);
  for (index_t layer = 0; layer < layers; ++layer) {
    auto& [counts, whole, scattered] = all[std::size_t(layer)];
    const sequence_layer owner{layer, id};
    const bool packs = packing.number[std::size_t(layer)] >= 0;
    const bool drops = packs && whole_rows.with().drops;
    host_vector<index_t> packed(counts.size(), 0);
    for (std::size_t h = 0; packs && h < counts.size(); ++h)
      counts[h] += packed[h] = segments.rows(packing.owner(owner), index_t(h));
    transfer_lengths(counts, next(layer), archive);
    transfer_lengths(packed, next(layer), archive);
    whole = counts;
    for (std::size_t h = 0; h < counts.size(); ++h) {
      archive.require((drops || packed[h] == packed[0]) && packed[h] <= counts[h] && (packs || packed[h] == 0),
                      "with packed rows that a GPU does not have");
      whole[h] -= packed[h];
    }
    if (packs) scattered = segments.is_scattered(packing.owner(owner));
    archive.flag(scattered);
    archive.require(!scattered || (packs ? drops : whole_rows.with().positions),
                    "with dropped tokens, which this cache never has");
    for (const index_t count : counts)
      archive.require(scattered || count == next(layer), "with lengths that cannot be");
    index_t since = Archive::loads ? 0 : whole_rows.since_choice(owner);
    transfer_count(since, next(layer), archive);
    if constexpr (Archive::loads) {
      store.require_fits(owner, *std::max_element(counts.begin(), counts.end()));
      whole_rows.lay_out(owner, whole, (std::min)(since, *std::min_element(whole.begin(), whole.end())), stream);
    }
    if (packs) {
      if (Archive::loads && scattered) segments.scatter(packing.owner(owner));
      detail::transfer_segments(segments, packing.owner(owner), packed, scattered, store.tokens(), archive, stream);
    } else {
      index_t none = 0;
      archive.number(none);
      archive.require(none == 0, "with packed rows that a GPU does not have");
    }
  }
  return all;
}

/// Saves the rows and columns of a sequence, or loads them into one that is laid out. Does not wait.
template <packing_layout Layout, class Next, class Archive>
void transfer_rows_of(kv_store<Layout>& store, index_t id, const host_vector<saved_lengths>& lengths, const Next& next,
                      Archive& archive, cudaStream_t stream) {
  auto [whole_rows, segments, packing] = store.parts();
  for (index_t layer = 0; layer < index_t(lengths.size()); ++layer) {
    const saved_lengths& of_layer = lengths[std::size_t(layer)];
    const sequence_layer owner{layer, id};
    const bool packs = packing.number[std::size_t(layer)] >= 0;
    auto columns = whole_rows.columns_of(owner);
    if (packs && of_layer.scattered) {
      columns.data[0] = nullptr;  // positions of all rows lie together
      detail::transfer_positions(store.view(owner), store.packed_positions(owner), store.tokens(), of_layer.counts,
                                 next(layer), archive, stream);
    }
    transfer_layer(whole_rows.view(owner), columns, of_layer.whole, of_layer.scattered,
                   of_layer.counts[0] - of_layer.whole[0], next(layer), archive, stream);
    if (!packs) continue;
    if (Archive::loads && !of_layer.scattered) store.count_positions(owner, stream);
    const sequence_layer packed = packing.owner(owner);
    for (std::size_t i = 0; i < segments.segments(packed).size(); ++i) {
      const segment_record& record = segments.segments(packed)[i];
      const device_segment rows = segments.on_device(packed, i);
      const index_t heads = index_t(of_layer.counts.size());
      const index_t* const by_head = segments.rows_by_head(packed, record);
      detail::transfer_planes(rows.k, &rows.v, by_head, rows.rows, 1, heads, archive, stream);
      if (record.block > 0)
        detail::transfer_planes(rows.means, nullptr, by_head, rows.rows, record.block, heads, archive, stream);
    }
  }
}

}  // namespace cuda
TESSERA_NAMESPACE_END
