// expect: tessera: the CUDA backend does not run this
#include <tessera/methods/snapkv.hpp>

/// A budget whose body runs on the host alone.
struct counted_by_the_host : tessera::uniform {
  static constexpr bool host_only = true;
};

using stage = tessera::retain<tessera::observation_window, counted_by_the_host, tessera::top_tokens>;
static_assert(!tessera::runs_on_devices<stage>);
static_assert(tessera::check_runs_on_devices<stage>());
