// Rows and columns of a layer to and from the arrays of a saved sequence, wherever they lie on the device.
#pragma once

#include <algorithm>

#include "../../../core/host/host_vector.hpp"
#include "../../../core/views.hpp"
#include "../../../runtime/saved/rows.hpp"
#include "sequence_archive.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {
namespace detail {

enum class saved_way { to_slice, to_cache };

inline constexpr int saving_threads = 256, saving_blocks = 128;

/// The terms that a word of 16 or 8 bytes, the one at byte `at` of its array, adds to a checksum.
__device__ __forceinline__ device_sum terms_of(const uint4& word, offset_t at) {
  return checksum_term(word.x | std::uint64_t(word.y) << 32, std::uint64_t(at) / 8) +
         checksum_term(word.z | std::uint64_t(word.w) << 32, std::uint64_t(at) / 8 + 1);
}
__device__ __forceinline__ device_sum terms_of(const uint2& word, offset_t at) {
  return checksum_term(word.x | std::uint64_t(word.y) << 32, std::uint64_t(at) / 8);
}

/// What a thread of `count` moves.
struct saving_thread {
  saved_slice slice;
  int index, count;
};

/// Moves what a slice has of a part of `bytes` bytes and the zeros behind it, in words. read(i) gives word i of the
/// cache, write(i, word) takes it. Returns what the words add to the checksum.
template <saved_way Way, class Word, class Read, class Write>
__device__ __forceinline__ device_sum move_part(const saving_thread& own, offset_t at, offset_t bytes, const Read& read,
                                                const Write& write) {
  constexpr int word_bytes = int(sizeof(Word));
  const saved_slice& slice = own.slice;
  const offset_t stored = (bytes + word_bytes - 1) / word_bytes;
  const offset_t first = (max)(offset_t(0), (slice.begin - at) / word_bytes);
  const offset_t last = ((min)(slice.end - at, padded_bytes(bytes))) / word_bytes;  // slices end where lines do
  Word* const words = reinterpret_cast<Word*>(slice.data + (at - slice.begin));
  device_sum sum = 0;
  for (offset_t i = first + own.index; i < last; i += own.count) {
    Word moved{};
    if constexpr (Way == saved_way::to_slice) {
      if (i < stored) moved = read(i);
      words[i] = moved;
    } else {
      moved = words[i];
      if (i < stored) write(i, moved);
    }
    sum += terms_of(moved, at + i * word_bytes);
  }
  return sum;
}
/// The same for `rows` rows of `Words` words of 16 bytes; address(row) is where one begins in the cache.
template <saved_way Way, int Words, class Address>
__device__ __forceinline__ device_sum move_rows(const saving_thread& own, offset_t at, index_t rows,
                                                const Address& address) {
  const auto word = [&](offset_t i) { return reinterpret_cast<uint4*>(address(index_t(i / Words))) + i % Words; };
  return move_part<Way, uint4>(
      own, at, offset_t(rows) * Words * 16, [&](offset_t i) { return *word(i); },
      [&](offset_t i, const uint4& moved) { *word(i) = moved; });
}
/// The same for `rows` rows of `Numbers` numbers of 4 bytes each; address(row) is where one begins in the cache.
template <saved_way Way, int Numbers, class Address>
__device__ __forceinline__ device_sum move_numbers(const saving_thread& own, offset_t at, index_t rows,
                                                   const Address& address) {
  const offset_t count = offset_t(rows) * Numbers;
  const auto number = [&](offset_t i) { return address(index_t(i / Numbers)) + i % Numbers; };
  return move_part<Way, uint2>(
      own, at, count * 4,
      [&](offset_t i) { return uint2{*number(2 * i), 2 * i + 1 < count ? *number(2 * i + 1) : 0u}; },
      [&](offset_t i, const uint2& word) {
        *number(2 * i) = word.x;
        if (2 * i + 1 < count) *number(2 * i + 1) = word.y;
      });
}
/// The same for `rows` rows of `Bytes` bytes, a multiple of 4.
template <saved_way Way, int Bytes, class Address>
__device__ __forceinline__ device_sum move_stored(const saving_thread& own, offset_t at, index_t rows,
                                                  const Address& address) {
  if constexpr (Bytes % 16 == 0) {
    return move_rows<Way, Bytes / 16>(own, at, rows, address);
  } else {
    return move_numbers<Way, Bytes / 4>(own, at, rows,
                                        [&](index_t row) { return reinterpret_cast<std::uint32_t*>(address(row)); });
  }
}
__device__ inline void add_to_sum(device_sum own, device_sum* sum) {
  for (int lanes = 16; lanes > 0; lanes /= 2) own += __shfl_down_sync(0xffffffffu, own, lanes);
  if (threadIdx.x % 32 == 0) atomicAdd(sum, own);
}

/// blockIdx.y is a head.
template <saved_way Way, class View>
__global__ void __launch_bounds__(saving_threads)
    move_rows_entry(View view, const saved_head* heads, saved_slice slice) {
  using stored = typename View::stored_type;
  const index_t head = blockIdx.y;
  const saved_head at = heads[head];
  const saving_thread own{slice, int(blockIdx.x * saving_threads + threadIdx.x), int(gridDim.x * saving_threads)};
  constexpr int k_bytes = View::k_units * int(sizeof(stored)), v_bytes = View::v_units * int(sizeof(stored));
  device_sum sum = move_stored<Way, k_bytes>(own, at.k, at.rows, [&](index_t row) { return view.key(0, head, row); });
  sum += move_stored<Way, v_bytes>(own, at.v, at.rows, [&](index_t row) { return view.value(0, head, row); });
  if constexpr (View::encoding_type::scaled) {
    const auto scales = [&](float* all) {
      return [&view, head, all](index_t row) {
        return reinterpret_cast<std::uint32_t*>(all + view.scales.index(view.table.locate(0, head, row), head));
      };
    };
    sum += move_numbers<Way, 1>(own, at.k_scales, at.rows, scales(view.scales.k));
    sum += move_numbers<Way, 1>(own, at.v_scales, at.rows, scales(view.scales.v));
  }
  add_to_sum(sum, slice.sum);
}

/// Columns of 4 bytes a token; null: there is no such column. Head h begins at begins[h].
struct cached_columns {
  std::uint32_t* data[saved_columns];
  const offset_t* begins;
};
template <saved_way Way>
__global__ void __launch_bounds__(saving_threads)
    move_columns_entry(cached_columns cached, const saved_head* heads, saved_slice slice) {
  const index_t head = blockIdx.y;
  const saved_head& at = heads[head];
  const saving_thread own{slice, int(blockIdx.x * saving_threads + threadIdx.x), int(gridDim.x * saving_threads)};
  device_sum sum = 0;
  for (int c = 0; c < saved_columns; ++c) {
    if (at.columns[c] < 0) continue;
    std::uint32_t* const column = cached.data[c] + cached.begins[head];
    sum += move_numbers<Way, 1>(own, at.columns[c], at.rows, [&](index_t i) { return column + i; });
  }
  add_to_sum(sum, slice.sum);
}
/// Positions of heads of which nothing was dropped, from `begin` on.
template <int Threads>
__global__ void __launch_bounds__(Threads)
    count_positions_entry(cached_columns cached, const saved_head* heads, index_t begin) {
  const index_t head = blockIdx.y;
  for (index_t i = index_t(blockIdx.x * Threads + threadIdx.x); i < heads[head].rows; i += index_t(gridDim.x * Threads))
    cached.data[0][cached.begins[head] + i] = std::uint32_t(begin + i);
}

}  // namespace detail

/// Saves a layer whose heads have `counts` rows, or loads one: an array of columns, if there are any, and one of rows.
/// `scattered`: positions are saved; else they count from `begin` on. next: the layer's next position.
template <class View, class Archive>
void transfer_layer(const View& view, const detail::cached_columns& columns, const host_vector<index_t>& counts,
                    bool scattered, index_t begin, index_t next, Archive& archive, cudaStream_t stream) {
  using stored = typename View::stored_type;
  constexpr offset_t k_bytes = View::k_units * offset_t(sizeof(stored)),
                     v_bytes = View::v_units * offset_t(sizeof(stored));
  static_assert(k_bytes % 4 == 0 && v_bytes % 4 == 0,
                "tessera: rows that a GPU saves have a multiple of 4 bytes; rows of ggml's blocks are the engine's");
  constexpr auto way = Archive::loads ? detail::saved_way::to_cache : detail::saved_way::to_slice;
  host_vector<detail::saved_head> heads;
  offset_t column_bytes = 0, row_bytes = 0;
  index_t longest = 0;
  for (const index_t rows : counts) {
    const auto place = [&](offset_t& end, offset_t bytes) {
      const offset_t begin = end;
      end += padded_bytes(offset_t(rows) * bytes);
      return begin;
    };
    detail::saved_head head{};
    head.rows = rows;
    for (int c = 0; c < detail::saved_columns; ++c) {
      const bool is_saved = columns.data[c] && (c > 0 || scattered);
      head.columns[c] = is_saved ? place(column_bytes, 4) : -1;
    }
    constexpr bool scaled = View::encoding_type::scaled;
    head.k = place(row_bytes, k_bytes);
    head.v = place(row_bytes, v_bytes);
    head.k_scales = place(row_bytes, scaled ? 4 : 0);
    head.v_scales = place(row_bytes, scaled ? 4 : 0);
    heads.push_back(head);
    longest = (std::max)(longest, rows);
  }
  const detail::saved_head* const uploaded = archive.upload(heads);
  const int of_head = (std::max)(1, detail::saving_blocks / int(heads.size()));
  const dim3 grid{unsigned(std::clamp(longest / 16, 1, of_head)), unsigned(heads.size())};
  const bool has_columns = columns.data[1] || columns.data[2] || (columns.data[0] && scattered);
  if (has_columns) {
    archive.device_array(
        std::size_t(column_bytes),
        [&](const std::byte* image) {
          for (const detail::saved_head& head : heads) {
            if (head.columns[0] >= 0)
              require_ascending(reinterpret_cast<const index_t*>(image + head.columns[0]), head.rows, next, archive);
          }
        },
        [&](const detail::saved_slice& slice) {
          detail::move_columns_entry<way><<<grid, detail::saving_threads, 0, stream>>>(columns, uploaded, slice);
          check(cudaGetLastError(), "launch of move_columns");
        });
  }
  archive.device_array(
      std::size_t(row_bytes), [](const std::byte*) {},
      [&](const detail::saved_slice& slice) {
        detail::move_rows_entry<way, View><<<grid, detail::saving_threads, 0, stream>>>(view, uploaded, slice);
        check(cudaGetLastError(), "launch of move_rows");
      });
  if (Archive::loads && columns.data[0] && !scattered && longest > 0) {
    detail::count_positions_entry<detail::saving_threads>
        <<<grid, detail::saving_threads, 0, stream>>>(columns, uploaded, begin);
    check(cudaGetLastError(), "launch of count_positions");
  }
}

}  // namespace cuda
TESSERA_NAMESPACE_END
