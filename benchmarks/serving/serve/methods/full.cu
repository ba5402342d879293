#include "../served.cuh"
#include "tessera/methods/full.hpp"

namespace serving {

outcome serve_full(const serving_case& given) {
  return serve_on_device(served_setup<tessera::full<bf16, head_dim, head_dim, rows_in_pages>>{}, given);
}

}  // namespace serving
