// The newest tokens of a sequence as a selection: what a sliding layer keeps.
#pragma once

#include "../../../core/selection.hpp"
#include "../device/memory.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {
namespace detail {

template <int Threads>
__global__ void __launch_bounds__(Threads)
    newest_entry(const index_t* lengths, index_t window, index_t* slots, index_t* counts) {
  const index_t h = blockIdx.x, held = lengths[h], count = min(held, window);
  for (index_t i = threadIdx.x; i < count; i += Threads) slots[h * window + i] = held - count + i;
  if (threadIdx.x == 0) counts[h] = count;
}

}  // namespace detail

/// The newest `window` slots of every kv_head of one sequence; they lie in this object's memory until the next call.
class newest_slots {
 public:
  newest_slots(index_t kv_heads, index_t window)
      : heads_(kv_heads),
        window_(window),
        slots_(std::size_t(kv_heads) * std::size_t(window)),
        counts_(std::size_t(kv_heads)) {}

  selection_view of(const index_t* lengths, cudaStream_t stream) const {
    detail::newest_entry<256><<<unsigned(heads_), 256, 0, stream>>>(lengths, window_, slots_.data(), counts_.data());
    check(cudaGetLastError(), "launch of newest");
    return {slots_.data(), counts_.data(), nullptr, window_};
  }

 private:
  index_t heads_, window_;
  device_buffer<index_t> slots_, counts_;
};

}  // namespace cuda
TESSERA_NAMESPACE_END
