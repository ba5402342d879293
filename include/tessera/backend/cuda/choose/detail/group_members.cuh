// Which query heads read together on the device: all of a kv_head's group, or those with one index in every group.
#pragma once

#include "../../../../core/logit_rule.hpp"
#include "../../../../core/model_shape.hpp"
#include "../../../../core/views.hpp"
#include "../../device/memory.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {
namespace detail {

template <int Threads>
__global__ void __launch_bounds__(Threads) every_sink_entry(const float* all, index_t step, index_t count, float* to) {
  const index_t h = index_t(blockIdx.x * Threads + threadIdx.x);
  if (h < count) to[h] = all[h * step];
}

}  // namespace detail

/// Splits a group's query heads into `count` members. To the kernels, each member is a model without groups. With one
/// member, it is the model as it is.
class group_members {
 public:
  group_members(index_t count, const model_shape& shape)
      : count_(count), heads_(shape.q_heads / count), sinks_(count > 1 ? std::size_t(shape.q_heads) : 0) {}

  index_t count() const { return count_; }
  /// Query heads of one member.
  index_t q_heads() const { return heads_; }

  /// The rows of a member's heads.
  template <class T>
  rows_view<T> rows(const rows_view<T>& all, index_t member) const {
    return every_head(all, member, count_);
  }
  /// The rule of a member's heads. Valid until the next call for the same member.
  logit_rule rule(const logit_rule& all, index_t member, cudaStream_t stream) const {
    logit_rule own = all;
    if (count_ == 1 || !all.sink_logits) return own;
    float* sinks = sinks_.data() + offset_t(member) * heads_;
    detail::every_sink_entry<128>
        <<<unsigned(ceil_div(heads_, 128)), 128, 0, stream>>>(all.sink_logits + member, count_, heads_, sinks);
    check(cudaGetLastError(), "launch of every_sink");
    own.sink_logits = sinks;
    return own;
  }

 private:
  index_t count_, heads_;
  device_buffer<float> sinks_;
};

}  // namespace cuda
TESSERA_NAMESPACE_END
