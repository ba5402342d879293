#include "../served.cuh"
#include "tessera/methods/snapkv.hpp"

namespace serving {

outcome serve_snapkv(const serving_case& given) {
  auto setup = with_share(tessera::snapkv<bf16, head_dim, head_dim, rows_in_pages>{}, given);
  setup.pooled = given.share;
  return serve_on_device(std::move(setup), given);
}

}  // namespace serving
