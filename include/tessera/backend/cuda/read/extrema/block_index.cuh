// The index of paged retrieval over an engine's own blocks on the GPU: filled by block as the engine writes keys.
#pragma once

#include "../../../../core/engine/read_problem.hpp"
#include "../../device/alignment.cuh"
#include "../../device/check.cuh"
#include "detail/block_logits.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {
namespace detail {

/// Sixteen bytes of a slot's key, from `channel` on, as the element type has them.
template <class View>
__device__ void load_key_chunk(const View& view, index_t sequence, index_t head, const slot_address& address,
                               index_t slot, int channel,
                               float (&x)[elements_of_16_bytes<typename View::element_type>]) {
  using T = typename View::element_type;
  if constexpr (View::is_raw) {
    const T* const key =
        view.k + address.outer * view.k_strides.outer + head * view.k_strides.head + address.row * view.k_strides.token;
    floats_of<T>(*reinterpret_cast<const uint4*>(key + channel), x);
  } else {
#pragma unroll
    for (int e = 0; e < elements_of_16_bytes<T>; ++e) x[e] = float(view.key_element(sequence, head, slot, channel + e));
  }
}

inline constexpr int index_threads = 256;

/// A block makes pages of one (sequence, kv_head), every gridDim.x-th run of as many as it has threads for. A thread
/// has 16 bytes of a page's rows.
template <class View>
__global__ void __launch_bounds__(index_threads)
    index_blocks_entry(const __grid_constant__ index_blocks_problem<View> p, read_plan plan) {
  using T = typename View::element_type;
  constexpr int chunk = elements_of_16_bytes<T>, lanes = View::k_dim / chunk, pages = index_threads / lanes;
  const index_t row = index_t(blockIdx.y), sequence = row / p.view.kv_heads, head = row % p.view.kv_heads;
  const index_t n = p.view.length(sequence, head), first = (max)(0, p.first_slot(sequence));
  const int channel = int(threadIdx.x) % lanes * chunk, local = int(threadIdx.x) / lanes;
  if (first >= n || local >= pages) return;
  const index_t end = plan.pages_of(n), step = index_t(gridDim.x) * pages;
  for (index_t page = plan.page_of(first) + index_t(blockIdx.x) * pages + local; page < end; page += step) {
    const index_t begin = page * plan.page, slots = (min)(plan.page, n - begin);
    slot_address address = p.view.table.locate(sequence, head, begin);
    T* const lower = p.index.lower(address.outer, plan.page_of(index_t(address.row)), head) + channel;
    float low[chunk], high[chunk];
#pragma unroll
    for (int e = 0; e < chunk; ++e) low[e] = high[e] = not_a_number;
#pragma unroll 4
    for (index_t i = 0; i < slots; ++i, ++address.row) {
      float x[chunk];
      load_key_chunk(p.view, sequence, head, address, begin + i, channel, x);
#pragma unroll
      for (int e = 0; e < chunk; ++e) {
        low[e] = plan.page == 1 ? x[e] : lower_with(low[e], x[e]);
        high[e] = plan.page == 1 ? x[e] : upper_with(high[e], x[e]);
      }
    }
    T packed[2][chunk];
#pragma unroll
    for (int e = 0; e < chunk; ++e) packed[0][e] = T(low[e]), packed[1][e] = T(high[e]);
    uint4 raw[2];
    __builtin_memcpy(raw, packed, sizeof(raw));
    *reinterpret_cast<uint4*>(lower) = raw[0];
    *reinterpret_cast<uint4*>(lower + p.index.side) = raw[1];
  }
}

}  // namespace detail

/// Brings the index of an engine's blocks up to date with keys that the engine has written: the device's
/// cpu::index_blocks, with the same bits.
///
/// Tables, lengths and first slots are read on the device, so a captured launch can be replayed while they change.
/// Sequences that share a block write the same values.
/// Errors   shapes that the kernel cannot take: tessera::error before anything is launched.
/// Cost     one launch, no workspace; reads the keys of the pages that hold new slots.
template <class View>
void index_blocks(const index_blocks_problem<View>& p, cudaStream_t stream) {
  static_assert(check_device_rows<View>());
  p.check();
  const index_t rows = p.view.sequences * p.view.kv_heads;
  if (rows <= 0) return;
  require(rows <= 65535, "sequences * kv_heads", rows, "at most 65535", "split the batch");
  if constexpr (View::is_raw) require_rows_on_16_bytes("K", p.view.k, p.view.k_strides);
  require_rows_on_16_bytes("the index", p.index.data, p.index.strides);
  require_rows_on_16_bytes("the larger values of the index", p.index.data, {p.index.side, 0, 0, 1});
  const index_t usual = p.new_tokens > 0 ? p.new_tokens : (std::max)(1, p.pool.max_blocks) * p.view.table.page;
  constexpr int lanes = View::k_dim / detail::elements_of_16_bytes<typename View::element_type>;
  const index_t pages = ceil_div(usual, p.index.page) + 1, pages_of_block = detail::index_threads / lanes;
  detail::index_blocks_entry<View>
      <<<dim3(unsigned(ceil_div(pages, pages_of_block)), unsigned(rows)), detail::index_threads, 0, stream>>>(
          p, read_plan(1, p.index.page));
  check(cudaGetLastError(), "launch of index_blocks");
}

}  // namespace cuda
TESSERA_NAMESPACE_END
