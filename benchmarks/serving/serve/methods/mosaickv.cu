#include "../served.cuh"
#include "tessera/methods/mosaickv.hpp"

namespace serving {

/// Packed rows have memory for the longest conversation in every sequence. The pool has prompts under way, documents, and
/// the newest tokens of the others.
outcome serve_mosaickv(const serving_case& given) {
  auto setup = with_share(tessera::mosaickv<bf16, head_dim, head_dim, rows_in_pages>{}, given);
  const extents counts(given.conversations, given.options.shares_prefixes);
  setup.pooled = std::min(1.0, 96 / counts.mean_own);
  return serve_on_device(std::move(setup), given);
}

}  // namespace serving
