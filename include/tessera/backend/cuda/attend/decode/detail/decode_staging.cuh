// How a warp of the decode kernel copies its tiles of K and V to shared memory.
#pragma once

#include <type_traits>

#include "../../../device/mma.cuh"
#include "../../detail/tile_values.cuh"
#include "decode_plan.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {
namespace detail {

/// Tables whose slots lie a fixed stride apart, so that no table entry is read per token.
template <class Table>
inline constexpr bool strided_table = std::is_same_v<Table, contiguous> || std::is_same_v<Table, ragged>;

/// A warp's ring of staged tiles. Lanes copy 16 bytes at a time, and zeros for tokens beyond the end.
/// One bulk copy per row (cp.async.bulk, sm_90) was slower: 2.8 TB/s against 4.4 (H200, CUDA 13.0, B8 128K). Also
/// slower (B1 128K): prefetching the pages ahead of the ring to the L2 (147 us against 127), and copying keys as soon
/// as the tile's keys are read (0.5 % more). Pages of 16 cost 2 % against contiguous rows. The lookups cost none of it:
/// behind the same table, contiguous rows take 124.4 us against 124.2. The memory prefers long runs: shuffled pages of
/// 64 tokens cost as much as those of 16, pages of 256 cost 0.7 %.
template <class View>
struct decode_staging {
  using format = decode_format<View>;
  using T = typename View::element_type;
  using stored_type = const typename format::stored_type;
  using config = decode_config<View>;
  static constexpr int tokens = config::tokens, stages = config::stages;
  static constexpr int chunk_elements = 16 / format::element_bytes;
  static constexpr auto k_rows = format::k_rows, v_rows = format::v_rows;
  static constexpr bool scaled = View::encoding_type::scaled;
  static constexpr bool strided = strided_table<decltype(View::table)>;

  std::uint32_t ring;                 // shared address
  std::uint32_t uses = 0, taken = 0;  // tiles fetched and read
  std::uint64_t policy = evict_first_policy();
  // A load that is issued behind copies completes behind them, microseconds later. So the addresses of tiles are read
  // long before the tiles are copied.
  index_t first_tile = 0;
  stored_type *k_first = nullptr, *v_first = nullptr;  // strided tables: the row's first slot
  offset_t scale_first = 0;                            // and its scale
  bool direct = true;                                  // strided and no selection: no addresses have to be read
  bool in_pages = false;                               // no selection: a tile lies in one page, or in two
  bool in_halves = false;                              // in_pages, and a tile lies in two pages
  // In pages, a lane holds the page of one of 32 tiles, and of one of the following 32. Otherwise it holds one token of
  // every `span` tiles: the addresses in the next two groups of tiles, and the slots in the two groups after those.
  static constexpr int span = 32 / tokens, half = 16;
  static constexpr bool can_halve = tokens == 2 * half && paged_table<decltype(View::table)>;
  using place_type = std::conditional_t<strided, index_t, slot_address>;
  place_type next{}, following{};
  index_t slots = 0, later_slots = 0;

  __device__ explicit decode_staging(std::uint32_t ring_) : ring(ring_) {}

  __device__ std::uint32_t stage(std::uint32_t use) const {
    return ring + use % stages * std::uint32_t(stage_bytes<View>(config::tuning));
  }
  __device__ static index_t slot_of(const decode_row& at, index_t token) {
    const index_t valid = token < at.count ? token : 0;
    return at.chosen ? at.chosen[valid] : valid;
  }

  /// Like `table.locate`, without the division if the page size is a power of two. For strided tables it returns the
  /// slot.
  __device__ static place_type locate(const View& view, const decode_row& at, index_t slot) {
    if constexpr (std::is_same_v<decltype(view.table), block_table>) {
      const index_t page = view.table.page;
      if ((page & (page - 1)) == 0) {
        const index_t* blocks =
            view.table.blocks + at.sequence * view.table.sequence_stride + at.head * view.table.head_stride;
        return {blocks[slot >> (31 - __clz(page))], slot & (page - 1)};
      }
    } else if constexpr (computed_page_table<decltype(view.table)>) {
      const index_t page = view.table.page;
      if ((page & (page - 1)) == 0) {
        return {view.table.page_of(at.sequence, at.head, slot >> (31 - __clz(page))), slot & (page - 1)};
      }
    }
    if constexpr (strided) {
      return slot;
    } else {
      return view.table.locate(at.sequence, at.head, slot);
    }
  }

  /// The slot of this lane's token in the group of `span` tiles that begins at `tile`.
  template <class TokenOf>
  __device__ static index_t group_slot(const decode_row& at, index_t tile, const TokenOf& token_of, int lane) {
    return slot_of(at, token_of(tile + lane / tokens) + lane % tokens);
  }

  /// The page of the tile that begins at `token`, where tables are paged.
  __device__ static index_t page_of(const View& view, const decode_row& at, index_t token) {
    if constexpr (strided) {
      return 0;
    } else {
      return index_t(locate(view, at, token < at.count ? token : 0).outer);
    }
  }

  /// The page of one half of tile first + lane / 2.
  template <class TokenOf>
  __device__ static index_t half_page_of(const View& view, const decode_row& at, index_t first, const TokenOf& token_of,
                                         int lane) {
    return page_of(view, at, token_of(first + lane / 2) + lane % 2 * half);
  }

  /// Reads the addresses of the first tiles of [first, last). Call it before `begin`, and before copies that do not
  /// depend on it.
  template <class TokenOf>
  __device__ void find(const View& view, const decode_row& at, index_t first, index_t last, const TokenOf& token_of,
                       int lane) {
    direct = strided && !at.chosen;
    first_tile = first;
    if constexpr (strided) {
      k_first = view.key(at.sequence, at.head, 0);
      v_first = view.value(at.sequence, at.head, 0);
      if constexpr (scaled) {
        scale_first = view.scales.index(view.table.locate(at.sequence, at.head, 0), at.head);
      }
      if (direct) return;
    }
    if constexpr (paged_table<decltype(View::table)>) {
      in_halves = can_halve && !at.chosen && view.table.page == half;
      in_pages = in_halves || (!at.chosen && view.table.page % tokens == 0);
      if (in_halves) {
        slots = half_page_of(view, at, first, token_of, lane);
        if (first + 16 < last) later_slots = half_page_of(view, at, first + 16, token_of, lane);
        return;
      }
      if (in_pages) {
        slots = page_of(view, at, token_of(first + lane));
        if (first + 32 < last) later_slots = page_of(view, at, token_of(first + 32 + lane));
        return;
      }
    }
    const auto slots_from = [&](index_t tile) { return tile < last ? group_slot(at, tile, token_of, lane) : 0; };
    const index_t ahead[2] = {slots_from(first), slots_from(first + span)};
    slots = slots_from(first + 2 * span);
    later_slots = slots_from(first + 3 * span);
    next = locate(view, at, ahead[0]);
    if (first + span < last) following = locate(view, at, ahead[1]);
  }

  /// Starts to copy the first tiles of [first, last), as many as the ring holds.
  template <class TokenOf>
  __device__ void begin(const View& view, const decode_row& at, index_t first, index_t last, const TokenOf& token_of,
                        int lane) {
#pragma unroll 1
    for (int s = 0; s < stages; ++s) fetch(view, at, first + s, last, token_of, lane);
  }

  /// Starts to copy tile `tile` of a row that ends at `last` into the stage that was read last. Beyond the end it
  /// copies nothing. `find` and earlier calls have read the tile's addresses.
  template <class TokenOf>
  __device__ void fetch(const View& view, const decode_row& at, index_t tile, index_t last, const TokenOf& token_of,
                        int lane) {
    if (tile < last) {
      const index_t i = tile - first_tile;
      copy(view, at, token_of(tile), i, lane);
      if (can_halve && in_halves) {
        if (i % 16 == 15) {
          slots = later_slots;
          if (tile + 17 < last) later_slots = half_page_of(view, at, tile + 17, token_of, lane);
        }
      } else if (in_pages) {
        if (i % 32 == 31) {
          slots = later_slots;
          if (tile + 33 < last) later_slots = page_of(view, at, token_of(tile + 33 + lane));
        }
      } else if (!direct && i % span == span - 1) {
        next = following;
        if (tile + span + 1 < last) following = locate(view, at, slots);
        slots = later_slots;
        if (tile + 3 * span + 1 < last) later_slots = group_slot(at, tile + 3 * span + 1, token_of, lane);
      }
    }
    commit_copies();
  }

  /// Waits for the oldest tile and returns its address.
  __device__ std::uint32_t await_tile() {
    wait_copies<stages - 1>();
    __syncwarp();
    return stage(taken++);
  }

 private:
  /// Copies the row's tile of tokens from `first` on, the i-th tile of this segment.
  __device__ void copy(const View& view, const decode_row& at, index_t first, index_t i, int lane) {
    const std::uint32_t to = stage(uses++), to_v = to + tokens * k_rows.bytes(),
                        to_scales = to_v + tokens * v_rows.bytes();
    if (first >= at.count) return;  // nor is it read
    if constexpr (can_halve) {
      if (in_halves) {
        const index_t pages[2] = {__shfl_sync(~0u, slots, i % 16 * 2), __shfl_sync(~0u, slots, i % 16 * 2 + 1)};
        copy_halves(view, at, pages, at.count - first, to, lane);
        return;
      }
    }
    const row_strides &ks = view.k_strides, &vs = view.v_strides;
    stored_type *k, *v;
    offset_t scale = 0;
    if (direct) {
      k = k_first + first * ks.token;
      v = v_first + first * vs.token;
      if constexpr (scaled) scale = scale_first + first * view.scales.token;
    } else {
      offset_t outer = 0, row = 0;
      if (in_pages) {
        if constexpr (paged_table<decltype(View::table)>) {
          const index_t page = view.table.page;
          outer = __shfl_sync(~0u, slots, i % 32);
          row = (page & (page - 1)) == 0 ? first & (page - 1) : first % page;
        }
      } else if constexpr (!strided) {
        outer = next.outer;
        row = next.row;
      }
      if constexpr (strided) {
        k = k_first + next * ks.token;
        v = v_first + next * vs.token;
        if constexpr (scaled) scale = scale_first + next * view.scales.token;
      } else {
        k = view.k + outer * ks.outer + at.head * ks.head + row * ks.token;
        v = view.v + outer * vs.outer + at.head * vs.head + row * vs.token;
        if constexpr (scaled) scale = view.scales.index({outer, row}, at.head);
      }
      if (!in_pages) {
        const int lane_of = i % span * tokens;
        float k_scale = 1, v_scale = 1;
        if constexpr (format::scaled) {
          if (lane / tokens == i % span) {
            const int token = lane % tokens;
            const bool valid = token < at.count - first;
            copy_async4(to_scales + token * 4, view.scales.k + scale, valid);
            copy_async4(to_scales + (tokens + token) * 4, view.scales.v + scale, valid);
          }
        } else if constexpr (scaled) {
          k_scale = view.scales.k[scale], v_scale = view.scales.v[scale];
        }
        copy_found<k_rows>(k, k_scale, lane_of, at.count - first, to, lane);
        copy_found<v_rows>(v, v_scale, lane_of, at.count - first, to_v, lane);
        return;
      }
    }
    const index_t valid = (min)(index_t(tokens), at.count - first);
    const float *k_scales = nullptr, *v_scales = nullptr;
    if constexpr (scaled) k_scales = view.scales.k + scale, v_scales = view.scales.v + scale;
    if constexpr (format::scaled) {
#pragma unroll
      for (int j = 0; j < tokens * 2 / 32; ++j) {
        const int id = j * 32 + lane, token = id % tokens;
        const float* from = id < tokens ? k_scales : v_scales;
        copy_async4(to_scales + id * 4, from + token * view.scales.token, token < valid);
      }
    }
    if (valid == tokens) {
      copy_strided<k_rows, true>(k, ks.token, k_scales, view.scales.token, tokens, to, lane);
      copy_strided<v_rows, true>(v, vs.token, v_scales, view.scales.token, tokens, to_v, lane);
    } else {
      copy_strided<k_rows, false>(k, ks.token, k_scales, view.scales.token, valid, to, lane);
      copy_strided<v_rows, false>(v, vs.token, v_scales, view.scales.token, valid, to_v, lane);
    }
  }
  /// A tile that lies in two pages.
  __device__ void copy_halves(const View& view, const decode_row& at, const index_t (&pages)[2], index_t valid,
                              std::uint32_t to, int lane) const {
    const std::uint32_t to_v = to + tokens * k_rows.bytes(), to_scales = to_v + tokens * v_rows.bytes();
    const row_strides &ks = view.k_strides, &vs = view.v_strides;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const index_t here = valid - h * half;
      stored_type* const k = view.k + pages[h] * ks.outer + at.head * ks.head;
      stored_type* const v = view.v + pages[h] * vs.outer + at.head * vs.head;
      const float *k_scales = nullptr, *v_scales = nullptr;
      if constexpr (scaled) {
        const offset_t scale = view.scales.index({pages[h], 0}, at.head);
        k_scales = view.scales.k + scale, v_scales = view.scales.v + scale;
      }
      if constexpr (format::scaled) {
        const int token = lane % half;
        const float* const from = lane < half ? k_scales : v_scales;
        copy_async4(to_scales + ((lane < half ? 0 : tokens) + h * half + token) * 4, from + token * view.scales.token,
                    token < here);
      }
      copy_strided<k_rows, false, half>(k, ks.token, k_scales, view.scales.token, here, to + h * half * k_rows.bytes(),
                                        lane);
      copy_strided<v_rows, false, half>(v, vs.token, v_scales, view.scales.token, here,
                                        to_v + h * half * v_rows.bytes(), lane);
    }
  }
  /// What copy_chunk takes of a row.
  template <auto Rows>
  __device__ static auto chunk_of(stored_type* row, int chunk) {
    if constexpr (format::groups) {
      return reinterpret_cast<const unsigned char*>(row) + chunk * Rows.chunk_bytes;
    } else {
      return row_elements(row, chunk * chunk_elements);
    }
  }
  /// Copies a chunk of a row: asynchronously, or decoded at once if it is encoded. Writes zeros if it is not valid.
  template <auto Rows, class Elements>
  __device__ void copy_chunk(std::uint32_t to, const Elements& from, bool valid, float scale) const {
    if constexpr (format::groups) {
      copy_async<Rows.chunk_bytes>(to, from, valid, policy);
    } else if constexpr (format::decoded) {
      store_decoded<T>(to, from, valid, scale);
    } else {
      copy_async16(to, from, valid, policy);
    }
  }
  /// Copies rows `stride` apart. Writes zeros from row `valid` on, unless the tile is full.
  template <auto Rows, bool Full, int Count = tokens>
  __device__ void copy_strided(stored_type* rows, offset_t stride, const float* scales, offset_t scale_stride,
                               index_t valid, std::uint32_t to, int lane) const {
    if constexpr (format::groups) {
      constexpr int all = Count * Rows.bytes() / 16;
      const auto* const from = reinterpret_cast<const unsigned char*>(rows);
      if (Full && stride * offset_t(sizeof(stored_type)) == Rows.bytes() && on_16_bytes(from)) {
#pragma unroll
        for (int i = 0; i < (all + 31) / 32; ++i) {
          const int id = i * 32 + lane;
          if (all % 32 == 0 || id < all) copy_async16(to + id * 16, from + id * 16, true, policy);
        }
        return;
      }
    }
    const auto copy_one = [&](int token, int chunk, const auto& from) {
      const bool there = Full || token < valid;
      float scale = 1;
      if constexpr (format::decoded && scaled) scale = there ? scales[token * scale_stride] : 0.0f;
      copy_chunk<Rows>(to + Rows.offset(token, chunk), from, there, scale);
    };
    if constexpr (!format::groups && 32 % Rows.chunks == 0) {
      constexpr int at_once = 32 / Rows.chunks;
      const int chunk = lane % Rows.chunks, mine = lane / Rows.chunks;
      auto from = row_elements(rows + mine * stride, chunk * chunk_elements);
#pragma unroll
      for (int i = 0; i < Count / at_once; ++i) {
        copy_one(i * at_once + mine, chunk, from);
        from += at_once * stride;
      }
    } else {
#pragma unroll
      for (int i = 0; i < (Count * Rows.chunks + 31) / 32; ++i) {
        const int id = i * 32 + lane, token = id / Rows.chunks, chunk = id % Rows.chunks;
        if (Count * Rows.chunks % 32 == 0 || token < Count)
          copy_one(token, chunk, chunk_of<Rows>(rows + token * stride, chunk));
      }
    }
  }
  /// `mine` is the row of the tile's token lane - lane_of, `scale` its scale.
  template <auto Rows>
  __device__ void copy_found(stored_type* mine, float scale, int lane_of, index_t valid, std::uint32_t to,
                             int lane) const {
#pragma unroll
    for (int i = 0; i < (tokens * Rows.chunks + 31) / 32; ++i) {
      const int id = (min)(i * 32 + lane, tokens * Rows.chunks - 1), token = id / Rows.chunks, chunk = id % Rows.chunks,
                from = lane_of + token;
      const auto row = __shfl_sync(~0u, reinterpret_cast<unsigned long long>(mine), from);
      float of_token = 1;
      if constexpr (format::decoded && scaled) of_token = __shfl_sync(~0u, scale, from);
      copy_chunk<Rows>(to + Rows.offset(token, chunk), chunk_of<Rows>(reinterpret_cast<stored_type*>(row), chunk),
                       token < valid, of_token);
    }
  }
};

}  // namespace detail
}  // namespace cuda
TESSERA_NAMESPACE_END
