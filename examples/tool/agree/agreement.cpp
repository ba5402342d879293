#include "agreement.hpp"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <numeric>
#include <tessera/core/error.hpp>

namespace tool {
namespace {

std::string row_name(const variant& row) {
  std::string name = row.method->name;
  if (row.budget) name += "/" + std::to_string(*row.budget);
  return row.differs.empty() ? name : name + " " + row.differs;
}

}  // namespace

next_token::next_token(std::vector<float> from) : logits(std::move(from)) {
  const float top = *std::max_element(logits.begin(), logits.end());
  double sum = 0;
  for (const float logit : logits) sum += std::exp(double(logit) - top);
  log_sum = top + std::log(sum);
}

double divergence(const next_token& p, const next_token& q) {
  double sum = 0;
  for (std::size_t i = 0; i < p.logits.size(); ++i) {
    const double log_p = double(p.logits[i]) - p.log_sum, log_q = double(q.logits[i]) - q.log_sum;
    sum += std::exp(log_p) * (log_p - log_q);
  }
  return sum < 0 ? 0 : sum;  // rounding could give -1e-17; NaN stays
}

double agreement::perplexity() const { return steps ? std::exp(surprise / double(steps)) : 0; }
double agreement::mean_divergence() const {
  return steps ? std::accumulate(divergences.begin(), divergences.end(), 0.0) / double(steps) : 0;
}
double agreement::divergence_of(double share) const {
  if (divergences.empty()) return 0;
  for (const double off : divergences) {
    if (std::isnan(off)) return off;
  }
  std::vector<double> sorted = divergences;
  std::sort(sorted.begin(), sorted.end());
  const auto wanted = std::size_t(std::ceil(share * double(sorted.size())));
  return sorted[std::min(sorted.size() - 1, std::max<std::size_t>(wanted, 1) - 1)];
}

agreement_run::agreement_run(runner& model, const engine::tokenizer& tokenizer, std::vector<variant> variants,
                             element_type element, std::shared_ptr<tessera::cpu::executor> workers)
    : model_(model),
      tokenizer_(tokenizer),
      evaluation_(model, tokenizer, std::move(variants), element, std::move(workers)) {
  const auto& all = evaluation_.variants();
  tessera::require(!all.empty() && all.front().method->name == "full", "first method",
                   all.empty() ? "none" : all.front().method->name, "full", "compare with the full cache");
}

void agreement_run::call_often(std::function<void()> tick) {
  tick_ = tick;
  evaluation_.call_often(std::move(tick));
}

void agreement_run::run(const text_piece& piece) {
  std::vector<length_sums> sums = sums_;
  auto found = std::ranges::lower_bound(sums, piece.length, {}, &length_sums::length);
  if (found == sums.end() || found->length != piece.length)
    found = sums.insert(found, {piece.length, std::vector<agreement>(variants().size())});
  full_.clear();
  const std::vector<planned_turn> turns{{piece.prompt, "", std::int32_t(piece.following.size())}};
  evaluation_.prompt_all(turns, [&](std::size_t variant, std::vector<float> logits, method_cache& cache) {
    follow(variant, piece, std::move(logits), cache, found->by_variant[variant]);
  });
  sums_ = std::move(sums);
}

void agreement_run::follow(std::size_t variant, const text_piece& piece, std::vector<float> logits, method_cache& cache,
                           agreement& own) {
  own.by_step.resize(std::max(own.by_step.size(), piece.following.size()));
  own.bytes_held += double(cache.bytes());
  own.bytes_full += double(cache.full_bytes(index_t(cache.next_position())));
  ++own.pieces;
  for (std::size_t step = 0; step < piece.following.size(); ++step) {
    tick_();
    const engine::token_t next = piece.following[step];
    const next_token predicted(std::move(logits));
    if (variant == 0) full_.push_back(predicted);
    const next_token& full = full_[step];
    const double off = divergence(full, predicted);
    own.same += engine::best_token(full.logits) == engine::best_token(predicted.logits);
    own.identical += std::ranges::equal(full.logits, predicted.logits);
    own.surprise -= predicted.log_probability(next);
    own.divergences.push_back(off);
    own.by_step[step].divergence += off;
    ++own.by_step[step].count;
    ++own.steps;
    if (step + 1 == piece.following.size()) break;
    const auto ends = tokenizer_.ends_segment();
    cache.begin_chunk(ends.subspan(std::size_t(next), 1));
    logits = model_.decode({&next, 1}, cache);
  }
  own.bytes_read += double(cache.reads().bytes);
}

std::string agreement_table(const std::vector<variant>& variants, const std::vector<length_sums>& sums) {
  std::size_t width = 6;
  for (const variant& row : variants) width = std::max(width, row_name(row).size());
  char line[256];
  std::string text;
  for (const length_sums& at : sums) {
    if (sums.size() > 1) text += (text.empty() ? "" : "\n") + ("prompts of " + std::to_string(at.length)) + " tokens\n";
    std::snprintf(line, sizeof line, "%-*s  %10s  %9s  %9s  %8s  %6s\n", int(width), "method", "perplexity", "KL mean",
                  "KL 99 %", "same top", "held");
    text += line;
    for (std::size_t i = 0; i < variants.size(); ++i) {
      const agreement& sum = at.by_variant[i];
      std::snprintf(line, sizeof line, "%-*s  %10.4f  %9.5f  %9.5f  %6.2f %%  %4.1f %%\n", int(width),
                    row_name(variants[i]).c_str(), sum.perplexity(), sum.mean_divergence(), sum.divergence_of(0.99),
                    100 * sum.same_share(), sum.bytes_full > 0 ? 100 * sum.bytes_held / sum.bytes_full : 0);
      text += line;
    }
  }
  return text;
}

namespace {

nlohmann::ordered_json row_of(const variant& made, std::int64_t length, const agreement& sum) {
  nlohmann::ordered_json row;
  row["method"] = made.method->name;
  row["budget"] = made.budget ? nlohmann::ordered_json(*made.budget) : nlohmann::ordered_json(nullptr);
  for (const parameter_info& parameter : made.method->configured(made.settings))
    row["parameters"][parameter.name] = parameter.value;
  row["prompt"] = length;
  row["pieces"] = sum.pieces;
  row["steps"] = sum.steps;
  row["perplexity"] = sum.perplexity();
  row["kl_mean"] = sum.mean_divergence();
  row["kl_99"] = sum.divergence_of(0.99);
  row["same_top"] = sum.same_share();
  row["same_logits"] = sum.identical_share();
  row["bytes_held"] = sum.bytes_held;
  row["bytes_full"] = sum.bytes_full;
  row["bytes_read_per_step"] = sum.steps ? sum.bytes_read / double(sum.steps) : 0;
  for (const auto& step : sum.by_step) row["kl_by_step"].push_back(step.divergence / double(step.count));
  return row;
}

}  // namespace

std::string agreement_json(const std::vector<variant>& variants, const std::vector<length_sums>& sums) {
  nlohmann::ordered_json all = nlohmann::ordered_json::array();
  for (const length_sums& at : sums) {
    for (std::size_t i = 0; i < variants.size(); ++i) all.push_back(row_of(variants[i], at.length, at.by_variant[i]));
  }
  return all.dump(1) + "\n";
}

}  // namespace tool
