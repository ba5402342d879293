// `tessera agree`: a text's own tokens under every method, against the full cache.
#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>
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
  REQUIRE(compared.sums().size() == 1);
  CHECK(compared.sums()[0].length == 60);
  const std::vector<agreement>& sums = compared.sums()[0].by_variant;
  REQUIRE(sums.size() == tool::methods().size());
  for (std::size_t i = 0; i < sums.size(); ++i) {
    const tool::method_info& method = *compared.variants()[i].method;
    INFO(method.name);
    CHECK(sums[i].pieces == 1);
    CHECK(sums[i].steps == 12);
    CHECK(sums[i].same == 12);
    // Attention along all lines, over ragged pages and over vectors that were rotated and packed may add up in another order.
    const bool is_ragged = std::ranges::any_of(method.policies, [](const auto& p) { return p.name == "ragged_pages"; });
    if (method.chooses_lines || is_ragged || !all_elements(method).empty()) {
      CHECK(sums[i].mean_divergence() < 1e-6);
      CHECK(sums[i].perplexity() == Approx(sums[0].perplexity()).epsilon(1e-5));
    } else {
      CHECK(sums[i].identical == 12);
      CHECK(sums[i].divergence_of(1) == 0);
      CHECK(sums[i].surprise == sums[0].surprise);
    }
  }
  CHECK(sums[0].surprise == Approx(surprise_by_hand(on, pieces[0])).epsilon(1e-9));
}

TEST_CASE("divergence is that of the definition, 0 for the same logits, and no number where a logit is none") {
  const float third = std::log(3.0f);
  const tool::next_token even({0, 0}), odd({third, 0});  // 1/2, 1/2 and 3/4, 1/4
  CHECK(tool::divergence(even, odd) == Approx(0.5 * std::log(2.0 / 3) + 0.5 * std::log(2.0)).epsilon(1e-6));
  CHECK(tool::divergence(odd, even) == Approx(0.75 * std::log(1.5) + 0.25 * std::log(0.5)).epsilon(1e-6));
  CHECK(tool::divergence(odd, odd) == 0);
  CHECK(odd.log_probability(1) == Approx(std::log(0.25)).epsilon(1e-6));
  const tool::next_token broken({std::numeric_limits<float>::quiet_NaN(), 0});
  CHECK(std::isnan(tool::divergence(even, broken)));
  agreement sum;
  sum.divergences = {3, 1, 2, 4};
  CHECK(sum.divergence_of(0.5) == 2);
  CHECK(sum.divergence_of(0.99) == 4);
  sum.divergences.push_back(tool::divergence(even, broken));
  CHECK(std::isnan(sum.divergence_of(0.5)));
}

TEST_CASE("small budgets predict other things, and the sums are those of the pieces, by length") {
  bench on;
  auto pieces = tool::pieces_of(long_text(on), {}, 2, 200, 8);
  for (auto& shorter : tool::pieces_of(long_text(on), {}, 1, 120, 5)) pieces.push_back(shorter);
  const std::vector<variant> variants{{&tool::find_method("full"), {}, {}},
                                      {&tool::find_method("snapkv"), 40, {}},
                                      {&tool::find_method("streaming_llm"), 20, {}}};
  tool::agreement_run all(*on.model, on.tokenizer, variants, tool::element_type::fp32, on.workers);
  std::vector<agreement> apart(variants.size());
  for (const auto& piece : pieces) {
    all.run(piece);
    if (piece.length != 200) continue;
    tool::agreement_run one(*on.model, on.tokenizer, variants, tool::element_type::fp32, on.workers);
    one.run(piece);
    for (std::size_t i = 0; i < variants.size(); ++i) {
      const agreement& sum = one.sums()[0].by_variant[i];
      apart[i].surprise += sum.surprise;
      apart[i].same += sum.same;
      for (const double off : sum.divergences) apart[i].divergences.push_back(off);
    }
  }
  REQUIRE(all.sums().size() == 2);
  CHECK(all.sums()[0].length == 120);
  const std::vector<agreement>& sums = all.sums()[1].by_variant;
  for (std::size_t i = 0; i < variants.size(); ++i) {
    CHECK(all.sums()[0].by_variant[i].steps == 5);
    CHECK(sums[i].steps == 16);
    CHECK(sums[i].surprise == Approx(apart[i].surprise));
    CHECK(sums[i].same == apart[i].same);
    CHECK(sums[i].divergences == apart[i].divergences);
    CHECK((sums[i].mean_divergence() > 1e-6) == (i > 0));
    CHECK((sums[i].identical_share() < 1) == (i > 0));
  }
  CHECK(sums[2].bytes_held < sums[0].bytes_held);

  const auto json = nlohmann::json::parse(tool::agreement_json(variants, all.sums()));
  REQUIRE(json.size() == 6);
  CHECK(json[0]["prompt"] == 120);
  CHECK(json[0]["kl_mean"] == 0);
  CHECK(json[0]["same_logits"] == 1);
  CHECK(json[4]["method"] == "snapkv");
  CHECK(json[4]["prompt"] == 200);
  CHECK(json[4]["pieces"] == 2);
  REQUIRE(json[4]["kl_by_step"].size() == 8);
  CHECK(json[4]["kl_by_step"][3] == Approx((sums[1].divergences[3] + sums[1].divergences[11]) / 2));
  CHECK_THROWS_WITH(tool::agreement_run(*on.model, on.tokenizer, {{&tool::find_method("snapkv"), 40, {}}},
                                        tool::element_type::fp32, on.workers),
                    contains("first method is snapkv; expected full"));
}

TEST_CASE("lines of a file give a piece for each length, or their own prompt and what follows it") {
  bench on;
  const auto parse = [&](const std::string& text, bool required = false) {
    return tool::parse_prompts(text, "file", on.tokenizer, {{8, 5}, 3, required});
  };
  const std::string words = "The rays which differ in colour differ also in degrees of refrangibility.";
  const std::vector<token_t> tokens = on.tokenizer.encode(words);
  const auto cut = parse("\n{\"text\": \"" + words + "\", \"id\": 1}\n", true);
  REQUIRE(cut.size() == 2);
  CHECK(cut[0].length == 8);
  CHECK(cut[0].prompt.front() == *on.tokenizer.bos());
  CHECK(cut[0].prompt.back() == tokens[6]);
  CHECK(cut[1].prompt.size() == 5);
  CHECK(cut[1].following == std::vector<token_t>(tokens.begin() + 4, tokens.begin() + 7));

  const auto own = parse(R"({"prompt": "The rays which differ in colour", "continuation": " differ also in degrees"})");
  REQUIRE(own.size() == 1);
  CHECK(own[0].following.size() == 3);
  CHECK(own[0].length >= std::int64_t(own[0].prompt.size()));
  CHECK(own[0].length < 2 * std::int64_t(own[0].prompt.size()));
  std::vector<token_t> joined(own[0].prompt.begin() + 1, own[0].prompt.end());
  joined.insert(joined.end(), own[0].following.begin(), own[0].following.end());
  CHECK(std::equal(joined.begin(), joined.end(),
                   on.tokenizer.encode("The rays which differ in colour differ also in degrees").begin()));

  const std::string good = "{\"text\": \"" + words + "\"}\n";
  for (const char* bad :
       {"x", "[]", R"({"prompt": "a"})", R"({"text": 3})", R"({"text": " "})", R"({"text": "short"})",
        R"({"prompt": "a", "continuation": ""})", R"({"text": "a", "prompt": "b", "continuation": "c"})"}) {
    INFO(bad);
    CHECK_THROWS_WITH(parse(good + bad), contains("file, line 2"));
  }
  CHECK_THROWS_WITH(parse(R"({"prompt": "The rays", "continuation": " differ"})", true), contains("--prompt is given"));
  CHECK_THROWS_WITH(parse("\n"), contains("file file is empty"));
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
