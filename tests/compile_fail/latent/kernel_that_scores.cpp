// expect: tessera: on the device attention alone reads latent rows; score, index and pack them on the CPU
#include <tessera/core/views.hpp>

static_assert(tessera::check_device_rows<tessera::latent_view<const tessera::bf16>>());
