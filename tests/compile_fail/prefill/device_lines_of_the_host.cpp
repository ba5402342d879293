// expect: tessera: a prefill policy that chooses lines runs on a device if it is trivially copyable and has takes_slash(distance) and takes_column(position) for both sides, TESSERA_HD
#include <tessera/concepts/prefill.hpp>

struct of_the_host {
  static constexpr const char* name = "of_the_host";
  static constexpr bool chooses_lines = true;
  void sample(tessera::index_t, tessera::index_t, tessera::host_vector<tessera::index_t>&) const {}
  void choose(const tessera::sampled_attention&, tessera::line_cover&, tessera::line_set&) const {}
  void check() const {}
  template <class Self, class Visit>
  static void parameters(Self&, Visit&&) {}
};

static_assert(tessera::check_prefill<of_the_host>());
static_assert(tessera::check_device_prefill<of_the_host>());
