// expect: tessera: the CUDA backend does not run this first stage yet
#include <tessera/methods/sablock.hpp>

static_assert(tessera::check_runs_on_devices<tessera::sablock<tessera::bf16, 64>::retain_type>());
