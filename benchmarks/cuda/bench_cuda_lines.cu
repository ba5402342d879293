// Prefill attention along lines: densities by construction, and the choice of lines by shaped attention.
//
// Lines of a density: a fifth of the causal (row, key) pairs on single columns, the rest on slashes in runs of 256 neighbours.
// The rows are of a made-up attention: two channels turn with the position, so that logits peak at every 4,096th distance, and a
// third is large for every 50th key. About a tenth of the lines carries 0.955 of it. The rest is noise.
#include "cuda_bench.hpp"

#include <cmath>

#include "tessera/backend/cuda/attend/prefill/line_attention.cuh"
#include "tessera/backend/cuda/choose/lines/choose_lines.cuh"
#include "tessera/prefill/covering_lines.hpp"

namespace gpu_bench::of_lines {
namespace {

constexpr double period = 4096;
constexpr int every_key = 50;

__global__ void __launch_bounds__(256) shape_attention_entry(bf16* rows, index_t tokens, index_t heads, bool keys) {
  const index_t i = index_t(blockIdx.x) * 256 + index_t(threadIdx.x);
  if (i >= tokens * heads) return;
  const index_t token = i / heads;
  bf16* row = rows + offset_t(i) * head_dim;
  const float size = 27, angle = float(6.283185307179586 * double(token % index_t(period)) / period);
  row[0] = bf16(size * __cosf(angle)), row[1] = bf16(size * __sinf(angle));
  row[2] = bf16(!keys || token % every_key == 7 ? size : 0.0f);
}

/// A share `density` of the causal pairs of a prompt, the same for each head but for where lines lie.
struct line_memory {
  buffer<std::uint32_t> slash, vertical;
  buffer<index_t> columns, counts;
  index_t words;

  static std::vector<std::vector<index_t>> chosen(index_t tokens, const std::vector<double>& densities, bool slashes) {
    std::mt19937 random(20261122);
    std::vector<std::vector<index_t>> all;
    for (const double density : densities) {
      // Entries of a line: a slash and a column alike have as many as the prompt goes on behind them.
      const double pairs = 0.5 * double(tokens) * double(tokens);
      double left = density >= 1 ? (slashes ? pairs * 2 : 0) : pairs * density * (slashes ? 0.8 : 0.2);
      const index_t run = slashes ? 256 : 1;
      std::vector<index_t> starts;
      for (index_t at = 0; at < tokens; at += run) starts.push_back(at);
      std::shuffle(starts.begin() + 1, starts.end(), random);  // the nearest run, or the first column, is always taken
      std::vector<index_t> lines;
      for (const index_t start : starts) {
        if (left <= 0) break;
        for (index_t at = start; at < std::min(tokens, start + run); ++at) lines.push_back(at), left -= tokens - at;
      }
      std::sort(lines.begin(), lines.end());
      all.push_back(lines);
    }
    return all;
  }
  static std::vector<std::uint32_t> bits(const std::vector<std::vector<index_t>>& lines, index_t words, bool reversed) {
    const std::size_t each = std::size_t(words) + (reversed ? 1 : 0);
    std::vector<std::uint32_t> all(lines.size() * each);
    for (std::size_t h = 0; h < lines.size(); ++h) {
      for (const index_t at : lines[h]) {
        const std::size_t bit = std::size_t(reversed ? words * 32 - 1 - at : at);
        all[h * each + bit / 32] |= 1u << bit % 32;
      }
    }
    return all;
  }
  static std::vector<index_t> flat(const std::vector<std::vector<index_t>>& lines, index_t words) {
    std::vector<index_t> all(lines.size() * std::size_t(words) * 32);
    for (std::size_t h = 0; h < lines.size(); ++h) {
      std::copy(lines[h].begin(), lines[h].end(), all.begin() + std::ptrdiff_t(h) * words * 32);
    }
    return all;
  }
  static std::vector<index_t> sizes(const std::vector<std::vector<index_t>>& lines) {
    std::vector<index_t> all;
    for (const auto& own : lines) all.push_back(index_t(own.size()));
    return all;
  }

  line_memory(index_t tokens, const std::vector<double>& densities)
      : line_memory(tokens / 32, chosen(tokens, densities, true), chosen(tokens, densities, false)) {}
  line_memory(index_t words_, const std::vector<std::vector<index_t>>& slashes,
              const std::vector<std::vector<index_t>>& verticals)
      : slash(bits(slashes, words_, true)),
        vertical(bits(verticals, words_, false)),
        columns(flat(verticals, words_)),
        counts(sizes(verticals)),
        words(words_) {}
  cuda::line_tables tables() const {
    return {words, slash.data(), vertical.data(), columns.data(), counts.data(), nullptr, 0};
  }
};

enum class measured { attention, choice, both };

prepared along_lines(index_t tokens, const std::vector<double>& densities, measured what,
                     const covering_lines& pattern = {}) {
  using view_type = kv_view<const bf16, head_dim>;
  const std::size_t elements = std::size_t(kv_heads) * std::size_t(tokens) * head_dim;
  const std::size_t q_elements = std::size_t(q_heads) * std::size_t(tokens) * head_dim;
  const auto device = cuda::device_info::current();
  host_vector<index_t> rows;
  pattern.sample(0, tokens, rows);
  struct memory {
    cuda::line_attention<view_type, bf16> attend;
    cuda::choose_lines<covering_lines, view_type> choose;
    line_memory lines;
    buffer<index_t> length, first;
    buffer<bf16> out;
    buffer<float> lse;
    buffer<unsigned char> workspace, choosing;
  };
  cuda::line_attention<view_type, bf16> attend(kv_heads, q_heads, device);
  cuda::choose_lines<covering_lines, view_type> choose(kv_heads, q_heads, tokens, index_t(rows.size()), device);
  const std::size_t attending = attend.workspace_bytes(), choosing = choose.workspace_bytes();
  const std::shared_ptr<memory> keep(new memory{std::move(attend), std::move(choose), line_memory(tokens, densities),
                                                std::vector<index_t>{tokens}, std::vector<index_t>{0}, q_elements,
                                                std::size_t(q_heads) * std::size_t(tokens), attending, choosing});
  prepared made;
  made.bytes = double(elements * 2 + q_elements * 2) * sizeof(bf16);
  double density = 0;
  for (const double own : densities) density += own / double(densities.size());
  made.flops = what == measured::choice ? 0 : 4.0 * q_heads * head_dim * double(tokens) * tokens / 2 * density;
  bf16* pool = random_rows(elements * 2 + q_elements);
  shape_attention_entry<<<unsigned(ceil_div(tokens * kv_heads, 256)), 256, 0, stream()>>>(pool, tokens, kv_heads, true);
  shape_attention_entry<<<unsigned(ceil_div(tokens * q_heads, 256)), 256, 0, stream()>>>(pool + elements * 2, tokens,
                                                                                         q_heads, false);
  cuda::check(cudaGetLastError(), "launch of shape_attention");
  cuda::check(cudaStreamSynchronize(stream()), "cudaStreamSynchronize");
  made.keep = keep;
  made.graph = std::make_unique<replay>(1, [&, pool, choosing](int) {
    cuda::prefill_problem<view_type, bf16> problem;
    problem.view.k = pool, problem.view.v = pool + elements;
    problem.view.k_strides = {0, head_dim, offset_t(kv_heads) * head_dim, 1};
    problem.view.v_strides = problem.view.k_strides;
    problem.view.sequences = 1, problem.view.kv_heads = kv_heads;
    problem.view.lengths = keep->length.data();
    problem.q = nhd_rows<const bf16>(pool + elements * 2, tokens, q_heads, head_dim);
    problem.first_position = keep->first.data();
    problem.out = nhd_rows(keep->out.data(), tokens, q_heads, head_dim);
    problem.lse = nhd_rows(keep->lse.data(), tokens, q_heads, 1);
    if (what != measured::attention) {
      keep->choose.run(pattern, {problem.view, problem.q, 0, problem.rule}, rows, keep->choosing.data(), stream());
    }
    if (what != measured::choice) {
      keep->attend.run(problem, keep->lines.tables(), keep->workspace.data(), stream(),
                       {keep->choosing.data(), choosing});
    }
  });
  return made;
}

const int registered = [] {
  for (const index_t tokens : {32768, 65536, 131072}) {
    const std::string size = std::to_string(tokens / 1024) + "K";
    const auto even = [](double density) { return std::vector<double>(q_heads, density); };
    add("lines/choice/" + size, [=] { return along_lines(tokens, even(0.1), measured::choice); }, 1);
    covering_lines published;
    published.algorithm = line_search::paper;
    add(
        "lines/choice/published/" + size, [=] { return along_lines(tokens, even(0.1), measured::choice, published); },
        1);
    add("lines/10/" + size, [=] { return along_lines(tokens, even(0.1), measured::both); }, 1);
    add("lines/5/" + size, [=] { return along_lines(tokens, even(0.05), measured::both); }, 1);
    add("lines/100/" + size, [=] { return along_lines(tokens, even(1), measured::attention); }, 1);
    // 1 to 60 %, and the same work evened.
    std::vector<double> densities;
    double mean = 0;
    for (index_t h = 0; h < q_heads; ++h) {
      densities.push_back(0.01 * std::pow(60.0, double(h) / (q_heads - 1)));
      mean += densities.back() / q_heads;
    }
    add("lines/uneven/" + size, [=] { return along_lines(tokens, densities, measured::attention); }, 1);
    add("lines/evened/" + size, [=] { return along_lines(tokens, even(mean), measured::attention); }, 1);
  }
  return 0;
}();

}  // namespace
}  // namespace gpu_bench::of_lines
