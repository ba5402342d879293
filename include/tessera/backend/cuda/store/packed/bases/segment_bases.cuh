// The bases of several segments at once, of the rows that they will hold.
#pragma once

#include <algorithm>
#include <string>
#include <utility>

#include "../../../../../core/host/host_vector.hpp"
#include "../../searched/pinned.cuh"
#include "find_bases.cuh"
#include "group_order.cuh"
#include "second_moment.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {

/// Whole rows that become a segment: `count` from `first` on of a view of one sequence.
template <class View>
struct segment_span {
  View view;
  index_t layer = 0, first = 0, count = 0;
};

/// Finds bases of many segments: one launch for up to 64 of them, for one block makes one basis and takes milliseconds.
///
/// Memory   the moments of 64 segments, and what one needs for its pieces.
/// Errors   a second moment with NaN or infinity: tessera::error, which the host has waited for.
template <class View>
class find_segment_bases {
  using moments = second_moments<View>;
  static constexpr index_t together = 64;

 public:
  /// `most` segments at once, each of at most `rows` rows.
  find_segment_bases(const segment_formats& formats, index_t kv_heads, index_t most, index_t rows,
                     const device_info& device)
      : formats_(formats),
        heads_(kv_heads),
        together_((std::min)(together, most)),
        keys_(View::k_dim, device),
        values_(View::v_dim, device),
        order_keys_(true, formats.k, kv_heads),
        order_values_(false, formats.v, kv_heads),
        moments_(std::size_t(together_ - 1) * std::size_t(kv_heads) * moments::each * sizeof(float) +
                 moments::workspace_bytes(kv_heads, rows)),
        work_((std::max)(keys_.workspace_bytes(together_ * kv_heads), values_.workspace_bytes(together_ * kv_heads))),
        not_finite_(2 * std::size_t(together_) * std::size_t(kv_heads)) {}

  /// Floats that the bases of one segment take: those of keys, then of values, each by head.
  offset_t each() const { return heads_ * (formats_.k_basis() + formats_.v_basis()); }

  /// bases [segments, each()]. Waits for the device.
  void run(const host_vector<segment_span<View>>& segments, float* bases, cudaStream_t stream) {
    start(segments, bases, stream);
    check(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
    const auto [wrong, lane] = first_wrong();
    if (!wrong) return;
    fail("the second moment of " + std::string(wrong) + " of layer " +
             std::to_string(segments[std::size_t(lane / heads_)].layer) + ", kv_head " + std::to_string(lane % heads_),
         "NaN or infinity", "finite numbers", "keep NaN and infinity out of keys and values, or scale them");
  }
  /// The same, but that only groups of several channels wait for the device; when it is done, `are_finite` says whether
  /// these are bases.
  void start(const host_vector<segment_span<View>>& segments, float* bases, cudaStream_t stream) {
    lanes_ = segments.size() * std::size_t(heads_);
    if (wrong_.size() < 2 * lanes_) wrong_ = pinned_buffer<index_t>(2 * lanes_);
    for (std::size_t first = 0; first < segments.size(); first += std::size_t(together_)) {
      const std::size_t count = (std::min)(segments.size() - first, std::size_t(together_));
      run_some({segments.begin() + offset_t(first), segments.begin() + offset_t(first + count)},
               bases + offset_t(first) * each(), wrong_.data() + 2 * first * std::size_t(heads_), stream);
    }
  }
  bool are_finite() const { return !first_wrong().first; }

 private:
  /// What has no finite second moment, and its lane; null: nothing.
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
  void run_some(const host_vector<segment_span<View>>& some, float* bases, index_t* wrong, cudaStream_t stream) const {
    const index_t count = index_t(some.size()), lanes = count * heads_;
    const offset_t step = offset_t(moments::each), of_segment = heads_ * step;
    // What one sums behind its result is scratch: the next one begins there.
    for (index_t i = 0; i < count; ++i) {
      const auto& rows = some[std::size_t(i)];
      moments{}.run(rows.view, rows.first, rows.count, moments_.data() + i * of_segment * offset_t(sizeof(float)),
                    stream);
    }
    const auto* sums = reinterpret_cast<const float*>(moments_.data());
    keys_.run(sums, step, lanes, formats_.k.channels, bases, not_finite_.data(), work_.data(), stream,
              {heads_, each()});
    values_.run(sums + View::k_dim * View::k_dim, step, lanes, formats_.v.channels, bases + heads_ * formats_.k_basis(),
                not_finite_.data() + lanes, work_.data(), stream, {heads_, each()});
    check(cudaMemcpyAsync(wrong, not_finite_.data(), 2 * std::size_t(lanes) * sizeof(index_t), cudaMemcpyDeviceToHost,
                          stream),
          "cudaMemcpyAsync");
    for (index_t i = 0; i < count; ++i) {
      const auto& rows = some[std::size_t(i)];
      float* own = bases + i * each();
      order_keys_.run(rows.view, rows.first, rows.count, own, stream);
      order_values_.run(rows.view, rows.first, rows.count, own + heads_ * formats_.k_basis(), stream);
    }
  }

  segment_formats formats_;
  index_t heads_, together_;
  find_bases keys_, values_;
  order_bases<View, View::k_dim> order_keys_;
  order_bases<View, View::v_dim> order_values_;
  device_buffer<unsigned char> moments_, work_;
  device_buffer<index_t> not_finite_;
  pinned_buffer<index_t> wrong_;  // not_finite_ of each of `together_` segments, one behind the other
  std::size_t lanes_ = 0;         // of the newest call
};

}  // namespace cuda
TESSERA_NAMESPACE_END
