// Every documented error: what it says, and that it leaves the cache as it was.
#include "catch.hpp"

#include "methods/support/refusals.hpp"

using namespace methods_test;
using tessera::nhd_rows;

TEST_CASE("a budget below one token is refused when a cache is made and when it is changed") {
  for (const auto& method : all_methods()) {
    CAPTURE(method);
    const traits& made_of = traits_of(method);
    if (made_of.scorer == traits::first::none && made_of.reads == traits::second::none) continue;  // has no budget
    const bool token_budget = made_of.pays_for_estimates();
    const std::string least =
        token_budget ? "budget is 0; expected 16 to 16777216; " : "budget is 0; expected 1 to 16777216; ";
    CHECK_THAT(said_on_making({method, 0, {{"window", 1}}}), contains(least));
    CHECK_THAT(said_on_making({method, -3, {{"window", 1}}}),
               contains(token_budget ? "budget is -3; expected 16 to" : "budget is -3; expected 1 to"));
    if (token_budget)
      CHECK_THAT(said_on_making({method, 15, {{"window", 1}}}), contains("budget is 15; expected 16 to 16777216"));
    working now({method, 40, {{"window", 4}}});
    now.prompt(60);
    now.end_prompt();
    now.refuses("budget is 0", [](any_cache& cache) { cache.set_budget(0); });
    now.refuses("budget is -3", [](any_cache& cache) { cache.set_budget(-3); });
  }
}

TEST_CASE("parameters that make no sense are refused by name, with what is allowed and the cure") {
  const std::string raise = "lower the window or raise the budget";
  for (const std::string method : {"snapkv", "pyramidkv", "ada_snapkv", "two_stages"}) {
    CHECK_THAT(said_on_making({method, 40, {{"window", 0}}}),
               contains("window is 0; expected 1 to 32768; it means: last prompt queries"));
    CHECK_THAT(said_on_making({method, 40, {{"window", 41}}}),
               contains("window is 41; expected at most the budget, which is 40; " + raise));
    CHECK_THAT(said_on_making({method, 40, {{"window", 4}, {"pool", 6}}}),
               contains("pool is 6; expected an odd number; pass 1"));
    CHECK_THAT(said_on_making({method, 40, {{"window", 4}, {"pool", 0}}}), contains("pool is 0"));
  }
  CHECK_THAT(said_on_making({"streaming_llm", 4}),
             contains("sinks is 4; expected at most one less than the budget, which is 4"));
  CHECK_THAT(said_on_making({"streaming_llm", 4, {{"sinks", -1}}}), contains("sinks is -1"));
  for (const std::string method : {"ada_snapkv", "two_stages"}) {
    CHECK_THAT(said_on_making({method, 40, {{"floor", 1.5}}}),
               contains("floor is 1.5; expected 0 to 1; it means: fraction"));
    CHECK_THAT(said_on_making({method, 40, {{"floor", -0.5}}}), contains("floor is -0.5"));
  }
  CHECK_THAT(said_on_making({"pyramidkv", 40, {{"beta", 0}}}), contains("beta is 0; expected 1 to 16777216"));
  CHECK_THAT(said_on_making({"h2o", 40, {{"recent", 41}}}),
             contains("recent is 41; expected at most the budget, which is 40"));
  CHECK_THAT(said_on_making({"two_stages", 40, {{"block", 0}}}), contains("block is 0; expected 1 to 16777216"));
  CHECK_THAT(said_on_making({"two_stages", 40, {{"read_tokens", 0}}}), contains("read_tokens is 0"));
}

TEST_CASE("a budget that no longer fits its window or sinks is refused") {
  working snapkv({"snapkv", 40});
  snapkv.prompt(60);
  snapkv.end_prompt();
  snapkv.refuses("window is 32; expected at most the budget, which is 31",
                 [](any_cache& cache) { cache.set_budget(31); });
  working streaming({"streaming_llm", 40});
  streaming.prompt(60);
  streaming.end_prompt();
  streaming.refuses("sinks is 4", [](any_cache& cache) { cache.set_budget(4); });
}

TEST_CASE("a model without layers or heads, or whose heads do not divide, is refused") {
  CHECK_THAT(said_on_making({"full", 1}, {0, 4, 2}), contains("layers is 0; expected at least 1"));
  CHECK_THAT(said_on_making({"full", 1}, {2, 4, 0}), contains("kv_heads is 0; expected at least 1"));
  CHECK_THAT(said_on_making({"full", 1}, {2, 5, 2}),
             contains("q_heads is 5; expected a multiple of kv_heads, which is 2"));
  CHECK_THAT(said_on_making({"full", 1}, {2, 0, 2}), contains("q_heads is 0"));
}

TEST_CASE("a wrong layer or sequence is refused everywhere") {
  sink nowhere;
  working now({"snapkv", 40});
  now.prompt(60);
  now.end_prompt();
  const index_t closed = now.cache->open();
  now.cache->close(closed);
  const auto& data = now.data;
  const auto prefill_in = [&](index_t layer, index_t id) {
    return [&data, layer, id](any_cache& cache) {
      cache.prefill(layer, id, data.queries(0, 60, 2), data.keys(0, 60, 2), data.values(0, 60, 2));
    };
  };
  const auto decode_in = [&](index_t layer, index_t id) {
    return [&data, &nowhere, layer, id](any_cache& cache) {
      cache.decode(layer, {id}, data.queries(0, 60, 1), data.keys(0, 60, 1), data.values(0, 60, 1), nowhere.rows(1),
                   {});
    };
  };
  for (const index_t layer : {-1, 2}) {
    const std::string words = "layer is " + std::to_string(layer) + "; expected 0 to 1; pass a layer of the model";
    now.refuses(words, prefill_in(layer, now.id));
    now.refuses(words, decode_in(layer, now.id));
    now.refuses(words, [&](any_cache& cache) { cache.positions(layer, now.id, 0); });
    now.refuses(words, [&](any_cache& cache) { cache.attended(layer, now.id); });
    now.refuses(words, [&](any_cache& cache) {
      cache.prefill_attention(layer, now.id, data.queries(0, 59, 1), nowhere.rows(1), {});
    });
  }
  for (const index_t id : {index_t(-1), closed, index_t(99)}) {
    const std::string words = "sequence is " + std::to_string(id) + "; expected an id that open() returned";
    now.refuses(words, prefill_in(0, id));
    now.refuses(words, decode_in(0, id));
    now.refuses(words, [&](any_cache& cache) { cache.end_prefill(id); });
    now.refuses(words, [&](any_cache& cache) { cache.close(id); });
    now.refuses(words, [&](any_cache& cache) { cache.bytes(id); });
    now.refuses(words, [&](any_cache& cache) { cache.bytes_read(id); });
    now.refuses(words, [&](any_cache& cache) { cache.next_position(id); });
  }
}

TEST_CASE("tensors of other heads, tokens or batches are refused") {
  sink nowhere;
  working now({"snapkv", 40});
  now.prompt(60);
  now.end_prompt();
  const auto& data = now.data;
  const auto q = data.queries(0, 60, 2), k = data.keys(0, 60, 2), v = data.values(0, 60, 2);
  auto other_q = q, other_k = k, other_v = v, three = k;
  other_q.heads = 3;
  other_k.heads = 1;
  other_v.heads = 3;
  three.tokens = 3;
  const index_t id = now.id;
  const auto both = [&](const std::string& words, const any_cache::rows& q_, const any_cache::rows& k_,
                        const any_cache::rows& v_) {
    now.refuses(words, [=](any_cache& cache) { cache.prefill(0, id, q_, k_, v_); });
    now.refuses(words, [&](any_cache& cache) { cache.decode(0, {id}, q_, k_, v_, nowhere.rows(2), {}); });
  };
  both("heads of q is 3; expected 4", other_q, k, v);
  both("heads of k and v is 1 and 2; expected 2", q, other_k, v);
  both("heads of k and v is 2 and 3; expected 2", q, k, other_v);
  both("tokens of v is 3; expected those of k, which are 2", q, k, three);
  now.refuses("tokens of a decode step is 3; expected those of prepare_step, which are 2",
              [&](any_cache& cache) { cache.decode(0, {id}, q, three, three, nowhere.rows(2), {}); });
  const index_t other = now.cache->open();
  now.refuses("sequences of the batch is 1; expected as many as ids, which are 2",
              [&](any_cache& cache) { cache.decode(0, {id, other}, q, k, v, nowhere.rows(2), {}); });
  now.refuses("shape of out is", [&](any_cache& cache) { cache.decode(0, {id}, q, k, v, nowhere.rows(1), {}); });
  now.refuses("shape of out is", [&](any_cache& cache) { cache.decode(0, {id}, q, k, v, nowhere.rows(2, 3), {}); });
  now.refuses("shape of out is", [&](any_cache& cache) { cache.decode(0, {id}, q, k, v, {}, {}); });
  auto twice_q = q, twice_k = k, twice_v = v;
  twice_q.sequences = twice_k.sequences = twice_v.sequences = 2;
  twice_q.sequence_stride = twice_k.sequence_stride = twice_v.sequence_stride = 0;
  now.refuses("sequence id in a batch is 0; expected given once", [&](any_cache& cache) {
    cache.decode(0, {id, id}, twice_q, twice_k, twice_v, nowhere.rows(2, 4, 2), {});
  });
}

TEST_CASE("a kv_head that the model does not have is refused") {
  for (const std::string method : {"full", "snapkv", "snapkv_turns", "quest"}) {
    working now({method, 40, {{"window", 8}}});
    now.prompt(60);
    now.end_prompt();
    for (const index_t head : {-1, 2, 1 << 30}) {
      const std::string words = "kv_head is " + std::to_string(head) + "; expected 0 to 1; pass a kv_head of the model";
      now.refuses(words, [&](any_cache& cache) { cache.positions(1, now.id, head); });
      now.refuses(words, [&](any_cache& cache) { cache.readable(1, now.id, head); });
    }
  }
}

TEST_CASE("log-sum-exps of another shape, rows without memory and chunks of two sequences are refused") {
  sink nowhere;
  for (const std::string method : {"full", "h2o"}) {
    working now({method, 40});
    now.prompt(60);
    const index_t id = now.id;
    const auto q = now.data.queries(0, 60, 2), k = now.data.keys(0, 60, 2), v = now.data.values(0, 60, 2);
    auto none = k, two_k = k, two_v = v, two_q = q;
    none.data = nullptr;
    for (auto* rows : {&two_k, &two_v, &two_q}) {
      rows->sequences = 2;
      rows->sequence_stride = 0;
    }
    const auto chunk_of_two = "sequences of a prompt chunk is 2; expected 1";
    now.refuses(chunk_of_two, [&](any_cache& cache) { cache.prefill(0, id, q, two_k, two_v); });
    now.refuses(chunk_of_two, [&](any_cache& cache) { cache.prefill(0, id, q, k, two_v); });
    now.refuses(chunk_of_two, [&](any_cache& cache) { cache.prefill(0, id, two_q, k, v); });
    now.refuses(chunk_of_two,
                [&](any_cache& cache) { cache.prefill_attention(0, id, two_q, nowhere.rows(2, 4, 2), {}); });
    now.refuses("memory of q, k and v is null", [&](any_cache& cache) { cache.prefill(0, id, q, none, v); });
    for (const auto& [tokens, heads] : {std::pair{1, 4}, {2, 3}, {3, 4}}) {
      const auto lse = nowhere.rows(tokens, heads);
      const std::string words =
          "shape of lse is [1, " + std::to_string(tokens) + ", " + std::to_string(heads) + "]; expected [1, 2, 4]";
      now.refuses(words, [&](any_cache& cache) {
        cache.prefill_attention(0, id, now.data.queries(0, 58, 2), nowhere.rows(2), lse);
      });
    }
    now.end_prompt();
    now.refuses("shape of lse is [1, 1, 4]",
                [&](any_cache& cache) { cache.decode(0, {id}, q, k, v, nowhere.rows(2), nowhere.rows(1)); });
    now.refuses("memory of q, k and v is null",
                [&](any_cache& cache) { cache.decode(0, {id}, q, k, none, nowhere.rows(2), {}); });
  }
}

TEST_CASE("a decode step of none or of more than eight tokens is refused") {
  sink nowhere;
  working now({"h2o", 40});
  now.prompt(60);
  now.end_prompt();
  for (const index_t count : {0, 9}) {
    now.refuses("tokens of a decode step is " + std::to_string(count) + "; expected 1 to 8; prefill longer runs",
                [&](any_cache& cache) {
                  cache.decode(0, {now.id}, now.data.queries(0, 60, count), now.data.keys(0, 60, count),
                               now.data.values(0, 60, count), nowhere.rows(count), {});
                });
  }
}

TEST_CASE("a retrieving step of more tokens than it may read is refused") {
  sink nowhere;
  working now({"exact_topk", 3});
  now.prompt(60);
  now.end_prompt();
  now.refuses("budget is 3; expected at least the tokens of the step, which are 4", [&](any_cache& cache) {
    cache.decode(0, {now.id}, now.data.queries(0, 60, 4), now.data.keys(0, 60, 4), now.data.values(0, 60, 4),
                 nowhere.rows(4), {});
  });
}

TEST_CASE("a turn's order is kept: no decoding inside a prompt, no end without a prompt in every layer") {
  sink nowhere;
  for (const auto& method : all_methods()) {
    CAPTURE(method);
    working now({method, 40, {{"window", 8}}});
    const auto& data = now.data;
    CHECK_THAT(said([&] { now.cache->end_prefill(now.id); }),
               contains("tokens of this turn is 0; expected at least 1"));
    now.prompt(60);
    now.refuses("tokens since the prompt began is 60; expected 0; call end_prefill", [&](any_cache& cache) {
      cache.decode(0, {now.id}, data.queries(0, 60, 1), data.keys(0, 60, 1), data.values(0, 60, 1), nowhere.rows(1),
                   {});
    });
    now.end_prompt();
    now.refuses("tokens of this turn is 0; expected at least 1", [&](any_cache& cache) { cache.end_prefill(now.id); });
    now.refuses(
        "queries of a prompt chunk is 1; expected 1 to the tokens of this turn, which are 0",
        [&](any_cache& cache) { cache.prefill_attention(0, now.id, data.queries(0, 59, 1), nowhere.rows(1), {}); });

    // Layer 1 lacks a chunk; once it has come, the prompt can end.
    const auto whole = now.cache->clone();
    prefill(*whole, now.id, data, 60, 5);
    whole->end_prefill(now.id);
    now.cache->prefill(0, now.id, data.queries(0, 60, 5), data.keys(0, 60, 5), data.values(0, 60, 5));
    CHECK_THAT(said([&] { now.cache->end_prefill(now.id); }),
               contains("tokens of a layer is 60; expected those of layer 0, which are 65"));
    now.cache->prefill(1, now.id, data.queries(1, 60, 5), data.keys(1, 60, 5), data.values(1, 60, 5));
    now.cache->end_prefill(now.id);
    CHECK(support::same_bits(decode(*now.cache, now.id, data, 65, 1), decode(*whole, now.id, data, 65, 1)));
  }
}

TEST_CASE("layers step in order: none is left out of a step and none goes ahead") {
  sink nowhere;
  working now({"snapkv", 40, {{"window", 8}}});
  now.prompt(60);
  now.end_prompt();
  const auto decode_layer = [&](index_t layer, index_t at) {
    return [&, layer, at](any_cache& cache) {
      cache.decode(layer, {now.id}, now.data.queries(layer, at, 1), now.data.keys(layer, at, 1),
                   now.data.values(layer, at, 1), nowhere.rows(1), {});
    };
  };
  now.refuses("tokens of a layer before the step is 60; expected 59", decode_layer(1, 60));
  decode_layer(0, 60)(*now.cache);
  CHECK_THAT(said([&] { decode_layer(0, 61)(*now.cache); }),
             contains("tokens of a layer before the step is 60; expected 61; decode every layer"));
  decode_layer(1, 60)(*now.cache);
  CHECK(now.cache->next_position(now.id) == 61);
  CHECK(now.cache->positions(1, now.id, 0).back() == 60);
}

TEST_CASE("a layer takes a step once, also when as long a prompt has begun in layer 0") {
  sink nowhere;
  working now({"snapkv", 40, {{"window", 8}}});
  now.prompt(60);
  now.end_prompt();
  const tessera::batch step = now.cache->prepare_step({now.id}, 3);
  const auto decode_layer = [&](index_t layer) {
    return [&, layer](any_cache& cache) {
      cache.decode(layer, step, now.data.queries(layer, 60, 3), now.data.keys(layer, 60, 3),
                   now.data.values(layer, 60, 3), nowhere.rows(3), {});
    };
  };
  for (index_t layer = 0; layer < now.data.shape.layers; ++layer) decode_layer(layer)(*now.cache);
  now.cache->prefill(0, now.id, now.data.queries(0, 63, 3), now.data.keys(0, 63, 3), now.data.values(0, 63, 3));
  CHECK_THAT(said([&] { decode_layer(1)(*now.cache); }),
             contains("tokens of a layer before the step is 63; expected 60"));
}

TEST_CASE("an empty chunk, and a chunk without the queries that the scorer observes, are refused") {
  for (const auto& method : all_methods()) {
    CAPTURE(method);
    working now({method, 40, {{"window", 8}}});
    const auto& data = now.data;
    now.prompt(50);
    const index_t id = now.id;
    now.refuses("tokens of a prompt chunk is 0; expected at least 1; skip empty chunks", [&](any_cache& cache) {
      cache.prefill(0, id, data.queries(0, 50, 0), data.keys(0, 50, 0), data.values(0, 50, 0));
    });
    now.refuses("queries of a prompt chunk is 11; expected ", [&](any_cache& cache) {
      cache.prefill(0, id, data.queries(0, 50, 11), data.keys(0, 50, 10), data.values(0, 50, 10));
    });
    const bool accumulates = traits_of(method).scorer == traits::first::accumulated;
    if (!accumulates && traits_of(method).scorer != traits::first::window) continue;
    const bool every = accumulates || method.starts_with("think");  // ThinK's rows ask more queries than the chunk has
    const index_t needed = every ? 10 : 8;
    const std::string scorer = accumulates ? "accumulated_attention" : "observation_window";
    now.refuses("queries of a prompt chunk is " + std::to_string(needed - 1) + "; expected " + std::to_string(needed) +
                    (every ? " (" : " to 10 (") + scorer + " observes them)",
                [&](any_cache& cache) {
                  cache.prefill(0, id, data.queries(0, 51, needed - 1), data.keys(0, 50, 10), data.values(0, 50, 10));
                });
    now.refuses("queries of a prompt chunk is 0",
                [&](any_cache& cache) { cache.prefill(0, id, {}, data.keys(0, 50, 1), data.values(0, 50, 1)); });
  }
}

TEST_CASE("parameters of two stages that make no sense are refused by name") {
  for (const std::string method : {"rocketkv", "rocketkv_mt", "ada_hsa"}) {
    CHECK_THAT(said_on_making({method, 15}), contains("budget is 15; expected 16 to 16777216"));
    CHECK_THAT(said_on_making({method, 64, {{"max_new", -1}}}), contains("max_new is -1; expected 0 to 16777216"));
    CHECK_THAT(said_on_making({method, 64, {{"split", 1.5}}}), contains("split is 1.5; expected adaptive, or 0 to 1"));
    CHECK_THAT(said_on_making({method, 64, {{"split", -1}}}), contains("split is -1; expected adaptive, or 0 to 1"));
    CHECK_THAT(said_on_making({method, 64, {{"window", 0}}}), contains("window is 0"));
    CHECK_THAT(said_on_making({method, 64, {{"page", -1}}}), contains("page is -1"));
    CHECK_THAT(said_on_making({method, 64, {{"channels", 65}}}),
               contains("channels is 65; expected 0 to the head dim, which is 64"));
  }
  CHECK_THAT(said_on_making({"hsa", 64, {{"max_new", -1}}}), contains("max_new is -1"));
  CHECK_THAT(said_on_making({"quest", 64, {{"page", -1}}}), contains("page is -1"));
  CHECK_THAT(said_on_making({"sparq", 64, {{"recent", 33}}}),
             contains("recent is 33; expected at most what a step attends, which is 32"));
  CHECK_THAT(said_on_making({"snapkv_quest", 64, {{"read_tokens", 15}}}),
             contains("read_tokens is 15; expected 16 to"));
}

TEST_CASE("a max_new that leaves no room for the window is refused when the prompt ends, and the prompt goes on") {
  for (const std::string method : {"rocketkv", "rocketkv_mt"}) {
    working now({method, 16, {{"max_new", 5}, {"window", 20}, {"split", 1}}});
    now.prompt(60);  // 65 tokens: 16 are kept, 5 of them room for the answer
    const auto untouched = now.cache->clone();
    const auto bytes = now.cache->bytes(now.id);
    const auto message = said([&] { now.cache->end_prefill(now.id); });
    CHECK_THAT(
        message,
        contains("max_new is 5; expected a number that leaves room for the window of 20 tokens: with a prompt of "
                 "60 the first stage keeps 11; "));
    CHECK(now.cache->bytes(now.id) == bytes);
    CHECK(now.cache->next_position(now.id) == 60);
    CHECK(now.cache->positions(1, now.id, 1) == untouched->positions(1, now.id, 1));
    CHECK_THAT(said([&] { now.cache->end_prefill(now.id); }), contains("max_new is 5"));
    // A larger budget goes on from there, as it would have without the refusal.
    now.cache->set_budget(48);
    untouched->set_budget(48);
    now.cache->end_prefill(now.id);
    untouched->end_prefill(now.id);
    CHECK(support::same_bits(decode(*now.cache, now.id, now.data, 60, 1), decode(*untouched, now.id, now.data, 60, 1)));
  }
}

TEST_CASE("a turn ended twice, or a step inside a prompt, is refused and changes nothing") {
  for (const std::string method :
       {"hsa", "quest", "sparq", "rocketkv", "rocketkv_mt", "snapkv_quest", "h2o_turns_quest"}) {
    CAPTURE(method);
    working now({method, 40, {{"window", 4}, {"max_new", 10}}});
    sink out;
    now.prompt(60);
    now.refuses("tokens since the prompt began is 60; expected 0", [&](any_cache& cache) {
      cache.decode(0, {now.id}, now.data.queries(0, 60, 1), now.data.keys(0, 60, 1), now.data.values(0, 60, 1),
                   out.rows(1), {});
    });
    now.end_prompt();
    now.refuses("tokens of this turn is 0; expected at least 1", [&](any_cache& cache) { cache.end_prefill(now.id); });
    now.refuses("budget is 15", [&](any_cache& cache) {
      traits_of(method).plans || traits_of(method).scorer == traits::first::none
          ? cache.set_budget(15)
          : tessera::fail("budget", 15, "", "not a token budget");
    });
  }
}
