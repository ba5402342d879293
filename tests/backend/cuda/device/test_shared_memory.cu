// What each kernel's block takes of shared memory, against what every compute capability has. It needs no device: a
// kernel that outgrows a card fails here. Where an operation chooses by the device, its own function chooses here too.
#include <cstdio>
#include <string>
#include <type_traits>
#include <vector>

#include "catch.hpp"
#include "tessera/backend/cuda/attend/decode/decode_attention.cuh"
#include "tessera/backend/cuda/attend/packed/packed_attention.cuh"
#include "tessera/backend/cuda/attend/prefill/line_attention.cuh"
#include "tessera/backend/cuda/choose/top_k.cuh"
#include "tessera/backend/cuda/read/extrema/choose_by_blocks.cuh"
#include "tessera/backend/cuda/read/extrema/page_retrieval.cuh"
#include "tessera/backend/cuda/read/means/detail/block_scores.cuh"
#include "tessera/backend/cuda/score/detail/lagged.cuh"
#include "tessera/backend/cuda/score/expected/score_expected.cuh"
#include "tessera/backend/cuda/score/score.cuh"
#include "tessera/backend/cuda/store/packed/detail/bases/channel_orders.cuh"
#include "tessera/backend/cuda/store/packed/detail/bases/find_bases.cuh"
#include "tessera/scorer/expected_weight.hpp"
#include "tessera/scorer/observation_window.hpp"
#include "tessera/scorer/page_min_max.hpp"

namespace {

using namespace tessera;
namespace parts = cuda::detail;

/// What the host gives a block without being asked for more, and what a kernel is launched with then.
constexpr std::size_t unasked = 48 * 1024;
/// (sequence, kv_head) rows of a large batch, segments of a long conversation, queries of a step and of a window.
constexpr index_t batch_rows = 1024, segments = 64, step_rows = 32, window_rows = 512;

struct need {
  std::string kernel;
  int dim;
  std::size_t bytes, limit;
};

/// The kernels' needs on one compute capability.
struct needs {
  int capability;
  std::vector<need> all;

  std::size_t limit() const { return std::size_t(cuda::shared_memory_of(capability)); }
  void add(const char* kernel, int dim, std::size_t bytes) { all.push_back({kernel, dim, bytes, limit()}); }
  void add_unasked(const char* kernel, int dim, std::size_t bytes) { all.push_back({kernel, dim, bytes, unasked}); }
};

template <class View>
void add_decode(needs& to, const char* kernel) {
  const cuda::decode_tuning tuning = cuda::decode_tuning_for<View>(to.capability);
  to.add(kernel, View::k_dim,
         std::size_t(parts::decode_shared_bytes<View>(tuning)) + parts::decode_static_bytes(tuning));
}

template <int D, int Dv>
void add_prompts(needs& to) {
  using view = kv_view<const bf16, D, contiguous, Dv>;
  using prefill = parts::prefill_kernel<view, float>;
  using lines = parts::line_kernel_of<view, float, false>;
  to.add(
      "prefill attention", D,
      std::size_t(
          parts::prefill_size::within<prefill, parts::small_prefill_kernel_of<view, float>>(to.limit()).shared_bytes));
  to.add("attention along lines", D,
         std::size_t(
             parts::prefill_size::within<lines, parts::small_line_kernel_of<view, float>>(to.limit()).shared_bytes));
  if constexpr (parts::fits_hopper_prefill<view>) {
    if (to.capability != 90) return;
    to.add("prefill attention for Hopper", D, std::size_t(parts::prefill_kernel_of<view, float, true>::shared_bytes));
    to.add("attention along lines for Hopper", D, std::size_t(parts::line_kernel_of<view, float, true>::shared_bytes));
  }
}

template <int D>
void add_scores(needs& to) {
  using view = kv_view<const bf16, D>;
  using sums = parts::sum_kernel<view, observation_window>;
  const std::size_t rows = batch_rows * sizeof(index_t);
  constexpr int stages = D <= 192 ? 3 : 2;
  using one_tile = parts::lse_kernel<view, 1, 1, D <= 128 ? 4 : stages>;
  using four_tiles = parts::lse_kernel<view, 4, D <= 128 ? 2 : 1, stages>;
  to.add("log-sum-exps of 16 query rows", D, one_tile::ring_bytes + rows + 1024);
  to.add("log-sum-exps of many query rows", D, four_tiles::ring_bytes + rows + 1024);
  for (const index_t query_rows : {step_rows, window_rows}) {
    parts::sum_shape shape{};
    shape.query_rows = query_rows;
    shape = sums::fitted(shape, batch_rows, to.limit());
    to.add("score sums", D, sums::shared_bytes(shape, batch_rows) + sizeof(cuda::block_scan<sums::threads, index_t>));
  }
  using expected = parts::expected_kernel<view, expected_weight>;
  using small_expected = parts::small_expected_kernel_of<view, expected_weight>;
  const std::size_t usual = expected::shared_bytes + sizeof(typename expected::static_memory);
  to.add("Expected Attention", D,
         usual <= to.limit() ? usual : small_expected::shared_bytes + sizeof(typename small_expected::static_memory));
  using partitions = parts::partition_rows<view, true>;
  to.add("scores by lags", D, partitions::shared_bytes + sizeof(parts::partition_scales<typename partitions::chunks>));
  using columns = parts::lagged_columns<view>;
  if constexpr (columns::possible) {
    to.add("scores by lags of 128", D, columns::shared_bytes + sizeof(typename columns::memory_type));
  }
  to.add("the sample of lines", D, std::size_t(parts::line_logits<view>::shared_bytes));
}

template <int D>
void add_reads(needs& to) {
  using view = kv_view<const bf16, D>;
  constexpr index_t rows = D <= 128 ? parts::max_query_rows : 64;
  to.add("page scores", D, parts::page_shared<bf16, D>::bytes(rows) + sizeof(parts::page_query_storage<D>));
  to.add("scores of blocks", D,
         parts::block_shared<view, page_min_max>::bytes(parts::max_query_rows) + sizeof(parts::page_query_storage<D>));
}

template <int D>
void add_packed(needs& to) {
  using memory = parts::packed_memory<D, D, cuda::packed_rows_in::planes>;
  // Of each vector three quarters of the channels, of which a third is stored: a quarter of the bytes.
  const packed_format quarter{packed_element::bf16, D * 3 / 4, 1, D / 4, true};
  const parts::packed_lengths<D, D> lengths(quarter, quarter);
  // Beyond head dim 128 a cache of packed rows is refused on cards with the least shared memory.
  if (D <= 128 || to.limit() > std::size_t(cuda::least_shared_memory)) {
    to.add("packed attention", D, std::size_t(memory(step_rows, segments, lengths).bytes));
  }
  to.add("the merge of packed attention", D,
         parts::merge_memory<D, parts::merge_tables::workspace>(1, segments).shared_bytes());
  to.add("scores of packed blocks", D, parts::score_memory<D>::begins + (segments + 1) * sizeof(index_t));
  const int stride = parts::encoding_stride(D);
  const index_t together = parts::encoded_together(stride, to.limit());
  to.add("packing rows", D, parts::encoding_bytes(stride, together));
  CHECK(together >= 96);  // blocks of 64 rows and their mean
  to.add("the search for strategies", D, sizeof(parts::ordering_memory<D>));
  to.add_unasked("moments of rows", D, std::size_t(cuda::staged_rows{D / 8}.bytes()) * parts::moment_tile_rows);
  to.add_unasked("rotated queries", D, parts::rows_rotated_together * D * sizeof(float));
}

void add_choices(needs& to) {
  const cuda::device_info device{132, to.capability, cuda::shared_memory_of(to.capability)};
  for (const bool single : {true, false}) {
    for (const index_t capacity : {1000, 20000, 50000, 131072, 1000000}) {
      const cuda::select_tuning tuning = cuda::tune_select(64, capacity, single, single ? 1 : 16, 2048, device);
      const bool streamed = tuning.search == cuda::row_search::streamed;
      const std::size_t held =
          tuning.cluster == 1 ? sizeof(parts::select_storage<1024, 1>) : sizeof(parts::select_storage<512, 4>);
      to.add("choice of slots", 0, std::size_t(tuning.resident) * (streamed ? 8 : 4) + held);
    }
  }
}

template <int D>
void add_dim(needs& to) {
  add_decode<kv_view<const bf16, D>>(to, "decode attention");
  add_prompts<D, D>(to);
  add_scores<D>(to);
  add_reads<D>(to);
  add_packed<D>(to);
}

needs needs_on(int capability) {
  needs to{capability, {}};
  add_dim<64>(to);
  add_dim<80>(to);
  add_dim<96>(to);
  add_dim<128>(to);
  add_dim<192>(to);
  add_dim<256>(to);
  add_prompts<192, 128>(to);
  add_choices(to);
  return to;
}

}  // namespace

TEST_CASE("a block of every kernel fits into the shared memory of every compute capability") {
  for (const int capability : {80, 86, 89, 90, 100, 120}) {
    for (const need& one : needs_on(capability).all) {
      INFO(one.kernel << " at head dim " << one.dim << " on compute capability " << capability / 10 << "."
                      << capability % 10 << " takes " << one.bytes << " bytes of " << one.limit);
      CHECK(one.bytes <= one.limit);
    }
  }
}

TEST_CASE("capabilities have the shared memory that CUDA's programming guide says") {
  CHECK(cuda::shared_memory_of(80) == 166912);
  CHECK(cuda::shared_memory_of(86) == 101376);
  CHECK(cuda::shared_memory_of(89) == 101376);
  CHECK(cuda::shared_memory_of(90) == 232448);
  CHECK(cuda::shared_memory_of(100) == 232448);
  CHECK(cuda::shared_memory_of(120) == 101376);
}

TEST_CASE("prompts take the usual block where it fits, and a smaller one elsewhere") {
  using view = kv_view<const bf16, 128>;
  using usual = parts::prefill_kernel<view, float>;
  using small = parts::small_prefill_kernel_of<view, float>;
  const auto on = [](int capability) {
    return parts::prefill_size::within<usual, small>(std::size_t(cuda::shared_memory_of(capability)));
  };
  CHECK(usual::shared_bytes == 104448);
  for (const int capability : {80, 90, 100}) CHECK(on(capability).shared_bytes == usual::shared_bytes);
  for (const int capability : {86, 89, 120}) CHECK(on(capability).shared_bytes == small::shared_bytes);
  CHECK(std::is_same_v<parts::small_prefill_kernel_of<kv_view<const bf16, 96>, float>,
                       parts::prefill_kernel<kv_view<const bf16, 96>, float>>);
}

TEST_CASE("the table of shared memory by kernel", "[.table]") {
  for (const int capability : {80, 86, 90}) {
    for (const need& one : needs_on(capability).all) {
      std::printf("%d %-34s %4d %7zu of %zu\n", capability, one.kernel.c_str(), one.dim, one.bytes, one.limit);
    }
  }
}
