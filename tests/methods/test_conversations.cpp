// Laws that hold for every method through the whole cache: full budget, batches, exact counts, NaN.
#include "catch.hpp"

#include <limits>
#include <numeric>

#include "methods/conversation.hpp"

using namespace methods_test;

namespace {

std::shared_ptr<tessera::cpu::executor> one_thread() { return std::make_shared<tessera::cpu::executor>(1); }

std::vector<index_t> everything(index_t tokens) {
  std::vector<index_t> all(static_cast<std::size_t>(tokens));
  std::iota(all.begin(), all.end(), 0);
  return all;
}

/// A prompt in all layers, ended.
index_t with_prompt(any_cache& cache, const model_data& data, index_t tokens) {
  const index_t id = cache.open();
  prefill(cache, id, data, 0, tokens);
  cache.end_prefill(id);
  return id;
}

}  // namespace

TEST_CASE("at full budget every method answers as dense attention does, over several turns") {
  rng random(141);
  const tessera::model_shape shape{2, 6, 2};
  const model_data data(random, shape, 150);
  for (const auto& method : all_methods()) {
    for (const index_t budget : {150, 1000}) {
      // Where the budget pays for an estimate too, a step attends half of it.
      if (budget < 300 && (traits_of(method).plans || traits_of(method).estimates())) continue;
      CAPTURE(method, budget);
      const settings chosen{method, budget};
      const auto cache = make_cache(chosen, shape, one_thread());
      const index_t id = cache->open();
      index_t next = 0;
      for (const turn& now : {turn{100, {1, 1, 8}}, turn{1, {1}}, turn{30, {3, 5}}}) {
        prefill(*cache, id, data, next, now.prompt);
        next += now.prompt;
        cache->end_prefill(id);
        for (const index_t count : now.steps) {
          const auto results = decode(*cache, id, data, next, count);
          for (index_t layer = 0; layer < shape.layers; ++layer) {
            for (index_t t = 0; t < count; ++t) {
              for (index_t h = 0; h < shape.q_heads; ++h) {
                const auto expected = data.attend({}, layer, next + t, h, everything(next + count));
                const std::size_t row = std::size_t((layer * count + t) * shape.q_heads + h);
                REQUIRE(support::row_error(results.data() + row * dim, expected.out) < 1e-5);
              }
            }
          }
          next += count;
        }
        for (index_t layer = 0; layer < shape.layers; ++layer) {
          for (index_t head = 0; head < shape.kv_heads; ++head) {
            REQUIRE(cache->positions(layer, id, head) == everything(next));
          }
        }
      }
      REQUIRE(next == 150);
    }
  }
}

TEST_CASE("prompt attention through a cache sees what is stored, also in a later turn after an eviction") {
  rng random(142);
  const tessera::model_shape shape{1, 4, 2};
  const model_data data(random, shape, 120);
  for (const auto& method : all_methods()) {
    CAPTURE(method);
    const settings chosen{method, 40};
    const auto cache = make_cache(chosen, shape, one_thread());
    const index_t id = with_prompt(*cache, data, 80);
    prefill(*cache, id, data, 80, 15);
    prefill(*cache, id, data, 95, 25);
    std::vector<float> out(std::size_t(25 * 4 * dim)), lse(25 * 4);
    cache->prefill_attention(0, id, data.queries(0, 95, 25), tessera::nhd_rows(out.data(), 25, 4, dim),
                             tessera::nhd_rows(lse.data(), 25, 4, 1));
    for (index_t t = 0; t < 25; ++t) {
      for (index_t h = 0; h < 4; ++h) {
        const auto expected = data.attend({}, 0, 95 + t, h, cache->positions(0, id, h / 2));
        REQUIRE(support::row_error(out.data() + (t * 4 + h) * dim, expected.out) < 1e-5);
        REQUIRE(support::number_error(lse[std::size_t(t * 4 + h)], expected.lse) < 1e-5);
      }
    }
  }
}

TEST_CASE("a batch of sequences of different lengths gives the bits of one call for each") {
  rng random(143);
  const tessera::model_shape shape{2, 4, 2};
  const std::vector<index_t> prompts{70, 1, 33, 150};
  for (const auto& method : all_methods()) {
    CAPTURE(method);
    std::vector<model_data> data;
    for (const index_t prompt : prompts) data.emplace_back(random, shape, prompt + 5);
    const settings chosen{method, 34};
    const auto batched = make_cache(chosen, shape, std::make_shared<tessera::cpu::executor>(2));
    std::vector<index_t> ids;
    for (std::size_t b = 0; b < prompts.size(); ++b) ids.push_back(with_prompt(*batched, data[b], prompts[b]));
    const auto single = batched->clone();
    std::swap(ids[0], ids[2]);  // ids need not ascend
    std::swap(data[0], data[2]);
    for (const index_t count : {1, 4}) {
      for (index_t layer = 0; layer < shape.layers; ++layer) {
        std::vector<float> q, k, v;
        for (std::size_t b = 0; b < ids.size(); ++b) {
          const index_t next = single->next_position(ids[b]) - (layer > 0 ? count : 0);
          const auto take = [&](std::vector<float>& to, const float* from, index_t heads) {
            to.insert(to.end(), from, from + count * heads * dim);
          };
          take(q, data[b].query(layer, next, 0), shape.q_heads);
          take(k, data[b].key(layer, next, 0), shape.kv_heads);
          take(v, data[b].value(layer, next, 0), shape.kv_heads);
        }
        const index_t batch = index_t(ids.size());
        std::vector<float> out(q.size()), alone(q.size()), lse(q.size() / dim), lse_alone(lse);
        const auto queries = tessera::nhd_rows<const float>(q.data(), count, shape.q_heads, dim, batch);
        const auto keys = tessera::nhd_rows<const float>(k.data(), count, shape.kv_heads, dim, batch);
        const auto values = tessera::nhd_rows<const float>(v.data(), count, shape.kv_heads, dim, batch);
        batched->decode(layer, ids, queries, keys, values, tessera::nhd_rows(out.data(), count, shape.q_heads, dim, batch),
                        tessera::nhd_rows(lse.data(), count, shape.q_heads, 1, batch));
        for (index_t b = 0; b < batch; ++b) {
          const auto part = [b](auto rows) {
            rows.data += b * rows.sequence_stride;
            rows.sequences = 1;
            return rows;
          };
          single->decode(layer, {ids[std::size_t(b)]}, part(queries), part(keys), part(values),
                         part(tessera::nhd_rows(alone.data(), count, shape.q_heads, dim, batch)),
                         part(tessera::nhd_rows(lse_alone.data(), count, shape.q_heads, 1, batch)));
        }
        REQUIRE(support::same_bits(out, alone));
        REQUIRE(support::same_bits(lse, lse_alone));
        for (const index_t id : ids) {
          for (index_t h = 0; h < 2; ++h) REQUIRE(batched->positions(layer, id, h) == single->positions(layer, id, h));
        }
      }
    }
  }
}

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
      sparse->prefill(0, id, data.queries(0, first + 30 - needed, needed), data.keys(0, first, 30), data.values(0, first, 30));
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

TEST_CASE("candidates are stored slots, each once, and nothing else is attended") {
  rng random(150);
  const tessera::model_shape shape{2, 4, 2};
  const model_data data(random, shape, 400);
  for (const auto& method : all_methods()) {
    if (!traits_of(method).filters) continue;
    CAPTURE(method);
    const auto cache = make_cache({method, 40, {{"max_new", 20}, {"window", 16}}}, shape, one_thread());
    cache->trace_attended(true);
    const index_t id = cache->open();
    index_t next = 0;
    for (const turn& now : {turn{120, {1, 1, 5}}, turn{3, {1, 8}}, turn{90, {1, 1, 1}}, turn{60, {2}}}) {
      prefill(*cache, id, data, next, now.prompt);
      next += now.prompt;
      cache->end_prefill(id);
      for (const index_t count : now.steps) {
        decode(*cache, id, data, next, count);
        next += count;
        for (index_t layer = 0; layer < 2; ++layer) {
          for (index_t head = 0; head < 2; ++head) {
            const auto readable = cache->readable(layer, id, head);
            REQUIRE(cache->positions(layer, id, head) == everything(next));
            REQUIRE(std::adjacent_find(readable.begin(), readable.end(), std::greater_equal<>{}) == readable.end());
            REQUIRE((readable.front() >= 0 && readable.back() == next - 1));
            const auto attended = cache->attended(layer, id)[std::size_t(head)];
            REQUIRE(std::includes(readable.begin(), readable.end(), attended.begin(), attended.end()));
          }
        }
      }
    }
  }
}

TEST_CASE("the plan is the first prompt's, whatever comes later, and a new budget is planned for at the next turn's end") {
  rng random(151);
  const tessera::model_shape shape{1, 2, 1};
  const model_data data(random, shape, 600);
  for (const std::string method : {"rocketkv", "rocketkv_mt", "hsa"}) {
    const auto cache = make_cache({method, 64, {{"max_new", 30}, {"window", 16}}}, shape, one_thread());
    const index_t id = with_prompt(*cache, data, 200);
    const auto first = cache->plan(id);
    CHECK(first.read == 32);
    prefill(*cache, id, data, 200, 250);
    cache->end_prefill(id);
    CHECK(cache->plan(id).capacity == first.capacity);
    CHECK(cache->plan(id).retained == first.retained);
    CHECK(cache->plan(id).ratio == first.ratio);
    cache->set_budget(128);
    CHECK(cache->plan(id).read == 32);
    decode(*cache, id, data, 450, 1);
    prefill(*cache, id, data, 451, 50);
    cache->end_prefill(id);
    CHECK(cache->plan(id).read == 64);
    CHECK(cache->plan(id).ratio < first.ratio);
    decode(*cache, id, data, 501, 1);
  }
}

TEST_CASE("a conversation may begin with a decode step") {
  rng random(152);
  const tessera::model_shape shape{1, 4, 2};
  const model_data data(random, shape, 60);
  for (const auto& method : all_methods()) {
    CAPTURE(method);
    const auto cache = make_cache({method, 40, {{"window", 4}}}, shape, one_thread());
    const index_t id = cache->open();
    for (index_t t = 0; t < 10; ++t) {
      const auto results = decode(*cache, id, data, t, 1);
      for (index_t h = 0; h < 4; ++h) {
        REQUIRE(support::row_error(results.data() + h * dim, data.attend({}, 0, t, h, everything(t + 1)).out) < 1e-5);
      }
    }
    prefill(*cache, id, data, 10, 30);
    cache->end_prefill(id);
    decode(*cache, id, data, 40, 1);
  }
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
