// Rung 2: the same cache under every method. What does each hold, and what does a step read?
#include <memory>

#include <tessera/methods/ada_snapkv.hpp>
#include <tessera/methods/exact_topk.hpp>
#include <tessera/methods/full.hpp>
#include <tessera/methods/h2o.hpp>
#include <tessera/methods/pyramidkv.hpp>
#include <tessera/methods/snapkv.hpp>
#include <tessera/methods/streaming_llm.hpp>
#include <tessera/tessera.hpp>

#include "support/ladder.hpp"

using namespace tessera;

namespace {

/// The sizes of the made-up model and of its conversation.
struct sizes {
  static constexpr index_t layers = 4, q_heads = 8, kv_heads = 2, dim = 64, prompt = 1024, steps = 8;
};

struct outcome {
  offset_t held, read;
  std::vector<float> out;  // the last layer's last step
};

/// A method is a type: this is instantiated once for each.
template <class Method>
outcome run(const ladder::tensors& model, index_t budget) {
  Method recipe;
  recipe.set_budget(budget);  // of `full`: nothing to set
  cache<Method> kv({sizes::layers, sizes::q_heads, sizes::kv_heads}, recipe, std::make_shared<cpu::executor>());
  const index_t id = kv.open();
  for (index_t layer = 0; layer < sizes::layers; ++layer) {
    kv.prefill(layer, id, model.queries(0, sizes::prompt), model.keys(0, sizes::prompt),
               model.values(0, sizes::prompt));
  }
  kv.end_prefill(id);
  std::vector<float> out(sizes::q_heads * sizes::dim);
  for (index_t t = sizes::prompt; t < sizes::prompt + sizes::steps; ++t) {
    const batch step = kv.prepare_step({id}, 1);
    for (index_t layer = 0; layer < sizes::layers; ++layer) {
      kv.decode(layer, step, model.queries(t, 1), model.keys(t, 1), model.values(t, 1),
                nhd_rows(out.data(), 1, sizes::q_heads, sizes::dim));
    }
  }
  return {kv.bytes(id), kv.bytes_read(id), out};
}

}  // namespace

int main() {
  const ladder::tensors model(sizes::prompt + sizes::steps, sizes::q_heads, sizes::kv_heads, sizes::dim);
  ladder::checks check;
  const outcome dense = run<full<fp32, sizes::dim>>(model, 0);
  std::printf("budget 128     %12s %12s   %s\n", "bytes held", "bytes read",
              "difference from full with a budget of all tokens");
  std::printf("%-14s %12lld %12lld\n", "full", (long long)dense.held, (long long)dense.read);

  bool reads_less = true, exact = true;
  const auto compare = [&]<class Method>(Method) {
    const outcome small = run<Method>(model, 128), whole = run<Method>(model, model.tokens);
    const float difference = ladder::largest_difference(whole.out, dense.out);
    std::printf("%-14s %12lld %12lld   %g\n", Method::name, (long long)small.held, (long long)small.read,
                double(difference));
    reads_less &= small.read < dense.read;
    exact &= difference < 1e-5f;
  };
  compare(streaming_llm<fp32, sizes::dim>{});
  compare(h2o<fp32, sizes::dim>{});
  compare(snapkv<fp32, sizes::dim>{});
  compare(pyramidkv<fp32, sizes::dim>{});
  compare(ada_snapkv<fp32, sizes::dim>{});
  compare(exact_topk<fp32, sizes::dim>{});  // drops nothing: it holds everything and reads every key, but few values
  check(reads_less, "every method's step reads less than the full cache");
  check(exact, "a budget that covers everything is dense attention, for every method");
  return check.exit_code();
}
