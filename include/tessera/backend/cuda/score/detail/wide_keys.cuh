// What both passes with products of four warps share: copies of keys to shared memory, and which keys need no
// comparison of positions.
#pragma once

#include <type_traits>

#include "../expected/detail/wide_product.cuh"
#include "../score_problem.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {
namespace detail {

/// How many of a head's first slots every query row sees, if no logits are capped. No two slots have the same position,
/// so the last slot's position bounds all others: slot s lies at least tokens - 1 - s positions before it. 0 with
/// sliding windows.
template <class View>
__device__ index_t slots_seen_by_all(const score_problem<View>& p, const scored_head& at) {
  if (at.tokens == 0 || at.query_rows == 0 || p.rule.soft_cap > 0 || p.rule.sliding_window > 0) return 0;
  const index_t last = p.view.position(at.sequence, at.head, at.tokens - 1);
  const offset_t seen = offset_t(at.first_position) - last + at.tokens;
  return index_t((max)(offset_t(0), (min)(offset_t(at.tokens), seen)));
}

/// `rule.cap` out of line, so that its many instructions do not slow down code without a cap.
__device__ __noinline__ inline float capped_logit(const logit_rule& rule, float scaled) { return rule.cap(scaled); }

/// Copies keys of one head to shared memory, 16 per warp at a time, in the layout of wide_product::offset for parts of
/// `Rows` rows.
template <class View, int Rows>
class wide_keys {
  using T = typename View::element_type;
  using wide = wide_product<T>;
  static constexpr int chunks = View::k_dim / 8, together = 32 / chunks;  // rows that a warp copies at once
  using table = std::remove_cvref_t<decltype(View::table)>;
  /// Whether slots of a head are evenly spaced.
  static constexpr bool in_runs = View::is_raw && (std::is_same_v<table, contiguous> || std::is_same_v<table, ragged>);

 public:
  __device__ wide_keys(const View& view, const scored_head& at, int lane)
      : lane_(lane), offset_(wide::offset(Rows, lane / chunks, lane % chunks)) {
    if constexpr (in_runs) {
      stride_ = view.k_strides.token * offset_t(sizeof(T));
      source_ = reinterpret_cast<const unsigned char*>(view.key(at.sequence, at.head, 0)) + lane / chunks * stride_ +
                lane % chunks * 16;
    }
  }

  /// Copies slots first .. first + 15, all of them stored, to rows from `to` on, whose number is a multiple of eight.
  __device__ __forceinline__ void bring_whole(const View& view, const scored_head& at, index_t first,
                                              std::uint32_t to) const {
    if constexpr (in_runs) {
      const unsigned char* from = source_ + first * stride_;
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
  /// The last three bits of a row's number permute its chunks, so the addresses of later rows differ by constants.
  __device__ __forceinline__ void copy_rows(const unsigned char* from, offset_t stride, std::uint32_t to) const {
#pragma unroll
    for (int i = 0; i < 16 / together; ++i) {
      copy_async16(((to + offset_) ^ std::uint32_t(i * together % 8 * 16)) + std::uint32_t(i * together * 128),
                   from + i * together * stride, true);
    }
  }

  int lane_;
  std::uint32_t offset_;  // of this lane's chunk of the first rows
  offset_t stride_ = 0;
  const unsigned char* source_ = nullptr;  // this lane's part of slot 0
};

}  // namespace detail
}  // namespace cuda
TESSERA_NAMESPACE_END
