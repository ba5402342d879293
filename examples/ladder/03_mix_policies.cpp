// Rung 3: a recipe of your own. One policy per axis; combinations that make no sense do not compile.
#include <memory>
#include <string_view>
#include <type_traits>

#include <tessera/attention/gathered_decode.hpp>
#include <tessera/budget/adaptive.hpp>
#include <tessera/layout/dense.hpp>
#include <tessera/schedule/once.hpp>
#include <tessera/scorer/exact_score.hpp>
#include <tessera/scorer/observation_window.hpp>
#include <tessera/selector/top_blocks.hpp>
#include <tessera/selector/top_tokens.hpp>
#include <tessera/tessera.hpp>

#include "support/ladder.hpp"

using namespace tessera;

// [method]
// Two decisions: what stays in memory after the prompt (SnapKV's scores, Ada-KV's budget, in blocks), and what each
// step reads of it (the tokens with most attention). No paper has this mixture.
struct two_stages : recipe<retain<observation_window, adaptive, top_blocks>, dense<bf16, 64>,
                           retrieve<exact_score, top_tokens>, gathered_decode, once> {
  static constexpr const char* name = "two_stages";
};
// [method]
// retain<exact_score, ...> here would stop with "tessera: a retained set cannot be chosen by a scorer that only sees
// one decode step; use it in retrieve".

int main() {
  constexpr index_t q_heads = 8, kv_heads = 2, dim = two_stages::layout_type::k_dim, prompt = 1024;
  ladder::checks check;
  two_stages policy;
  policy.set_budget(256);       // retained tokens per kv_head on average over the heads
  policy.retrieve.tokens = 64;  // read per kv_head and step
  policy.attention.rule.soft_cap = 30;

  // Parameters can be set as members, or by name, as a command line does.
  const auto set = [&]<class T>(std::string_view wanted, T value) {
    two_stages::parameters(policy,
                           [&]<class P>(std::string_view name, P& parameter, const auto& allowed, const char* about) {
                             if (name != wanted) return;
                             std::printf("%s, %s: %s\n", name.data(), allowed.text().c_str(), about);
                             if constexpr (std::is_same_v<T, P>) parameter = value;
                           });
  };
  set("block", index_t(8));
  set("floor", 0.5f);
  check(policy.retain.selector.block == 8 && policy.retain.budget.floor == 0.5f, "parameters are set by name");

  cache<two_stages> kv({1, q_heads, kv_heads}, policy, std::make_shared<cpu::executor>());
  const ladder::tensors model(prompt + 1, q_heads, kv_heads, dim);
  const index_t id = kv.open();
  kv.prefill(0, id, model.queries(0, prompt), model.keys(0, prompt), model.values(0, prompt));
  kv.end_prefill(id);
  const index_t kept = kv.length(0, id, 0) + kv.length(0, id, 1);
  std::printf("kept by head: %d and %d\n", int(kv.length(0, id, 0)), int(kv.length(0, id, 1)));
  check(std::abs(kept - 2 * 256) <= 1, "two heads share 2 x 256 tokens, up to rounding");

  kv.trace_attended(true);
  std::vector<float> out(q_heads * dim);
  kv.decode(0, kv.prepare_step({id}, 1), model.queries(prompt, 1), model.keys(prompt, 1), model.values(prompt, 1),
            nhd_rows(out.data(), 1, q_heads, dim));
  check(kv.attended(0, id)[0].size() == 64 && kv.attended(0, id)[1].size() == 64, "each head's step reads 64 tokens");

  policy.retain.scorer.pool = 4;  // parameters are checked where the cache is made, with the cure in the message
  try {
    cache<two_stages> wrong({1, q_heads, kv_heads}, policy, std::make_shared<cpu::executor>());
    check(false, "an even pool is refused");
  } catch (const tessera::error& problem) {
    std::printf("%s\n", problem.what());
    check(std::string_view(problem.what()).starts_with("pool is 4"), "an even pool is refused");
  }
  return check.exit_code();
}
