// expect: tessera: append writes to its view: a kv_view<E>, not a kv_view<const E>
#include <tessera/backend/cpu/store/pack.hpp>

using namespace tessera;

void append_both(const kv_view<const float, 64>& view, const rows_view<float>& k, const rows_view<float>& v) {
  cpu::append(view, k, v);
}
