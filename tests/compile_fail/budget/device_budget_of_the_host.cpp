// expect: tessera: this budget runs on the host only; a device needs index_t share(head_extent)
#include <tessera/concepts/budget.hpp>

struct host_only {
  static constexpr const char* name = "host_only";
  static constexpr bool compares_heads = false;
  tessera::index_t tokens = 8;
  void allot(const tessera::layer_scores&, tessera::index_t*) const {}
  void check() const {}
};

static_assert(tessera::check_budget<host_only>());
static_assert(tessera::check_device_budget<host_only>());
