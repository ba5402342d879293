// Laws that hold for every method through the whole cache: full budget, batches, prompts, candidates.
#include "methods/support/laws.hpp"

#include "catch.hpp"

#include <numeric>

#include "methods/support/conversation.hpp"

namespace methods_test {

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

// At full budget every method answers as dense attention does, over several turns.
void answers_densely_at_full_budget(const std::string& method) {
  rng random(141);
  const tessera::model_shape shape{2, 6, 2};
  const model_data data(random, shape, 150);
  for (const index_t budget : {150, 1000}) {
    // Where the budget pays for an estimate too, a step attends half of it.
    if (budget < 300 && (traits_of(method).plans || traits_of(method).estimate)) continue;
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

// What a prompt's row attends of the stored positions: all of them, or those on its query head's lines.
std::vector<index_t> on_lines(const tessera::prompt_lines& lines, index_t row, index_t q_head,
                              std::vector<index_t> stored) {
  if (lines.heads.empty() || row >= lines.dense_from) return stored;
  const auto& [vertical, slash] = lines.heads[std::size_t(q_head)];
  std::erase_if(stored, [&](index_t at) {
    return !std::binary_search(vertical.begin(), vertical.end(), at) &&
           !std::binary_search(slash.begin(), slash.end(), row - at);
  });
  return stored;
}

// Prompt attention through a cache sees what is stored, also in a later turn after an eviction.
void attends_prompts_over_what_is_stored(const std::string& method) {
  rng random(142);
  const tessera::model_shape shape{1, 4, 2};
  const model_data data(random, shape, 120);
  const settings chosen{method, 40};
  const auto cache = make_cache(chosen, shape, one_thread());
  cache->trace_lines();
  const index_t id = with_prompt(*cache, data, 80);
  prefill(*cache, id, data, 80, 15);
  prefill(*cache, id, data, 95, 25);
  std::vector<float> out(std::size_t(25 * 4 * dim)), lse(25 * 4);
  cache->prefill_attention(0, id, data.queries(0, 95, 25), tessera::nhd_rows(out.data(), 25, 4, dim),
                           tessera::nhd_rows(lse.data(), 25, 4, 1));
  for (index_t t = 0; t < 25; ++t) {
    for (index_t h = 0; h < 4; ++h) {
      const auto read = on_lines(cache->lines(0, id), 95 + t, h, cache->positions(0, id, h / 2));
      const auto expected = data.attend({}, 0, 95 + t, h, read);
      REQUIRE(support::row_error(out.data() + (t * 4 + h) * dim, expected.out) < 1e-5);
      REQUIRE(support::number_error(lse[std::size_t(t * 4 + h)], expected.lse) < 1e-5);
    }
  }
}

// A batch of sequences of different lengths gives the bits of one call for each.
void batches_with_the_bits_of_single_calls(const std::string& method) {
  rng random(143);
  const tessera::model_shape shape{2, 4, 2};
  const std::vector<index_t> prompts{70, 1, 33, 150};
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
      batched->decode(layer, ids, queries, keys, values,
                      tessera::nhd_rows(out.data(), count, shape.q_heads, dim, batch),
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

// Candidates are stored slots, each once, and nothing else is attended.
void reads_only_candidates(const std::string& method) {
  rng random(150);
  const tessera::model_shape shape{2, 4, 2};
  const model_data data(random, shape, 400);
  if (!traits_of(method).filters) return;
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

// A conversation may begin with a decode step.
void may_begin_with_a_step(const std::string& method) {
  rng random(152);
  const tessera::model_shape shape{1, 4, 2};
  const model_data data(random, shape, 60);
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

/// What a turn comes to: outputs of its steps, and what was stored and attended behind each.
struct answers_of_turn {
  std::vector<float> outputs;
  std::vector<std::vector<index_t>> tokens;
};
answers_of_turn take_turn(any_cache& cache, index_t id, const model_data& data, const turn& now) {
  answers_of_turn all;
  index_t next = cache.next_position(id);
  prefill(cache, id, data, next, now.prompt);
  cache.end_prefill(id);
  next += now.prompt;
  for (const index_t count : now.steps) {
    const auto results = decode(cache, id, data, next, count);
    all.outputs.insert(all.outputs.end(), results.begin(), results.end());
    next += count;
    for (index_t layer = 0; layer < data.shape.layers; ++layer) {
      for (index_t h = 0; h < data.shape.kv_heads; ++h) all.tokens.push_back(cache.positions(layer, id, h));
      for (const auto& attended : cache.attended(layer, id)) all.tokens.push_back(attended);
    }
  }
  return all;
}
void goes_on_as(any_cache& cache, index_t id, any_cache& twin, index_t twin_id, const model_data& data,
                const turn& now) {
  const answers_of_turn got = take_turn(cache, id, data, now), expected = take_turn(twin, twin_id, data, now);
  REQUIRE(support::same_bits(got.outputs, expected.outputs));
  REQUIRE(got.tokens == expected.tokens);
}

// A fork and what it came from go on as two copies of the cache would, also when the other one is closed and its id used again.
void forks_go_on_alone(const std::string& method) {
  rng random(153);
  const tessera::model_shape shape{3, 4, 2, 12, {false, true, false}};
  const model_data data(random, shape, 400), other(random, shape, 400);
  const auto cache = make_cache({method, 40, {{"window", 8}}}, shape, one_thread());
  cache->trace_attended(true);
  const index_t first = cache->open(), empty = cache->fork(first);
  REQUIRE(empty != first);
  take_turn(*cache, first, data, {90, {1, 3}});
  take_turn(*cache, first, data, {40, {1}});
  const auto twin = cache->clone(), other_twin = cache->clone();
  index_t fork = cache->fork(first), grandchild = cache->fork(fork);
  REQUIRE(cache->next_position(fork) == cache->next_position(first));
  goes_on_as(*cache, fork, *other_twin, first, other, {20, {1, 1}});
  goes_on_as(*cache, first, *twin, first, data, {50, {2, 1, 1}});
  goes_on_as(*cache, empty, *twin, empty, other, {35, {1}});
  cache->close(first);
  REQUIRE(cache->open() == first);
  take_turn(*cache, first, other, {130, {1, 1}});
  goes_on_as(*cache, fork, *other_twin, first, other, {45, {4, 1}});
  const auto before = cache->clone();
  cache->close(fork);
  goes_on_as(*cache, grandchild, *before, grandchild, data, {33, {1, 2}});

  // In the middle of a prompt: both go on with it.
  prefill(*cache, grandchild, data, cache->next_position(grandchild), 25);
  REQUIRE_THROWS_AS(cache->fork(fork), tessera::error);
  REQUIRE(cache->fork(grandchild) == fork);
  const auto of_fork = cache->clone(), of_source = cache->clone();
  for (const auto& [kv, id] : {std::pair{cache.get(), fork}, {of_fork.get(), grandchild}}) {
    prefill(*kv, id, data, kv->next_position(id), 12);
    kv->end_prefill(id);
  }
  goes_on_as(*cache, fork, *of_fork, grandchild, other, {20, {1, 1}});
  for (const auto& kv : {cache.get(), of_source.get()}) {
    prefill(*kv, grandchild, other, kv->next_position(grandchild), 7);
    kv->end_prefill(grandchild);
  }
  goes_on_as(*cache, grandchild, *of_source, grandchild, data, {20, {1, 1}});

  const index_t next = cache->next_position(grandchild);
  for (index_t layer = 0; layer < shape.layers; ++layer) {
    cache->prefill(layer, grandchild, data.queries(layer, next, 5), data.keys(layer, next, 5),
                   data.values(layer, next, 5));
    if (layer > 0) continue;
    REQUIRE_THROWS_WITH(cache->fork(grandchild), contains("finish the step, or the prompt's chunk, in every layer"));
  }
  cache->end_prefill(grandchild);
  cache->prepare_step({grandchild}, 2);
  REQUIRE_THROWS_WITH(cache->fork(grandchild), contains("steps without rows is 1; expected 0"));
}

// A prompt whose layers end one by one leaves what it leaves without that, and no layer takes any more of it.
void ends_layers_one_by_one(const std::string& method) {
  rng random(154);
  const tessera::model_shape shape{3, 4, 2, 12, {false, true, false}};
  const model_data data(random, shape, 400);
  const auto cache = make_cache({method, 40, {{"window", 8}}}, shape, one_thread());
  cache->trace_attended(true);
  const index_t id = cache->open();
  REQUIRE_THROWS_WITH(cache->end_layer(0, id), contains("tokens of this turn is 0; expected at least 1"));
  for (const index_t count : {90, 40}) {
    prefill(*cache, id, data, cache->next_position(id), count);
    const auto twin = cache->clone();
    std::vector<float> out(std::size_t(count * shape.q_heads * dim));
    const auto queries = data.queries(1, cache->next_position(id) - count, count);
    for (index_t layer = 0; layer < shape.layers; ++layer) cache->end_layer(layer, id);
    const auto refuses = contains("layer of this turn's prompt is 1; expected one that end_layer has not ended");
    REQUIRE_THROWS_WITH(cache->end_layer(1, id), refuses);
    REQUIRE_THROWS_WITH(cache->prefill(1, id, queries, data.keys(1, 0, count), data.values(1, 0, count)), refuses);
    REQUIRE_THROWS_WITH(
        cache->prefill_attention(1, id, queries, tessera::nhd_rows(out.data(), count, shape.q_heads, dim), {}),
        refuses);
    cache->end_prefill(id);
    twin->end_prefill(id);
    REQUIRE(cache->clone()->bytes(id) == twin->clone()->bytes(id));  // a copy has no spare memory
    for (const index_t tokens : {1, 3, 1}) {
      const index_t next = cache->next_position(id);
      REQUIRE(support::same_bits(decode(*cache, id, data, next, tokens), decode(*twin, id, data, next, tokens)));
      for (index_t layer = 0; layer < shape.layers; ++layer)
        REQUIRE(cache->attended(layer, id) == twin->attended(layer, id));
    }
  }
}

}  // namespace

void keep_laws(const std::string& method) {
  CAPTURE(method);
  answers_densely_at_full_budget(method);
  attends_prompts_over_what_is_stored(method);
  batches_with_the_bits_of_single_calls(method);
  reads_only_candidates(method);
  may_begin_with_a_step(method);
  forks_go_on_alone(method);
  ends_layers_one_by_one(method);
}

TEST_CASE("mixtures that no paper has keep the laws of every method") {
  for (const auto& method : mixed_methods()) keep_laws(method);
}

}  // namespace methods_test
