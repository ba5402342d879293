// expect: tessera: this budget pays for two stages; pass what a plan leaves for the first one: method.retain.planned(method.plan(prompt_tokens))
#include <tessera/backend/cpu/choose/score_and_choose.hpp>
#include <tessera/methods/rocketkv.hpp>

using namespace tessera;

void evict(const choose_problem<kv_view<float, 64>>& problem, selection& kept, cpu::choose_workspace<64>& scratch,
           cpu::executor& workers) {
  cpu::score_and_choose(rocketkv<float, 64>{}.retain, problem, kept, scratch, workers);
}
