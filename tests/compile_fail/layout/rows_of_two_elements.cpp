// expect: tessera: k and v of one call hold one element type; convert one of them; q may have another
#include <tessera/backend/cpu/store/pack.hpp>

using namespace tessera;

void append_both(const kv_view<float, 64>& view, const rows_view<float>& k, const rows_view<const bf16>& v) {
  cpu::append(view, k, v);
}
