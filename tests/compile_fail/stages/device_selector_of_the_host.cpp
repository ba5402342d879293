// expect: tessera: this selector runs on the host only; a device needs index_t unit_slots(), or
#include <tessera/concepts/selector.hpp>

struct host_only {
  static constexpr const char* name = "host_only";
  using unit = tessera::token_unit;
  tessera::index_t select(const float*, tessera::index_t, tessera::index_t, tessera::index_t, tessera::index_t*,
                          tessera::top_k_scratch&) const {
    return 0;
  }
  void check() const {}
};

static_assert(tessera::check_selector<host_only>());
static_assert(tessera::check_device_selector<host_only>());
