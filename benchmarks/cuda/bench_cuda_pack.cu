// Compaction of 128K tokens to a quarter with lengths that differ by head, fresh and in place; and append.
#include "cuda_bench.hpp"
#include "tessera/backend/cuda/store/append.cuh"
#include "tessera/backend/cuda/store/pack.cuh"

namespace gpu_bench::of_pack {
namespace {

using view_type = kv_view<bf16, head_dim>;

view_type view_of(bf16* k, bf16* v, index_t sequences, index_t tokens) {
  view_type view;
  view.k = k, view.v = v;
  view.k_strides = {offset_t(kv_heads) * tokens * head_dim, offset_t(tokens) * head_dim, head_dim, 1};
  view.v_strides = view.k_strides;
  view.sequences = sequences, view.kv_heads = kv_heads;
  return view;
}

/// Heads keep 1/18 to 8/18 of their tokens, a quarter together. The bytes: indices and kept rows read, rows written.
template <bool InPlace>
prepared pack(index_t tokens, index_t run) {
  std::mt19937 random(3);
  std::vector<index_t> indices(std::size_t(kv_heads) * std::size_t(tokens), no_index), counts;
  double kept = 0;
  for (index_t h = 0; h < kv_heads; ++h) {
    const index_t count = index_t(offset_t(tokens) * (h + 1) / (2 * (kv_heads + 1))) / run * run;
    const auto row = random_subset(tokens, count, run, random);
    std::copy(row.begin(), row.end(), indices.begin() + offset_t(h) * tokens);
    counts.push_back(count), kept += count;
  }
  cuda::pack<view_type, view_type, InPlace> op(1, kv_heads, tokens, cuda::device_info::current());
  const std::size_t elements = std::size_t(kv_heads) * std::size_t(tokens) * head_dim;
  const index_t room = tokens / 2;
  const std::size_t target = InPlace ? 0 : std::size_t(kv_heads) * std::size_t(room) * head_dim;
  prepared made;
  made.bytes = kept * (2 * 2 * head_dim * sizeof(bf16) + sizeof(index_t));
  const int sets = input_sets(made.bytes);
  struct memory {
    buffer<index_t> indices, counts;
    buffer<bf16> to;
    buffer<unsigned char> workspace;
  };
  const auto keep = std::make_shared<memory>(indices, counts, target * 2 * std::size_t(sets), op.workspace_bytes());
  bf16* pool = random_rows(elements * 2 * std::size_t(sets));
  op.prepare(keep->workspace.data(), stream());
  cuda::check(cudaStreamSynchronize(stream()), "cudaStreamSynchronize");
  made.keep = keep;
  made.graph = std::make_unique<replay>(launches(made.bytes, sets), [&](int i) {
    const std::size_t set = std::size_t(i % sets);
    bf16* k = pool + elements * 2 * set;
    bf16* to = keep->to.data() + target * 2 * set;
    cuda::pack_problem<view_type, view_type> problem;
    problem.source = view_of(k, k + elements, 1, tokens);
    problem.chosen = {keep->indices.data(), keep->counts.data(), nullptr, tokens};
    problem.target = InPlace ? problem.source : view_of(to, to + target, 1, room);
    op.run(problem, keep->workspace.data(), stream());
  });
  return made;
}

/// `tokens` new rows of every sequence behind 4,000 stored ones. The lengths after go to other memory, so that every
/// launch appends at the same place.
prepared append_rows(index_t sequences, index_t tokens) {
  const index_t stored = 4000, room = stored + tokens;
  const std::size_t new_rows = std::size_t(sequences * kv_heads) * std::size_t(tokens) * head_dim;
  const std::size_t elements = std::size_t(sequences * kv_heads) * std::size_t(room) * head_dim;
  prepared made;
  made.bytes = double(new_rows) * 2 * 2 * sizeof(bf16);
  const int sets = std::min(input_sets(made.bytes), 32);
  struct memory {
    buffer<index_t> lengths, after;
    buffer<bf16> to;
  };
  const std::size_t rows = std::size_t(sequences * kv_heads);
  const auto keep = std::make_shared<memory>(std::vector<index_t>(rows, stored), rows, elements * 2);
  const bf16* pool = random_rows(new_rows * 2 * std::size_t(sets));
  const cuda::append<view_type, bf16> op(sequences, kv_heads);
  made.keep = keep;
  made.graph = std::make_unique<replay>(launches(made.bytes, sets), [&](int i) {
    const bf16* k = pool + new_rows * 2 * std::size_t(i % sets);
    cuda::append_problem<view_type, bf16> problem;
    problem.view = view_of(keep->to.data(), keep->to.data() + elements, sequences, room);
    problem.view.lengths = keep->lengths.data(), problem.view.length_strides = {kv_heads, 1};
    problem.k = nhd_rows<const bf16>(k, tokens, kv_heads, head_dim, sequences);
    problem.v = nhd_rows<const bf16>(k + new_rows, tokens, kv_heads, head_dim, sequences);
    problem.lengths = keep->after.data();
    op.run(problem, nullptr, stream());
  });
  return made;
}

const int registered = [] {
  for (const index_t run : {1, 16}) {
    const std::string name = run == 1 ? "singles" : "runs_of_16";
    add("pack_fresh/" + name, [=] { return pack<false>(131072, run); });
    add("pack_in_place/" + name, [=] { return pack<true>(131072, run); });
  }
  add("append/B1/1", [] { return append_rows(1, 1); });
  add("append/B64/1", [] { return append_rows(64, 1); });
  add("append/B1/64K", [] { return append_rows(1, 65536); });
  return 0;
}();

}  // namespace
}  // namespace gpu_bench::of_pack
