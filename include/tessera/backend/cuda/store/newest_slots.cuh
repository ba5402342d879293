// The newest tokens of a sequence as a selection: what a sliding layer keeps, and what stays whole where a prompt has
// been packed.
#pragma once

#include "../../../core/selection.hpp"
#include "../device/memory.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {
namespace detail {

/// slots [kv_heads, most] = the newest ones of each kv_head, and how many they are.
template <int Threads>
__global__ void __launch_bounds__(Threads)
    newest_slots_entry(const index_t* lengths, index_t most, index_t* slots, index_t* counts) {
  const index_t h = blockIdx.x, held = lengths[h], count = (min)(held, most);
  for (index_t i = threadIdx.x; i < count; i += Threads) slots[h * most + i] = held - count + i;
  if (threadIdx.x == 0) counts[h] = count;
}

}  // namespace detail

/// The newest slots of every kv_head of one sequence, up to `capacity`; they lie in this object's memory until the next
/// call.
class newest_slots {
 public:
  newest_slots(index_t kv_heads, index_t capacity)
      : heads_(kv_heads), slots_(std::size_t(kv_heads) * std::size_t(capacity)), counts_(std::size_t(kv_heads)) {}

  /// At most `most` of each kv_head, of those that it has.
  selection_view of(const index_t* lengths, index_t most, cudaStream_t stream) const {
    detail::newest_slots_entry<256><<<unsigned(heads_), 256, 0, stream>>>(lengths, most, slots_.data(), counts_.data());
    check(cudaGetLastError(), "launch of newest_slots");
    return {slots_.data(), counts_.data(), nullptr, most};
  }

 private:
  index_t heads_;
  device_buffer<index_t> slots_, counts_;
};

}  // namespace cuda
TESSERA_NAMESPACE_END
