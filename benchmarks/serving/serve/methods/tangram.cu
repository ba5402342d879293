#include "../served.cuh"
#include "tessera/methods/tangram.hpp"

namespace serving {
namespace {

/// Shares as heads of models have them (arXiv:2606.06302, figure 5), made up as the simulator's: log-normal, of deviation 0.7
/// in a layer, with the mean `mean` and none above 1.
std::vector<double> made_up_shares(index_t layers, index_t heads, double mean_share) {
  random_source random(12);
  std::vector<double> shares;
  for (index_t layer = 0; layer < layers; ++layer) {
    const double of_layer = 0.25 * random.normal();
    for (index_t head = 0; head < heads; ++head) shares.push_back(std::exp(of_layer + 0.7 * random.normal()));
  }
  for (int round = 0; round < 20; ++round) {
    const double now = mean(shares);
    for (double& share : shares) share = std::clamp(share * mean_share / now, 0.005, 1.0);
  }
  return shares;
}

}  // namespace

outcome serve_tangram(const serving_case& given) {
  const engine::llama_config& config = given.model.config();
  const index_t layers = config.num_hidden_layers, heads = config.num_key_value_heads;
  const std::vector<double> shares = made_up_shares(layers, heads, given.share);
  served_setup<tessera::tangram<bf16, head_dim>> setup;
  setup.method.retain.budget.shares = setup.method.placement.shares = {shares.data(), layers, heads};
  setup.method.placement.cluster = tessera::clustering::model;
  setup.method.schedule.chunk = given.options.chunk;
  setup.pooled = given.share;
  return serve_on_device(std::move(setup), given);
}

}  // namespace serving
