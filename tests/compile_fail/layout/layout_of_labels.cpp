// expect: tessera: a layout is a row format at a placement: stored<dense_rows<T, D>, runs>; labels alone store nothing
#include <tessera/attention/dense_decode.hpp>
#include <tessera/recipe.hpp>
#include <tessera/schedule/once.hpp>

struct labels {
  static constexpr const char* name = "labels";
  using element_type = tessera::bf16;
  static constexpr int k_dim = 64, v_dim = 64;
  static constexpr tessera::offset_t token_bytes() { return 256; }
};

tessera::recipe<tessera::retain_all, labels, tessera::retrieve_all, tessera::dense_decode, tessera::once> wrong;
