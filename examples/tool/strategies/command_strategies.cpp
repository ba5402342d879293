// tessera strategies
#include <algorithm>
#include <cstdio>
#include <tessera/channels/top_groups.hpp>
#include <tessera/layout/packed/rotated.hpp>
#include <tessera/runtime/eigen.hpp>

#include "strategy_limits.hpp"
#include "tool/backend.hpp"
#include "tool/commands.hpp"
#include "tool/heads/watched_cache.hpp"
#include "tool/methods/registry.hpp"
#include "tool/methods/values.hpp"
#include "tool/profile/sample_prompts.hpp"
#include "tool/progress.hpp"

namespace tool {
namespace {

/// Measures the candidates of every layer of a prompt, each a segment.
void measure(const watched_cache& rows, const engine::llama_config& config, index_t tokens,
             tessera::cpu::executor& workers, measured_segments& to) {
  const index_t heads = config.num_key_value_heads, dim = config.head_dim;
  const index_t left = tessera::rotated{}.channels(dim), stride = heads * dim;
  using search = tessera::strategy_search<tessera::top_groups>;
  std::vector<search> of_heads(std::size_t(config.num_hidden_layers * heads), search(tessera::top_groups{}));
  workers.for_each(index_t(of_heads.size()), [&](index_t i, int) {
    const int layer = int(i / heads);
    const auto loader = [&](const std::vector<float>& from) {
      return [&from, stride, dim, first = i % heads * dim](index_t t, float* row) {
        std::copy_n(from.data() + tessera::offset_t(t) * stride + first, dim, row);
      };
    };
    const std::string of = " of layer " + std::to_string(layer) + ", kv_head " + std::to_string(i % heads);
    search& own = of_heads[std::size_t(i)];
    own.add(tokens, dim, left, "keys" + of, loader(rows.keys(layer)));
    own.add(tokens, dim, left, "values" + of, loader(rows.values(layer)));
    own.add_blocks(tokens, dim, loader(rows.keys(layer)));
  });
  for (int layer = 0; layer < config.num_hidden_layers; ++layer) {
    search& all = of_heads[std::size_t(layer * heads)];
    for (index_t h = 1; h < heads; ++h) all.add(of_heads[std::size_t(layer * heads + h)]);
    to.add(all.measures());
  }
}

/// A line of numbers of all segments: their mean, the least and the most.
template <class Number>
void print_line(const std::string& name, const measured_segments& segments, const Number& number) {
  double sum = 0, least = 1e300, most = -1e300;
  for (const auto& segment : segments.all()) {
    const double x = number(segment);
    sum += x, least = std::min(least, x), most = std::max(most, x);
  }
  std::printf("  %-28s %.4f  (%.4f to %.4f)\n", name.c_str(), sum / double(segments.count()), least, most);
}

}  // namespace

void find_strategy_limits(const strategies_options& given) {
  float share = 0;
  parse_value("--channels", given.channels, "0.125, 0.25 or 0.375", share);
  const auto group = index_t(parse_count("--group", given.group, 1));
  const auto block = index_t(parse_count("--block", given.block, 1));
  measured_segments segments;
  (void)segments.channel_loss(share, group), (void)segments.block_spread(block);  // asks whether they are candidates
  sample_prompts prompts(given, given.samples);
  const auto workers = make_workers(given.threads);
  const std::filesystem::path folder = given.model;
  prompts.open(folder);
  const engine::llama_config& config = prompts.config();
  tessera::require(prompts.context() >= 4 * config.head_dim, "--context", prompts.context(),
                   "at least " + std::to_string(4 * config.head_dim) + ", of which a segment's basis is made",
                   "ask for longer prompts");
  const auto model = [&] {
    progress_line progress("loading the model");
    return load_model(folder, backend::cpu, *workers);
  }();
  {
    progress_line progress("prompts");
    for (index_t i = 0; i < prompts.count(); ++i) {
      progress.update(i, prompts.count());
      const std::vector<engine::token_t> prompt = prompts.prompt(i);
      cache_request request;
      request.shape = shape_of(config);
      request.head_dim = config.head_dim;
      request.workers = workers;
      request.tokens = index_t(prompt.size());
      watched_cache cache(find_method("full").make(request), config, 1, true);
      (void)model->prefill(prompt, cache);
      measure(cache, config, index_t(prompt.size()), *workers, segments);
    }
  }
  std::printf("%zu segments: %d prompts of %zu families, %d layers. Mean, least and most:\n", segments.count(),
              int(prompts.count()), prompts.families().size(), int(config.num_hidden_layers));
  std::printf("share of the energy that is left out\n");
  for (std::size_t s = 0; s < tessera::strategy_shares.size(); ++s) {
    for (std::size_t g = 0; g < tessera::strategy_groups.size(); ++g) {
      char name[64];
      std::snprintf(name, sizeof name, "%g %% in groups of %d", 100 * double(tessera::strategy_shares[s]),
                    int(tessera::strategy_groups[g]));
      print_line(name, segments, [&](const tessera::strategy_measures& one) { return one.losses[s][g]; });
    }
  }
  std::printf("how far keys differ within blocks, of how far all do\n");
  for (std::size_t b = 0; b < tessera::strategy_blocks.size(); ++b) {
    print_line("blocks of " + std::to_string(tessera::strategy_blocks[b]), segments,
               [&](const tessera::strategy_measures& one) { return one.inside[b] / std::max(one.outside, 1e-300); });
  }
  const found_limit loss = segments.channel_loss(share, group), spread = segments.block_spread(block);
  // As many digits as a limit has: a rounded one may choose something else.
  std::printf("channel_loss=%.9g chooses %g %% of the channels in groups of %d in %zu of %zu segments\n", loss.value,
              100 * double(share), int(group), loss.segments, segments.count());
  std::printf("block_spread=%.9g chooses blocks of %d in %zu of %zu segments\n", spread.value, int(block),
              spread.segments, segments.count());
}

}  // namespace tool
