// What ragged pages waste, and what grouping heads by their shares reclaims, on made-up profiles of 32 layers of 8 KV heads:
//   build/release/bin/bench_page_waste [tokens of the prompt]
// Waste is what the pages hold beside the kept tokens: empty slots of heads that are shorter than their group's longest, and of
// last pages; in percent of what is kept.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <string>
#include <tessera/budget/calibrated.hpp>
#include <tessera/runtime/page_plan.hpp>
#include <vector>

using namespace tessera;

namespace {

constexpr index_t layers = 32, kv_heads = 8, page = 16, window = 32, chunk = 2048;

/// Shares of a mean, by layer: heads of every layer differ by a factor, some retrieve and keep almost all.
std::vector<double> shares_like(const std::string& kind, double mean, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  std::normal_distribution<double> normal;
  std::uniform_real_distribution<double> uniform;
  std::vector<double> shares;
  for (index_t layer = 0; layer < layers; ++layer) {
    const double of_layer = 0.25 * normal(random);
    for (index_t head = 0; head < kv_heads; ++head) {
      double share = std::exp(of_layer + 0.7 * normal(random));
      if (kind == "few retrieve") share = uniform(random) < 0.12 ? 2.5 + 0.5 * normal(random) : 0.4 * share;
      shares.push_back(share);
    }
  }
  for (int pass = 0; pass < 20; ++pass) {  // to the mean, none above 1
    double sum = 0;
    for (const double share : shares) sum += share;
    for (double& share : shares) share = std::clamp(share * mean * double(shares.size()) / sum, 0.005, 1.0);
  }
  return shares;
}

}  // namespace

int main(int count, char** arguments) {
  const index_t prompt = count > 1 ? index_t(std::atoi(arguments[1])) : 32'768;
  std::printf(
      "| profile | mean share | heads | pages none | layer | model | fitted | waste none | layer | model | fitted | "
      "reclaimed |\n");
  std::printf("| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |\n");
  bool fits = true;
  for (const std::string kind : {"log-normal", "few retrieve"}) {
    for (const double mean : {0.5, 0.3, 0.1}) {
      for (const index_t heads : {2, 4, 8}) {
        const auto shares = shares_like(kind, mean, 12);
        const calibrated budget{.shares = {shares.data(), layers, kv_heads}};
        double pages[4] = {}, waste[4] = {};
        for (const clustering among : {clustering::none, clustering::layer, clustering::model, clustering::fitted}) {
          const head_groups groups = group_heads(layers, kv_heads, heads, among, shares);
          const page_plan plan = plan_pages(
              groups, page, std::vector<index_t>(shares.size(), 0), {prompt, chunk, window},
              [&](index_t layer, index_t head, index_t seen) { return budget.share_of(layer, head, seen); },
              [](index_t) { return false; }, [](index_t) { return 0; });
          double kept = 0, held = 0;
          for (index_t h = 0; h < layers * kv_heads; ++h)
            kept += std::max(window, budget.share_of(h / kv_heads, h % kv_heads, prompt));
          for (const index_t one : plan.final_pages) held += double(one) * page * heads;
          const int at = among == clustering::none    ? 0
                         : among == clustering::layer ? 1
                         : among == clustering::model ? 2
                                                      : 3;
          pages[at] = held / (page * heads);
          waste[at] = 100 * (held - kept) / kept;
        }
        // In one layer all 8 heads are one group, however they are sorted.
        std::printf(
            "| %s | %.1f | %d | %.0f | %.0f | %.0f | %.0f | %.1f %% | %.1f %% | %.2f %% | %.2f %% | %.1f %% |\n",
            kind.c_str(), mean, heads, pages[0], pages[1], pages[2], pages[3], waste[0], waste[1], waste[2], waste[3],
            100 * (pages[0] - pages[2]) / pages[0]);
        fits &= waste[3] <= 5 && (waste[2] <= 5 || mean < 0.3);
      }
    }
  }
  std::printf(
      "\nreclaimed: of the pages without clustering, those that clustering over the model saves. %s\n",
      fits
          ? "Waste is at most 5 % of what is kept, clustered over the model for shares of 0.3 and more, fitted for all."
          : "Waste is above 5 % of what is kept, clustered over the model for a share of 0.3 or more, or fitted.");
  return fits ? 0 : 1;
}
