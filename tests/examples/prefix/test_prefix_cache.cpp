// The prefix cache of the example engine: against a list of all that was stored, and over a cache whose forks share pages.
#include "catch.hpp"

#include <algorithm>
#include <memory>
#include <set>
#include <vector>

#include <tessera/layout/dense_rows.hpp>
#include <tessera/layout/fixed_pages.hpp>
#include <tessera/layout/stored.hpp>
#include <tessera/methods/full.hpp>
#include <tessera/methods/snapkv.hpp>
#include <tessera/tessera.hpp>

#include "engine/prefix/prefix_cache.hpp"
#include "support/random.hpp"

using namespace tessera;
using engine::prefix_cache;
using engine::token_t;
using token_list = std::vector<token_t>;

namespace {

/// A cache that knows the tokens of its sequences and nothing else.
struct listed_cache {
  std::vector<token_list> sequences;
  std::set<index_t> open_ids;
  bool refuses = false;

  index_t open(const token_list& has) {
    index_t id = 0;
    while (open_ids.count(id) > 0) ++id;
    if (sequences.size() <= std::size_t(id)) sequences.resize(std::size_t(id) + 1);
    sequences[std::size_t(id)] = has;
    open_ids.insert(id);
    return id;
  }
  index_t fork(index_t id) { return fork(id, next_position(id)); }
  index_t fork(index_t id, index_t position) {
    require(!refuses, "pages", 0, "some", "wait");
    REQUIRE(open_ids.count(id) == 1);
    REQUIRE(position <= next_position(id));
    const token_list& from = sequences[std::size_t(id)];
    return open(token_list(from.begin(), from.begin() + position));
  }
  void close(index_t id) { REQUIRE(open_ids.erase(id) == 1); }
  index_t next_position(index_t id) const { return index_t(sequences[std::size_t(id)].size()); }
  index_t settled(index_t) const { return 0; }
  index_t announced(index_t) const { return 0; }
  index_t prompt_tokens(index_t id) const { return next_position(id); }
};

/// What is stored, in the plainest form, the one that was asked for longest ago first.
struct listed_prefixes {
  std::vector<token_list> all;

  static std::size_t common(const token_list& a, const token_list& b) {
    return std::size_t(std::mismatch(a.begin(), a.end(), b.begin(), b.end()).first - a.begin());
  }
  std::size_t longest(const token_list& prompt, bool cuts) const {
    std::size_t best = 0;
    const std::size_t most = prompt.empty() ? 0 : prompt.size() - 1;
    for (const token_list& stored : all) {
      const std::size_t same = common(stored, prompt);
      if (cuts) best = std::max(best, std::min(same, most));
      if (same == stored.size() && same <= most) best = std::max(best, same);
    }
    return best;
  }
};

token_list random_tokens(support::rng& random, index_t most) {
  token_list made(std::size_t(random.between(1, most)));
  for (token_t& token : made) token = token_t(random.between(0, 2));
  return made;
}

}  // namespace

TEST_CASE("random prompts find the longest beginning that was stored, and nothing stays open") {
  support::rng random(48);
  for (const bool cuts : {false, true}) {
    listed_cache cache;
    {
      prefix_cache prefixes(cache, cuts);
      listed_prefixes model;
      for (int i = 0; i < int(support::scaled(20'000)); ++i) {
        const int what = random.between(0, 9);
        const token_list prompt = random_tokens(random, 12);
        if (what < 4) {
          const std::size_t expected = model.longest(prompt, cuts);
          const auto found = prefixes.fork(prompt);
          REQUIRE(found.tokens == expected);
          REQUIRE((found.id >= 0) == (expected > 0));
          if (found.id < 0) continue;
          REQUIRE(cache.sequences[std::size_t(found.id)] ==
                  token_list(prompt.begin(), prompt.begin() + std::ptrdiff_t(expected)));
          cache.close(found.id);
        } else if (what < 8) {
          const index_t id = cache.open(prompt);
          const bool is_known = std::count(model.all.begin(), model.all.end(), prompt) > 0;
          cache.refuses = random.chance(0.1);
          if (cache.refuses && !is_known) {
            REQUIRE_THROWS_AS(prefixes.insert(prompt, id), error);
          } else {
            REQUIRE(prefixes.insert(prompt, id) == !is_known);
            if (!is_known) model.all.push_back(prompt);
          }
          cache.refuses = false;
          cache.close(id);
        } else if (what == 8) {
          REQUIRE(prefixes.evict() == !model.all.empty());
          // Which one: it is no longer open.
          std::vector<token_list> left;
          for (const index_t id : cache.open_ids) left.push_back(cache.sequences[std::size_t(id)]);
          std::erase_if(model.all,
                        [&](const token_list& each) { return std::count(left.begin(), left.end(), each) == 0; });
        } else if (random.chance(0.02)) {
          prefixes.clear();
          model.all.clear();
        }
        REQUIRE(prefixes.size() == model.all.size());
        REQUIRE(cache.open_ids.size() == model.all.size());
      }
      CHECK(prefixes.counts().hits > 0);
      CHECK(prefixes.counts().evicted > 0);
    }
    CHECK(cache.open_ids.empty());
  }
}

TEST_CASE("the prefix that was asked for longest ago goes first, and what it begins goes before it") {
  listed_cache cache;
  prefix_cache prefixes(cache, false);
  for (const token_list& stored : {token_list{1, 2}, token_list{1, 2, 3, 4}, token_list{5, 6}}) {
    const index_t id = cache.open(stored);
    CHECK(prefixes.insert(stored, id));
    CHECK_FALSE(prefixes.insert(stored, id));
    cache.close(id);
  }
  cache.close(prefixes.fork(token_list{1, 2, 3, 9}).id);  // touches {1, 2} alone
  CHECK(prefixes.evict());
  CHECK(prefixes.fork(token_list{1, 2, 3, 4, 5}).tokens == 2);
  CHECK(prefixes.evict());
  CHECK(prefixes.fork(token_list{5, 6, 7}).id == -1);
  CHECK(prefixes.evict_until([&] { return prefixes.size() == 0; }));
  CHECK_FALSE(prefixes.evict());
  CHECK_FALSE(prefixes.evict_until([] { return false; }));
  CHECK(cache.open_ids.size() == 1);  // the fork above
  CHECK_THROWS_WITH(prefixes.insert(token_list{1}, 0),
                    contains("tokens of a prefix is 1; expected those of the sequence, which are 2"));
}

namespace {

constexpr int dim = 64;
using in_pages = stored<dense_rows<fp32, dim>, fixed_pages<16>>;

/// Rows of a made-up model: those of a token follow from the token and its position.
std::vector<float> rows_of(const token_list& text, std::size_t first, index_t heads, float shift) {
  std::vector<float> rows;
  for (std::size_t t = first; t < text.size(); ++t) {
    support::rng random(std::uint64_t(1000 * t) + std::uint64_t(text[t]) + 1);
    for (index_t i = 0; i < heads * dim; ++i) rows.push_back(float(random.uniform()) - shift);
  }
  return rows;
}

/// Writes tokens from `first` on, ends the prompt and decodes one token. Returns its outputs.
template <class Method>
std::vector<float> answer(cache<Method>& kv, index_t id, const token_list& prompt, std::size_t first) {
  const model_shape& shape = kv.shape();
  const auto write = [&](const token_list& text, std::size_t from) {
    const auto q = rows_of(text, from, shape.q_heads, 0.5f), k = rows_of(text, from, shape.kv_heads, 0.4f);
    const auto count = index_t(text.size() - from);
    for (index_t layer = 0; layer < shape.layers; ++layer)
      kv.prefill(layer, id, nhd_rows(q.data(), count, shape.q_heads, dim),
                 nhd_rows(k.data(), count, shape.kv_heads, dim), nhd_rows(k.data(), count, shape.kv_heads, dim));
  };
  write(prompt, first);
  kv.end_prefill(id);
  const auto q = rows_of({1}, 0, shape.q_heads, 0.5f);
  std::vector<float> all;
  const batch step = kv.prepare_step({id}, 1);
  for (index_t layer = 0; layer < shape.layers; ++layer) {
    std::vector<float> out(q.size());
    kv.decode(layer, step, nhd_rows(q.data(), 1, shape.q_heads, dim), nhd_rows(q.data(), 1, shape.kv_heads, dim),
              nhd_rows(q.data(), 1, shape.kv_heads, dim), nhd_rows(out.data(), 1, shape.q_heads, dim));
    all.insert(all.end(), out.begin(), out.end());
  }
  return all;
}

template <class Method>
void ask_many_questions(const Method& method, double most) {
  const model_shape shape{2, 4, 2};
  const auto workers = std::make_shared<cpu::executor>(2);
  cache<Method> kv(shape, method, workers), alone(shape, method, workers);
  support::rng random(7);
  token_list document(400);
  for (token_t& token : document) token = token_t(random.between(0, 99));
  prefix_cache prefixes(kv, cache<Method>::cuts_prompts);
  {
    const index_t id = kv.open();
    const auto q = rows_of(document, 0, shape.q_heads, 0.5f), k = rows_of(document, 0, shape.kv_heads, 0.4f);
    for (index_t layer = 0; layer < shape.layers; ++layer)
      kv.prefill(layer, id, nhd_rows(q.data(), 400, shape.q_heads, dim), nhd_rows(k.data(), 400, shape.kv_heads, dim),
                 nhd_rows(k.data(), 400, shape.kv_heads, dim));
    prefixes.insert(document, id);
    kv.close(id);
  }
  std::vector<index_t> open;
  offset_t compressed = 0;
  for (int question = 0; question < 10; ++question) {
    token_list prompt = document;
    for (int i = 0; i < 9 + question; ++i) prompt.push_back(token_t(random.between(0, 99)));
    const auto found = prefixes.fork(prompt);
    REQUIRE(found.tokens == document.size());
    const index_t fresh = alone.open();
    REQUIRE(answer(kv, found.id, prompt, found.tokens) == answer(alone, fresh, prompt, 0));
    open.push_back(found.id);
    compressed = alone.bytes(fresh);
    alone.close(fresh);
  }
  // Ten questions at once: one whole document, and what each keeps of its own.
  offset_t all = 0;
  for (const index_t id : open) all += kv.bytes(id);
  CHECK(double(all) <= most * double(compressed));
  CHECK(prefixes.counts().saved == 4000);
}

}  // namespace

TEST_CASE("layers that slide share what they can still go back to, and an announced prompt is not stored") {
  model_shape shape{2, 4, 2};
  shape.window = 32, shape.sliding = {true, false};
  cache<full<fp32, dim, dim, in_pages>> kv(shape, {}, std::make_shared<cpu::executor>(1));
  prefix_cache prefixes(kv, true);
  token_list text(300);
  for (std::size_t i = 0; i < text.size(); ++i) text[i] = token_t(i % 97);
  const index_t id = kv.open();
  for (const std::size_t end : {100u, 200u, 300u}) {
    const token_list part(text.begin(), text.begin() + std::ptrdiff_t(end));
    const auto q = rows_of(part, end - 100, shape.q_heads, 0.5f), k = rows_of(part, end - 100, shape.kv_heads, 0.4f);
    for (index_t layer = 0; layer < shape.layers; ++layer)
      kv.prefill(layer, id, nhd_rows(q.data(), 100, shape.q_heads, dim), nhd_rows(k.data(), 100, shape.kv_heads, dim),
                 nhd_rows(k.data(), 100, shape.kv_heads, dim));
    if (end != 200u) prefixes.insert(part, id);
  }
  token_list prompt(text.begin(), text.begin() + 150);
  prompt.push_back(98);
  CHECK(prefixes.fork(prompt).tokens == 100);  // the longer one has dropped what lies before 150

  const index_t announced = kv.open();
  kv.announce(announced, 10);
  const token_list five(text.begin(), text.begin() + 5);
  const auto q = rows_of(five, 0, shape.q_heads, 0.5f), k = rows_of(five, 0, shape.kv_heads, 0.4f);
  for (index_t layer = 0; layer < shape.layers; ++layer)
    kv.prefill(layer, announced, nhd_rows(q.data(), 5, shape.q_heads, dim), nhd_rows(k.data(), 5, shape.kv_heads, dim),
               nhd_rows(k.data(), 5, shape.kv_heads, dim));
  CHECK_THROWS_WITH(prefixes.insert(five, announced), contains("announced with is 10; expected 0"));
  kv.end_prefill(id);
  CHECK_THROWS_WITH(prefixes.insert(text, id), contains("tokens of the prompt under way is 0; expected all of"));
}

TEST_CASE("questions about one document are answered as in sequences of their own, and share its rows") {
  full<fp32, dim, dim, in_pages> everything;
  ask_many_questions(everything, 2);  // the document, whose pages the stored one shares, and ten questions
  snapkv<fp32, dim, dim, in_pages> method;
  method.set_budget(64);
  method.retain.scorer.window = 8;
  ask_many_questions(method, 10.01);  // what each keeps
}
