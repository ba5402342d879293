// Whole conversations of single methods: exact counts, turns, plans, NaN. Laws of every method are in test_laws.cpp.
#include "catch.hpp"

#include <limits>

#include "methods/support/conversation.hpp"

using namespace methods_test;

namespace {

std::shared_ptr<tessera::cpu::executor> one_thread() { return std::make_shared<tessera::cpu::executor>(1); }

/// A prompt in all layers, ended.
index_t with_prompt(any_cache& cache, const model_data& data, index_t tokens) {
  const index_t id = cache.open();
  prefill(cache, id, data, 0, tokens);
  cache.end_prefill(id);
  return id;
}

}  // namespace

TEST_CASE("streaming_llm and h2o hold exactly their budget after every step, sinks and newest among it") {
  rng random(144);
  const tessera::model_shape shape{2, 2, 2};
  const model_data data(random, shape, 100);
  for (const std::string method : {"streaming_llm", "h2o"}) {
    const auto cache = make_cache({method, 16}, shape, one_thread());
    const index_t id = with_prompt(*cache, data, 50);
    for (index_t next = 50; next < 100; ++next) {
      decode(*cache, id, data, next, 1);
      for (index_t layer = 0; layer < 2; ++layer) {
        for (index_t head = 0; head < 2; ++head) {
          const auto kept = cache->positions(layer, id, head);
          REQUIRE(kept.size() == 16);
          REQUIRE(std::is_sorted(kept.begin(), kept.end()));
          const index_t recent = method == "h2o" ? 8 : 12;
          for (index_t back = 0; back < recent; ++back) REQUIRE(kept[std::size_t(15 - back)] == next - back);
          for (index_t sink = 0; sink < 4 && method != "h2o"; ++sink) REQUIRE(kept[std::size_t(sink)] == sink);
        }
      }
    }
  }
}

TEST_CASE("methods that retain once append while decoding and choose anew when the next prompt ends") {
  rng random(145);
  const tessera::model_shape shape{1, 2, 1};
  const model_data data(random, shape, 100);
  for (const std::string method : {"snapkv", "pyramidkv", "ada_snapkv", "two_stages"}) {
    const auto cache = make_cache({method, 40}, shape, one_thread());
    const index_t id = with_prompt(*cache, data, 80);
    const auto held = cache->positions(0, id, 0).size();
    REQUIRE((held == 40 || held == 39));  // Ada-KV rounds
    for (index_t next = 80; next < 90; ++next) decode(*cache, id, data, next, 1);
    REQUIRE(cache->positions(0, id, 0).size() == held + 10);
    prefill(*cache, id, data, 90, 5);
    cache->end_prefill(id);
    const auto kept = cache->positions(0, id, 0);
    REQUIRE(kept.size() <= 40);
    REQUIRE(kept.size() >= 39);
    for (index_t back = 0; back < 5; ++back) REQUIRE(kept[kept.size() - 1 - std::size_t(back)] == 94 - back);
  }
}

TEST_CASE("a token whose key is not a number is the first to go and changes no other choice") {
  rng random(146);
  const tessera::model_shape shape{1, 2, 1};
  const model_data without(random, shape, 61);
  for (const std::string method : {"snapkv", "ada_snapkv", "pyramidkv", "h2o"}) {
    CAPTURE(method);
    const settings chosen{method, 40, {{"pool", 1}, {"window", 8}}};
    const auto clean = make_cache(chosen, shape, one_thread());
    const index_t id = with_prompt(*clean, without, 60);
    // The same tokens with one more, of which nothing is a number, between tokens 19 and 20.
    model_data with = without;
    const std::vector<float> nan(2 * dim, std::numeric_limits<float>::quiet_NaN());
    with.k.insert(with.k.begin() + 20 * dim, nan.begin(), nan.begin() + dim);
    with.v.insert(with.v.begin() + 20 * dim, nan.begin(), nan.begin() + dim);
    with.q.insert(with.q.begin() + 20 * 2 * dim, nan.begin(), nan.end());
    with.tokens += 1;
    const auto poisoned = make_cache(chosen, shape, one_thread());
    REQUIRE(with_prompt(*poisoned, with, 61) == id);
    std::vector<index_t> expected = clean->positions(0, id, 0);
    for (auto& position : expected) position += position >= 20;
    REQUIRE(poisoned->positions(0, id, 0) == expected);
    const auto results = decode(*poisoned, id, with, 61, 1);
    CHECK(std::none_of(results.begin(), results.end(), [](float x) { return std::isnan(x); }));
  }
}

TEST_CASE("queries of the observed rows are all that a scorer needs of a chunk") {
  rng random(147);
  const tessera::model_shape shape{1, 4, 2};
  const model_data data(random, shape, 90);
  for (const std::string method : {"snapkv", "streaming_llm", "full", "exact_topk"}) {
    const settings chosen{method, 20, {{"window", 8}}};
    const auto whole = make_cache(chosen, shape, one_thread()), sparse = make_cache(chosen, shape, one_thread());
    const index_t id = with_prompt(*whole, data, 90);
    REQUIRE(sparse->open() == id);
    for (index_t first = 0; first < 90; first += 30) {
      const index_t needed = method == "snapkv" ? 8 : 0;
      sparse->prefill(0, id, data.queries(0, first + 30 - needed, needed), data.keys(0, first, 30),
                      data.values(0, first, 30));
    }
    sparse->end_prefill(id);
    for (index_t h = 0; h < 2; ++h) REQUIRE(sparse->positions(0, id, h) == whole->positions(0, id, h));
  }
}

TEST_CASE("rocketkv that leaves all compression to its second stage is hsa, to the bit") {
  rng random(148);
  const tessera::model_shape shape{2, 8, 2};
  const model_data data(random, shape, 330);
  for (const double unit : {0.0, 1.0}) {
    const settings split{"rocketkv", 48, {{"split", 0}, {"max_new", 40}, {"unit", unit}}};
    const settings alone{"hsa", 48, {{"max_new", 40}, {"unit", unit}}};
    const auto rocket = make_cache(split, shape, one_thread()), hsa = make_cache(alone, shape, one_thread());
    const index_t id = with_prompt(*rocket, data, 300);
    REQUIRE(with_prompt(*hsa, data, 300) == id);
    CHECK(rocket->plan(id).ratio == hsa->plan(id).ratio);
    for (index_t next = 300; next < 330;) {
      const index_t count = std::min(random.between(1, 4), 330 - next);
      REQUIRE(support::same_bits(decode(*rocket, id, data, next, count), decode(*hsa, id, data, next, count)));
      next += count;
    }
  }
}

TEST_CASE("rocketkv_mt finds in the second turn what rocketkv dropped in the first") {
  // Two needles: keys that only the first turn's queries, or only the second's, look at.
  rng random(149);
  const tessera::model_shape shape{1, 1, 1};
  model_data data(random, shape, 400);
  const auto aim = [&](index_t token, index_t key) {  // this query looks at that key
    for (int d = 0; d < dim; ++d) data.q[std::size_t(token * dim + d)] = 3 * data.k[std::size_t(key * dim + d)];
  };
  const index_t first_needle = 40, second_needle = 170;
  for (index_t t = 280; t < 310; ++t) aim(t, first_needle);
  for (index_t t = 320; t < 360; ++t) aim(t, second_needle);
  const std::map<std::string, double> values{{"window", 8}, {"max_new", 16}, {"pool", 1}, {"split", 1}};
  const auto rocket = make_cache({"rocketkv", 32, values}, shape, one_thread());
  const auto turns = make_cache({"rocketkv_mt", 32, values}, shape, one_thread());
  for (const auto* cache : {rocket.get(), turns.get()}) {
    const bool keeps = cache == turns.get();
    any_cache& now = const_cast<any_cache&>(*cache);
    now.trace_attended(true);
    const index_t id = with_prompt(now, data, 300);
    const auto has = [](const std::vector<index_t>& list, index_t token) {
      return std::binary_search(list.begin(), list.end(), token);
    };
    CHECK(has(now.readable(0, id, 0), first_needle));
    CHECK_FALSE(has(now.readable(0, id, 0), second_needle));
    for (index_t t = 300; t < 310; ++t) decode(now, id, data, t, 1);
    CHECK(has(now.attended(0, id)[0], first_needle));
    // Generated tokens join the candidates.
    for (index_t t = 300; t < 310; ++t) CHECK(has(now.readable(0, id, 0), t));
    prefill(now, id, data, 310, 40);
    now.end_prefill(id);
    CHECK(has(now.positions(0, id, 0), second_needle) == keeps);
    CHECK(has(now.readable(0, id, 0), second_needle) == keeps);
    CHECK(has(now.readable(0, id, 0), first_needle) == false);
    decode(now, id, data, 350, 1);
    CHECK(has(now.attended(0, id)[0], second_needle) == keeps);
  }
}

TEST_CASE("every turn's end plans for all tokens that the sequence has taken, and for the budget of that moment") {
  rng random(151);
  const tessera::model_shape shape{1, 2, 1};
  const model_data data(random, shape, 600);
  for (const std::string method : {"rocketkv", "rocketkv_mt", "hsa"}) {
    CAPTURE(method);
    const auto planned_at_once = [&](index_t budget, index_t tokens) {
      const auto cache = make_cache({method, budget, {{"max_new", 30}, {"window", 16}}}, shape, one_thread());
      return cache->plan(with_prompt(*cache, data, tokens));
    };
    const auto check = [&](const tessera::stage_plan& got, const tessera::stage_plan& expected) {
      CHECK(got.capacity == expected.capacity);
      CHECK(got.retained == expected.retained);
      CHECK(got.read == expected.read);
      CHECK(got.ratio == expected.ratio);
    };
    const auto cache = make_cache({method, 64, {{"max_new", 30}, {"window", 16}}}, shape, one_thread());
    const index_t id = with_prompt(*cache, data, 200);
    check(cache->plan(id), planned_at_once(64, 200));
    CHECK(cache->plan(id).read == 32);
    prefill(*cache, id, data, 200, 250);
    cache->end_prefill(id);
    check(cache->plan(id), planned_at_once(64, 450));
    cache->set_budget(128);
    CHECK(cache->plan(id).read == 32);
    decode(*cache, id, data, 450, 1);
    check(cache->plan(id), planned_at_once(64, 450));
    prefill(*cache, id, data, 451, 50);
    cache->end_prefill(id);
    check(cache->plan(id), planned_at_once(128, 501));
    decode(*cache, id, data, 501, 1);
  }
}

TEST_CASE("a chat that begins with a short prompt keeps of a long one what the plan for all of its tokens gives") {
  rng random(152);
  const tessera::model_shape shape{1, 1, 1};
  const model_data data(random, shape, 20'010);
  const auto chat = make_cache({"rocketkv", 1024}, shape, one_thread()),
             alone = make_cache({"rocketkv", 1024}, shape, one_thread());
  const index_t id = with_prompt(*chat, data, 10);
  CHECK(chat->positions(0, id, 0).size() == 10);
  prefill(*chat, id, data, 10, 20'000);
  chat->end_prefill(id);
  CHECK(chat->positions(0, id, 0).size() == alone->positions(0, with_prompt(*alone, data, 20'010), 0).size());
}

TEST_CASE("a key that is no number does not keep a step from what it would read without it") {
  rng random(153);
  const tessera::model_shape shape{1, 2, 1};
  const model_data clean(random, shape, 210);
  for (const std::string method : {"hsa", "quest", "sparq"}) {
    CAPTURE(method);
    // Pages of one token: the token itself comes last, every other choice is as it was.
    const settings chosen{method, 32, {{"max_new", 0}, {"page", 1}, {"channels", 64}}};
    model_data poisoned = clean;
    std::fill_n(poisoned.k.begin() + 50 * dim, dim, std::numeric_limits<float>::quiet_NaN());
    const auto before = make_cache(chosen, shape, one_thread()), after = make_cache(chosen, shape, one_thread());
    before->trace_attended(true);
    after->trace_attended(true);
    const index_t id = with_prompt(*before, clean, 200);
    with_prompt(*after, poisoned, 200);
    for (index_t t = 200; t < 210; ++t) {
      decode(*before, id, clean, t, 1);
      const auto results = decode(*after, id, poisoned, t, 1);
      CHECK(std::none_of(results.begin(), results.end(), [](float x) { return std::isnan(x); }));
      auto expected = before->attended(0, id)[0];
      const auto got = after->attended(0, id)[0];
      expected.erase(std::remove(expected.begin(), expected.end(), 50), expected.end());
      CHECK(std::includes(got.begin(), got.end(), expected.begin(), expected.end()));
    }
  }
}

TEST_CASE("a choice by estimates gives the same bits with any number of threads") {
  rng random(154);
  const tessera::model_shape shape{1, 12, 3};
  const model_data data(random, shape, 6004);
  for (const std::string method : {"hsa", "quest", "sparq", "rocketkv_mt"}) {
    CAPTURE(method);
    const settings chosen{method, 512, {{"page", 2}, {"channels", 64}, {"split", 0}}};
    const auto alone = make_cache(chosen, shape, one_thread());
    const auto together = make_cache(chosen, shape, std::make_shared<tessera::cpu::executor>(3));
    const index_t id = with_prompt(*alone, data, 6000);
    REQUIRE(with_prompt(*together, data, 6000) == id);
    for (index_t t = 6000; t < 6004; t += 2) {
      REQUIRE(support::same_bits(decode(*alone, id, data, t, 2), decode(*together, id, data, t, 2)));
    }
  }
}

namespace {

const tessera::model_shape options_shape{2, 6, 3};

/// With small windows and pages. What a step reads beside a first stage is given: else it would follow the budget.
settings of_budget(const std::string& method, index_t budget) {
  return {method, budget, {{"window", 8}, {"max_new", 30}, {"recent", 6}, {"read_tokens", 24}}, {}};
}
bool has_number(const std::string& method, const std::string& name) {
  const auto numbers = numbers_of(method);
  return std::any_of(numbers.begin(), numbers.end(), [&](const number& one) { return one.name == name; });
}

/// So many thousandths.
index_t part_of(index_t thousandths, index_t tokens, index_t least) {
  return std::max(least, index_t((std::int64_t(thousandths) * tokens + 999) / 1000));
}

}  // namespace

TEST_CASE("a sequence with budgets of its own does as in a cache of those budgets, bit for bit") {
  rng random(147);
  const model_data data(random, options_shape, 200);
  const auto same = [](const auto& got, const auto& expected) { REQUIRE(support::same_bits(got, expected)); };
  for (const auto& method : all_methods()) {
    if (!has_number(method, "budget")) continue;
    CAPTURE(method);
    const auto wider = make_cache(of_budget(method, 90), options_shape, one_thread());
    const auto other = make_cache(of_budget(method, 40), options_shape, one_thread());
    wider->open(), other->open();  // whose budget is the recipe's
    prefill(*wider, 0, data, 0, 100);
    hold_the_same_conversation(*wider, data, *other, data, same, {{40, 0}, {}});
    CHECK(wider->plan(1).read == other->plan(1).read);
    CHECK(wider->bound(100, 20, 0, {{40, 0}, {}}).bytes == other->bound(100, 20, 0).bytes);
    if (!has_number(method, "read_tokens")) continue;
    settings less = of_budget(method, 90);
    less.values["read_tokens"] = 17;
    const auto reader = make_cache(less, options_shape, one_thread());
    reader->open(), reader->open();
    hold_the_same_conversation(*wider, data, *reader, data, same, {{}, {17, 0}});
  }
}

TEST_CASE("a budget that is a share follows the sequence's tokens") {
  rng random(148);
  const model_data data(random, options_shape, 220);
  constexpr index_t thousandths = 275;
  for (const auto& method : all_methods()) {
    if (!has_number(method, "budget")) continue;
    CAPTURE(method);
    const traits& known = traits_of(method);
    const bool chooses = known.scorer != traits::first::none, estimates = known.pays_for_estimates();
    const index_t least = estimates ? 16 : 8;
    const tessera::sequence_options share{{0, double(thousandths) / 1000}, {}};
    const auto cache = make_cache(of_budget(method, 90), options_shape, one_thread());
    // The other cache is told each budget before it counts.
    const auto told = make_cache(of_budget(method, 90), options_shape, one_thread());
    const index_t id = cache->open(share);
    REQUIRE(told->open() == id);
    index_t next = 0;
    for (const turn& now : {turn{150, {1, 1, 3, 1}}, turn{30, {1, 8, 1}}}) {
      for (const auto& to : {cache.get(), told.get()}) prefill(*to, id, data, next, now.prompt);
      next += now.prompt;
      told->set_budget(part_of(thousandths, next, least));
      for (const auto& to : {cache.get(), told.get()}) to->end_prefill(id);
      for (const index_t count : now.steps) {
        if (!chooses || known.each_step || known.before_step) {
          if (!estimates || chooses) told->set_budget(part_of(thousandths, next + count, least));
        }
        const auto results = decode(*cache, id, data, next, count), expected = decode(*told, id, data, next, count);
        next += count;
        if (!chooses && estimates) {  // what its steps read grows between two plans, and a budget that is told does not
          REQUIRE(cache->plan(id).read == part_of(thousandths, next, least) / 2);
          continue;
        }
        REQUIRE(support::same_bits(results, expected));
        for (index_t head = 0; head < options_shape.kv_heads; ++head) {
          REQUIRE(cache->positions(1, id, head) == told->positions(1, id, head));
          REQUIRE(cache->readable(1, id, head) == told->readable(1, id, head));
        }
        REQUIRE(cache->bytes(id) <= cache->bound(150, 20, 0, share).bytes);
      }
    }
  }
}

TEST_CASE("a share of what a step reads follows the tokens that are stored") {
  rng random(149);
  const model_data data(random, options_shape, 120);
  const auto cache = make_cache({"two_stages", 40, {{"read_tokens", 24}, {"window", 8}}}, options_shape, one_thread());
  const index_t id = cache->open({{}, {0, 1.0 / 3}});
  prefill(*cache, id, data, 0, 100);
  cache->end_prefill(id);
  CHECK(cache->plan(id).read == 14);  // of 40 that stay
  for (index_t next = 100; next < 109; ++next) {
    decode(*cache, id, data, next, 1);
    CHECK(cache->plan(id).read == (40 + next - 100 + 1 + 2) / 3);
  }
}

TEST_CASE("a share is never less than the method needs, and holds over forks and what is taken back") {
  rng random(150);
  const model_data data(random, options_shape, 120);
  const auto cache = make_cache({"snapkv", 40, {{"window", 8}}}, options_shape, one_thread());
  const index_t id = cache->open({{0, 0.01}, {}});
  prefill(*cache, id, data, 0, 100);
  cache->end_prefill(id);
  CHECK(cache->positions(0, id, 0).size() == 8);
  const auto h2o = make_cache({"h2o", 40}, options_shape, one_thread());
  const index_t first = h2o->open({{0, 0.5}, {}});
  prefill(*h2o, first, data, 0, 50);
  h2o->end_prefill(first);
  const index_t second = h2o->fork(first);
  for (const index_t held : {first, second}) {
    decode(*h2o, held, data, 50, 1);
    CHECK(h2o->positions(0, held, 0).size() == 26);
  }
}

TEST_CASE("budgets that a sequence cannot have are refused in a sentence, and no sequence is opened") {
  const auto said = [](const std::string& method, const tessera::sequence_options& options) {
    const auto cache = make_cache({method, 40}, options_shape, one_thread());
    std::string text;
    try {
      cache->open(options);
    } catch (const tessera::error& refusal) {
      text = refusal.what();
    }
    CHECK(cache->open() == 0);
    return text;
  };
  const double nan = std::numeric_limits<double>::quiet_NaN();
  CHECK_THAT(said("snapkv", {{40, 0.5}, {}}), contains("budget is tokens and a share; expected one of them"));
  for (const double share : {-0.5, 1.0001, nan})
    CHECK_THAT(said("snapkv", {{0, share}, {}}), contains("share of budget is ") && contains("expected in (0, 1]"));
  CHECK_THAT(said("snapkv", {{31, 0}, {}}), contains("window is 32; expected at most the budget, which is 31"));
  CHECK_THAT(said("snapkv", {{-1, 0}, {}}), contains("budget is -1; expected 1 to "));
  CHECK_THAT(said("snapkv", {{}, {16, 0}}), contains("read_tokens of a sequence is given; expected none"));
  CHECK_THAT(said("full", {{64, 0}, {}}), contains("budget of a sequence is given; expected none"));
  CHECK_THAT(said("quest", {{15, 0}, {}}), contains("budget is 15; expected 16 to "));
}
