// Selectors with a body of their own, on the GPU: one thread a row runs it.
#pragma once

#include "top_k.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {
namespace detail {

template <class Selector>
__global__ void __launch_bounds__(128) plain_select_entry(const __grid_constant__ select_problem p, Selector selector) {
  const index_t row = index_t(blockIdx.x);
  const auto [n, keep, tail] = p.bounds_of(row);
  index_t* out = p.out_row(row);
  for (index_t i = keep + index_t(threadIdx.x); i < p.pad_to; i += 128) out[i] = no_index;
  if (threadIdx.x == 0) p.counts[row] = selector.choose(p.score_row(row), n, tail, keep, out);
}

}  // namespace detail

/// `select_slots` for selectors that bring one body for all backends.
/// Cost     one thread a row: for selections that are cheap, or not yet worth a kernel.
template <class Selector>
requires(plain_selector<Selector> && !best_units_selector<Selector>) class select_slots<Selector> {
 public:
  select_slots(Selector selector, index_t rows, index_t, const device_info&, index_t = 0)
      : selector_(selector), rows_(rows) {
    selector.check();
    require(rows >= 0, "rows", rows, "0 or more", "pass sequences * kv_heads");
  }

  std::size_t workspace_bytes() const { return 0; }

  void run(const select_problem& problem, void*, cudaStream_t stream) const {
    const index_t rows = problem.rows > 0 ? problem.rows : rows_;
    require(rows <= rows_, "rows", rows, "at most " + std::to_string(rows_),
            "construct select_slots for the most rows");
    if (rows == 0) return;
    detail::plain_select_entry<Selector><<<unsigned(rows), 128, 0, stream>>>(problem, selector_);
    check(cudaGetLastError(), "launch of plain_select");
  }

 private:
  Selector selector_;
  index_t rows_;
};

}  // namespace cuda
TESSERA_NAMESPACE_END
