// What both passes by products of four warps share: how keys come to shared memory, and which need no look at
// positions.
#pragma once

#include <type_traits>

#include "../expected/detail/wide_product.cuh"
#include "../score_problem.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {
namespace detail {

/// First slots of a head that every query row sees and whose logits nothing caps. No two slots have one position, so
/// one look at the last tells for all: slot s lies tokens - 1 - s positions before it, or more. 0 where windows slide.
template <class View>
__device__ index_t slots_seen_by_all(const score_problem<View>& p, const scored_head& at) {
  if (at.tokens == 0 || at.query_rows == 0 || p.rule.soft_cap > 0 || p.rule.sliding_window > 0) return 0;
  const index_t last = p.view.position(at.sequence, at.head, at.tokens - 1);
  const offset_t seen = offset_t(at.first_position) - last + at.tokens;
  return index_t((max)(offset_t(0), (min)(offset_t(at.tokens), seen)));
}

/// `rule.cap` out of line: where nothing is capped its many instructions are not in the way.
__device__ __noinline__ inline float capped_logit(const logit_rule& rule, float scaled) { return rule.cap(scaled); }

/// Brings keys of one head to shared memory, 16 by a warp at a time, as wide_product::place lays them in parts of
/// `Rows` rows.
template <class View, int Rows>
class wide_keys {
  using T = typename View::element_type;
  using wide = wide_product<T>;
  static constexpr int chunks = View::k_dim / 8, together = 32 / chunks;  // rows that a warp copies at once
  using table = std::remove_cvref_t<decltype(View::table)>;
  /// Slots of a head stand at one distance.
  static constexpr bool in_runs = View::is_raw && (std::is_same_v<table, contiguous> || std::is_same_v<table, ragged>);

 public:
  __device__ wide_keys(const View& view, const scored_head& at, int lane)
      : lane_(lane), place_(wide::offset(Rows, lane / chunks, lane % chunks)) {
    if constexpr (in_runs) {
      stride_ = view.k_strides.token * offset_t(sizeof(T));
      from_ = reinterpret_cast<const unsigned char*>(view.key(at.sequence, at.head, 0)) + lane / chunks * stride_ +
              lane % chunks * 16;
    }
  }

  /// Slots first .. first + 15, all of them stored, to rows from `to` on, a multiple of eight of them in.
  __device__ __forceinline__ void bring_whole(const View& view, const scored_head& at, index_t first,
                                              std::uint32_t to) const {
    if constexpr (in_runs) {
      const unsigned char* from = from_ + first * stride_;
      if (stride_ == chunks * 16) {
        copy_rows(from, chunks * 16, to);
      } else {
        copy_rows(from, stride_, to);
      }
    } else {
      bring(view, at, first, to);
    }
  }
  /// The same; zeros beyond the end.
  __device__ __forceinline__ void bring(const View& view, const scored_head& at, index_t first,
                                        std::uint32_t to) const {
    stage_keys_at<16>(
        view, at, first, [to](int token, int chunk) { return to + wide::offset(Rows, token, chunk); }, lane_);
  }

 private:
  /// Chunks are exchanged by what the row's last three bits say: those of later rows differ by known ones.
  __device__ __forceinline__ void copy_rows(const unsigned char* from, offset_t stride, std::uint32_t to) const {
#pragma unroll
    for (int i = 0; i < 16 / together; ++i) {
      copy_async16(((to + place_) ^ std::uint32_t(i * together % 8 * 16)) + std::uint32_t(i * together * 128),
                   from + i * together * stride, true);
    }
  }

  int lane_;
  std::uint32_t place_;  // of this lane's chunk of the first rows
  offset_t stride_ = 0;
  const unsigned char* from_ = nullptr;  // this lane's part of slot 0
};

}  // namespace detail
}  // namespace cuda
TESSERA_NAMESPACE_END
