// `tessera agree`: a text's own tokens under every method, against the full cache.
#include <cmath>
#include <tessera/core/error.hpp>

#include "evaluation_bench.hpp"
#include "tool/agree/agreement.hpp"

using engine::token_t;
using tool::agreement;
using tool::variant;
using namespace tool_tests;

namespace {

std::vector<token_t> long_text(const bench& on) {
  std::string text;
  for (int i = 0; i < 40; ++i) text += "The rays which differ in colour differ also in degrees of refrangibility.\n";
  return on.tokenizer.encode(text);
}

std::vector<variant> with_full_first(std::vector<variant> variants) {
  std::stable_partition(variants.begin(), variants.end(),
                        [](const variant& row) { return row.method->name == "full"; });
  return variants;
}

/// Log-probabilities of the full cache, computed in double.
double surprise_by_hand(bench& on, const tool::text_piece& piece) {
  const auto cache = tool::find_method("full").make({{2, 4, 2}, 64, tool::element_type::fp32, {}, {}, on.workers});
  std::vector<float> logits = on.model->prefill(piece.prompt, *cache);
  double total = 0;
  for (const token_t next : piece.following) {
    double sum = 0;
    for (const float logit : logits) sum += std::exp(double(logit) - logits[std::size_t(next)]);
    total += std::log(sum);
    logits = on.model->decode({&next, 1}, *cache);
  }
  return total;
}

}  // namespace

TEST_CASE("at a budget that covers everything every method predicts what the full cache does") {
  bench on;
  const auto text = long_text(on);
  const token_t bos = *on.tokenizer.bos();
  const auto pieces = tool::pieces_of(text, {&bos, 1}, 1, 60, 12);
  tool::agreement_run compared(*on.model, on.tokenizer, with_full_first(all_methods({500}, true)),
                               tool::element_type::fp32, on.workers);
  compared.run(pieces[0]);
  REQUIRE(compared.sums().size() == tool::methods().size());
  for (std::size_t i = 0; i < compared.sums().size(); ++i) {
    const agreement& sum = compared.sums()[i];
    INFO(compared.variants()[i].method->name);
    CHECK(sum.steps == 12);
    CHECK(sum.same == 12);
    CHECK(sum.mean_divergence() < 1e-6);  // of float log-probabilities
    CHECK(sum.perplexity() == Approx(compared.sums()[0].perplexity()).epsilon(1e-5));
  }
  CHECK(compared.sums()[0].divergence_of(1) == 0);
  CHECK(compared.sums()[0].surprise == Approx(surprise_by_hand(on, pieces[0])).epsilon(1e-6));
}

TEST_CASE("small budgets predict other things, and the sums are those of the pieces") {
  bench on;
  const auto pieces = tool::pieces_of(long_text(on), {}, 3, 200, 8);
  const std::vector<variant> variants{{&tool::find_method("full"), {}, {}},
                                      {&tool::find_method("snapkv"), 40, {}},
                                      {&tool::find_method("streaming_llm"), 20, {}}};
  tool::agreement_run all(*on.model, on.tokenizer, variants, tool::element_type::fp32, on.workers);
  std::vector<agreement> apart(variants.size());
  for (const auto& piece : pieces) {
    all.run(piece);
    tool::agreement_run one(*on.model, on.tokenizer, variants, tool::element_type::fp32, on.workers);
    one.run(piece);
    for (std::size_t i = 0; i < variants.size(); ++i) {
      apart[i].surprise += one.sums()[i].surprise;
      apart[i].same += one.sums()[i].same;
      for (const double off : one.sums()[i].divergences) apart[i].divergences.push_back(off);
    }
  }
  for (std::size_t i = 0; i < variants.size(); ++i) {
    CHECK(all.sums()[i].steps == 24);
    CHECK(all.sums()[i].surprise == Approx(apart[i].surprise));
    CHECK(all.sums()[i].same == apart[i].same);
    CHECK(all.sums()[i].divergences == apart[i].divergences);
    CHECK((all.sums()[i].mean_divergence() > 1e-6) == (i > 0));
  }
  CHECK(all.sums()[2].bytes_held < all.sums()[0].bytes_held);
  CHECK_THROWS_WITH(tool::agreement_run(*on.model, on.tokenizer, {{&tool::find_method("snapkv"), 40, {}}},
                                        tool::element_type::fp32, on.workers),
                    contains("first method is snapkv; expected full"));
}

TEST_CASE("pieces lie at even distances, and a text that is too short is refused") {
  const std::vector<token_t> text{0, 1, 2, 3, 4, 5, 6, 7, 8, 9}, first{99};
  const auto pieces = tool::pieces_of(text, first, 3, 4, 2);
  CHECK(pieces[0].prompt == std::vector<token_t>{99, 0, 1, 2});
  CHECK(pieces[0].following == std::vector<token_t>{3, 4});
  CHECK(pieces[1].prompt == std::vector<token_t>{99, 2, 3, 4});
  CHECK(pieces[2].following == std::vector<token_t>{8, 9});
  CHECK_THROWS_WITH(tool::pieces_of(text, first, 1, 9, 4), contains("expected at least 12"));
}
