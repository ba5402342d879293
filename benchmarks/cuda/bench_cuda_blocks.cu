// A decode step of Quest over an engine's own blocks of 16 tokens (HND, bf16): indexing its new token, choosing, attending
// what was chosen; beside it attention over everything.
#include <numeric>

#include "cuda_bench.hpp"
#include "tessera/backend/cuda/attend/decode/decode_attention.cuh"
#include "tessera/backend/cuda/read/extrema/block_index.cuh"
#include "tessera/backend/cuda/read/extrema/choose_by_blocks.cuh"
#include "tessera/scorer/page_min_max.hpp"

namespace gpu_bench::of_blocks {
namespace {

using view_type = kv_view<bf16, head_dim, block_table>;
enum class part { index, choose, attend, step, whole };

prepared block_step(index_t sequences, index_t context, index_t read, part wanted) {
  constexpr index_t block = 16;
  const index_t max_blocks = ceil_div(context, block), blocks = sequences * max_blocks, rows = sequences * kv_heads;
  const std::size_t elements = std::size_t(blocks) * block * kv_heads * 2 * head_dim;
  const std::size_t index_elements = std::size_t(blocks) * kv_heads * 2 * head_dim;
  prepared made;
  const double row_bytes = 2.0 * head_dim * sizeof(bf16);
  switch (wanted) {
    case part::index:
      made.bytes = rows * row_bytes * (block / 2 + 1);
      break;
    case part::choose:
      made.bytes = double(index_elements) * sizeof(bf16);
      break;
    case part::attend:
      made.bytes = rows * row_bytes * read;
      break;
    case part::step:
      made.bytes = double(index_elements) * sizeof(bf16) + rows * row_bytes * (read + block / 2 + 1);
      break;
    case part::whole:
      made.bytes = double(elements) * sizeof(bf16);
      break;
  }
  const int sets = input_sets(double(elements + index_elements) * sizeof(bf16));
  const auto device = cuda::device_info::current();
  const page_min_max scorer{block, head_dim};
  const cuda::choose_by_blocks<view_type, page_min_max> choose(
      scorer, selection_unit::page, {sequences, kv_heads, q_heads, 1, context, read}, device);
  cuda::decode_attention<view_type> attend(sequences, kv_heads, q_heads, 1, device);
  std::vector<index_t> ids(static_cast<std::size_t>(blocks));
  std::iota(ids.begin(), ids.end(), 0);
  std::shuffle(ids.begin(), ids.end(), std::mt19937(3));
  struct memory {
    buffer<index_t> table, lengths, first, zero, indices, counts;
    buffer<bf16> index;
    buffer<float> out;
    buffer<unsigned char> choosing, attending;
  };
  const std::size_t most = std::size_t(choose.max_chosen()), q_rows = std::size_t(sequences) * q_heads;
  const auto keep = std::make_shared<memory>(
      ids, std::vector<index_t>(std::size_t(sequences), context),
      std::vector<index_t>(std::size_t(sequences), context - 1), std::vector<index_t>(std::size_t(sequences), 0),
      std::size_t(rows) * most * std::size_t(sets), std::size_t(rows) * std::size_t(sets),
      index_elements * std::size_t(sets), q_rows * head_dim, choose.workspace_bytes(), attend.workspace_bytes());
  bf16* pool = random_rows(elements * std::size_t(sets) + q_rows * head_dim);
  attend.prepare(keep->attending.data(), stream());
  const auto view_of = [=](int set) {
    view_type view;
    view.k = pool + elements * std::size_t(set);
    view.v = view.k + head_dim;
    view.k_strides = {offset_t(kv_heads) * block * 2 * head_dim, block * 2 * head_dim, 2 * head_dim, 1};
    view.v_strides = view.k_strides;
    view.sequences = sequences;
    view.kv_heads = kv_heads;
    view.lengths = keep->lengths.data();
    view.length_strides = {1, 0};
    view.table = {keep->table.data(), block, max_blocks, 0};
    return view;
  };
  const auto extrema_of = [=](int set) {
    return block_extrema<head_dim>(keep->index.data() + index_elements * std::size_t(set), block, block, kv_heads);
  };
  const auto index_now = [=](int set, bool all) {
    index_blocks_problem<view_type> p;
    p.view = view_of(set);
    p.index = extrema_of(set);
    p.first_slots = all ? keep->zero.data() : keep->first.data();
    p.new_tokens = all ? context : 1;
    cuda::index_blocks(p, stream());
  };
  const auto q = nhd_rows<const bf16>(pool + elements * std::size_t(sets), 1, q_heads, head_dim, sequences);
  const auto chosen_of = [=](int set) {
    return selection_view{keep->indices.data() + std::size_t(set) * std::size_t(rows) * most,
                          keep->counts.data() + std::size_t(set) * std::size_t(rows), nullptr, offset_t(most)};
  };
  const auto choose_now = [=](int set) {
    choose_by_blocks_problem<view_type> p;
    p.view = view_of(set);
    p.index = extrema_of(set);
    p.read = read;
    p.q = q;
    p.first_position = keep->first.data();
    p.out = const_cast<index_t*>(chosen_of(set).indices);
    p.out_stride = offset_t(most);
    p.counts = const_cast<index_t*>(chosen_of(set).counts);
    choose.run(p, keep->choosing.data(), stream());
  };
  const rows_view<float> out = nhd_rows(keep->out.data(), 1, q_heads, head_dim, sequences);
  for (int set = 0; set < sets; ++set) {
    index_now(set, true);
    choose_now(set);
  }
  cuda::check(cudaStreamSynchronize(stream()), "cudaStreamSynchronize");
  made.keep = keep;
  made.graph = std::make_unique<replay>(launches(made.bytes, sets), [&](int i) {
    const int set = i % sets;
    if (wanted == part::index || wanted == part::step) index_now(set, false);
    if (wanted == part::choose || wanted == part::step) choose_now(set);
    if (wanted == part::index || wanted == part::choose) return;
    attend.run(
        {view_of(set), q, keep->first.data(), {}, out, {}, wanted == part::whole ? selection_view{} : chosen_of(set)},
        keep->attending.data(), stream());
  });
  return made;
}

const int registered = [] {
  const auto cell = [](index_t sequences, const char* name, index_t context, index_t read) {
    const std::string where = "blocks/B" + std::to_string(sequences) + "/" + name + "/" + std::to_string(read) + "/";
    add(where + "index", [=] { return block_step(sequences, context, read, part::index); });
    add(where + "choose", [=] { return block_step(sequences, context, read, part::choose); });
    add(where + "attend", [=] { return block_step(sequences, context, read, part::attend); });
    add(where + "step", [=] { return block_step(sequences, context, read, part::step); });
    add(where + "whole", [=] { return block_step(sequences, context, read, part::whole); });
  };
  cell(1, "32K", 32768, 1024), cell(1, "128K", 131072, 1024);
  cell(8, "128K", 131072, 1024), cell(32, "32K", 32768, 1024);
  return 0;
}();

}  // namespace
}  // namespace gpu_bench::of_blocks
