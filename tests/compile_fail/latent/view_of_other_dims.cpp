// expect: tessera: a view of latent rows takes keys of 576 elements, of which 512 are the value
#include <tessera/core/views.hpp>

tessera::kv_view<tessera::latent_elements<tessera::bf16>, 576, tessera::contiguous, 256> view;
