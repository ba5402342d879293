// Heads of uneven shares in ragged pages: decode attention beside the same bytes spread evenly, and what compressing a
// prompt chunk by chunk adds to its attention. peers.py has the same lengths.
#include <cmath>
#include <fstream>

#include "cuda_bench.hpp"
#include "tessera/attention/dense_decode.hpp"
#include "tessera/backend/cuda/cache.cuh"
#include "tessera/layout/dense_rows.hpp"
#include "tessera/layout/ragged_pages.hpp"
#include "tessera/layout/stored.hpp"
#include "tessera/methods/tangram.hpp"
#include "tessera/scorer/position.hpp"

namespace gpu_bench::of_ragged {
namespace {

constexpr index_t page = 16;
using shares_of_heads = std::vector<double>;

/// Of 8 heads, 0.25 on average: such as are calibrated; quantiles of a log-normal number of deviation 1. Or one whole head
/// beside seven of a sixteenth.
const std::pair<const char*, shares_of_heads> kinds[] = {
    {"calibrated", {0.05, 0.09, 0.13, 0.18, 0.24, 0.32, 0.42, 0.57}},
    {"log_normal", {0.0361, 0.0689, 0.1026, 0.1429, 0.1957, 0.2727, 0.4060, 0.7754}},
    {"one_long", {0.0625, 0.0625, 0.0625, 1.0, 0.0625, 0.0625, 0.0625, 0.0625}}};

/// [sequences, kv_heads]; sequences have the shares of their heads turned, as other texts have other lengths.
std::vector<index_t> uneven_lengths(const shares_of_heads& shares, index_t sequences, index_t tokens) {
  std::vector<index_t> lengths;
  for (index_t row = 0; row < sequences * kv_heads; ++row) {
    const index_t turned = (row / kv_heads + row % kv_heads) % kv_heads;
    lengths.push_back(index_t(std::lround(shares[std::size_t(turned)] * double(tokens))));
  }
  return lengths;
}
std::vector<index_t> evened(std::vector<index_t> lengths) {
  offset_t total = 0;
  for (const index_t length : lengths) total += length;
  std::fill(lengths.begin(), lengths.end(), index_t(total / offset_t(lengths.size())));
  return lengths;
}

/// `split_only`: times the split of the rows in place of a step. `split_by`: lengths that a split ahead goes by, in place of
/// the rows' own; equal ones give every row as many blocks.
template <cuda::decode_split Split = cuda::decode_split::each_step>
prepared decode_ragged(const std::vector<index_t>& lengths, index_t sequences, bool split_only = false,
                       std::vector<index_t> split_by = {}, cuda::split_rule rule = cuda::split_rule::shortest) {
  using view_type = kv_view<const bf16, head_dim, csr_table>;
  std::vector<index_t> begins{0}, blocks;
  offset_t read = 0;
  for (const index_t length : lengths) {
    begins.push_back(begins.back() + ceil_div(length, page));
    read += length;
  }
  for (index_t i = 0; i < begins.back(); ++i) blocks.push_back(i);
  std::mt19937 random(21);
  std::shuffle(blocks.begin(), blocks.end(), random);
  const std::size_t elements = blocks.size() * page * head_dim, q_rows = std::size_t(sequences) * q_heads;

  prepared made;
  made.bytes = double(read) * 2 * head_dim * sizeof(bf16);
  const int sets = input_sets(made.bytes);
  const cuda::decode_attention<view_type, float, Split> op(sequences, kv_heads, q_heads, 1,
                                                           cuda::device_info::current());
  struct memory {
    buffer<index_t> lengths, split_by, first, begins, blocks;
    buffer<float> out, lse;
    buffer<unsigned char> workspace;
  };
  const auto keep = std::make_shared<memory>(
      lengths, split_by.empty() ? lengths : split_by,
      std::vector<index_t>(std::size_t(sequences), *std::max_element(lengths.begin(), lengths.end())), begins, blocks,
      q_rows * head_dim, q_rows, op.workspace_bytes());
  const bf16* pool = random_rows(elements * 2 * std::size_t(sets) + q_rows * head_dim);
  const bf16* q = pool + elements * 2 * std::size_t(sets);
  op.prepare(keep->workspace.data(), stream());
  cuda::check(cudaStreamSynchronize(stream()), "cudaStreamSynchronize");
  made.keep = keep;
  const auto problem_of = [&](int i) {
    cuda::decode_problem<view_type> problem;
    view_type& view = problem.view;
    view.k = pool + elements * 2 * std::size_t(i % sets), view.v = view.k + elements;
    view.k_strides = view.v_strides = {offset_t(page) * head_dim, 0, head_dim, 1};
    view.table = {keep->begins.data(), keep->blocks.data(), page, kv_heads};
    view.sequences = sequences, view.kv_heads = kv_heads;
    view.lengths = keep->lengths.data(), view.length_strides = {kv_heads, 1};
    problem.q = nhd_rows<const bf16>(q, 1, q_heads, head_dim, sequences);
    problem.first_position = keep->first.data();
    problem.out = nhd_rows(keep->out.data(), 1, q_heads, head_dim, sequences);
    problem.lse = nhd_rows(keep->lse.data(), 1, q_heads, 1, sequences);
    return problem;
  };
  if constexpr (Split == cuda::decode_split::ahead) {
    auto problem = problem_of(0);
    problem.view.lengths = keep->split_by.data();
    op.split(problem, keep->workspace.data(), stream(), rule);
  }
  if (split_only) made.bytes = 0;
  made.graph = std::make_unique<replay>(split_only ? 32 : launches(made.bytes, sets), [&](int i) {
    if constexpr (Split == cuda::decode_split::ahead) {
      if (split_only) return op.split(problem_of(i), keep->workspace.data(), stream());
    }
    op.run(problem_of(i), keep->workspace.data(), stream());
  });
  return made;
}

/// One layer of a prompt in chunks of 2,048: attention, and what of each chunk stays, by `Recipe`.
template <class Recipe>
prepared prompt_in_chunks(index_t tokens) {
  constexpr index_t chunk = 2048;
  static const shares_of_heads shares = kinds[0].second;
  Recipe recipe;
  recipe.retain.budget.shares = {shares.data(), 1, kv_heads};
  recipe.schedule.chunk = chunk;
  cuda::cache_options options;
  options.tokens = index_t(double(tokens) * 0.57) + 2 * chunk;
  struct memory {
    cuda::cache<Recipe> kv;
    buffer<float> out;
  };
  const auto keep = std::make_shared<memory>(cuda::cache<Recipe>(model_shape{1, q_heads, kv_heads}, recipe, options),
                                             std::size_t(chunk) * q_heads * head_dim);
  const std::size_t of_kv = std::size_t(tokens) * kv_heads * head_dim;
  const bf16* k = random_rows(2 * of_kv + std::size_t(chunk) * q_heads * head_dim);
  const rows_view<const bf16> q = nhd_rows<const bf16>(k + 2 * of_kv, chunk, q_heads, head_dim);
  keep->kv.open(stream());
  prepared made;
  made.keep = keep;
  for (index_t done = 0; done < tokens; done += chunk)  // 2 products of the stored tokens, half of a chunk's own
    for (const double share : shares)
      made.flops += 4.0 * (q_heads / kv_heads) * head_dim * chunk * (share * done + chunk / 2.0);
  made.graph = std::make_unique<replay>(1, [&](int) {
    keep->kv.close(0, stream());
    keep->kv.open(stream());
    keep->kv.announce(0, tokens);
    for (index_t done = 0; done < tokens; done += chunk) {
      const bf16* own = k + std::size_t(done) * kv_heads * head_dim;
      keep->kv.prefill(0, 0, q, nhd_rows<const bf16>(own, chunk, kv_heads, head_dim),
                       nhd_rows<const bf16>(own + of_kv, chunk, kv_heads, head_dim), stream());
      keep->kv.prefill_attention(0, 0, q, nhd_rows(keep->out.data(), chunk, q_heads, head_dim), {}, stream());
    }
    keep->kv.end_prefill(0, stream());
  });
  return made;
}

template <class T>
void write_file(const std::string& name, const T* of_device, std::size_t count) {
  std::vector<T> values(count);
  cuda::check(cudaMemcpy(values.data(), of_device, count * sizeof(T), cudaMemcpyDeviceToHost), "cudaMemcpy");
  std::ofstream file(name, std::ios::binary);
  file.write(reinterpret_cast<const char*>(values.data()), std::streamsize(count * sizeof(T)));
  if (!file) throw std::runtime_error("cannot write " + name);
}

const int registered = [] {
  const std::pair<index_t, index_t> batches[] = {{1, 131072}, {4, 131072}, {16, 65536}, {64, 32768}};
  for (const auto& kind : kinds) {
    for (const auto& batch : batches) {
      const std::string name = std::string("ragged/") + kind.first + "/B" + std::to_string(batch.first);
      const auto lengths = uneven_lengths(kind.second, batch.first, batch.second);
      const index_t sequences = batch.first;
      add(name, [=] { return decode_ragged(lengths, sequences); });
      add(name + "_evened", [=] { return decode_ragged(evened(lengths), sequences); });
      constexpr cuda::decode_split ahead = cuda::decode_split::ahead;
      add(name + "/split_ahead", [=] { return decode_ragged<ahead>(lengths, sequences); });
      add(name + "/split_ahead_evened", [=] { return decode_ragged<ahead>(evened(lengths), sequences); });
      add(name + "/split_rounded",
          [=] { return decode_ragged<ahead>(lengths, sequences, false, {}, cuda::split_rule::rounded); });
      // What a kernel does that knows no lengths ahead. As many blocks a row as there are; 64 sequences have more rows.
      if (sequences < 64) {
        add(name + "/fixed_split", [=] {
          return decode_ragged<ahead>(lengths, sequences, false, std::vector<index_t>(lengths.size(), 2048));
        });
      }
      add(name + "/making_the_split", [=] { return decode_ragged<ahead>(lengths, sequences, true); });
    }
  }
  // The same counts, but the newest tokens stay: nothing is scored but positions.
  using pages = stored<dense_rows<bf16, head_dim>, ragged_pages>;
  using given = recipe<retain<position, calibrated, top_tokens>, pages, retrieve_all, dense_decode, each_chunk>;
  for (const auto& [name, tokens] : {std::pair<const char*, index_t>{"32K", 32768}, {"128K", 131072}}) {
    add(std::string("chunks/") + name + "/tangram",
        [tokens = tokens] { return prompt_in_chunks<tangram<bf16, head_dim>>(tokens); });
    add(std::string("chunks/") + name + "/given", [tokens = tokens] { return prompt_in_chunks<given>(tokens); });
  }
  return 0;
}();

}  // namespace
}  // namespace gpu_bench::of_ragged

void gpu_bench::write_flat_table(const std::string& folder) {
  using namespace of_ragged;
  constexpr index_t tokens = 3001, chunk = 512;
  static const shares_of_heads shares = kinds[0].second;
  tangram<bf16, head_dim> recipe;
  recipe.retain.budget.shares = {shares.data(), 1, kv_heads};
  recipe.schedule.chunk = chunk;
  cuda::cache_options options;
  options.tokens = tokens;
  cuda::cache<tangram<bf16, head_dim>> kv(model_shape{1, q_heads, kv_heads}, recipe, options);
  const std::size_t of_kv = std::size_t(tokens) * kv_heads * head_dim, of_q = std::size_t(tokens) * q_heads * head_dim;
  const bf16* k = random_rows(2 * of_kv + of_q);
  const bf16* q = k + 2 * of_kv;
  kv.open(stream());
  kv.announce(0, tokens);
  for (index_t done = 0; done < tokens; done += chunk) {
    const index_t count = std::min(chunk, tokens - done);
    const bf16* own = k + std::size_t(done) * kv_heads * head_dim;
    kv.prefill(0, 0, nhd_rows<const bf16>(q + std::size_t(done) * q_heads * head_dim, count, q_heads, head_dim),
               nhd_rows<const bf16>(own, count, kv_heads, head_dim),
               nhd_rows<const bf16>(own + of_kv, count, kv_heads, head_dim), stream());
  }
  kv.end_prefill(0, stream());

  using view_type = kv_view<const bf16, head_dim, csr_table>;
  const auto held = kv.view(0, 0);
  const std::vector<index_t> first{tokens};
  const buffer<index_t> position(first);
  const buffer<float> out(std::size_t(q_heads) * head_dim), lse(q_heads);
  const cuda::decode_attention<view_type> attend(1, kv_heads, q_heads, 1, cuda::device_info::current());
  const buffer<unsigned char> workspace(attend.workspace_bytes());
  attend.prepare(workspace.data(), stream());
  cuda::decode_problem<view_type> problem;
  view_type& view = problem.view;
  view.k = held.k, view.v = held.v, view.k_strides = held.k_strides, view.v_strides = held.v_strides;
  view.table = held.table, view.sequences = 1, view.kv_heads = kv_heads;
  view.lengths = held.lengths, view.length_strides = {held.length_strides.sequence, held.length_strides.head};
  problem.q = nhd_rows<const bf16>(q, 1, q_heads, head_dim);
  problem.first_position = position.data();
  problem.out = nhd_rows(out.data(), 1, q_heads, head_dim);
  problem.lse = nhd_rows(lse.data(), 1, q_heads, 1);
  attend.run(problem, workspace.data(), stream());
  cuda::check(cudaStreamSynchronize(stream()), "cudaStreamSynchronize");

  // Of a head's row of the table its first blocks, as many as hold something.
  std::vector<index_t> lengths, ends{0}, blocks, begins(kv_heads);
  const auto fetch = [](std::vector<index_t>& to, std::size_t at, const index_t* from) {
    cuda::check(cudaMemcpy(to.data() + at, from, (to.size() - at) * sizeof(index_t), cudaMemcpyDeviceToHost),
                "cudaMemcpy");
  };
  fetch(begins, 0, view.table.indptr);
  for (index_t h = 0; h < kv_heads; ++h) {
    lengths.push_back(index_t(kv.positions(0, 0, h).size()));
    const std::size_t at = blocks.size();
    blocks.resize(at + std::size_t(ceil_div(lengths.back(), page)));
    fetch(blocks, at, view.table.indices + begins[std::size_t(h)]);
    ends.push_back(index_t(blocks.size()));
  }
  const index_t last = *std::max_element(blocks.begin(), blocks.end());
  const std::size_t pool = std::size_t(last + 1) * page * head_dim;
  write_file(folder + "/k", view.k, pool), write_file(folder + "/v", view.v, pool);
  write_file(folder + "/q", q, std::size_t(q_heads) * head_dim);
  write_file(folder + "/out", out.data(), std::size_t(q_heads) * head_dim);
  for (const auto& [name, numbers] :
       {std::pair{"/indptr", &ends}, std::pair{"/indices", &blocks}, std::pair{"/lengths", &lengths}}) {
    std::ofstream(folder + name, std::ios::binary)
        .write(reinterpret_cast<const char*>(numbers->data()), std::streamsize(numbers->size() * sizeof(index_t)));
  }
}
