#include "../served.cuh"
#include "tessera/methods/rocketkv_mt.hpp"

namespace serving {

/// Its index has memory for what the longest conversation lets through.
outcome serve_rocketkv_mt(const serving_case& given) {
  auto setup = with_share(tessera::rocketkv_mt<bf16, head_dim, head_dim, rows_in_pages>{}, given);
  const extents counts(given.conversations, given.options.shares_prefixes);
  index_t answers = 0;
  for (const conversation& entry : given.conversations) {
    index_t tokens = 0;
    for (const turn& next : entry.turns) tokens += next.answer;
    answers = std::max(answers, tokens);
  }
  setup.sizes.index_tokens = std::min(counts.longest, setup.method.plan(counts.longest).capacity + answers) + 64;
  return serve_on_device(std::move(setup), given);
}

}  // namespace serving
