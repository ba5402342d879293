// A unit that an engine builds once for each level of processors: conversations of two methods, by the name TARGET.
#include <tessera/methods/h2o.hpp>
#include <tessera/methods/tangram.hpp>
#include <tessera/tessera.hpp>

#include "targets.hpp"

namespace {

using namespace tessera;

template <class Method>
double converse(Method method, const float* rows, index_t tokens, index_t threads) {
  cache<Method> kv({2, 4, 2}, method, std::make_shared<cpu::executor>(threads));
  const index_t id = kv.open(), prompt = tokens - 4;
  std::vector<float> out(4 * 64);
  double sum = 0;
  for (index_t layer = 0; layer < 2; ++layer) {
    kv.prefill(layer, id, nhd_rows(rows, prompt, 4, 64), nhd_rows(rows, prompt, 2, 64), nhd_rows(rows, prompt, 2, 64));
  }
  kv.end_prefill(id);
  const index_t other = kv.fork(id);
  for (index_t t = prompt; t < tokens; ++t) {
    const batch step = kv.prepare_step({id, other}, 1);
    std::vector<float> outs(2 * 4 * 64);
    for (index_t layer = 0; layer < 2; ++layer) {
      kv.decode(layer, step, nhd_rows(rows + t * 256, 1, 4, 64, 2), nhd_rows(rows + t * 128, 1, 2, 64, 2),
                nhd_rows(rows + t * 128, 1, 2, 64, 2), nhd_rows(outs.data(), 1, 4, 64, 2), {});
    }
    for (const float x : outs) sum += double(x);
  }
  for (const index_t at : kv.positions(1, id, 0)) sum += at;
  return sum;
}

}  // namespace

double TARGET(const rows_view<const float>& rows, index_t threads) {
  h2o<float, 64> by_weight;
  by_weight.set_budget(rows.tokens < 8 ? -1 : 64);
  return converse(by_weight, rows.data, rows.tokens, threads) +
         converse(tangram<float, 64>(), rows.data, rows.tokens, threads);
}
