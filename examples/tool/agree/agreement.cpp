#include "agreement.hpp"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <numeric>
#include <tessera/core/error.hpp>

namespace tool {
namespace {

/// Log-probabilities in place of logits, computed in double.
void to_log_probabilities(std::vector<float>& logits) {
  const float top = *std::max_element(logits.begin(), logits.end());
  double sum = 0;
  for (const float logit : logits) sum += std::exp(double(logit) - top);
  const double shift = top + std::log(sum);
  for (float& logit : logits) logit = float(logit - shift);
}

/// KL(p, q) of two distributions, given as log-probabilities. Never below 0: float rounding could give -1e-8.
double divergence(const std::vector<float>& p, const std::vector<float>& q) {
  double sum = 0;
  for (std::size_t i = 0; i < p.size(); ++i) sum += std::exp(double(p[i])) * (double(p[i]) - q[i]);
  return std::max(0.0, sum);
}

std::string row_name(const variant& row) {
  std::string name = row.method->name;
  if (row.budget) name += "/" + std::to_string(*row.budget);
  return row.differs.empty() ? name : name + " " + row.differs;
}

}  // namespace

double agreement::perplexity() const { return steps ? std::exp(surprise / double(steps)) : 0; }
double agreement::mean_divergence() const {
  return steps ? std::accumulate(divergences.begin(), divergences.end(), 0.0) / double(steps) : 0;
}
double agreement::divergence_of(double share) const {
  if (divergences.empty()) return 0;
  std::vector<double> sorted = divergences;
  std::sort(sorted.begin(), sorted.end());
  const auto wanted = std::size_t(std::ceil(share * double(sorted.size())));
  return sorted[std::min(sorted.size() - 1, std::max<std::size_t>(wanted, 1) - 1)];
}

std::vector<text_piece> pieces_of(std::span<const engine::token_t> text, std::span<const engine::token_t> first,
                                  std::size_t count, std::int64_t prompt, std::int64_t following) {
  const auto own = prompt - std::int64_t(first.size()), needed = own + following, have = std::int64_t(text.size());
  tessera::require(own >= 1 && have >= needed, "tokens of the text", have,
                   "at least " + std::to_string(std::max<std::int64_t>(needed, 1 + following)) + ", which a piece has",
                   "pass a longer text, or a smaller --prompt or --steps");
  std::vector<text_piece> pieces;
  for (std::size_t i = 0; i < count; ++i) {
    const auto at = count > 1 ? std::int64_t(i) * (have - needed) / std::int64_t(count - 1) : 0;
    text_piece piece{{first.begin(), first.end()}, {}};
    piece.prompt.insert(piece.prompt.end(), text.begin() + at, text.begin() + at + own);
    piece.following.assign(text.begin() + at + own, text.begin() + at + needed);
    pieces.push_back(std::move(piece));
  }
  return pieces;
}

agreement_run::agreement_run(runner& model, const engine::tokenizer& tokenizer, std::vector<variant> variants,
                             element_type element, std::shared_ptr<tessera::cpu::executor> workers)
    : model_(model),
      tokenizer_(tokenizer),
      evaluation_(model, tokenizer, std::move(variants), element, std::move(workers)),
      sums_(evaluation_.variants().size()) {
  const auto& all = evaluation_.variants();
  tessera::require(!all.empty() && all.front().method->name == "full", "first method",
                   all.empty() ? "none" : all.front().method->name, "full", "compare with the full cache");
}

void agreement_run::call_often(std::function<void()> tick) {
  tick_ = tick;
  evaluation_.call_often(std::move(tick));
}

void agreement_run::run(const text_piece& piece) {
  std::vector<agreement> sums = sums_;
  full_.clear();
  const std::vector<planned_turn> turns{{piece.prompt, "", std::int32_t(piece.following.size())}};
  evaluation_.prompt_all(turns, [&](std::size_t variant, std::vector<float> logits, method_cache& cache) {
    follow(variant, piece, std::move(logits), cache, sums);
  });
  sums_ = std::move(sums);
}

void agreement_run::follow(std::size_t variant, const text_piece& piece, std::vector<float> logits, method_cache& cache,
                           std::vector<agreement>& sums) {
  agreement& own = sums[variant];
  own.by_step.resize(std::max(own.by_step.size(), piece.following.size()));
  own.bytes_held += double(cache.bytes());
  own.bytes_full += double(cache.full_bytes(index_t(cache.next_position())));
  for (std::size_t step = 0; step < piece.following.size(); ++step) {
    tick_();
    const engine::token_t next = piece.following[step], likeliest = engine::best_token(logits);
    to_log_probabilities(logits);
    if (variant == 0) full_.push_back(logits);
    const double off = variant == 0 ? 0 : divergence(full_[step], logits);
    own.same += engine::best_token(full_[step]) == likeliest;
    own.surprise -= double(logits[std::size_t(next)]);
    own.divergences.push_back(off);
    own.by_step[step] += off;
    ++own.steps;
    if (step + 1 == piece.following.size()) break;
    const auto ends = tokenizer_.ends_segment();
    cache.begin_chunk(ends.subspan(std::size_t(next), 1));
    logits = model_.decode({&next, 1}, cache);
  }
  own.bytes_read += double(cache.reads().bytes);
}

std::string agreement_table(const std::vector<variant>& variants, const std::vector<agreement>& sums) {
  std::size_t width = 6;
  for (const variant& row : variants) width = std::max(width, row_name(row).size());
  char line[256];
  std::snprintf(line, sizeof line, "%-*s  %10s  %9s  %9s  %8s  %6s\n", int(width), "method", "perplexity", "KL mean",
                "KL 99 %", "same top", "held");
  std::string text = line;
  for (std::size_t i = 0; i < variants.size(); ++i) {
    const agreement& sum = sums[i];
    std::snprintf(line, sizeof line, "%-*s  %10.4f  %9.5f  %9.5f  %6.2f %%  %4.1f %%\n", int(width),
                  row_name(variants[i]).c_str(), sum.perplexity(), sum.mean_divergence(), sum.divergence_of(0.99),
                  100 * sum.same_share(), sum.bytes_full > 0 ? 100 * sum.bytes_held / sum.bytes_full : 0);
    text += line;
  }
  return text;
}

std::string agreement_json(const std::vector<variant>& variants, const std::vector<agreement>& sums) {
  nlohmann::ordered_json all = nlohmann::ordered_json::array();
  for (std::size_t i = 0; i < variants.size(); ++i) {
    const agreement& sum = sums[i];
    nlohmann::ordered_json row;
    row["method"] = variants[i].method->name;
    row["budget"] = variants[i].budget ? nlohmann::ordered_json(*variants[i].budget) : nlohmann::ordered_json(nullptr);
    for (const parameter_info& parameter : variants[i].method->configured(variants[i].settings))
      row["parameters"][parameter.name] = parameter.value;
    row["steps"] = sum.steps;
    row["perplexity"] = sum.perplexity();
    row["kl_mean"] = sum.mean_divergence();
    row["kl_99"] = sum.divergence_of(0.99);
    row["same_top"] = sum.same_share();
    row["bytes_held"] = sum.bytes_held;
    row["bytes_full"] = sum.bytes_full;
    row["bytes_read_per_step"] = sum.steps ? sum.bytes_read / double(sum.steps) : 0;
    const double pieces = sum.by_step.empty() ? 1 : double(sum.steps) / double(sum.by_step.size());
    for (const double step : sum.by_step) row["kl_by_step"].push_back(step / pieces);
    all.push_back(std::move(row));
  }
  return all.dump(1) + "\n";
}

}  // namespace tool
