// The mean of V on the GPU: updated as tokens arrive, and weighted by the mass that attended tokens do not hold.
#pragma once

#include <string>

#include "../../../../../core/error.hpp"
#include "../../../../../core/stored/page_extrema.hpp"
#include "../../../../../core/views.hpp"
#include "../../../device/check.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {

/// A step's outputs and the choice that made them. Every pointer is a device pointer.
template <class View, class Out = float>
struct mean_value_problem {
  View view;                     ///< lengths count the step's own tokens
  double* sums = nullptr;        ///< [rows, v_dim]: of V over the slots before the step's; gets those of all slots
  const index_t* ids = nullptr;  ///< [sequences]: the id whose sums a sequence uses; null: the view's own rows
  const float* mass = nullptr;   ///< [rows, tokens * group], as choose_pages writes it; null: only the sums are updated
  rows_view<Out> out;            ///< [sequences, tokens, q_heads, v_dim]; gets mass * out + (1 - mass) * mean
  index_t tokens = 0;            ///< of the step
};

namespace detail {

/// The row of sums of a view's (sequence, head).
__device__ inline offset_t sums_row(const index_t* ids, index_t row, index_t heads) {
  return ids ? offset_t(ids[row / heads]) * heads + row % heads : row;
}

template <class View>
__device__ double finite_value(const View& view, index_t sequence, index_t head, index_t slot, int d) {
  const float x = float(row_elements(view.value(sequence, head, slot), d, view.v_strides.dim)[0]) *
                  view.value_scale(sequence, head, slot);
  return is_finite(x) ? double(x) : 0.0;
}

inline constexpr int sum_threads = 512;

/// Sums parts of a row: the sum of part blockIdx.x of gridDim.x is written to partial [rows, parts, v_dim].
template <class View>
__global__ void __launch_bounds__(sum_threads) sum_values_entry(const __grid_constant__ View view, double* partial) {
  constexpr int D = View::v_dim, lanes = sum_threads / D;
  __shared__ double of_lane[lanes][D];
  const index_t row = index_t(blockIdx.y), sequence = row / view.kv_heads, head = row % view.kv_heads;
  const index_t n = view.length(sequence, head), share = ceil_div(n, index_t(gridDim.x));
  const index_t begin = index_t(blockIdx.x) * share, end = (min)(n, begin + share);
  const int d = int(threadIdx.x) % D, lane = int(threadIdx.x) / D;
  if (lane < lanes) {
    double sum = 0;
#pragma unroll 4
    for (index_t slot = begin + lane; slot < end; slot += lanes) sum += finite_value(view, sequence, head, slot, d);
    of_lane[lane][d] = sum;
  }
  __syncthreads();
  if (lane != 0) return;
  double sum = 0;
  for (int i = 0; i < lanes; ++i) sum += of_lane[i][d];
  partial[(offset_t(row) * gridDim.x + blockIdx.x) * D + d] = sum;
}

template <int D>
__global__ void __launch_bounds__(D)
    merge_sums_entry(const double* partial, int parts, double* sums, const index_t* ids, index_t heads) {
  double sum = 0;
  for (int i = 0; i < parts; ++i) sum += partial[(offset_t(blockIdx.x) * parts + i) * D + threadIdx.x];
  sums[sums_row(ids, index_t(blockIdx.x), heads) * D + threadIdx.x] = sum;
}

/// Adds the step's tokens to a row's sums one by one. The output of each token uses the sums up to it.
template <class View, class Out>
__global__ void __launch_bounds__(View::v_dim)
    add_mean_value_entry(const __grid_constant__ mean_value_problem<View, Out> p) {
  const int d = int(threadIdx.x);
  const index_t row = index_t(blockIdx.x), sequence = row / p.view.kv_heads, head = row % p.view.kv_heads;
  const index_t n = p.view.length(sequence, head), group = p.out.heads / p.view.kv_heads;
  double& kept = p.sums[sums_row(p.ids, row, p.view.kv_heads) * View::v_dim + d];
  double sum = kept;
  for (index_t t = 0; t < p.tokens; ++t) {
    const index_t slot = n - p.tokens + t;
    if (slot < 0) continue;
    sum += finite_value(p.view, sequence, head, slot, d);
    for (index_t g = 0; p.mass && g < group; ++g) {
      const float held = p.mass[(offset_t(row) * p.tokens + t) * group + g];
      if (held == 1) continue;
      Out& out = p.out.row(sequence, t, head * group + g)[d];
      out = Out(held * float(out) + (1 - held) * float(sum / double(slot + 1)));
    }
  }
  kept = sum;
}

}  // namespace detail

/// SparQ's mean-value correction: sums of V over the stored tokens, and outputs mixed with their mean. Values that are
/// not finite count as 0. Lengths are read on the device; a run can be captured.
/// Cost     build: one read of V; run: O(tokens * (1 + group) * v_dim) a row, one launch.
template <class View, class Out = float>
class mean_value {
  static constexpr int parts = 32;  // of a row, for build: the same split every time gives the same bits

 public:
  explicit mean_value(index_t rows) : rows_(rows) {
    require(rows >= 0 && rows <= 65535, "sequences * kv_heads", rows, "0 to 65535", "split the batch");
  }

  std::size_t workspace_bytes() const { return std::size_t(rows_) * parts * View::v_dim * sizeof(double); }

  /// Sums over everything that is stored. `ids`: as in the problem.
  void build(const View& view, double* sums, void* workspace, cudaStream_t stream, const index_t* ids = nullptr) const {
    const index_t rows = checked_rows(view);
    if (rows == 0) return;
    auto* partial = static_cast<double*>(workspace);
    detail::sum_values_entry<View><<<dim3(parts, unsigned(rows)), detail::sum_threads, 0, stream>>>(view, partial);
    check(cudaGetLastError(), "launch of sum_values");
    detail::merge_sums_entry<View::v_dim>
        <<<unsigned(rows), View::v_dim, 0, stream>>>(partial, parts, sums, ids, view.kv_heads);
    check(cudaGetLastError(), "launch of merge_sums");
  }

  /// Adds the step's tokens to the sums. If there is a mass, also mixes the step's outputs with the mean.
  void run(const mean_value_problem<View, Out>& p, void*, cudaStream_t stream) const {
    const index_t rows = checked_rows(p.view);
    require(p.tokens >= 0, "tokens", p.tokens, "at least 0", "pass the step's tokens");
    require(!p.mass || (p.out.data && p.out.heads % p.view.kv_heads == 0 && p.out.tokens == p.tokens), "out",
            p.out.heads, "[sequences, tokens, q_heads, v_dim]", "pass the attention's output beside its mass");
    if (rows == 0 || p.tokens == 0) return;
    detail::add_mean_value_entry<View, Out><<<unsigned(rows), View::v_dim, 0, stream>>>(p);
    check(cudaGetLastError(), "launch of add_mean_value");
  }

 private:
  index_t checked_rows(const View& view) const {
    const index_t rows = view.sequences * view.kv_heads;
    require(rows <= rows_, "sequences * kv_heads", rows, "at most " + std::to_string(rows_),
            "make one object for the largest batch");
    return rows;
  }
  index_t rows_;
};

}  // namespace cuda
TESSERA_NAMESPACE_END
