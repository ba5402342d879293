// expect: tessera: score_and_choose takes a first stage that chooses: method.retain in place of the recipe; a method that keeps everything has none
#include <tessera/backend/cpu/choose/score_and_choose.hpp>
#include <tessera/methods/snapkv.hpp>

using namespace tessera;

void evict(const choose_problem<kv_view<float, 64>>& problem, selection& kept, cpu::choose_workspace<64>& scratch,
           cpu::executor& workers) {
  cpu::score_and_choose(snapkv<float, 64>{}, problem, kept, scratch, workers);
}
