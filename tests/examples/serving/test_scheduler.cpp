// The serving benchmark's scheduler over caches on the CPU: what it serves is what each conversation would get alone.
#include "catch.hpp"

#include <bit>
#include <cstdint>
#include <memory>
#include <set>
#include <utility>
#include <vector>

#include <tessera/layout/dense_rows.hpp>
#include <tessera/layout/ragged_pages.hpp>
#include <tessera/layout/stored.hpp>
#include <tessera/methods/full.hpp>
#include <tessera/methods/snapkv.hpp>
#include <tessera/methods/tangram.hpp>
#include <tessera/tessera.hpp>

#include "serving/serve/queued_cache.hpp"
#include "serving/serve/scheduler.hpp"
#include "support/random.hpp"

using namespace tessera;
using namespace serving;

namespace {

constexpr int dim = 64;
constexpr index_t page = 16;
using in_pages = stored<dense_rows<fp32, dim>, ragged_pages>;
const model_shape shape{2, 4, 2};

/// A clock that goes on with every pass.
struct counted_clock {
  double time = 0;
  double now() const { return time; }
  void wait_until(double seconds) { time = std::max(time, seconds); }
};

/// A made-up model: rows follow from tokens and positions, and the next token from every bit of what a row attends.
struct hashing_model {
  counted_clock& clock;

  template <class Cache>
  std::vector<token_t> pass(Cache& cache, const mixed_batch& work, const std::vector<token_t>& tokens,
                            const std::vector<std::int32_t>& wanted) {
    clock.time += 1e-3 * work.rows();
    const auto rows = std::size_t(work.rows()), width = std::size_t(shape.q_heads * dim);
    REQUIRE(tokens.size() == rows);
    std::vector<std::uint64_t> hashes(rows, 14695981039346656037u);
    cache.begin(work);
    for (index_t layer = 0; layer < shape.layers; ++layer) {
      std::vector<float> q, k, out(rows * width);
      for (std::size_t i = 0; i < work.items.size(); ++i) {
        for (index_t t = 0; t < work.items[i].tokens; ++t) {
          const token_t token = tokens[std::size_t(work.indptr[i] + t)];
          support::rng random(std::uint64_t(token) * 1009 + std::uint64_t(work.positions[i] + t) * 13 +
                              std::uint64_t(layer));
          for (std::size_t j = 0; j < width; ++j) q.push_back(float(random.uniform()) - 0.5f);
          for (index_t j = 0; j < shape.kv_heads * dim; ++j) k.push_back(float(random.uniform()) - 0.5f);
        }
      }
      const auto keys = nhd_rows(k.data(), work.rows(), shape.kv_heads, dim);
      cache.process(layer, work, nhd_rows(q.data(), work.rows(), shape.q_heads, dim), keys, keys,
                    nhd_rows(out.data(), work.rows(), shape.q_heads, dim));
      for (std::size_t i = 0; i < out.size(); ++i)
        hashes[i / width] = (hashes[i / width] ^ std::bit_cast<std::uint32_t>(out[i])) * 1099511628211u;
    }
    std::vector<token_t> next;
    for (const std::int32_t row : wanted) next.push_back(token_t(hashes[std::size_t(row)] >> 40) % 1000);
    return next;
  }
};

/// A cache that cannot save.
template <class Cache>
struct unsaved : queued_cache<Cache> {
  using queued_cache<Cache>::queued_cache;
  bool can_save() const { return false; }
};

struct served {
  serving_statistics counts;
  std::vector<std::vector<token_t>> texts;
};

template <template <class...> class Queued = queued_cache, class Method>
served serve(Method method, const std::vector<conversation>& conversations, index_t pages,
             const scheduler_options& options, const sequence_options& budgets = {}) {
  method.placement.heads = 2;
  method.placement.page = page;
  method.placement.max_pages = pages;
  cache<Method> kv(shape, method, std::make_shared<cpu::executor>(1));
  Queued<cache<Method>> queued(kv, budgets);
  counted_clock clock;
  hashing_model model{clock};
  scheduler<decltype(queued), hashing_model, counted_clock> server(queued, model, clock, options);
  served made;
  made.counts = server.run(conversations,
                           [&](const serving_statistics&, int running, int) { REQUIRE(running <= options.sequences); });
  for (std::size_t i = 0; i < conversations.size(); ++i) made.texts.push_back(server.text(i));
  if (pages > 0) CHECK(kv.available().pages == pages);  // nothing stays open
  return made;
}

/// Every turn once, in order, with its times in order, and every token of it.
void require_all_served(const std::vector<conversation>& conversations, const served& found) {
  std::set<std::pair<std::size_t, std::size_t>> turns;
  for (const served_turn& entry : found.counts.turns) {
    REQUIRE(turns.insert({entry.conversation, entry.number}).second);
    REQUIRE(entry.arrived >= conversations[entry.conversation].arrival);
    REQUIRE(entry.first_token > entry.arrived);
    REQUIRE(entry.last_token >= entry.first_token);
  }
  std::size_t expected = 0;
  for (std::size_t i = 0; i < conversations.size(); ++i) {
    expected += conversations[i].turns.size();
    REQUIRE(found.texts[i].size() == conversations[i].tokens());
  }
  REQUIRE(turns.size() == expected);
}

std::vector<conversation> some_conversations(support::rng& random, int count, index_t turns, bool share) {
  mix workload{"test", "", {5, 90}, {1, 30}, turns, {3, 40}, 0.05};
  if (share) workload.documents = 2, workload.document = {60, 90}, workload.prompt = {4, 20};
  return draw(workload, count, random.chance(0.5) ? 5 : 0, 1000, std::uint64_t(random.between(1, 1 << 20)));
}

template <class Method>
std::vector<std::vector<token_t>> alone(const Method& method, const std::vector<conversation>& conversations,
                                        const scheduler_options& options, const sequence_options& budgets) {
  std::vector<std::vector<token_t>> texts;
  for (const conversation& entry : conversations)
    texts.push_back(serve(method, {entry}, 0, options, budgets).texts.front());
  return texts;
}

/// Random conversations in memory for one and a half of the largest: whoever leaves comes back with the same bits.
template <class Method>
serving_statistics hold_under_pressure(Method method, const sequence_options& budgets, int cases) {
  support::rng random(31);
  serving_statistics total;
  for (int i = 0; i < cases; ++i) {
    const bool share = random.chance(0.5);
    const auto conversations = some_conversations(random, random.between(3, 9), random.between(1, 3), share);
    scheduler_options options;
    options.chunk = random.between(24, 48);
    if constexpr (requires { method.schedule.chunk; }) method.schedule.chunk = options.chunk;
    options.sequences = random.between(4, 12);
    std::size_t largest = 0;
    for (const conversation& entry : conversations) largest = std::max(largest, entry.tokens());
    const index_t pages = shape.layers * index_t(largest + largest / 2 + 3 * page) / page;
    const served found = serve(method, conversations, pages, options, budgets);
    require_all_served(conversations, found);
    const auto expected = alone(method, conversations, options, budgets);
    for (std::size_t entry = 0; entry < conversations.size(); ++entry) REQUIRE(found.texts[entry] == expected[entry]);
    total.preemptions += found.counts.preemptions;
    total.swaps.out += found.counts.swaps.out;
    total.swaps.in += found.counts.swaps.in;
    total.prefix_hits += found.counts.prefix_hits;
    REQUIRE(found.counts.swaps.out == found.counts.swaps.in);
  }
  return total;
}

snapkv<fp32, dim, dim, in_pages> small_snapkv() {
  snapkv<fp32, dim, dim, in_pages> method;
  method.retain.scorer.window = 4;
  return method;
}
tangram<fp32, dim, dim, in_pages> small_tangram(const std::vector<double>& shares) {
  tangram<fp32, dim, dim, in_pages> method;
  method.retain.scorer.window = 4;
  method.schedule.chunk = 32;
  method.retain.budget.shares = {shares.data(), shape.layers, shape.kv_heads};
  method.placement.shares = method.retain.budget.shares;
  return method;
}

}  // namespace

TEST_CASE("conversations that leave the cache and come back get the tokens that they would get alone") {
  const int cases = int(support::scaled(12));
  const serving_statistics whole = hold_under_pressure(full<fp32, dim, dim, in_pages>{}, {}, cases);
  CHECK(whole.preemptions > 0);
  CHECK(whole.swaps.out > 0);
  CHECK(whole.prefix_hits > 0);
  sequence_options quarter;
  quarter.budget.share = 0.25;
  const serving_statistics dropping = hold_under_pressure(small_snapkv(), quarter, cases);
  CHECK(dropping.swaps.out > 0);
  CHECK(dropping.prefix_hits > 0);
}

TEST_CASE("heads that keep calibrated shares are served as alone too") {
  const std::vector<double> shares{0.2, 0.5, 0.1, 0.3};
  const serving_statistics counts = hold_under_pressure(small_tangram(shares), {}, int(support::scaled(12)));
  CHECK(counts.swaps.out > 0);
  CHECK(counts.prefix_hits > 0);
}

TEST_CASE("a cache that cannot save writes once more what had to leave, and loses no turn") {
  support::rng random(5);
  int rewritten = 0;
  for (int i = 0; i < int(support::scaled(12)); ++i) {
    const auto conversations = some_conversations(random, 8, 2, random.chance(0.5));
    const served found =
        serve<unsaved>(full<fp32, dim, dim, in_pages>{}, conversations, 45, {.chunk = 32, .sequences = 6});
    require_all_served(conversations, found);
    CHECK(found.counts.swaps.out == 0);
    rewritten += found.counts.rewritten;
  }
  CHECK(rewritten > 0);
}

TEST_CASE("where admission counts whole answers no running sequence has to leave") {
  support::rng random(6);
  const std::vector<double> shares{0.2, 0.5, 0.1, 0.3};
  for (int i = 0; i < int(support::scaled(10)); ++i) {
    const auto conversations = some_conversations(random, 9, 1, false);
    const scheduler_options options{.chunk = 32, .sequences = 8, .answer_share = 1, .spare = 0};
    for (const served& found : {serve(full<fp32, dim, dim, in_pages>{}, conversations, 40, options),
                                serve(small_tangram(shares), conversations, 40, options)}) {
      require_all_served(conversations, found);
      CHECK(found.counts.preemptions == 0);
      CHECK(found.counts.swaps.out == 0);
    }
  }
}

TEST_CASE("who asks about a stored document does not write it, and a request does not run before it arrives") {
  support::rng random(8);
  mix workload{"test", "", {4, 9}, {2, 5}, 1};
  workload.documents = 1, workload.document = {100, 100};
  auto conversations = draw(workload, 5, 0, 1000, 3);
  conversations.back().arrival = 50;
  const served found = serve(full<fp32, dim, dim, in_pages>{}, conversations, 0, {.chunk = 32});
  require_all_served(conversations, found);
  CHECK(found.counts.prefix_hits == 4);
  CHECK(found.counts.prefix_tokens == 400);
  std::size_t questions = 0;
  for (const conversation& entry : conversations) questions += entry.first_prompt() - 100;
  CHECK(std::size_t(found.counts.prompt_tokens) == 100 + questions);
  CHECK(found.counts.turns.back().conversation == 4);
  CHECK(found.counts.seconds >= 50);

  const served apart =
      serve(full<fp32, dim, dim, in_pages>{}, conversations, 0, {.chunk = 32, .shares_prefixes = false});
  CHECK(apart.counts.prefix_hits == 0);
  CHECK(apart.texts == found.texts);
}

TEST_CASE("a conversation that the memory does not hold is refused in a sentence") {
  mix workload{"test", "", {200, 200}, {2, 2}};
  const auto conversations = draw(workload, 1, 0, 1000, 1);
  CHECK_THROWS_WITH(serve(full<fp32, dim, dim, in_pages>{}, conversations, 10, {.chunk = 32}),
                    contains("memory of a conversation of 200 tokens is more than there is; expected 10 pages"));
  CHECK_THROWS_WITH(find_mix("medium"), contains("mix is medium; expected one of short, mid, long"));
}

TEST_CASE("serving that is stopped says how many conversations had not ended") {
  const mix workload{"test", "", {50, 50}, {20, 20}};
  const auto conversations = draw(workload, 6, 0, 1000, 1);
  cache<full<fp32, dim, dim, in_pages>> kv(shape, {}, std::make_shared<cpu::executor>(1));
  queued_cache<decltype(kv)> queued(kv, {});
  counted_clock clock;
  hashing_model model{clock};
  scheduler<decltype(queued), hashing_model, counted_clock> server(queued, model, clock, {.chunk = 32, .limit = 0.2});
  const serving_statistics counts = server.run(conversations, [](const serving_statistics&, int, int) {});
  CHECK(counts.unfinished > 0);
  CHECK(counts.turns.size() + std::size_t(counts.unfinished) == conversations.size());
}

TEST_CASE("percentiles are those of sorted values") {
  std::vector<double> all;
  for (int i = 100; i > 0; --i) all.push_back(i);
  CHECK(percentile(all, 0.5) == 51);
  CHECK(percentile(all, 0.99) == 100);
  CHECK(percentile({}, 0.5) == 0);
  CHECK(mean(all) == 50.5);
}
