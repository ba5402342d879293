// expect: tessera: pack writes to the view `target`: a kv_view<E>, not a kv_view<const E>
#include <tessera/backend/cpu/store/pack.hpp>

using namespace tessera;

void pack_down(const kv_view<const float, 64>& view, selection_view kept, cpu::executor& workers) {
  cpu::pack(view, kept, view, workers);
}
