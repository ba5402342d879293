// expect: tessera: latent rows take keys of 576 elements, of which 512 are the value
#include <tessera/layout/latent_rows.hpp>

static_assert(tessera::check_row_format<tessera::latent_rows<tessera::bf16, 512, 448>>());
