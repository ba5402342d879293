// Decode attention on the GPU: what the host calls.
#pragma once

#include <algorithm>
#include <string>

#include "decode_kernel.cuh"
#include "tuning.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {

/// Decode attention of 1 to 8 tokens a sequence over all stored tokens or a selection.
///
/// `workspace_bytes` and `prepare` once, then `run` any number of times on one stream: no allocation, no synchronisation,
/// no length on the host, so a captured graph can be replayed while lengths grow.
template <class View>
class decode_attention {
  static_assert(sizeof(typename View::element_type) == 2, "tessera: the tensor-core decode kernel takes fp16 and bf16");
  static constexpr int dims = View::k_dim + View::v_dim;
  static constexpr int warps = dims <= 384 ? 4 : 2;
  static constexpr int stages = dims <= 256 || dims > 384 ? 3 : 2;
  using kernel = detail::decode_kernel<View, warps, stages>;

 public:
  decode_attention(index_t sequences, index_t kv_heads, index_t q_heads, index_t tokens, const device_info& device)
      : rows_(sequences * kv_heads) {
    require(q_heads % kv_heads == 0, "q_heads", q_heads, "a multiple of kv_heads", "pass the model's head counts");
    require(rows_ <= detail::most_rows, "sequences * kv_heads", rows_, "at most " + std::to_string(detail::most_rows),
            "split the batch");
    query_blocks_ = ceil_div(tokens * (q_heads / kv_heads), detail::rows_per_block);
    require(kernel::shared_bytes <= device.shared_memory, "shared memory of a block", kernel::shared_bytes,
            "at most " + std::to_string(device.shared_memory), "use a device of compute capability 8.0 or newer");
    check(cudaFuncSetAttribute(detail::decode_entry<View, warps, stages>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                               kernel::shared_bytes),
          "cudaFuncSetAttribute");
    int resident = 0;
    check(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&resident, detail::decode_entry<View, warps, stages>,
                                                        warps * 32, kernel::shared_bytes),
          "cudaOccupancyMaxActiveBlocksPerMultiprocessor");
    blocks_ = std::max(1, resident) * device.multiprocessors;
  }

  std::size_t workspace_bytes() const { return state_at() + slots() * detail::rows_per_block * sizeof(float2); }

  /// Clears the arrival counters; once per workspace.
  void prepare(void* workspace, cudaStream_t stream) const {
    check(cudaMemsetAsync(workspace, 0, out_at(), stream), "cudaMemsetAsync");
  }

  void run(const decode_problem<View>& problem, void* workspace, cudaStream_t stream) const {
    auto* bytes = static_cast<unsigned char*>(workspace);
    const detail::decode_scratch scratch{reinterpret_cast<unsigned*>(bytes), reinterpret_cast<float*>(bytes + out_at()),
                                         reinterpret_cast<float2*>(bytes + state_at())};
    detail::decode_entry<View, warps, stages>
        <<<dim3(unsigned(blocks_), unsigned(query_blocks_)), warps * 32, kernel::shared_bytes, stream>>>(problem,
                                                                                                         scratch);
    check(cudaGetLastError(), "launch of decode attention");
  }

 private:
  std::size_t slots() const { return std::size_t(query_blocks_) * std::size_t(blocks_ + rows_); }
  std::size_t out_at() const { return (std::size_t(query_blocks_ * rows_) * 4 + 255) / 256 * 256; }
  std::size_t state_at() const { return out_at() + slots() * detail::rows_per_block * View::v_dim * 4; }

  index_t rows_ = 0, query_blocks_ = 1, blocks_ = 1;
};

}  // namespace cuda
TESSERA_NAMESPACE_END
