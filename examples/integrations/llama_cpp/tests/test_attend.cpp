// llama.cpp with Tessera's attention, over a model of two layers with random weights.
#include "catch.hpp"

#include <cmath>
#include <cstring>
#include <map>

#include "tessera_llama/attend.hpp"
#include "tiny_llama.hpp"

using namespace llama_tests;

namespace {

struct session {
  attention own;
  context_pointer context;
  explicit session(const std::string& method, std::optional<index_t> budget = {}, int sequences = 1)
      : own(tiny_model().get(), {method, budget, {}, 1}), context(tiny_model().context(256, 1, own, sequences)) {}
};

/// The rows of one sequence in a pass.
struct part {
  llama_seq_id sequence;
  std::vector<llama_token> tokens;
};
void decode(session& of, const std::vector<part>& parts) {
  token_batch batch(256);
  for (const part& one : parts) {
    llama_pos position = of.own.next_position(one.sequence);
    for (const llama_token token : one.tokens) batch.add(token, position++, one.sequence, true);
  }
  of.own.decode(of.context.get(), batch.get());
}

std::vector<unsigned char> saved(attention& own, llama_seq_id id) {
  std::vector<unsigned char> bytes;
  own.save(id, [&](const void* data, std::size_t count) {
    const auto* const first = static_cast<const unsigned char*>(data);
    bytes.insert(bytes.end(), first, first + count);
  });
  return bytes;
}
void load(attention& own, llama_seq_id id, const std::vector<unsigned char>& bytes) {
  std::size_t read = 0;
  own.load(id, [&](void* data, std::size_t wanted) {
    const std::size_t count = std::min(wanted, bytes.size() - read);
    std::memcpy(data, bytes.data() + read, count);
    read += count;
    return count;
  });
}

std::vector<float> copied(const tessera::rows_view<const float>& rows) {
  std::vector<float> values;
  for (index_t t = 0; t < rows.tokens; ++t)
    for (index_t h = 0; h < rows.heads; ++h)
      values.insert(values.end(), rows.row(0, t, h), rows.row(0, t, h) + rows.dim);
  return values;
}

}  // namespace

TEST_CASE("full attention of Tessera gives llama.cpp's logits, prompts in chunks and steps") {
  std::mt19937 bits(1);
  const auto prompt = random_tokens(bits, 700), answer = random_tokens(bits, 20);
  plain_llama plain;
  session full("full");
  decode_text(plain, plain.context.get(), prompt);
  for (std::size_t done = 0; done < prompt.size(); done += 175) {
    const std::vector<llama_token> chunk(prompt.begin() + long(done), prompt.begin() + long(done) + 175);
    decode(full, {{0, chunk}});
  }
  CHECK(relative_distance(logits_of(full.context.get()), logits_of(plain.context.get())) <
        2e-3);  // keys and values in fp16
  full.own.end_prompt(0);
  for (const llama_token token : answer) {
    decode_text(plain, plain.context.get(), {token});
    decode(full, {{0, {token}}});
    CHECK(relative_distance(logits_of(full.context.get()), logits_of(plain.context.get())) < 2e-3);
  }
  CHECK(full.own.next_position(0) == 720);
  CHECK(llama_memory_seq_pos_max(llama_get_memory(full.context.get()), 0) == -1);  // llama.cpp holds nothing
}

TEST_CASE("what full attention writes is the definition in double over llama.cpp's cells") {
  std::mt19937 bits(9);
  session full("full");
  std::vector<std::vector<float>> k(layers), v(layers);
  double worst = 0;
  full.own.trace([&](const attention::traced_rows& rows) {
    auto &keys = k[std::size_t(rows.layer)], &values = v[std::size_t(rows.layer)];
    const auto own_k = copied(rows.k), own_v = copied(rows.v), q = copied(rows.q), out = copied(rows.out);
    keys.insert(keys.end(), own_k.begin(), own_k.end()), values.insert(values.end(), own_v.begin(), own_v.end());
    const int n = int(keys.size()) / (kv_heads * dim), first = n - rows.q.tokens;
    for (int t = 0; t < rows.q.tokens; ++t) {
      for (int h = 0; h < heads; ++h) {
        const int kv = h / (heads / kv_heads);
        std::vector<double> sum(dim, 0.0);
        double total = 0;
        for (int j = 0; j <= first + t; ++j) {
          double dot = 0;
          for (int d = 0; d < dim; ++d)
            dot += double(q[std::size_t((t * heads + h) * dim + d)]) * keys[std::size_t((j * kv_heads + kv) * dim + d)];
          const double weight = std::exp(dot / 8);
          total += weight;
          for (int d = 0; d < dim; ++d)
            sum[std::size_t(d)] += weight * values[std::size_t((j * kv_heads + kv) * dim + d)];
        }
        for (int d = 0; d < dim; ++d)
          worst = std::max(worst,
                           std::abs(sum[std::size_t(d)] / total - double(out[std::size_t((t * heads + h) * dim + d)])));
      }
    }
  });
  decode(full, {{0, random_tokens(bits, 250)}});
  decode(full, {{0, random_tokens(bits, 150)}});
  full.own.end_prompt(0);
  for (int i = 0; i < 5; ++i) decode(full, {{0, random_tokens(bits, 1 + i)}});
  CHECK(worst < 1e-4);
  CHECK(worst > 0);
}

TEST_CASE("every method answers, and holds what it keeps") {
  std::mt19937 bits(2);
  const auto prompt = random_tokens(bits, 240);
  for (const std::string& method : tessera::cache_methods()) {
    CAPTURE(method);
    if (method == "kvzip" || method == "fastkvzip") {
      session refused(method, 32);
      const std::string allowed =
          method == "kvzip" ? "one that reads a prompt once" : "one that scores tokens by itself";
      CHECK_THROWS_WITH(decode(refused, {{0, prompt}}), contains("method is '" + method + "'; expected " + allowed));
      CHECK_FALSE(refused.own.has(0));
      continue;
    }
    std::optional<index_t> budget = 64;
    std::string refusal;
    try {
      session one(method, budget);
      decode(one, {{0, prompt}});
      one.own.end_prompt(0);
      for (int i = 0; i < 6; ++i) decode(one, {{0, random_tokens(bits, 1 + i % 2)}});
      for (const float logit : logits_of(one.context.get())) REQUIRE(std::isfinite(logit));
      CHECK(one.own.bytes(0) > 0);
      if (method == "snapkv") CHECK(one.own.bytes(0) < one.own.full_bytes(0) / 2);
    } catch (const tessera::error& said) {
      refusal = said.what();
    }
    // Those that need more of a model than its shape say so in a sentence.
    if (!refusal.empty()) {
      CHECK_THAT(refusal, contains("; expected "));
      CHECK((method == "expected_attention" || method == "duo_attention" || method == "sablock" ||
             method == "sentencekv"));
    }
  }
}

TEST_CASE("slots of a server, mixed at random, attend as caches of one sequence alone do") {
  for (const std::string method : {"full", "snapkv", "streaming_llm", "quest", "rocketkv"}) {
    CAPTURE(method);
    std::mt19937 bits(3);
    const auto budget = method == "full" ? std::nullopt : std::optional<index_t>(48);
    session slots(method, budget, 4);
    struct alone {
      std::unique_ptr<tessera::any_cache> cache;
      index_t id = 0;
      tessera::mixed_batch work;
      bool in_prompt = true, has_prompt = false;
      index_t ended = 0;
    };
    std::map<llama_seq_id, alone> twins;
    const auto workers = std::make_shared<tessera::cpu::executor>(1);
    long compared = 0, loads = 0;
    slots.own.trace([&](const attention::traced_rows& rows) {
      alone& twin = twins[rows.sequence];
      if (!twin.cache) {
        tessera::any_cache_request request;
        request.shape = {layers, heads, kv_heads};
        request.budget = budget;
        request.rule.scale = 1.0f / std::sqrt(float(dim));
        twin.cache = tessera::make_cache(method, "fp16", dim, request, workers);
        twin.id = twin.cache->open();
      }
      if (rows.layer == 0) twin.work = twin.cache->prepare({{twin.id, rows.q.tokens, rows.is_prompt}});
      std::vector<float> out(std::size_t(rows.q.tokens) * heads * dim);
      twin.cache->process(rows.layer, twin.work, rows.q, rows.k, rows.v,
                          tessera::nhd_rows(out.data(), rows.q.tokens, heads, dim));
      REQUIRE(out == copied(rows.out));
      ++compared;
    });
    for (int operation = 0; operation < 500; ++operation) {
      CAPTURE(operation);
      std::vector<part> parts;
      for (llama_seq_id id = 0; id < 4; ++id) {
        const bool exists = slots.own.has(id);
        if (exists && (bits() % 12 == 0 || slots.own.next_position(id) > 400)) {
          slots.own.remove(id, 0);
          twins.erase(id);
          continue;
        }
        if (bits() % 3 == 0) continue;
        alone& twin = twins[id];
        const int count = twin.in_prompt ? 1 + int(bits() % 40) : 1 + int(bits() % 3);
        parts.push_back({id, random_tokens(bits, count)});
        if (twin.in_prompt) twin.has_prompt = true;
      }
      if (!parts.empty()) decode(slots, parts);
      for (auto& [id, twin] : twins) {
        if (!twin.cache) continue;
        REQUIRE(slots.own.next_position(id) == twin.cache->next_position(twin.id));
        if (twin.in_prompt && twin.has_prompt && bits() % 3 == 0) {
          slots.own.end_prompt(id);
          twin.cache->end_prefill(twin.id);
          twin.in_prompt = twin.has_prompt = false;
          twin.ended = twin.cache->next_position(twin.id);
        } else if (!twin.in_prompt && bits() % 8 == 0) {
          slots.own.begin_prompt(id);
          twin.in_prompt = true;
        } else if (!twin.has_prompt && bits() % 6 == 0) {  // the slot's sequence leaves for memory and comes back
          const auto bytes = saved(slots.own, id);
          if (bits() % 2 == 0) slots.own.remove(id, 0);
          load(slots.own, id, bytes);
          ++loads;
        } else if (!twin.in_prompt && bits() % 5 == 0) {  // rollback
          const index_t position = twin.cache->next_position(twin.id) - 1, settled = twin.cache->settled(twin.id);
          if (position > 0 && position >= settled) {
            slots.own.remove(id, position);
            twin.cache->truncate(twin.id, position);
            twin.in_prompt = position < twin.ended;
          }
        }
      }
    }
    CHECK(compared > 200);
    CHECK(loads > 20);
  }
}

TEST_CASE("a saved sequence goes on in another process's cache, and damaged or foreign bytes change nothing") {
  for (const std::string method : {"full", "snapkv", "quest", "mosaickv", "rocketkv"}) {
    CAPTURE(method);
    const auto& methods = tessera::cache_methods();
    if (std::find(methods.begin(), methods.end(), method) == methods.end()) continue;
    std::mt19937 bits(15);
    const auto budget = method == "full" ? std::nullopt : std::optional<index_t>(48);
    session own(method, budget, 2), other(method, budget, 2);
    decode(own, {{0, random_tokens(bits, 200)}});
    CHECK_THROWS_WITH(saved(own.own, 0), contains("; expected "));
    own.own.end_prompt(0);
    decode(own, {{0, {5}}});
    const auto bytes = saved(own.own, 0);
    auto damaged = bytes;
    damaged[bytes.size() - 100] ^= 4;
    CHECK_THROWS_WITH(load(other.own, 1, damaged), contains("saved sequence is damaged"));
    CHECK_THROWS_WITH(load(other.own, 1, {bytes.begin(), bytes.end() - 1}), contains("saved sequence is cut short"));
    CHECK_FALSE(other.own.has(1));
    CHECK(other.own.cache() == nullptr);  // which another model may make
    load(other.own, 1, bytes);
    CHECK(other.own.next_position(1) == 201);
    for (const llama_token token : {9, 11, 13}) {
      decode(own, {{0, {token}}}), decode(other, {{1, {token}}});
      CHECK(logits_of(own.context.get()) == logits_of(other.context.get()));
    }
    CHECK_THROWS_WITH(load(other.own, 1, damaged), contains("saved sequence is damaged"));
    CHECK(other.own.next_position(1) == 204);
    session foreign(method == "full" ? "snapkv" : "full");
    CHECK_THROWS_WITH(load(foreign.own, 0, bytes), contains("method of a saved sequence is '" + method + "'"));
  }
}

TEST_CASE("a pass that fails half way, or behind the last attention, leaves no trace") {
  for (const std::string method : {"full", "snapkv", "quest"}) {
    for (const int fails_in : {0, 1, layers}) {  // the layer in which it fails; behind all of them
      CAPTURE(method, fails_in);
      std::mt19937 bits(14);
      const auto budget = method == "full" ? std::nullopt : std::optional<index_t>(48);
      session own(method, budget, 3), twin(method, budget, 3);
      const auto prompt = random_tokens(bits, 90), lost = random_tokens(bits, 20);
      for (session* one : {&own, &twin}) {
        decode(*one, {{0, prompt}});
        one->own.end_prompt(0);
        decode(*one, {{0, {5}}});
      }
      bool aborts = false;
      llama_set_abort_callback(own.context.get(), [](void* wanted) { return *static_cast<bool*>(wanted); }, &aborts);
      own.own.trace([&](const attention::traced_rows& rows) {
        if (rows.layer == fails_in) throw tessera::error("this layer fails; expected nothing else; it is a test");
        aborts = fails_in == layers && rows.layer == layers - 1;
      });
      CHECK_THROWS_WITH(decode(own, {{0, {7}}, {2, lost}}), contains("; expected "));
      own.own.trace({});
      aborts = false;
      CHECK_FALSE(own.own.has(2));
      REQUIRE(own.own.has(0));
      CHECK(own.own.next_position(0) == 91);
      for (const llama_token token : {9, 11, 13}) {
        decode(own, {{0, {token}}}), decode(twin, {{0, {token}}});
        CHECK(logits_of(own.context.get()) == logits_of(twin.context.get()));
      }
    }
  }
}

TEST_CASE("what cannot be is refused in a sentence, and nothing has changed") {
  std::mt19937 bits(4);
  CHECK_THROWS_WITH(session("sublime"), contains("method is 'sublime'; expected ") && contains("snapkv"));
  session one("snapkv", 32, 2);
  decode(one, {{0, random_tokens(bits, 60)}});
  const auto refuses = [&](const std::vector<std::array<int, 2>>& rows, const std::string& sentence) {
    token_batch batch(256);
    for (const auto& [sequence, position] : rows) batch.add(3, position, sequence, true);
    CHECK_THROWS_WITH(one.own.decode(one.context.get(), batch.get()), contains(sentence));
    CHECK(one.own.next_position(0) == 60);
    CHECK_FALSE(one.own.has(1));
  };
  refuses({{0, 61}}, "position of a token of sequence 0 is 61; expected 60");
  refuses({{0, 60}, {1, 0}, {0, 61}}, "rows of sequence 0 is apart; expected side by side");
  refuses({{1, 0}, {1, 2}}, "position of a token of sequence 1 is 2; expected 1");
  one.own.end_prompt(0);
  CHECK_THROWS_WITH(one.own.end_prompt(0), contains("prompt of sequence 0 is none"));
  CHECK_THROWS_WITH(one.own.copy(0, 0), contains("copy of sequence 0 is 0; expected another id"));
  one.own.copy(0, 1);
  CHECK(one.own.next_position(1) == 60);
  one.own.remove(1, 0);
  CHECK_FALSE(one.own.has(1));
  CHECK_THROWS_WITH(decode(one, {{0, random_tokens(bits, 9)}}),
                    contains("tokens of a step of sequence 0 is 9; expected 1 to 8"));
  one.own.begin_prompt(0);
  decode(one, {{0, random_tokens(bits, 9)}});
  CHECK_THROWS_WITH(one.own.remove(0, 10), contains("; expected "));
  CHECK(one.own.next_position(0) == 69);

  session large("snapkv", 4);  // a budget below the window is found out when the cache is made: nothing is there
  CHECK_THROWS_WITH(decode(large, {{0, random_tokens(bits, 60)}}), contains("; expected "));
  CHECK_FALSE(large.own.has(0));
  CHECK(llama_memory_seq_pos_max(llama_get_memory(large.context.get()), 0) == -1);

  session acausal("full");
  llama_set_causal_attn(acausal.context.get(), false);
  CHECK_THROWS_WITH(decode(acausal, {{0, {1, 2, 3}}}), contains("attention of the context is not causal"));

  attention own(tiny_model().get(), {"full"});
  struct without_flash {
    attention& of;
    void attach(llama_context_params& params) const {
      of.attach(params);
      params.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_DISABLED;
    }
  } settings{own};
  const auto context = tiny_model().context(256, 1, settings);
  token_batch batch(4);
  batch.add(1, 0, 0, true);
  CHECK_THROWS_WITH(own.decode(context.get(), batch.get()), contains("attention nodes of a pass is 0; expected 2"));
  CHECK_FALSE(own.has(0));

  attention second(tiny_model().get(), {"full"});
  struct with_streams {
    attention& of;
    void attach(llama_context_params& params) const {
      of.attach(params);
      params.kv_unified = false;
    }
  } streams{second};
  const auto parted = tiny_model().context(512, 1, streams, 2);
  token_batch of_second(4);
  of_second.add(1, 0, 1, true);
  CHECK_THROWS_WITH(second.decode(parted.get(), of_second.get()), contains("make the context with kv_unified"));
  CHECK_FALSE(second.has(1));
}
