// expect: tessera: the rows of one call hold one element type; convert q, k and v to the same one
#include <tessera/backend/cpu/store/pack.hpp>

using namespace tessera;

void append_both(const kv_view<float, 64>& view, const rows_view<float>& k, const rows_view<const bf16>& v) {
  cpu::append(view, k, v);
}
