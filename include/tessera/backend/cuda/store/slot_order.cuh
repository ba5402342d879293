// Checks on the GPU whether an engine's positions ascend by slot; a later call reports what was found.
#pragma once

#include <string>

#include "../../../core/views.hpp"
#include "../device/kernel.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {
namespace detail {

/// Names a slot whose position is not larger than the previous slot's. From the highest bit down: a bit 1, 20 bits of
/// the sequence, 12 of the kv_head, 31 of the slot. 0: no such slot was found.
using disorder_word = volatile unsigned long long*;

/// The word of page-locked memory, one for the process, that kernels write findings to.
class found_disorder {
 public:
  found_disorder() {
    cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;  // the first call may come during a capture
    check(cudaThreadExchangeStreamCaptureMode(&mode), "cudaThreadExchangeStreamCaptureMode");
    void* memory = nullptr;
    const cudaError_t status =
        cudaHostAlloc(&memory, sizeof(unsigned long long), cudaHostAllocPortable | cudaHostAllocMapped);
    cudaThreadExchangeStreamCaptureMode(&mode);
    check(status, "cudaHostAlloc");
    word_ = static_cast<disorder_word>(memory);
    *word_ = 0;
  }
  found_disorder(const found_disorder&) = delete;
  found_disorder& operator=(const found_disorder&) = delete;
  ~found_disorder() { cudaFreeHost(const_cast<unsigned long long*>(word_)); }

  static found_disorder& of_process() {
    static found_disorder word;
    return word;
  }
  disorder_word word() const { return word_; }
  /// Errors   a finding of an earlier call: tessera::error, once.
  void report() const {
    const unsigned long long found = *word_;
    if (found == 0) return;
    *word_ = 0;
    fail("position of slot " + std::to_string(found & 0x7fffffffu) + " (sequence " +
             std::to_string(found >> 43 & 0xfffffu) + ", kv_head " + std::to_string(found >> 31 & 0xfffu) +
             " of an earlier call)",
         "not more than that of the slot before it", "positions that ascend by slot",
         "read such slots through a `filtered` table that lists them by position");
  }

 private:
  disorder_word word_ = nullptr;
};

__device__ inline void note_disorder(disorder_word word, index_t sequence, index_t head, index_t slot) {
  *word = 1ull << 63 | (unsigned long long)(sequence & 0xfffff) << 43 | (unsigned long long)(head & 0xfff) << 31 |
          unsigned(slot);
}

/// The part of a view that describes positions.
struct position_rows {
  const index_t *positions, *lengths;
  const offset_t* begin;
  offset_t sequence_stride, head_stride, length_sequence, length_head;
  index_t kv_heads;
};

/// blockIdx: x a row, y a share of its slots.
template <int Threads>
__global__ void __launch_bounds__(Threads) find_disorder_entry(position_rows of, disorder_word word) {
  wait_for_earlier();
  let_later_begin();
  const index_t row = index_t(blockIdx.x), b = row / of.kv_heads, h = row % of.kv_heads;
  const index_t length = of.lengths[b * of.length_sequence + h * of.length_head];
  const index_t* at = of.positions + (of.begin ? of.begin[row] : b * of.sequence_stride + h * of.head_stride);
  for (index_t i = 1 + index_t(blockIdx.y * Threads + threadIdx.x); i < length; i += index_t(gridDim.y) * Threads) {
    if (at[i] <= at[i - 1]) note_disorder(word, b, h, i);
  }
}

}  // namespace detail

/// Checks whether a view's positions ascend, unless the view says that they do. A small launch checks them beside the
/// work that uses them. A later call, of any operation, reports what was found: the first call after that launch has
/// run whose own view does not say that positions ascend.
/// Errors   positions of an earlier call that do not ascend: tessera::error, before anything is launched.
/// Cost     none where slots are positions or `order` says that they ascend; else 4 bytes a slot.
template <class View>
void watch_order(const View& view, cudaStream_t stream) {
  if constexpr (requires { view.order; }) {
    if (!view.positions || view.order == slot_order::ascending || view.sequences <= 0) return;
    const auto& found = detail::found_disorder::of_process();
    found.report();
    const detail::position_rows of{view.positions,
                                   view.lengths,
                                   view.position_begin,
                                   view.position_strides.sequence,
                                   view.position_strides.head,
                                   view.length_strides.sequence,
                                   view.length_strides.head,
                                   view.kv_heads};
    launch_overlapping<detail::find_disorder_entry<256>>(dim3(unsigned(view.sequences * view.kv_heads), 8), 256, stream,
                                                         "launch of find_disorder", of, found.word());
  }
}

}  // namespace cuda
TESSERA_NAMESPACE_END
