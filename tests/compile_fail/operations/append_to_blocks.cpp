// expect: tessera: append writes rows of elements, and of blocks that can be made of them; the engine writes its own blocks
#include <tessera/backend/cpu/store/pack.hpp>

using namespace tessera;

void append_both(const kv_view<block_int4_elements<fp16>, 64>& view, const rows_view<float>& k) {
  cpu::append(view, k, k);
}
