// expect: tessera: kernels take head dims up to 256; rows of 512 are for the CPU
#include <tessera/core/views.hpp>

static_assert(tessera::check_device_rows<tessera::kv_view<tessera::bf16, 512>>());
