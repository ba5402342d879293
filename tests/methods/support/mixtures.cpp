// The mixtures by name.
#include "methods/support/mixtures.hpp"

namespace methods_test {

std::vector<entry> mixture_entries() {
  return {
      entry_of<mixtures::two_stages>("two_stages"),
      entry_of<mixtures::block_heavy_hitters>("block_heavy_hitters"),
      entry_of<mixtures::snapkv_quest>("snapkv_quest"),
      entry_of<mixtures::ada_hsa>("ada_hsa"),
      entry_of<mixtures::pyramid_sparq>("pyramid_sparq"),
      entry_of<mixtures::h2o_exact>("h2o_exact"),
      entry_of<mixtures::h2o_hsa>("h2o_hsa"),
      entry_of<mixtures::sinks_sparq>("sinks_sparq"),
      entry_of<mixtures::recent_exact>("recent_exact"),
      entry_of<mixtures::recent_sparq>("recent_sparq"),
      entry_of<mixtures::rocket_exact>("rocket_exact"),
      entry_of<mixtures::snapkv_turns>("snapkv_turns"),
      entry_of<mixtures::snapkv_turns_exact>("snapkv_turns_exact"),
      entry_of<mixtures::h2o_turns_quest>("h2o_turns_quest"),
      entry_of<mixtures::ada_turns_sparq>("ada_turns_sparq"),
      entry_of<mixtures::packed_snapkv>("packed_snapkv"),
      entry_of<mixtures::packed_rocketkv>("packed_rocketkv"),
      entry_of<mixtures::think_snapkv>("think_snapkv"),
      entry_of<mixtures::packed_h2o>("packed_h2o"),
      entry_of<mixtures::snapkv_mosaickv>("snapkv_mosaickv"),
      entry_of<mixtures::rocket_mosaickv>("rocket_mosaickv"),
      entry_of<mixtures::newest_turns_quest>("newest_turns_quest"),
      entry_of<mixtures::newest_kept>("newest_kept"),
      entry_of<mixtures::lines_rocket_turns>("lines_rocket_turns"),
      entry_of<mixtures::lines_h2o>("lines_h2o"),
  };
}

}  // namespace methods_test
