// tessera calibrate
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <limits>
#include <tessera/math/share.hpp>
#include <tessera/runtime/calibration.hpp>

#include "engine/files/input_file.hpp"
#include "engine/files/output_file.hpp"
#include "tool/backend.hpp"
#include "tool/commands.hpp"
#include "tool/eval/report.hpp"
#include "tool/methods/registry.hpp"
#include "tool/methods/values.hpp"
#include "tool/profile/profile_file.hpp"
#include "tool/profile/sample_prompts.hpp"
#include "tool/progress.hpp"

namespace tool {
namespace {

double parse_real(const char* name, const std::string& text, tessera::value_range<double> allowed) {
  double value = 0;
  parse_value(name, text, allowed.text(), value);
  allowed.check(name, value, std::string("pass another ") + name);
  return value;
}

/// What each head keeps of one prompt where its layer keeps `share` of it, whichever heads that belongs to.
std::vector<double> shares_of(const method_cache& cache, const tessera::model_shape& shape, index_t tokens,
                              double share) {
  std::vector<double> all;
  for (index_t layer = 0; layer < shape.layers; ++layer) {
    const ranked_tokens ranked = cache.ranked(layer);
    tessera::require(ranked.scores.size() == std::size_t(shape.kv_heads), "rankings of a layer", ranked.scores.size(),
                     "one for each KV head, which are " + std::to_string(shape.kv_heads),
                     "leave out what makes query heads choose apart");
    std::vector<float> values;
    std::vector<offset_t> offsets;
    const std::vector<index_t> lengths(std::size_t(shape.kv_heads), tokens);
    for (const auto& head : ranked.scores) {
      offsets.push_back(offset_t(values.size()));
      values.insert(values.end(), head.begin(), head.end());
    }
    if (values.empty()) {  // a layer that keeps everything
      all.insert(all.end(), std::size_t(shape.kv_heads), 1.0);
      continue;
    }
    tessera::layer_scores scores;
    scores.kv_heads = shape.kv_heads;
    scores.protected_tail = tokens - index_t(ranked.scores.front().size());
    scores.tokens = lengths.data();
    scores.offsets = offsets.data();
    scores.scores = values.data();
    const auto kept = tessera::layer_wide_shares(scores, share);
    all.insert(all.end(), kept.begin(), kept.end());
  }
  return all;
}

/// How alike heads rank from sample to sample, and from family to family.
rank_stability stability_of(const tessera::calibration& samples, const tessera::profile& profile,
                            const std::vector<std::string>& families) {
  rank_stability result;
  result.families = families;
  result.least = 1;
  result.family_shares.assign(families.size(), std::vector<double>(profile.mean.size(), 0.0));
  std::vector<double> counts(families.size(), 0.0);
  for (index_t i = 0; i < samples.samples(); ++i) {
    const double alike = tessera::rank_correlation(samples.sample(i), profile.mean);
    result.mean += alike / double(samples.samples());
    result.least = std::min(result.least, alike);
    const std::size_t family = std::size_t(i) % families.size();
    counts[family] += 1;
    for (std::size_t h = 0; h < profile.mean.size(); ++h) result.family_shares[family][h] += samples.sample(i)[h];
  }
  for (std::size_t family = 0; family < families.size(); ++family) {
    for (double& share : result.family_shares[family]) share /= std::max(1.0, counts[family]);
  }
  for (const auto& one : result.family_shares) {
    result.between.emplace_back();
    for (const auto& other : result.family_shares)
      result.between.back().push_back(tessera::rank_correlation(one, other));
  }
  return result;
}

}  // namespace

void calibrate(const calibrate_options& given) {
  const method_info& method = find_method(given.method);
  tessera::require(method.ranks, "--method", method.name, "a method that ranks the prompt's tokens",
                   "`tessera list` shows the methods; snapkv is one");
  const std::vector<setting> settings = parse_settings(given.settings);
  (void)method.configured(settings);
  // A method that chooses again after so many outputs may let a prompt's end pass: here it chooses there.
  const bool chooses_later = has_parameter(method, "every") && has_parameter(method, "first") &&
                             std::ranges::find(settings, "first", &setting::name) == settings.end();
  const double share = parse_real("--share", given.share, {1e-6, 1.0});
  const double alpha = parse_real("--alpha", given.alpha, tessera::profile::alphas);
  sample_prompts prompts(given, given.samples);
  const index_t count = prompts.count();
  const auto workers = make_workers(given.threads);
  engine::require_writable(given.out);
  const std::filesystem::path folder = given.model;
  prompts.open(folder);
  const engine::llama_config& config = prompts.config();
  const engine::tokenizer& tokenizer = prompts.tokenizer();
  const auto model = [&] {
    progress_line progress("loading the model");
    return load_model(folder, backend::cpu, *workers);
  }();

  const tessera::model_shape shape = shape_of(config);
  tessera::calibration samples(shape.layers, shape.kv_heads);
  {
    progress_line progress("prompts");
    for (index_t i = 0; i < count; ++i) {
      progress.update(i, count);
      const std::vector<engine::token_t> prompt = prompts.prompt(i);
      const auto tokens = index_t(prompt.size());
      std::vector<setting> own = settings;
      if (method.fuses_chunks) own.push_back({"chunk", std::to_string(tessera::max_tokens)});  // one choice a prompt
      if (chooses_later) own.push_back({"first", "0"});                                        // at its end
      const auto kept = index_t(tessera::decimal_share(share).up(tokens));
      const index_t budget = std::clamp(kept, method.budgets.least, tokens - 1);  // all must compete
      const auto cache =
          make_cache(method, backend::cpu, {shape, config.head_dim, element_type::fp32, budget, own, workers, tokens});
      (void)cache->trace_ranked();
      const std::vector<std::uint8_t> boundaries = tokenizer.boundaries(prompt);
      engine::prefill_options options;
      options.boundaries = boundaries;
      options.repeat = repeat_sentences(tokenizer);
      (void)model->prefill(prompt, *cache, options);
      samples.add(shares_of(*cache, shape, tokens, share));
    }
  }
  tessera::profile profile = samples.finish(share, alpha);
  profile.model = std::filesystem::weakly_canonical(folder).filename().string();
  profile.method = method.name;
  if (given.renormalise) profile.renormalise();
  profile.check();
  const rank_stability stability = stability_of(samples, profile, prompts.families());
  engine::write_file(given.out, profile_text(profile, stability));

  double budget = 0, least_between = 1;
  for (const double one : profile.budget) budget += one / double(profile.budget.size());
  for (const auto& row : stability.between) {
    for (const double alike : row) least_between = std::min(least_between, alike);
  }
  std::printf(
      "%s over %d prompts of %zu families: heads keep %.1f to %.1f %% of a prompt, %.1f %% on average (share %.1f "
      "%%).\n"
      "Order of the heads: a prompt and the mean of all correlate by %.3f (least %.3f), two families by %.3f at "
      "least.\n"
      "Wrote %s\n",
      method.name.c_str(), count, prompts.families().size(),
      100 * *std::min_element(profile.budget.begin(), profile.budget.end()),
      100 * *std::max_element(profile.budget.begin(), profile.budget.end()), 100 * budget, 100 * share, stability.mean,
      stability.least, least_between, engine::printable(given.out).c_str());
}

}  // namespace tool
