// expect: tessera: append writes rows of single elements; the engine writes its rows of blocks
#include <tessera/backend/cpu/store/pack.hpp>

using namespace tessera;

void append_both(const kv_view<block_int4_elements<fp16>, 64>& view, const rows_view<float>& k) {
  cpu::append(view, k, k);
}
