// One warp's part of decode attention: staging tiles of K and V, and the softmax state that reads them.
#pragma once

#include <type_traits>

#include "decode_problem.cuh"
#include "decode_tuning.cuh"
#include "mma.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {
namespace detail {

/// Slots of these tables lie a fixed stride apart, so that no table is read per token.
template <class Table>
inline constexpr bool strided_table = std::is_same_v<Table, contiguous> || std::is_same_v<Table, ragged>;

/// One (sequence, kv_head) row of K and V.
struct decode_row {
  index_t sequence, head, count;
  const index_t* chosen;  // its selected slots, or null
};

/// A warp's ring of staged tiles: lanes copy 16 bytes at a time, zeros for tokens beyond the end.
/// One bulk copy per row (cp.async.bulk, sm_90) lost: 2.8 TB/s where this reaches 4.4 (H200, CUDA 13.0, B8 128K).
template <class View, class Config>
struct decode_staging {
  using T = typename View::element_type;
  static constexpr decode_tuning tuning = Config::tuning;
  static constexpr int tokens = tuning.tokens, stages = tuning.stages;
  static constexpr staged_rows k_rows{View::k_dim / 8}, v_rows{View::v_dim / 8};
  static constexpr bool strided = strided_table<decltype(View::table)>;

  std::uint32_t ring;                 // shared address
  std::uint32_t uses = 0, taken = 0;  // tiles put and read; a row starts with both equal
  // Of a row with a table or a selection: addresses of the next tile and slots of the one after it, one token a lane.
  // Both are read ahead, so that no copy waits for an index.
  slot_address next{};
  index_t slot_after = 0;
  // Of a row without: where its first slot lies.
  const T *k_first = nullptr, *v_first = nullptr;
  bool direct = true;

  __device__ explicit decode_staging(std::uint32_t ring_) : ring(ring_) {}

  __device__ static std::uint32_t place(const staged_rows& rows, int token, int chunk) {
    return std::uint32_t(token * rows.bytes() + (rows.swizzled() ? chunk ^ (token % 8) : chunk) * 16);
  }
  __device__ std::uint32_t stage(std::uint32_t use) const {
    return ring + use % stages * std::uint32_t(stage_bytes(tuning, View::k_dim, View::v_dim));
  }
  __device__ static index_t slot_of(const decode_row& at, index_t token) {
    const index_t valid = token < at.count ? token : 0;
    return at.chosen ? at.chosen[valid] : valid;
  }

  /// Starts the first tiles of [first_tile, last_tile) on their way, as many as the ring holds.
  template <class TokenOf>
  __device__ void begin(const View& view, const decode_row& at, index_t first_tile, index_t last_tile,
                        const TokenOf& token_of, int lane) {
    direct = strided && !at.chosen;
    if (direct) {
      k_first = view.key(at.sequence, at.head, 0);
      v_first = view.value(at.sequence, at.head, 0);
#pragma unroll
      for (int s = 0; s < stages; ++s) {
        if (first_tile + s < last_tile) copy_direct(view, at, token_of(first_tile + s), lane);
        commit_copies();
      }
      return;
    }
    index_t slots[stages + 2];
    slot_address found[stages + 1];
#pragma unroll
    for (int s = 0; s < stages + 2; ++s) {
      slots[s] = first_tile + s < last_tile ? slot_of(at, token_of(first_tile + s) + lane % tokens) : 0;
    }
#pragma unroll
    for (int s = 0; s < stages + 1; ++s) {
      if (first_tile + s < last_tile) found[s] = view.table.locate(at.sequence, at.head, slots[s]);
    }
#pragma unroll
    for (int s = 0; s < stages; ++s) {
      if (first_tile + s < last_tile) copy_found(view, at, found[s], token_of(first_tile + s), lane);
      commit_copies();
    }
    next = found[stages];
    slot_after = slots[stages + 1];
  }

  /// Starts tile `tile` of a row that ends at `last_tile` on its way, into the stage that was read last, or nothing
  /// beyond the end; `begin` and earlier calls have read its addresses.
  template <class TokenOf>
  __device__ void put(const View& view, const decode_row& at, index_t tile, index_t last_tile, const TokenOf& token_of,
                      int lane) {
    if (tile < last_tile) {
      if (direct) {
        copy_direct(view, at, token_of(tile), lane);
      } else {
        copy_found(view, at, next, token_of(tile), lane);
        if (tile + 1 < last_tile) next = view.table.locate(at.sequence, at.head, slot_after);
        if (tile + 2 < last_tile) slot_after = slot_of(at, token_of(tile + 2) + lane % tokens);
      }
    }
    commit_copies();
  }

  /// Waits for the oldest tile and returns where it lies.
  __device__ std::uint32_t take() {
    wait_copies<stages - 1>();
    __syncwarp();
    return stage(taken++);
  }

 private:
  __device__ void copy_direct(const View& view, const decode_row& at, index_t first, int lane) {
    const std::uint32_t to = stage(uses++);
    const T* k = k_first + first * view.k_strides.token;
    const T* v = v_first + first * view.v_strides.token;
    if (first + tokens <= at.count) {
      copy_strided<k_rows, true>(k, view.k_strides.token, tokens, to, lane);
      copy_strided<v_rows, true>(v, view.v_strides.token, tokens, to + tokens * k_rows.bytes(), lane);
    } else {
      copy_strided<k_rows, false>(k, view.k_strides.token, at.count - first, to, lane);
      copy_strided<v_rows, false>(v, view.v_strides.token, at.count - first, to + tokens * k_rows.bytes(), lane);
    }
  }
  template <staged_rows Rows, bool Full>
  __device__ static void copy_strided(const T* rows, offset_t stride, index_t valid, std::uint32_t to, int lane) {
    if constexpr (32 % Rows.chunks == 0) {
      constexpr int at_once = 32 / Rows.chunks;
      const int chunk = lane % Rows.chunks;
      const T* from = rows + (lane / Rows.chunks) * stride + chunk * 8;
#pragma unroll
      for (int i = 0; i < tokens / at_once; ++i) {
        const int token = i * at_once + lane / Rows.chunks;
        const bool here = Full || token < valid;
        copy_async16(to + place(Rows, token, chunk), here ? from : rows, here);
        from += at_once * stride;
      }
    } else {
#pragma unroll
      for (int i = 0; i < tokens * Rows.chunks / 32; ++i) {
        const int id = i * 32 + lane, token = id / Rows.chunks, chunk = id % Rows.chunks;
        const bool here = Full || token < valid;
        copy_async16(to + place(Rows, token, chunk), here ? rows + token * stride + chunk * 8 : rows, here);
      }
    }
  }

  __device__ void copy_found(const View& view, const decode_row& at, const slot_address& mine, index_t first,
                             int lane) {
    const std::uint32_t to = stage(uses++);
    const row_strides& ks = view.k_strides;
    const row_strides& vs = view.v_strides;
    copy_rows<k_rows>(view.k + mine.outer * ks.outer + at.head * ks.head + mine.row * ks.token, at.count - first, to,
                      lane);
    copy_rows<v_rows>(view.v + mine.outer * vs.outer + at.head * vs.head + mine.row * vs.token, at.count - first,
                      to + tokens * k_rows.bytes(), lane);
  }
  template <staged_rows Rows>
  __device__ static void copy_rows(const T* mine, index_t valid, std::uint32_t to, int lane) {
#pragma unroll
    for (int i = 0; i < tokens * Rows.chunks / 32; ++i) {
      const int id = i * 32 + lane, token = id / Rows.chunks, chunk = id % Rows.chunks;
      const T* row = reinterpret_cast<const T*>(__shfl_sync(~0u, reinterpret_cast<unsigned long long>(mine), token));
      copy_async16(to + place(Rows, token, chunk), row + chunk * 8, token < valid);
    }
  }
};

/// Running state of one warp: 16 query rows over the tokens that it has seen.
template <class View, class Config>
struct decode_state {
  using T = typename View::element_type;
  static constexpr int D = View::k_dim, Dv = View::v_dim, tokens = Config::tuning.tokens;
  static constexpr staged_rows k_rows{D / 8}, v_rows{Dv / 8};

  float out[Dv / 8][4] = {};
  float max[2] = {-infinity, -infinity}, sum[2] = {};  // rows lane / 4 and lane / 4 + 8, base 2

  /// Reads the tile of `tokens` tokens at `shared`. `logit_of(token, half, product)` gives the logit, in base 2, of
  /// query row lane / 4 + 8 * half; with `plain` that is product * scale2.
  template <class LogitOf>
  __device__ void read(const std::uint32_t (&q)[D / 16][4], std::uint32_t shared, bool plain, float scale2,
                       const LogitOf& logit_of, int lane) {
    float s[tokens / 8][4] = {};
    const int matrix = lane / 8, in_matrix = lane % 8;
    const std::uint32_t k_at = shared + std::uint32_t((matrix / 2 * 8 + in_matrix) * k_rows.bytes());
    const std::uint32_t k_chunk = std::uint32_t(k_rows.swizzled() ? matrix % 2 ^ in_matrix : matrix % 2) * 16;
#pragma unroll
    for (int step = 0; step < D / 16; ++step) {
#pragma unroll
      for (int pair = 0; pair < tokens / 16; ++pair) {
        std::uint32_t b[4];
        load_matrices(b, k_at + std::uint32_t(pair * 16 * k_rows.bytes()) +
                             (k_rows.swizzled() ? k_chunk ^ std::uint32_t(step * 32) : k_chunk + step * 32));
        multiply<T>(s[pair * 2], q[step], b[0], b[1]);
        multiply<T>(s[pair * 2 + 1], q[step], b[2], b[3]);
      }
    }
    if (plain) {
#pragma unroll
      for (int n = 0; n < tokens / 8; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) s[n][i] *= scale2;
      }
    } else {
#pragma unroll
      for (int n = 0; n < tokens / 8; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) s[n][i] = logit_of(n * 8 + lane % 4 * 2 + i % 2, i / 2, s[n][i]);
      }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float top = max[half];
#pragma unroll
      for (int n = 0; n < tokens / 8; ++n) top = fmaxf(top, fmaxf(s[n][half * 2], s[n][half * 2 + 1]));
      top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
      top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
      const float reference = top == -infinity ? 0.0f : top;
      const float shrink = power_of_two(max[half] - reference);  // 2^-inf = 0: nothing seen so far
      float more = 0;
#pragma unroll
      for (int n = 0; n < tokens / 8; ++n) {
        s[n][half * 2] = power_of_two(s[n][half * 2] - reference);
        s[n][half * 2 + 1] = power_of_two(s[n][half * 2 + 1] - reference);
        more += s[n][half * 2] + s[n][half * 2 + 1];
      }
      sum[half] = sum[half] * shrink + more;
      if (top != max[half]) {
#pragma unroll
        for (int n = 0; n < Dv / 8; ++n) {
          out[n][half * 2] *= shrink;
          out[n][half * 2 + 1] *= shrink;
        }
      }
      max[half] = top;
    }
    const std::uint32_t v_at =
        shared + std::uint32_t(tokens * k_rows.bytes() + (matrix % 2 * 8 + in_matrix) * v_rows.bytes());
    const std::uint32_t v_chunk = std::uint32_t(v_rows.swizzled() ? matrix / 2 ^ in_matrix : matrix / 2) * 16;
#pragma unroll
    for (int k = 0; k < tokens / 16; ++k) {
      std::uint32_t weights[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        weights[i] = pack_pair<T>(s[k * 2 + i / 2][i % 2 * 2], s[k * 2 + i / 2][i % 2 * 2 + 1]);
      }
#pragma unroll
      for (int pair = 0; pair < Dv / 16; ++pair) {
        std::uint32_t b[4];
        load_matrices_transposed(b, v_at + std::uint32_t(k * 16 * v_rows.bytes()) +
                                        (v_rows.swizzled() ? v_chunk ^ std::uint32_t(pair * 32) : v_chunk + pair * 32));
        multiply<T>(out[pair * 2], weights, b[0], b[1]);
        multiply<T>(out[pair * 2 + 1], weights, b[2], b[3]);
      }
    }
  }

  /// Adds the four lanes' shares of every row's sum.
  __device__ void close() {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      sum[half] += __shfl_xor_sync(~0u, sum[half], 1);
      sum[half] += __shfl_xor_sync(~0u, sum[half], 2);
    }
  }

  /// Writes the first `used` rows to shared memory: outputs `merge_pitch` apart, then their states.
  __device__ void store(float* outs, float2* states, int used, int lane) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int r = lane / 4 + half * 8;
      if (r >= used) continue;
#pragma unroll
      for (int n = 0; n < Dv / 8; ++n) {
        *reinterpret_cast<float2*>(outs + r * merge_pitch(Dv) + n * 8 + lane % 4 * 2) =
            make_float2(out[n][half * 2], out[n][half * 2 + 1]);
      }
      if (lane % 4 == 0) states[r] = make_float2(max[half], sum[half]);
    }
  }
};

}  // namespace detail
}  // namespace cuda
TESSERA_NAMESPACE_END
