#include <algorithm>
#include <tessera/core/error.hpp>

#include "catch.hpp"
#include "tool/eval/random.hpp"
#include "tool/score/metrics.hpp"

using tool::scoring;

namespace {

double score(const char* metric, const std::string& text, const std::vector<std::string>& answers,
             bool normalised = false) {
  return scoring::parsed(metric, normalised)(text, answers);
}

/// All words of a bit set, in order.
std::string subsequence(const std::vector<std::string>& words, unsigned bits) {
  std::string all;
  for (std::size_t i = 0; i < words.size(); ++i) {
    if (bits >> i & 1) all += words[i] + " ";
  }
  return all;
}

/// The longest common subsequence, among all subsequences of both.
std::size_t longest_common(const std::vector<std::string>& a, const std::vector<std::string>& b) {
  std::vector<std::string> of_b;
  for (unsigned bits = 0; bits < 1u << b.size(); ++bits) of_b.push_back(subsequence(b, bits));
  std::sort(of_b.begin(), of_b.end());
  std::size_t longest = 0;
  for (unsigned bits = 0; bits < 1u << a.size(); ++bits) {
    if (std::binary_search(of_b.begin(), of_b.end(), subsequence(a, bits)))
      longest = std::max(longest, std::size_t(__builtin_popcount(bits)));
  }
  return longest;
}

/// How many words two lists share, each as often as in both.
std::size_t shared(std::vector<std::string> a, std::vector<std::string> b) {
  std::sort(a.begin(), a.end());
  std::sort(b.begin(), b.end());
  std::vector<std::string> both;
  std::set_intersection(a.begin(), a.end(), b.begin(), b.end(), std::back_inserter(both));
  return both.size();
}

}  // namespace

TEST_CASE("prefix accepts what goes on, strict only at the end of a word or number, exact nothing more") {
  for (const char* metric : {"prefix", "strict", "exact"}) {
    INFO(metric);
    CHECK(score(metric, " 12345\n", {"12345 "}) == 1);
    CHECK(score(metric, "the 12345", {"12345"}) == 0);
    CHECK(score(metric, "1234", {"12345"}) == 0);
    CHECK(score(metric, "", {"12345"}) == 0);
    CHECK(score(metric, "b", {"a", "b"}) == 1);
  }
  for (const char* longer : {"123", "12a", "12.5", "12,500", "12\xc3\xa9"}) {
    INFO(longer);
    CHECK(score("prefix", longer, {"12"}) == 1);
    CHECK(score("strict", longer, {"12"}) == 0);
  }
  for (const char* ended : {"12", "12.", "12, and", "12 3", "12\nmore", "12-3"}) {
    INFO(ended);
    CHECK(score("strict", ended, {"12"}) == 1);
    CHECK(score("exact", ended, {"12"}) == (ended == std::string("12")));
  }
}

TEST_CASE("normalised texts have small letters, no punctuation, no articles and single blanks") {
  CHECK(tool::normalised_text("  The Rays, of\tan (Apple)\n a-b; Another's!") == "rays of apple ab anothers");
  CHECK(tool::normalised_text("The. A an") == "");
  CHECK(tool::normalised_text("Caf\xc3\xa9 \xc3\x89") == "caf\xc3\xa9 \xc3\x89");
  CHECK(score("exact", "The answer!", {"answer"}) == 0);
  CHECK(score("exact", "The answer!", {"answer"}, true) == 1);
  CHECK(score("strict", "\"Sir Isaac Newton\", of course", {"the Sir Isaac Newton."}, true) == 1);
  CHECK(score("prefix", "anything", {"The"}, true) == 0);  // nothing is left of the answer
}

TEST_CASE("contained answers count in small letters: their share, or whether there is one") {
  CHECK(score("contains_all", "They are ALPHA and beta.", {"alpha", "Beta", "gamma", "delta"}) == 0.5);
  CHECK(score("contains_any", "They are ALPHA and beta.", {"gamma", "Beta"}) == 1);
  CHECK(score("contains_any", "They are", {"gamma", "Beta"}) == 0);
}

TEST_CASE("f1 and rouge_l of cases by hand") {
  // 2 of 3 words of the text, 2 of 4 of the answer: p 2/3, r 1/2.
  CHECK(score("f1", "The light of Newton", {"white light from Newton"}) == Approx(4.0 / 7));
  CHECK(score("f1", "red red red", {"red blue red"}) == Approx(2.0 / 3));
  CHECK(score("f1", "red", {"blue", "A red, red thing", "Red!"}) == 1);
  CHECK(score("f1", "", {"blue"}) == 0);
  CHECK(score("f1", "the", {"an"}) == 0);
  // "the cat on mat" is common: 4 of 5 words, 4 of 6.
  CHECK(score("rouge_l", "the cat lay on mat", {"the cat sat on the mat"}) == Approx(8.0 / 11));
  CHECK(score("rouge_l", "d c b a", {"a b c d"}) == Approx(0.25));
  CHECK(score("rouge_l", "The mat.", {"mat"}) == 0);
  CHECK(score("rouge_l", "The mat.", {"mat"}, true) == 1);
  CHECK(score("rouge_l", " \n", {"mat"}) == 0);
}

TEST_CASE("f1 and rouge_l of random words are those of the definitions") {
  tool::random_source random(3);
  for (int trial = 0; trial < 60; ++trial) {
    std::vector<std::string> words[2];
    for (auto& list : words) {
      for (std::size_t count = 1 + random.below(8); list.size() < count;)
        list.push_back(std::string(1, char('p' + random.below(4))));
    }
    const std::string text = subsequence(words[0], ~0u), answer = subsequence(words[1], ~0u);
    INFO(text << "| " << answer);
    const auto f = [&](std::size_t common) {
      const double p = double(common) / double(words[0].size()), r = double(common) / double(words[1].size());
      return common == 0 ? 0 : 2 * p * r / (p + r);
    };
    CHECK(score("f1", text, {answer}) == Approx(f(shared(words[0], words[1]))));
    CHECK(score("rouge_l", text, {answer}) == Approx(f(longest_common(words[0], words[1]))));
  }
}

TEST_CASE("metrics are told apart by name") {
  CHECK(scoring::parsed("f1", false).text() == "f1");
  CHECK(scoring::parsed("exact", true).text() == "exact, normalised");
  CHECK(scoring::parsed("strict", false).is_yes_or_no());
  CHECK_FALSE(scoring::parsed("contains_all", false).is_yes_or_no());
  CHECK_THROWS_WITH(scoring::parsed("rouge", false), contains("--metric"));
}
