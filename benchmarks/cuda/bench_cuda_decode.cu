// Decode attention: dense, behind a block table, over a selection, over uneven lengths, and over rows of bytes.
#include "cuda_bench.hpp"
#include "tessera/backend/cuda/attend/decode/decode_attention.cuh"

namespace gpu_bench::of_decode {
namespace {

constexpr index_t page = 16;

struct decode_shape {
  index_t sequences = 1;
  index_t tokens = 0;              ///< of the longest row
  std::vector<index_t> lengths{};  ///< [kv_heads], the same for every sequence; empty: all have `tokens`
  index_t chosen = 0, run = 1;     ///< of every row, in runs; 0: everything
  bool by_token = false;  ///< pages [16, kv_heads, head_dim], as `fixed_pages` has them, or [kv_heads, 16, head_dim]
};

/// Rows that lie one after another.
template <class E>
void place_rows(kv_view<const E, head_dim>& view, const decode_shape& s, const index_t*) {
  constexpr offset_t row = kv_view<const E, head_dim>::k_units;
  view.k_strides = {kv_heads * s.tokens * row, s.tokens * row, row, 1};
}
/// Pages of all heads in any order, as an engine's allocator leaves them.
template <class E>
void place_rows(kv_view<const E, head_dim, block_table>& view, const decode_shape& s, const index_t* blocks) {
  constexpr offset_t row = kv_view<const E, head_dim>::k_units;
  view.k_strides = {kv_heads * page * row, s.by_token ? row : page * row, s.by_token ? kv_heads * row : row, 1};
  view.table = {blocks, page, s.tokens / page, 0};
}

template <class Byte>
__global__ void __launch_bounds__(256) fill_bytes_entry(Byte* to, std::size_t count) {
  for (std::size_t i = blockIdx.x * std::size_t(256) + threadIdx.x; i < count; i += gridDim.x * std::size_t(256)) {
    unsigned x = unsigned(i) * 2654435761u + unsigned(i >> 32) * 40503u;
    x ^= x >> 16, x *= 0x85ebca6bu, x ^= x >> 13;
    to[i].bits = decltype(to->bits)((x & 0x7fu) == 0x7fu ? x & 0xfeu : x);  // any number
  }
}

/// Groups in the range of normal numbers.
template <element_block Group>
__global__ void __launch_bounds__(256) fill_bytes_entry(Group* to, std::size_t count) {
  for (std::size_t i = blockIdx.x * std::size_t(256) + threadIdx.x; i < count; i += gridDim.x * std::size_t(256)) {
    unsigned x = unsigned(i) * 2654435761u + unsigned(i >> 32) * 40503u;
    const float range = 4 + float(x >> 24) / 256;
    to[i] = Group::of_range(-range / 2, range / 2, true);
    for (auto& word : to[i].codes) x ^= x >> 16, x *= 0x85ebca6bu, x ^= x >> 13, word = x;
  }
}

template <class Table, class E = bf16, cuda::decode_split Split = cuda::decode_split::each_step>
prepared decode(const decode_shape& s) {
  using view_type = kv_view<const E, head_dim, Table>;
  using stored_type = typename view_type::encoding_type::stored_type;
  constexpr bool encoded = !view_type::is_raw, scaled = view_type::encoding_type::scaled;
  constexpr int row_units = view_type::k_units;
  std::mt19937 random(17);
  const std::size_t rows = std::size_t(s.sequences) * kv_heads;
  const std::size_t units = rows * std::size_t(s.tokens) * row_units;
  std::vector<index_t> lengths, blocks(std::size_t(s.sequences) * std::size_t(s.tokens / page));
  for (std::size_t row = 0; row < rows; ++row)
    lengths.push_back(s.lengths.empty() ? s.tokens : s.lengths[row % kv_heads]);
  for (std::size_t i = 0; i < blocks.size(); ++i) blocks[i] = index_t(i);
  std::shuffle(blocks.begin(), blocks.end(), random);
  double read = 0;
  for (const index_t length : lengths) read += s.chosen ? s.chosen : length;

  prepared made;
  made.bytes = read * 2 * (row_units * sizeof(stored_type) + (scaled ? sizeof(float) : 0));
  const int sets = input_sets(made.bytes);
  // A selection rotates by itself: other tokens of the same keys and values.
  const int kv_sets = s.chosen ? 1 : sets;
  std::vector<index_t> indices;
  for (std::size_t i = 0; s.chosen && i < rows * std::size_t(sets); ++i) {
    const auto row = random_subset(s.tokens, s.chosen, s.run, random);
    indices.insert(indices.end(), row.begin(), row.end());
  }
  const cuda::decode_attention<view_type, float, Split> op(s.sequences, kv_heads, q_heads, 1,
                                                           cuda::device_info::current());
  struct memory {
    buffer<index_t> lengths, first, blocks, indices, counts;
    buffer<float> out, lse;
    buffer<unsigned char> workspace;
    buffer<std::conditional_t<encoded, stored_type, fp8>> stored;
    buffer<float> scales;
  };
  const std::size_t q_rows = std::size_t(s.sequences) * q_heads;
  const auto keep = std::make_shared<memory>(
      lengths, std::vector<index_t>(std::size_t(s.sequences), s.tokens - 1), blocks, indices,
      std::vector<index_t>(rows, s.chosen), q_rows * head_dim, q_rows, op.workspace_bytes(),
      encoded ? units * 2 * std::size_t(kv_sets) : 0, std::vector<float>(scaled ? units / row_units : 0, 1.0f / 64));
  const std::size_t pool_units = units * 2 * std::size_t(kv_sets), plain = encoded ? 0 : pool_units;
  const bf16* q = random_rows(plain + q_rows * head_dim) + plain;
  const stored_type* pool;
  if constexpr (encoded) {
    fill_bytes_entry<<<2048, 256, 0, stream()>>>(keep->stored.data(), pool_units);
    pool = keep->stored.data();
  } else {
    pool = q - plain;
  }
  op.prepare(keep->workspace.data(), stream());
  cuda::check(cudaStreamSynchronize(stream()), "cudaStreamSynchronize");

  made.keep = keep;
  const auto problem_of = [&](int i) {
    cuda::decode_problem<view_type> problem;
    place_rows(problem.view, s, keep->blocks.data());
    problem.view.v_strides = problem.view.k_strides;
    problem.view.k = pool + units * 2 * std::size_t(i % kv_sets), problem.view.v = problem.view.k + units;
    const row_strides& rows_at = problem.view.k_strides;
    if (scaled) {
      problem.view.scales = {keep->scales.data(), keep->scales.data(), rows_at.outer / row_units,
                             rows_at.head / row_units, rows_at.token / row_units};
    }
    problem.view.sequences = s.sequences, problem.view.kv_heads = kv_heads;
    problem.view.lengths = keep->lengths.data(), problem.view.length_strides = {kv_heads, 1};
    problem.q = nhd_rows<const bf16>(q, 1, q_heads, head_dim, s.sequences);
    problem.first_position = keep->first.data();
    problem.out = nhd_rows(keep->out.data(), 1, q_heads, head_dim, s.sequences);
    problem.lse = nhd_rows(keep->lse.data(), 1, q_heads, 1, s.sequences);
    if (s.chosen) {
      const index_t* chosen = keep->indices.data() + rows * std::size_t(s.chosen) * std::size_t(i % sets);
      problem.chosen = {chosen, keep->counts.data(), nullptr, s.chosen};
    }
    return problem;
  };
  if constexpr (Split == cuda::decode_split::ahead) op.split(problem_of(0), keep->workspace.data(), stream());
  made.graph = std::make_unique<replay>(launches(made.bytes, sets),
                                        [&](int i) { op.run(problem_of(i), keep->workspace.data(), stream()); });
  return made;
}

const int registered = [] {
  struct {
    const char* name;
    index_t sequences, tokens;
  } const dense[] = {{"B1/8K", 1, 8192},     {"B1/32K", 1, 32768},   {"B1/128K", 1, 131072}, {"B1/256K", 1, 262144},
                     {"B4/128K", 4, 131072}, {"B8/128K", 8, 131072}, {"B64/8K", 64, 8192}};
  for (const auto& s : dense) {
    const decode_shape shape{.sequences = s.sequences, .tokens = s.tokens};
    add(std::string("decode/") + s.name, [=] { return decode<contiguous>(shape); });
    add(std::string("decode_paged/") + s.name, [=] { return decode<block_table>(shape); });
    const decode_shape by_token{.sequences = s.sequences, .tokens = s.tokens, .by_token = true};
    add(std::string("decode_paged/") + s.name + "/by_token", [=] { return decode<block_table>(by_token); });
    add(std::string("decode_fp8/") + s.name, [=] { return decode<contiguous, fp8_elements<bf16>>(shape); });
  }
  for (const index_t sequences : {1, 16}) {
    for (const index_t run : {1, 16}) {
      const std::string name = "gathered/B" + std::to_string(sequences) + (run == 1 ? "/singles" : "/runs_of_16");
      add(name,
          [=] { return decode<contiguous>({.sequences = sequences, .tokens = 131072, .chosen = 2048, .run = run}); });
    }
  }
  add("decode_int8/B8/128K",
      [] { return decode<contiguous, int8_elements<bf16>>({.sequences = 8, .tokens = 131072}); });
  add("decode_int8_paged/B8/128K",
      [] { return decode<block_table, int8_elements<bf16>>({.sequences = 8, .tokens = 131072}); });
  const decode_shape large{.sequences = 8, .tokens = 131072};
  add("decode_int4/B8/128K", [=] { return decode<contiguous, grouped_elements<bf16, 4, 64>>(large); });
  add("decode_int2/B8/128K", [=] { return decode<contiguous, grouped_elements<bf16, 2, 64>>(large); });
  add("decode_int4_paged/B8/128K", [=] { return decode<block_table, grouped_elements<bf16, 4, 64>>(large); });
  add("decode_int2_paged/B8/128K", [=] { return decode<block_table, grouped_elements<bf16, 2, 64>>(large); });
  add("gathered_int4/B16/singles", [] {
    return decode<contiguous, grouped_elements<bf16, 4, 64>>({.sequences = 16, .tokens = 131072, .chosen = 2048});
  });
  add("decode_fp8_paged/B8/128K",
      [] { return decode<block_table, fp8_elements<bf16>>({.sequences = 8, .tokens = 131072}); });
  add("gathered_fp8/B16/singles",
      [] { return decode<contiguous, fp8_elements<bf16>>({.sequences = 16, .tokens = 131072, .chosen = 2048}); });
  // Uneven lengths: drawn from 1/16 to 1 of 128K, one full head beside seven of 1/16, and the same totals spread evenly.
  std::vector<index_t> drawn, one_long(kv_heads, 131072 / 16);
  std::mt19937 random(6);
  for (index_t h = 0; h < kv_heads; ++h) drawn.push_back(std::uniform_int_distribution<index_t>(8192, 131072)(random));
  one_long[3] = 131072;
  const auto uneven = [](const std::string& name, const std::vector<index_t>& lengths) {
    index_t total = 0;
    for (const index_t length : lengths) total += length;
    const std::vector<index_t> even(kv_heads, total / kv_heads);
    add("uneven/" + name, [=] { return decode<contiguous>({.tokens = 131072, .lengths = lengths}); });
    add("uneven/" + name + "_evened", [=] { return decode<contiguous>({.tokens = 131072, .lengths = even}); });
    add("uneven/" + name + "/split_ahead",
        [=] { return decode<contiguous, bf16, cuda::decode_split::ahead>({.tokens = 131072, .lengths = lengths}); });
  };
  uneven("drawn", drawn);
  uneven("one_long", one_long);
  return 0;
}();

}  // namespace
}  // namespace gpu_bench::of_decode
