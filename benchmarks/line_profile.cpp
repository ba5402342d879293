// What share of its lines carries a model's attention, by layer and query head, and how far lines and tokens that matter stay the same:
// between the halves of a text, between texts, and along a text. LoopServe's figures 1, 2 and 4 on a model of one's own.
//
//   line_profile MODEL TEXT CONTEXT INPUTS > profile.json
//
// INPUTS slices of the text, CONTEXT tokens each, pass through the model, whose attention is dense. Lines: of 48 sampled rows, the exact
// greedy with nothing forced, until 0.9 of the weight is covered; a slice has 2 * CONTEXT lines. Tokens: the tenth of the first half
// that a block of 16 queries of the second half gives most weight, summed over the block, for each query head.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "engine/model.hpp"
#include "engine/tokenizer.hpp"
#include "tessera/backend/cpu/attend/attend.hpp"
#include "tessera/backend/cpu/choose/lines.hpp"
#include "tessera/prefill/covering_lines.hpp"

namespace {

using namespace tessera;

constexpr int dim = 64, block = 16;
constexpr double share = 0.9;

/// As `covering_lines`, with nothing that is always taken.
struct best_lines : covering_lines {
  void choose(const sampled_attention& seen, line_cover& cover, line_set& lines) const {
    cover.begin(seen);
    cover.cover(share);
    cover.write(lines);
  }
};

/// Dense attention; keeps the rows of every layer.
class recording final : public engine::kv_cache {
 public:
  struct rows {
    std::vector<float> q, k, v;
    index_t tokens = 0;
  };

  recording(index_t q_heads, index_t kv_heads, index_t layers, cpu::executor& workers)
      : q_heads_(q_heads), kv_heads_(kv_heads), layers_(std::size_t(layers)), workers_(workers) {}

  void prefill(int layer, const float* q, const float* k, const float* v, int tokens, float* out) override {
    rows& held = layers_[std::size_t(layer)];
    held.q.insert(held.q.end(), q, q + offset_t(tokens) * q_heads_ * dim);
    held.k.insert(held.k.end(), k, k + offset_t(tokens) * kv_heads_ * dim);
    held.v.insert(held.v.end(), v, v + offset_t(tokens) * kv_heads_ * dim);
    const index_t first = held.tokens;
    held.tokens += tokens;
    cpu::prefill_attention(view(layer), queries(layer, first, held.tokens, first), {},
                           {nhd_rows(out, tokens, q_heads_, dim), {}}, workers_);
  }
  void end_prefill() override {}
  void decode(int, const float*, const float*, const float*, int, float*) override { std::abort(); }
  std::int64_t next_position() const override { return layers_.back().tokens; }

  /// Rows [begin, end), and where the first of them stands.
  cpu::query_rows<float> queries(int layer, index_t begin, index_t end, const index_t& first) const {
    return {
        nhd_rows(layers_[std::size_t(layer)].q.data() + offset_t(begin) * q_heads_ * dim, end - begin, q_heads_, dim),
        &first};
  }
  kv_view<const float, dim> view(int layer) {
    const rows& held = layers_[std::size_t(layer)];
    kv_view<const float, dim> all;
    all.k = held.k.data();
    all.v = held.v.data();
    all.k_strides = all.v_strides = {0, dim, offset_t(kv_heads_) * dim, 1};
    all.sequences = 1;
    all.kv_heads = kv_heads_;
    all.lengths = &held.tokens;
    return all;
  }

  std::vector<line_set> lines(int layer, index_t begin, index_t end) {
    prompt_lines found;
    cpu::line_workspace<dim> memory;
    auto seen = view(layer);
    seen.lengths = &end;
    cpu::choose_lines(best_lines{}, seen, queries(layer, begin, end, begin), {}, found, memory, workers_);
    return found.heads;
  }

  /// The `count` tokens before `limit` that rows [begin, begin + block) give most weight, by query head, ascending.
  std::vector<std::vector<index_t>> best_tokens(int layer, index_t begin, index_t limit, index_t count) {
    const rows& held = layers_[std::size_t(layer)];
    std::vector<std::vector<index_t>> best;
    std::vector<double> logits, sums;
    for (index_t h = 0; h < q_heads_; ++h) {
      sums.assign(std::size_t(limit), 0.0);
      for (index_t row = begin; row < begin + block; ++row) {
        logits.assign(std::size_t(row) + 1, 0.0);
        double top = -1e300, total = 0;
        for (index_t at = 0; at <= row; ++at) {
          const float* q = held.q.data() + (offset_t(row) * q_heads_ + h) * dim;
          const float* k = held.k.data() + (offset_t(at) * kv_heads_ + h / (q_heads_ / kv_heads_)) * dim;
          float product = 0;
          for (int d = 0; d < dim; ++d) product += q[d] * k[d];
          logits[std::size_t(at)] = product / std::sqrt(double(dim));
          top = std::max(top, logits[std::size_t(at)]);
        }
        for (double& logit : logits) total += logit = std::exp(logit - top);
        for (index_t at = 0; at < limit; ++at) sums[std::size_t(at)] += logits[std::size_t(at)] / total;
      }
      std::vector<index_t> order(static_cast<std::size_t>(limit));
      for (index_t at = 0; at < limit; ++at) order[std::size_t(at)] = at;
      std::stable_sort(order.begin(), order.end(),
                       [&](index_t a, index_t b) { return sums[std::size_t(a)] > sums[std::size_t(b)]; });
      order.resize(std::size_t(count));
      std::sort(order.begin(), order.end());
      best.push_back(order);
    }
    return best;
  }

 private:
  index_t q_heads_, kv_heads_;
  std::vector<rows> layers_;
  cpu::executor& workers_;
};

/// [layers, heads]
class table {
 public:
  table(index_t layers, index_t heads) : heads_(heads), cells_(std::size_t(layers) * std::size_t(heads), 0.0) {}
  double& at(index_t layer, index_t head) { return cells_[std::size_t(layer * heads_ + head)]; }
  void print(const char* name) const {
    std::printf("\"%s\": [", name);
    for (std::size_t i = 0; i < cells_.size(); ++i) {
      const bool begins = i % std::size_t(heads_) == 0, ends = (i + 1) % std::size_t(heads_) == 0;
      std::printf("%s%s%.4f%s", i > 0 ? ", " : "", begins ? "[" : "", cells_[i], ends ? "]" : "");
    }
    std::printf("],\n");
  }

 private:
  index_t heads_;
  std::vector<double> cells_;
};

std::vector<index_t> common(const std::vector<index_t>& a, const std::vector<index_t>& b) {
  std::vector<index_t> both;
  std::set_intersection(a.begin(), a.end(), b.begin(), b.end(), std::back_inserter(both));
  return both;
}
std::vector<index_t> below(std::vector<index_t> lines, index_t limit) {
  lines.erase(std::lower_bound(lines.begin(), lines.end(), limit), lines.end());
  return lines;
}

/// Lines of both over lines of either, of those that both could have: below `limit`.
double overlap(const line_set& a, const line_set& b, index_t limit) {
  double shared = 0, all = 0;
  for (const auto kind : {&line_set::vertical, &line_set::slash}) {
    const auto x = below(a.*kind, limit), y = below(b.*kind, limit);
    const double both = double(common(x, y).size());
    shared += both;
    all += double(x.size() + y.size()) - both;
  }
  return all > 0 ? shared / all : 1;
}

}  // namespace

int main(int count, char** arguments) try {
  require(count == 5, "arguments", count - 1, "4", "pass MODEL TEXT CONTEXT INPUTS");
  const std::filesystem::path folder = arguments[1];
  const index_t context = index_t(std::stol(arguments[3])), inputs = index_t(std::stol(arguments[4]));
  std::ifstream file(arguments[2]);
  const std::string text{std::istreambuf_iterator<char>(file), {}};
  cpu::executor workers(1);
  auto model = engine::llama::load(folder, workers);
  const engine::llama_config& config = model.config();
  require(config.head_dim == dim, "head_dim of the model", config.head_dim, "64", "pass the example model");
  const auto all = engine::tokenizer::load(folder / "tokenizer.model").encode(text);
  require(offset_t(all.size()) >= offset_t(context) * inputs && context >= 64 && inputs >= 1, "tokens of the text",
          offset_t(all.size()), "at least CONTEXT * INPUTS", "ask for less");
  const index_t layers = config.num_hidden_layers, heads = config.num_attention_heads, half = context / 2;
  std::vector<recording> seen;
  for (index_t i = 0; i < inputs; ++i) {
    seen.emplace_back(heads, config.num_key_value_heads, layers, workers);
    const auto begin = all.begin() + offset_t(all.size()) / inputs * i;
    std::vector<engine::token_t> prompt(begin, begin + context);
    model.prefill(prompt, seen.back());
    std::fprintf(stderr, "slice %d of %d\n", i + 1, inputs);
  }

  // By layer and head, means over the inputs.
  table lines(layers, heads), between_halves(layers, heads), between_inputs(layers, heads);
  const index_t kept = half / 10, blocks = half / block;
  std::vector<double> along(std::size_t(blocks), 0.0), pairs(std::size_t(blocks), 0.0);
  for (index_t l = 0; l < layers; ++l) {
    std::vector<std::vector<line_set>> whole;
    for (recording& one : seen) {
      whole.push_back(one.lines(l, 0, context));
      const auto first = one.lines(l, 0, half), second = one.lines(l, half, context);
      for (index_t h = 0; h < heads; ++h) {
        const line_set& own = whole.back()[std::size_t(h)];
        lines.at(l, h) += double(own.vertical.size() + own.slash.size()) / (2.0 * context) / inputs;
        between_halves.at(l, h) += overlap(first[std::size_t(h)], second[std::size_t(h)], half) / inputs;
      }
      std::vector<std::vector<std::vector<index_t>>> best;
      for (index_t b = 0; b < blocks; ++b) best.push_back(one.best_tokens(l, half + b * block, half, kept));
      for (index_t a = 0; a < blocks; ++a) {
        for (index_t b = a + 1; b < blocks; ++b) {
          for (index_t h = 0; h < heads; ++h) {
            along[std::size_t(b - a)] +=
                double(common(best[std::size_t(a)][std::size_t(h)], best[std::size_t(b)][std::size_t(h)]).size()) /
                kept;
            ++pairs[std::size_t(b - a)];
          }
        }
      }
    }
    for (index_t i = 0; i < inputs; ++i) {
      for (index_t j = i + 1; j < inputs; ++j) {
        for (index_t h = 0; h < heads; ++h) {
          const double same =
              overlap(whole[std::size_t(i)][std::size_t(h)], whole[std::size_t(j)][std::size_t(h)], context);
          between_inputs.at(l, h) += same * 2 / (inputs * (inputs - 1.0));
        }
      }
    }
    std::fprintf(stderr, "layer %d of %d\n", l + 1, layers);
  }
  std::printf("{\"context\": %d, \"inputs\": %d, \"weight\": %g,\n", context, inputs, share);
  lines.print("share");
  between_halves.print("between_halves");
  between_inputs.print("between_inputs");
  std::printf("\"along_the_text\": [");  // mean overlap of best tokens by distance in blocks of 16
  for (index_t d = 1; d < blocks; ++d)
    std::printf("%s%.4f", d > 1 ? ", " : "", along[std::size_t(d)] / pairs[std::size_t(d)]);
  std::printf("]}\n");
  return 0;
} catch (const std::exception& problem) {
  std::fprintf(stderr, "line_profile: %s\n", problem.what());
  return 1;
}
