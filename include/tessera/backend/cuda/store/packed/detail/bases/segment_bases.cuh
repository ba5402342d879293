// The bases of several segments at once, of the rows that they will hold.
#pragma once

#include <algorithm>
#include <string>
#include <utility>

#include "../../../../../../core/host/host_vector.hpp"
#include "../../../../device/pinned.cuh"
#include "../../../../device/tuning.cuh"
#include "../segment_store.cuh"
#include "channel_orders.cuh"
#include "find_bases.cuh"
#include "find_strategies.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {

/// Finds bases of many segments, one launch for up to 64 of them: a block makes one basis and takes milliseconds. Puts
/// their channels in order for groups of several; and searches their strategies, where the limits say so.
///
/// Memory   the moments of 64 segments, and the pieces of one; see channel_orders and find_strategies.
/// Errors   a second moment with NaN or infinity: tessera::error. The host waits for the device to know.
template <class View>
class find_segment_bases {
  using moments = second_moments<View>;
  static constexpr index_t together = 64;

 public:
  /// For at most `limit` segments at once, each of at most `rows` rows.
  find_segment_bases(const segment_formats& formats, const strategy_limits& limits, index_t kv_heads, index_t limit,
                     index_t rows, const device_info& device)
      : formats_(formats),
        limits_(limits),
        heads_(kv_heads),
        together_((std::min)(together, limit)),
        keys_(View::k_dim, device),
        values_(View::v_dim, device),
        moments_(std::size_t(together_ - 1) * std::size_t(kv_heads) * moments::lane_floats * sizeof(float) +
                 moments::workspace_bytes(kv_heads, rows)),
        work_((std::max)(keys_.workspace_bytes(together_ * kv_heads), values_.workspace_bytes(together_ * kv_heads))),
        not_finite_(2 * std::size_t(together_) * std::size_t(kv_heads)) {
    if (!limits.searches && formats.k.group == 1 && formats.v.group == 1) return;
    sampled_ = limits.searches ? (std::min)(index_t(detail::max_sampled), limit) : 1;
    orders_ = channel_orders<View>(limits.candidates, kv_heads, sampled_);
    if (limits.searches) strategies_ = find_strategies<View>(kv_heads, sampled_, rows);
  }

  /// Floats that the bases of one segment take: those of keys, then of values, each by head.
  offset_t segment_floats() const { return heads_ * (formats_.k_basis() + formats_.v_basis()); }

  /// bases [segments, segment_floats()]; found: the strategy of each segment, where they are searched. Waits for the
  /// device.
  void run(const host_vector<segment_span<View>>& segments, float* bases, host_vector<segment_strategy>& found,
           cudaStream_t stream) {
    start(segments, bases, found, stream);
    check(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
    const auto [wrong, lane] = first_wrong();
    if (!wrong) return;
    fail("the second moment of " + std::string(wrong) + " of layer " +
             std::to_string(segments[std::size_t(lane / heads_)].layer) + ", kv_head " + std::to_string(lane % heads_),
         "NaN or infinity", "finite numbers", "keep NaN and infinity out of keys and values, or scale them");
  }
  /// The same, but only searches wait for the device. When the device is done, `are_finite` says whether all bases are
  /// valid.
  void start(const host_vector<segment_span<View>>& segments, float* bases, host_vector<segment_strategy>& found,
             cudaStream_t stream) {
    found.clear();
    lanes_ = segments.size() * std::size_t(heads_);
    if (wrong_.size() < 2 * lanes_) wrong_ = pinned_buffer<index_t>(2 * lanes_);
    for (std::size_t first = 0; first < segments.size(); first += std::size_t(together_)) {
      const std::size_t count = (std::min)(segments.size() - first, std::size_t(together_));
      run_some({segments.begin() + offset_t(first), segments.begin() + offset_t(first + count)},
               bases + offset_t(first) * segment_floats(), wrong_.data() + 2 * first * std::size_t(heads_), found,
               stream);
    }
  }
  bool are_finite() const { return !first_wrong().first; }

 private:
  /// Keys or values without a finite second moment, and their lane; null: there are none.
  std::pair<const char*, std::size_t> first_wrong() const {
    const std::size_t group = std::size_t(together_) * std::size_t(heads_);
    for (std::size_t first = 0; first < lanes_; first += group) {
      const std::size_t count = (std::min)(lanes_ - first, group);
      const index_t* wrong = wrong_.data() + 2 * first;
      for (std::size_t i = 0; i < 2 * count; ++i) {
        if (wrong[i] != 0) return {i < count ? "keys" : "values", first + i % count};
      }
    }
    return {nullptr, 0};
  }
  void run_some(const host_vector<segment_span<View>>& some, float* bases, index_t* wrong,
                host_vector<segment_strategy>& found, cudaStream_t stream) {
    const index_t count = index_t(some.size()), lanes = count * heads_;
    const offset_t step = offset_t(moments::lane_floats), of_segment = heads_ * step;
    // The memory behind a segment's result is scratch: the next result begins there.
    for (index_t i = 0; i < count; ++i) {
      const auto& rows = some[std::size_t(i)];
      moments{}.run(rows.view, rows.first, rows.count, moments_.data() + i * of_segment * offset_t(sizeof(float)),
                    stream);
    }
    const auto* sums = reinterpret_cast<const float*>(moments_.data());
    keys_.run(sums, step, lanes, formats_.k.channels, bases, not_finite_.data(), work_.data(), stream,
              {heads_, segment_floats(), spread_step(formats_.k.channels)});
    values_.run(sums + View::k_dim * View::k_dim, step, lanes, formats_.v.channels, bases + heads_ * formats_.k_basis(),
                not_finite_.data() + lanes, work_.data(), stream,
                {heads_, segment_floats(), spread_step(formats_.v.channels)});
    check(cudaMemcpyAsync(wrong, not_finite_.data(), 2 * std::size_t(lanes) * sizeof(index_t), cudaMemcpyDeviceToHost,
                          stream),
          "cudaMemcpyAsync");
    for (index_t first = 0; sampled_ > 0 && first < count; first += sampled_) {
      const index_t end = (std::min)(count, first + sampled_);
      order({some.begin() + first, some.begin() + end}, bases + first * segment_floats(), found, stream);
    }
  }
  /// Orders the channels of a few segments, by the strategies that are found for them or by the formats.
  void order(const host_vector<segment_span<View>>& few, float* bases, host_vector<segment_strategy>& found,
             cudaStream_t stream) {
    const index_t count = index_t(few.size());
    const auto k_bases = [&](index_t i) { return bases + i * segment_floats(); };
    const auto v_bases = [&](index_t i) { return k_bases(i) + heads_ * formats_.k_basis(); };
    for (index_t i = 0; i < count; ++i) orders_.sample(i, few[std::size_t(i)], k_bases(i), v_bases(i), stream);
    orders_.find(count, stream);
    const auto measures = limits_.searches ? strategies_.run(few, orders_, stream) : host_vector<strategy_measures>{};
    for (index_t i = 0; i < count; ++i) {
      index_t share = 0, k_group = formats_.k.group, v_group = formats_.v.group;
      if (limits_.searches) {
        const segment_strategy own = measures[std::size_t(i)].best(limits_.loss, limits_.spread, limits_.unit);
        found.push_back(own);
        share =
            index_t(std::find(strategy_shares.begin(), strategy_shares.end(), own.channels) - strategy_shares.begin());
        k_group = v_group = own.group;
      }
      if (k_group > 1) orders_.apply(i, true, share, k_group, k_bases(i), stream);
      if (v_group > 1) orders_.apply(i, false, share, v_group, v_bases(i), stream);
    }
  }

  segment_formats formats_;
  strategy_limits limits_;
  index_t heads_, together_, sampled_ = 0;  // sampled_: segments that are ordered at once; 0: none need it
  find_bases keys_, values_;
  channel_orders<View> orders_;
  find_strategies<View> strategies_;
  device_buffer<unsigned char> moments_, work_;
  device_buffer<index_t> not_finite_;
  pinned_buffer<index_t> wrong_;  // not_finite_ of each of `together_` segments, one behind the other
  std::size_t lanes_ = 0;         // of the newest call
};

}  // namespace cuda
TESSERA_NAMESPACE_END
