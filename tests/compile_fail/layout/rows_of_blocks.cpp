// expect: tessera: an encoding needs element_type (fp32, fp16, bf16), a stored_type that is made from a float
#include <tessera/layout/runs.hpp>
#include <tessera/layout/stored.hpp>
#include <tessera/methods/snapkv.hpp>

using namespace tessera;

struct block_rows {
  static constexpr const char* name = "block_rows";
  using encoding_type = block_int8_elements<fp16>;
  static constexpr int k_dim = 64;
  static constexpr int v_dim = 64;
};
snapkv<fp16, 64, 64, stored<block_rows, runs>> method;
