// The example engine against a naive model in double.
#include "catch.hpp"
#include "naive_model.hpp"

using namespace engine_tests;

TEST_CASE("logits equal those of a naive model in double, with a tied and an untied head") {
  for (const bool tied : {true, false}) {
    tiny made(tied);
    const auto tokens = some_tokens(40);
    naive_cache cache(made.model.config());
    const auto logits = made.model.prefill(tokens, cache);
    CHECK(relative_error(logits, oracle(made.weights).logits(tokens).back()) < 1e-5);
    CHECK(cache.turns == 1);
    CHECK(cache.next_position() == 40);
  }
}

TEST_CASE("a prompt in chunks gives what one chunk gives") {
  tiny made;
  const auto tokens = some_tokens(150);
  const auto expected = oracle(made.weights).logits(tokens).back();
  for (const int chunk : {1, 7, 8, 9, 31, 32, 33, 149, 150, 1000}) {
    naive_cache cache(made.model.config());
    std::vector<std::int64_t> seen;
    engine::prefill_options options;
    options.chunk = chunk;
    options.progress = [&](std::int64_t done, std::int64_t total) {
      CHECK(total == 150);
      seen.push_back(done);
    };
    CHECK(relative_error(made.model.prefill(tokens, cache, options), expected) < 1e-5);
    CHECK(seen.size() == std::size_t((150 + chunk - 1) / chunk));
    CHECK(seen.back() == 150);
    CHECK(cache.turns == 1);
  }
}

TEST_CASE("a prompt's boundaries reach the cache chunk by chunk, before the layers") {
  struct marked_cache : naive_cache {
    using naive_cache::naive_cache;
    void begin_chunk(std::span<const std::uint8_t> boundaries) override {
      flags.insert(flags.end(), boundaries.begin(), boundaries.end());
      lengths.push_back(boundaries.size());
    }
    void prefill(int layer, const float* q, const float* k, const float* v, int tokens, float* out) override {
      CHECK((lengths.back() == 0 || lengths.back() == std::size_t(tokens)));
      naive_cache::prefill(layer, q, k, v, tokens, out);
    }
    std::vector<std::uint8_t> flags;
    std::vector<std::size_t> lengths;
  };
  tiny made;
  const auto tokens = some_tokens(50);
  std::vector<std::uint8_t> flags;
  for (std::size_t t = 0; t < tokens.size(); ++t) flags.push_back(t % 7 == 3);
  for (const int chunk : {1, 9, 50}) {
    marked_cache with(made.model.config()), without(made.model.config());
    engine::prefill_options options;
    options.chunk = chunk;
    CHECK_NOTHROW(made.model.prefill(tokens, without, options));
    CHECK(without.flags.empty());
    options.boundaries = flags;
    CHECK_NOTHROW(made.model.prefill(tokens, with, options));
    CHECK(with.flags == flags);
    options.boundaries = std::span(flags).first(49);
    CHECK_THROWS_WITH(made.model.prefill(tokens, with, options), contains("boundaries is 49; expected one flag"));
  }
}

TEST_CASE("where an answer's segments end reaches the cache token by token, before the layers") {
  struct marked_cache : naive_cache {
    using naive_cache::naive_cache;
    void begin_chunk(std::span<const std::uint8_t> boundaries) override {
      now.assign(boundaries.begin(), boundaries.end());
    }
    void decode(int layer, const float* q, const float* k, const float* v, int tokens, float* out) override {
      REQUIRE(now.size() == std::size_t(tokens));
      if (layer == 0) flags.insert(flags.end(), now.begin(), now.end());
      naive_cache::decode(layer, q, k, v, tokens, out);
    }
    std::vector<std::uint8_t> now, flags;
  };
  tiny made;
  std::vector<std::uint8_t> ends;
  for (int token = 0; token < made.model.config().vocab_size; ++token) ends.push_back(token % 3 == 0);
  engine::generate_options options;
  options.max_new = 12;
  options.stop = [](std::span<const engine::token_t>) { return false; };
  options.ends_segment = ends;
  marked_cache cache(made.model.config());
  const auto answer = made.model.generate(some_tokens(20), cache, options);
  REQUIRE(cache.flags.size() == answer.size() - 1);
  for (std::size_t t = 0; t + 1 < answer.size(); ++t) CHECK(cache.flags[t] == (answer[t] % 3 == 0));
  options.ends_segment = std::span(ends).first(ends.size() - 1);
  marked_cache other(made.model.config());
  CHECK_THROWS_WITH(made.model.generate(some_tokens(20), other, options), contains("number of ends_segment"));
}

TEST_CASE("a prompt is read again in parts, behind sentences, for a cache that asks for it") {
  struct rereading_cache : naive_cache {
    using naive_cache::naive_cache;
    bool rereads() const override { return asks; }
    void reread(int layer, std::int64_t first, std::int64_t count, const float* q, const float* k, const float* v,
                int tokens, float* out) override {
      CHECK(turns == 0);
      naive_cache copy = *this;
      if (layer == 0) parts.push_back({first, count, {}});
      auto& seen = parts.back().keys;
      seen.insert(seen.end(), k, k + tokens * row);
      copy.prefill(layer, q, k, v, tokens, out);
    }
    struct part {
      std::int64_t first, count;
      std::vector<float> keys;  // [layers, tokens, kv_heads, head_dim]
    };
    std::vector<part> parts;
    std::int64_t row = 0;
    bool asks = true;
  };
  tiny made;
  const auto tokens = some_tokens(50);
  engine::prefill_options options;
  options.repeat = {{7, 8, 9}, {5, 6}, {4}, 3, 20};
  rereading_cache cache(made.model.config()), silent(made.model.config());
  cache.row = made.model.config().kv_size();
  silent.asks = false;
  const auto logits = made.model.prefill(tokens, cache, options);
  CHECK(logits == made.model.prefill(tokens, silent, options));
  CHECK(silent.parts.empty());
  CHECK((cache.turns == 1 && cache.next_position() == 50));
  REQUIRE(cache.parts.size() == 3);
  for (std::size_t p = 0; p < 3; ++p) {
    const std::size_t begin = 20 * p, end = std::min<std::size_t>(50, begin + 20);
    CHECK(cache.parts[p].first == std::int64_t(begin));
    CHECK(cache.parts[p].count == std::int64_t(end - begin));
    auto text = tokens;  // the prompt, the sentence, the last words of the part before, and the part once more
    const std::vector<engine::token_t> sentence =
        p == 0 ? std::vector<engine::token_t>{7, 8, 9} : std::vector<engine::token_t>{5, 6};
    text.insert(text.end(), sentence.begin(), sentence.end());
    if (p > 0)
      text.insert(text.end(), tokens.begin() + std::ptrdiff_t(begin) - 3, tokens.begin() + std::ptrdiff_t(begin));
    text.push_back(4);
    text.insert(text.end(), tokens.begin() + std::ptrdiff_t(begin), tokens.begin() + std::ptrdiff_t(end));
    naive_cache plain(made.model.config());
    made.model.prefill(text, plain);
    std::vector<double> expected;
    for (int layer = 0; layer < made.model.config().num_hidden_layers; ++layer) {
      const auto& keys = plain.keys(layer);
      expected.insert(expected.end(), keys.begin() + 50 * cache.row, keys.end());
    }
    REQUIRE(cache.parts[p].keys.size() == expected.size());
    CHECK(relative_error(cache.parts[p].keys, expected) < 1e-5);
  }
  options.repeat.part = 0;
  rereading_cache refused(made.model.config());
  CHECK_THROWS_WITH(made.model.prefill(tokens, refused, options),
                    contains("part and words of a re-reading is 0 and 3"));
}

TEST_CASE("decoding gives the logits of prefilling, for every step length") {
  tiny made;
  const auto tokens = some_tokens(30);
  const auto expected = oracle(made.weights).logits(tokens);
  for (std::size_t step = 1; step <= 8; ++step) {
    naive_cache cache(made.model.config());
    made.model.prefill(std::span(tokens).first(5), cache);
    for (std::size_t done = 5; done < tokens.size();) {
      const std::size_t count = std::min(step, tokens.size() - done);
      const auto logits = made.model.decode(std::span(tokens).subspan(done, count), cache);
      REQUIRE(logits.size() == count * std::size_t(vocabulary));
      for (std::size_t row = 0; row < count; ++row)
        CHECK(relative_error(std::span(logits).subspan(row * 61, 61), expected[done + row]) < 1e-5);
      done += count;
    }
    CHECK(cache.turns == 1);
  }
}

TEST_CASE("a second turn continues the first") {
  tiny made;
  const auto tokens = some_tokens(60);
  naive_cache cache(made.model.config());
  made.model.prefill(std::span(tokens).first(33), cache);
  const auto logits = made.model.prefill(std::span(tokens).subspan(33), cache);
  CHECK(relative_error(logits, oracle(made.weights).logits(tokens).back()) < 1e-5);
  CHECK(cache.turns == 2);
}

TEST_CASE("positions come from the cache, not from what it stores") {
  tiny made;
  const auto tokens = some_tokens(20);
  naive_cache moved(made.model.config(), 100), plain(made.model.config());
  const auto logits = made.model.prefill(tokens, moved);
  made.model.prefill(tokens, plain);
  CHECK(relative_error(logits, oracle(made.weights, 100).logits(tokens).back()) < 1e-4);
  // Keys turn with the position; values do not.
  CHECK(moved.keys(0) != plain.keys(0));
  CHECK(moved.values(0) == plain.values(0));
}

TEST_CASE("the number of threads does not change a bit") {
  const auto tokens = some_tokens(150);
  std::vector<float> first;
  for (const int threads : {1, 2, 3}) {
    tiny made(true, threads);
    naive_cache cache(made.model.config());
    auto logits = made.model.prefill(tokens, cache);
    const auto stepped = made.model.decode(std::span(tokens).first(8), cache);
    logits.insert(logits.end(), stepped.begin(), stepped.end());
    if (first.empty()) first = logits;
    CHECK(logits == first);
  }
}

TEST_CASE("the greedy answer is the best token, step after step") {
  tiny made(false);
  auto text = some_tokens(20);
  const auto prompt = text;
  std::vector<token_t> expected;
  for (int step = 0; step < 12; ++step) {
    const auto logits = oracle(made.weights).logits(text).back();
    text.push_back(token_t(std::max_element(logits.begin(), logits.end()) - logits.begin()));
    expected.push_back(text.back());
  }
  naive_cache cache(made.model.config());
  CHECK(made.model.generate(prompt, cache, at_most(12)) == expected);
  // The newest token is not in the cache.
  CHECK(cache.next_position() == 20 + 11);

  naive_cache stopped(made.model.config());
  engine::generate_options options = at_most(12);
  options.stop = [](std::span<const token_t> answer) { return answer.size() == 5; };
  CHECK(made.model.generate(prompt, stopped, options) == std::vector<token_t>(expected.begin(), expected.begin() + 5));

  naive_cache none(made.model.config());
  CHECK(made.model.generate(prompt, none, at_most(0)).empty());

  naive_cache split(made.model.config());
  const auto logits = made.model.prefill(prompt, split);
  CHECK(made.model.extend(logits, split, at_most(12)) == expected);
}

TEST_CASE("an answer ends with one of the config's eos tokens") {
  tiny made(false);
  const auto prompt = some_tokens(20);
  naive_cache cache(made.model.config());
  const auto answer = made.model.generate(prompt, cache, at_most(6));
  made.folder.write("config.json", config_text(false, ",\"eos_token_id\":[60," + std::to_string(answer[0]) + "]"));
  llama ending = llama::load(made.folder.path(), made.workers);
  naive_cache fresh(ending.config());
  CHECK(ending.generate(prompt, fresh, at_most(6)) == std::vector<token_t>{answer[0]});
}

TEST_CASE("equal logits go to the lower token id") {
  CHECK(engine::best_token(std::vector<float>{1, 3, 2, 3}) == 1);
  CHECK(engine::best_token(std::vector<float>{-2, -2}) == 0);
  CHECK_THROWS_AS(engine::best_token({}), tessera::error);
}

TEST_CASE("bad arguments are refused before the cache is touched") {
  tiny made;
  naive_cache cache(made.model.config());
  const auto tokens = some_tokens(300);
  const std::span<const token_t> all = tokens;
  const std::vector<token_t> strange{1, 61}, negative{-1};
  const std::vector<float> logits(61);
  llama& model = made.model;
  CHECK_THROWS_WITH(model.prefill({}, cache), contains("prompt length is 0"));
  CHECK_THROWS_WITH(model.prefill(all.first(201), cache), contains("201") && contains("max_position_embeddings = 200"));
  CHECK_THROWS_WITH(model.prefill(strange, cache), contains("token id is 61"));
  CHECK_THROWS_WITH(model.prefill(negative, cache), contains("token id is -1"));
  CHECK_THROWS_WITH(model.prefill(all.first(5), cache, {.chunk = 0, .progress = {}}), contains("chunk is 0"));
  CHECK_THROWS_WITH(model.decode({}, cache), contains("1 to 8"));
  CHECK_THROWS_WITH(model.decode(all.first(9), cache), contains("1 to 8"));
  CHECK_THROWS_WITH(model.decode(strange, cache), contains("token id"));
  CHECK_THROWS_WITH(model.generate(all.first(150), cache, at_most(52)), contains("201"));
  CHECK_THROWS_WITH(model.generate({}, cache, at_most(1)), contains("prompt length"));
  CHECK_THROWS_WITH(model.generate(all.first(5), cache, at_most(-1)), contains("max_new"));
  CHECK_THROWS_WITH(model.extend(std::span(logits).first(60), cache), contains("number of logits is 60"));
  CHECK(cache.calls == 0);
  CHECK(cache.turns == 0);

  CHECK_NOTHROW(model.prefill(all.first(200), cache));
  CHECK_THROWS_WITH(model.decode(all.first(1), cache), contains("200 of them in the cache"));
  naive_cache exact(model.config());
  CHECK_NOTHROW(model.generate(all.first(150), exact, at_most(51)));
}

TEST_CASE("queries, keys and values whose products would overflow are refused by layer, head and token") {
  for (const auto& [weight, what, head] : {std::tuple{"q_proj", "a query of layer 1, head 3, token 0", 3},
                                           {"k_proj", "a key of layer 1, head 1, token 0", 1},
                                           {"v_proj", "a value of layer 1, head 1, token 0", 1}}) {
    tiny made;
    auto& values = made.weights.at(std::string("model.layers.1.self_attn.") + weight + ".weight").values;
    for (std::size_t i = std::size_t(head) * 64 * 96; i < values.size(); ++i) values[i] *= 1e20f;
    llama large = made.load(true);
    naive_cache cache(large.config());
    CHECK_THROWS_WITH(large.prefill(some_tokens(9), cache), contains(what) && contains("at most 1e18"));
    CHECK(cache.turns == 0);
  }
}

TEST_CASE("an exception from the progress callback reaches the caller") {
  tiny made;
  naive_cache cache(made.model.config());
  engine::prefill_options options{.chunk = 4, .progress = [](std::int64_t, std::int64_t) { throw 42; }};
  CHECK_THROWS_AS(made.model.prefill(some_tokens(12), cache, options), int);
  CHECK(cache.next_position() == 4);
  CHECK(cache.turns == 0);
}

TEST_CASE("weights in shards and in other dtypes give the same model") {
  tiny made;
  const auto tokens = some_tokens(25);
  naive_cache cache(made.model.config());
  const auto expected = made.model.prefill(tokens, cache);

  const temporary_folder sharded;
  sharded.write("config.json", config_text(true));
  tensors parts[2];
  std::string map;
  for (const auto& [name, item] : made.weights) {
    const bool second = name.find("layers.1") != std::string::npos;
    parts[second][name] = item;
    map += (map.empty() ? "\"" : ",\"") + name + "\":\"" + (second ? "b.safetensors" : "a.safetensors") + "\"";
  }
  write_weights(parts[0], sharded / "a.safetensors");
  write_weights(parts[1], sharded / "b.safetensors", dtype::bf16);
  sharded.write("model.safetensors.index.json", "{\"weight_map\":{" + map + "}}");
  naive_cache second(made.model.config());
  CHECK(llama::load(sharded.path(), made.workers).prefill(tokens, second) == expected);

  write_weights(parts[0], sharded / "b.safetensors");
  CHECK_THROWS_WITH(llama::load(sharded.path(), made.workers), contains("two shards"));
  for (const std::string index :
       {"{}", "[]", "{\"weight_map\":{\"a\":\"../a.safetensors\"}}", "{\"weight_map\":{\"a\":3}}",
        "{\"weight_map\":{\"a\":\"absent.safetensors\"}}", "{"}) {
    sharded.write("model.safetensors.index.json", index);
    CHECK_THROWS_AS(llama::load(sharded.path(), made.workers), tessera::error);
  }
}

TEST_CASE("a checkpoint that does not fit its config is refused by the weight's name") {
  const temporary_folder folder;
  executor workers(1);
  const auto load_with = [&](const std::function<void(tensors&)>& change) {
    tensors all = random_weights(false);
    change(all);
    write_weights(all, folder / "model.safetensors");
    return llama::load(folder.path(), workers);
  };
  const std::string name = "model.layers.1.mlp.up_proj.weight";
  CHECK_THROWS_WITH(llama::load(folder.path(), workers), contains("config.json"));
  folder.write("config.json", config_text(false));
  CHECK_THROWS_WITH(llama::load(folder.path(), workers), contains("without weights"));
  CHECK_NOTHROW(load_with([](tensors&) {}));
  CHECK_THROWS_WITH(load_with([&](tensors& all) { all.erase(name); }), contains(name) && contains("missing"));
  CHECK_THROWS_WITH(load_with([&](tensors& all) { all[name].shape = {96, 80}; }),
                    contains(name) && contains("[80, 96]"));
  CHECK_THROWS_WITH(load_with([&](tensors& all) { all[name].values[5] = std::nanf(""); }),
                    contains(name) && contains("element 5"));
  CHECK_THROWS_WITH(load_with([&](tensors& all) { all.erase("lm_head.weight"); }), contains("lm_head.weight"));
}
