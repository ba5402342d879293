// expect: tessera: kv_view takes head dims 64, 80, 96, 128, 192, 256 and 512
#include <tessera/core/views.hpp>

tessera::kv_view<tessera::bf16, 128, tessera::contiguous, 100> view;
