#include "compress.hpp"

#include <algorithm>
#include <cmath>
#include <limits>

#include "tool/layer/tensors.hpp"
#include "tool/methods/registry.hpp"
#include "tool/methods/values.hpp"

namespace tool {
namespace {

using engine::safetensors_file;

/// What the rows of the last turn's prompt attended, for a method that chooses lines.
struct prompt_outputs {
  index_t first = 0;
  std::vector<float> out, lse;
};

// The sign of a NaN says nothing.
float without_sign_of_nan(float value) { return std::isnan(value) ? std::abs(value) : value; }

// Errors: an output that is not finite. `row` says which one is looked at.
void require_finite_row(const std::vector<float>& out, std::size_t begin, const layer_tensors& layer,
                        const std::string& row) {
  for (std::size_t i = 0; i < std::size_t(layer.q_heads * layer.head_dim); ++i) {
    const float value = out[begin + i];
    if (value - value == 0) continue;
    tessera::fail(
        "layer 0, query head " + std::to_string(i / std::size_t(layer.head_dim)) + ", " + row + ": the attention",
        without_sign_of_nan(value), "a finite number", "products overflow float: scale queries, keys or values");
  }
}

// Gives the prompt to the cache, turn by turn, and ends each. Where the method chooses lines, its prompts are attended.
prompt_outputs prefill(const layer_tensors& layer, const std::vector<std::pair<index_t, index_t>>& turns,
                       const method_info& info, method_cache& cache) {
  const std::string& method = info.name;
  const index_t given = layer.q ? layer.q->shape[0] : 0;
  const auto rows_needed = [&](index_t tokens) { return info.chooses_lines ? tokens : cache.queries_needed(tokens); };
  index_t needed = 0;
  for (const auto& [begin, end] : chunks_of(turns, cache)) {
    const index_t rows = rows_needed(end - begin);
    if (rows > 0) needed = std::max(needed, layer.tokens - (end - rows));
  }
  tessera::require(
      given >= needed && given <= layer.tokens, "n_q, the rows of tensor q", given,
      tessera::value_range{needed, layer.tokens}.text() + " for " + method,
      needed == layer.tokens ? "dump the queries of every prompt token" : "dump the queries of the last prompt tokens");
  if (needed > 0) require_products(layer);
  const auto rows_of = [](input_rows rows, index_t begin, index_t end) {
    rows.data += begin * rows.token_stride;
    rows.tokens = end - begin;
    return rows;
  };
  prompt_outputs last;
  std::size_t turn = 0;
  for (const auto& [begin, end] : chunks_of(turns, cache)) {
    if (begin == turns[turn].first) cache.announce(turns[turn].second - begin);
    const index_t rows = rows_needed(end - begin), skipped = layer.tokens - given;
    input_rows q = rows > 0 ? rows_of(layer.q->tokens_first(), end - rows - skipped, end - skipped) : input_rows{};
    q.heads = layer.q_heads;
    if (!layer.boundaries.empty()) {
      cache.begin_chunk(std::span(layer.boundaries).subspan(std::size_t(begin), std::size_t(end - begin)));
    }
    cache.observe(0, q, rows_of(layer.k.heads_first(), begin, end), rows_of(layer.v.heads_first(), begin, end));
    if (info.takes_scores) {
      std::vector<float> scores;
      for (index_t head = 0; head < layer.kv_heads; ++head) {
        const auto own = layer.scores.begin() + offset_t(head) * layer.tokens;
        scores.insert(scores.end(), own + begin, own + end);
      }
      cache.set_scores(0, begin, scores.data(), end - begin);
    }
    if (info.chooses_lines) {
      const std::size_t row = std::size_t(layer.q_heads) * std::size_t(layer.head_dim);
      last.first = begin;
      last.out.resize(std::size_t(end - begin) * row);
      last.lse.resize(std::size_t(end - begin) * std::size_t(layer.q_heads));
      cache.attend_prompt(0, q, last.out.data(), last.lse.data());
      for (index_t token = begin; token < end; ++token) {
        require_finite_row(last.out, std::size_t(token - begin) * row, layer, "prompt token " + std::to_string(token));
      }
    }
    if (end < turns[turn].second) continue;
    cache.end_prefill();
    ++turn;
  }
  return last;
}

// What lies in the file beside what this method reads.
std::vector<std::string> unused_tensors(const safetensors_file& in, const method_cache& cache,
                                        const layer_tensors& layer, const method_info& method) {
  std::vector<std::string> all;
  const std::string turns = turns_name(in);
  for (const auto& [name, tensor] : in.tensors()) {
    const bool known = name == "k" || name == "v" || name == "q_decode" || name == "k_decode" || name == "v_decode" ||
                       name == turns || (name == "boundaries" && method.needs_segments) ||
                       (name == "boundaries_decode" && method.needs_step_segments) ||
                       (name == "output_projection" && method.takes_projection) ||
                       (name == "scores" && method.takes_scores) ||
                       (name == "q" && (method.chooses_lines || cache.queries_needed(layer.tokens) > 0));
    if (!known) all.push_back(name);
  }
  return all;
}

struct index_lists {
  std::vector<std::int64_t> indptr{0};
  std::vector<index_t> indices;
  void add(const std::vector<index_t>& row) {
    indices.insert(indices.end(), row.begin(), row.end());
    indptr.push_back(std::int64_t(indices.size()));
  }
  void write(engine::safetensors_writer& file, const std::string& name) const {
    file.add(name + ".indptr", {std::int64_t(indptr.size())}, std::span<const std::int64_t>(indptr));
    file.add(name + ".indices", {std::int64_t(indices.size())}, std::span<const std::int32_t>(indices));
  }
};

// The last turn's lines, by query head, and what its rows attended along them.
void write_lines(const tessera::prompt_lines& lines, const prompt_outputs& prompt, const layer_tensors& layer,
                 engine::safetensors_writer& file) {
  index_lists vertical, slash;
  for (index_t head = 0; head < layer.q_heads; ++head) {
    const bool any = std::size_t(head) < lines.heads.size();
    vertical.add(any ? lines.heads[std::size_t(head)].vertical : tessera::host_vector<index_t>{});
    slash.add(any ? lines.heads[std::size_t(head)].slash : tessera::host_vector<index_t>{});
  }
  const std::int64_t rows = layer.tokens - prompt.first;
  file.add("lines.rows", {std::int64_t(lines.rows.size())}, std::span<const std::int32_t>(lines.rows));
  vertical.write(file, "lines.vertical");
  slash.write(file, "lines.slash");
  std::vector<index_t> dense;
  for (index_t row = lines.heads.empty() ? prompt.first : lines.dense_from; row < layer.tokens; ++row)
    dense.push_back(row);
  if (!dense.empty()) file.add("lines.dense_rows", {std::int64_t(dense.size())}, std::span<const std::int32_t>(dense));
  file.add("prefill_out", {rows, layer.q_heads, layer.head_dim}, std::span<const float>(prompt.out));
  file.add("prefill_lse", {rows, layer.q_heads}, std::span<const float>(prompt.lse));
}

// Errors: a score that is no number, or -infinity, by which tokens would be ranked last without a word. What stays in any case has
// infinity.
void require_scores(const ranked_tokens& ranked, index_t kv_heads) {
  for (std::size_t row = 0; row < ranked.scores.size(); ++row) {
    for (std::size_t i = 0; i < ranked.scores[row].size(); ++i) {
      if (ranked.scores[row][i] > -tessera::infinity) continue;
      const bool by_kv_head = ranked.scores.size() <= std::size_t(kv_heads);
      tessera::fail("layer 0, " + std::string(by_kv_head ? "KV head " : "query head ") + std::to_string(row) +
                        ", prompt token " + std::to_string(ranked.positions[row][i]) + ": the score",
                    without_sign_of_nan(ranked.scores[row][i]), "a finite number",
                    "products overflow float: scale queries, keys or values");
    }
  }
}

// A row for each KV head, or for each query head where these choose apart. Returns how many tokens have a score.
std::int64_t write_scores(const ranked_tokens& ranked, index_t kv_heads, engine::safetensors_writer& file) {
  std::vector<std::int64_t> indptr{0};
  std::vector<index_t> positions;
  std::vector<float> values;
  for (std::size_t head = 0; head < std::max(std::size_t(kv_heads), ranked.scores.size()); ++head) {
    if (head < ranked.scores.size()) {
      positions.insert(positions.end(), ranked.positions[head].begin(), ranked.positions[head].end());
      values.insert(values.end(), ranked.scores[head].begin(), ranked.scores[head].end());
    }
    indptr.push_back(std::int64_t(values.size()));
  }
  file.add("scores.indptr", {std::int64_t(indptr.size())}, std::span<const std::int64_t>(indptr));
  file.add("scores.positions", {std::int64_t(positions.size())}, std::span<const std::int32_t>(positions));
  file.add("scores.values", {std::int64_t(values.size())}, std::span<const float>(values));
  return indptr.back();
}

// What is left of the vectors, of a method that keeps every token and leaves elements of them out.
void write_packed(method_cache& cache, const layer_tensors& layer, engine::safetensors_writer& file) {
  const std::optional<unpacked_rows> rows = cache.unpacked(0);
  if (!rows || rows->k.size() != layer.k.values.size()) return;  // none, or heads hold other tokens
  file.add("packed.k", {layer.kv_heads, layer.tokens, layer.head_dim}, std::span<const float>(rows->k));
  file.add("packed.v", {layer.kv_heads, layer.tokens, layer.head_dim}, std::span<const float>(rows->v));
}

// Runs the decode steps one by one and writes down what they read and what came out.
void decode(const layer_tensors& layer, method_cache& cache, engine::safetensors_writer& file) {
  const index_t steps = layer.q_decode ? layer.q_decode->shape[0] : 0;
  const std::size_t row = std::size_t(layer.q_heads) * std::size_t(layer.head_dim);
  std::vector<float> out(std::size_t(steps) * row), lse(std::size_t(steps) * std::size_t(layer.q_heads));
  index_lists attended;
  const auto one = [](const tensor& all, index_t step) {
    input_rows rows = all.tokens_first();
    rows.data = rows.row(0, step, 0);
    rows.tokens = 1;
    return rows;
  };
  cache.trace_attended();
  for (index_t step = 0; step < steps; ++step) {
    if (!layer.step_boundaries.empty())
      cache.begin_chunk(std::span(layer.step_boundaries).subspan(std::size_t(step), 1));
    cache.step(0, one(*layer.q_decode, step), one(*layer.k_decode, step), one(*layer.v_decode, step),
               out.data() + std::size_t(step) * row, lse.data() + std::size_t(step) * std::size_t(layer.q_heads));
    for (const auto& positions : cache.attended(0)) attended.add(positions);
    require_finite_row(out, std::size_t(step) * row, layer, "step " + std::to_string(step));
  }
  attended.write(file, "attend");
  file.add("out", {steps, layer.q_heads, layer.head_dim}, std::span<const float>(out));
  file.add("lse", {steps, layer.q_heads}, std::span<const float>(lse));
}

// The shape of a model of this one layer.
tessera::model_shape shape_of(const layer_tensors& layer, const method_info& method, const compress_options& options) {
  tessera::model_shape shape{1, layer.q_heads, layer.kv_heads};
  tessera::require(options.rope_theta.has_value() == method.needs_rope, "rope_theta",
                   options.rope_theta ? "set for " + method.name : "missing",
                   method.needs_rope ? "the base of the model's RoPE, for " + method.name
                                     : "nothing: " + method.name + " does not turn queries",
                   method.needs_rope ? "add --set rope_theta=NUMBER, as rope_theta in the model's config.json says"
                                     : "leave it out");
  if (layer.projection) {
    shape.output_projection = layer.projection->values.data();
    shape.hidden = layer.projection->shape[2];
  }
  const index_t pairs = layer.head_dim / 2;
  for (index_t d = 0; options.rope_theta && d < pairs; ++d) {
    shape.rope_frequencies.push_back(float(std::pow(double(*options.rope_theta), -double(d) / double(pairs))));
  }
  return shape;
}

}  // namespace

compressed compress(const safetensors_file& in, const compress_options& options) {
  const method_info& method = find_method(options.method);
  (void)method.configured(options.settings);  // before anything is read
  if (options.scores) {
    tessera::require(method.ranks, "--scores", "asked of " + method.name, "a method that ranks the prompt's tokens",
                     "leave it out: " + method.name + " gives no token of the prompt a score");
    tessera::require(options.where == backend::cpu, "--scores", "asked of the backend cuda", "the backend cpu",
                     "leave out one of them");
  }
  tessera::require(!method.rereads, "method", method.name, "one that needs no engine",
                   "use `tessera run` or `tessera eval`: the model must read the prompt once more");
  const layer_tensors layer = read_layer(in);
  tessera::require(!method.needs_segments || in.contains("boundaries"), "tensor boundaries", "missing",
                   "[tokens] U8, 1 where a segment of the text ends, for " + method.name, "add it to the file");
  tessera::require(!method.takes_scores || !layer.scores.empty(), "tensor scores", "missing",
                   "[kv_heads, tokens] F32, what a gate gives each token, for " + method.name, "add it to the file");
  const index_t steps = layer.q_decode ? layer.q_decode->shape[0] : 0;
  tessera::require(!method.needs_step_segments || steps == 0 || in.contains("boundaries_decode"),
                   "tensor boundaries_decode", "missing",
                   "[steps] U8, 1 where a segment of the text ends, for " + method.name, "add it to the file");
  const auto cache = make_cache(method, options.where,
                                {shape_of(layer, method, options), layer.head_dim, layer.element, options.budget,
                                 options.settings, options.workers, layer.tokens + steps});
  const bool blocks = method.keeps_blocks_of_segments && options.where == backend::cpu;
  if (method.ranks) (void)cache->trace_ranked();
  compressed result;
  const auto turns = read_turns(in, layer.tokens);
  if (method.chooses_lines) (void)cache->trace_lines();
  const prompt_outputs prompt = prefill(layer, turns, method, *cache);
  if (method.ranks) require_scores(cache->ranked(0), layer.kv_heads);
  index_lists kept;
  for (index_t head = 0; head < layer.kv_heads; ++head) kept.add(cache->positions(0, head));
  kept.write(result.file, "keep");
  write_packed(*cache, layer, result.file);
  if (const auto pages = cache->pages()) {
    for (const auto& [name, counts] : {std::pair{"used", &pages->used}, std::pair{"reserved", &pages->reserved}})
      result.file.add("pages." + std::string(name), {std::int64_t(counts->size())}, std::span(std::as_const(*counts)));
  }
  if (method.chooses_lines) write_lines(cache->lines(0), prompt, layer, result.file);
  if (options.scores) result.ranked = write_scores(cache->ranked(0), layer.kv_heads, result.file);
  if (blocks) {
    const ranked_tokens ranked = cache->ranked(0);  // one set for all heads, or that of the first one
    const auto sizes = ranked.blocks.empty() ? tessera::host_vector<index_t>() : ranked.blocks.front();
    result.file.add("segments.block_size", {std::int64_t(sizes.size())}, std::span<const std::int32_t>(sizes));
  }
  result.unused = unused_tensors(in, *cache, layer, method);
  result.kv_heads = layer.kv_heads;
  result.tokens = layer.tokens;
  result.kept = kept.indptr.back();
  result.bytes_full = cache->full_bytes(layer.tokens);
  result.bytes_held = cache->bytes();
  decode(layer, *cache, result.file);
  result.reads = cache->reads();

  result.file.set_metadata("method", method.name);
  if (method.has_budget && options.budget) result.file.set_metadata("budget", std::to_string(*options.budget));
  const auto parameters = method.planned(options.settings, options.budget, turns[0].second, layer.head_dim);
  for (const parameter_info& parameter : parameters) result.file.set_metadata(parameter.name, parameter.value);
  result.file.set_metadata("bytes_full", std::to_string(result.bytes_full));
  result.file.set_metadata("bytes_held", std::to_string(result.bytes_held));
  result.file.set_metadata("bytes_read_per_step",
                           std::to_string(result.reads.steps ? result.reads.bytes / result.reads.steps : 0));
  return result;
}

}  // namespace tool
