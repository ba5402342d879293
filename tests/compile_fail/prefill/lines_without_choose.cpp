// expect: tessera: a prefill policy that chooses lines needs sample(first, next, rows), choose(sampled_attention, line_cover, line_set), check() and parameters(self, visit)
#include <tessera/concepts/prefill.hpp>

struct only_samples {
  static constexpr const char* name = "only_samples";
  static constexpr bool chooses_lines = true;
  void sample(tessera::index_t, tessera::index_t, tessera::host_vector<tessera::index_t>&) const {}
};

static_assert(tessera::check_prefill<only_samples>());
