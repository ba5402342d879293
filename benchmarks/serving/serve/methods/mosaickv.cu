#include "../served.cuh"
#include "tessera/methods/mosaickv.hpp"

namespace serving {

/// The pool has prompts under way, documents, packed rows, of which a whole row's pages hold three, and the newest tokens.
outcome serve_mosaickv(const serving_case& given) {
  auto setup = with_share(tessera::mosaickv<bf16, head_dim, head_dim, rows_in_pages>{}, given);
  const extents counts(given.conversations, given.options.shares_prefixes);
  setup.pooled = std::min(1.0, 0.33 + 96 / counts.mean_own);
  // Each segment has a basis of keys and one of values for every head of every layer.
  const engine::llama_config& config = given.model.config();
  const auto& rows = setup.method.layout.rows;
  const double basis = double(rows.key_format().channels + rows.value_format().channels) * head_dim * sizeof(float);
  setup.later_bytes = double(tessera::ceil_div(counts.longest, rows.segment)) * config.num_hidden_layers *
                      config.num_key_value_heads * basis;
  return serve_on_device(std::move(setup), given);
}

}  // namespace serving
