// llama.cpp's own attention over cells of which Tessera chose what stays.
#include "catch.hpp"

#include <cmath>
#include <cstring>
#include <numeric>

#include "tessera_llama/attend.hpp"
#include "tessera_llama/evict.hpp"
#include "tiny_llama.hpp"

using namespace llama_tests;

namespace {

/// Attaches an observer, and sets the type of cells.
template <class Observer>
struct cells_of_type {
  ggml_type type;
  Observer& observer;
  void attach(llama_context_params& params) {
    observer.attach(params);
    params.type_k = params.type_v = type;
  }
};

struct watched {
  eviction watcher;
  context_pointer context;
  llama_pos next[2] = {0, 0};
  explicit watched(int cells = 1024, eviction_options options = {}, ggml_type type = GGML_TYPE_F16)
      : watcher(tiny_model().get(), options) {
    cells_of_type<eviction> settings{type, watcher};
    context = tiny_model().context(cells, 1, settings, 2);
  }
  void feed(const std::vector<llama_token>& tokens, bool observed, llama_seq_id id = 0) {
    token_batch batch(512);
    for (const llama_token token : tokens) batch.add(token, next[id]++, id, true);
    watcher.decode(context.get(), batch.get(), observed ? id : -1);
  }
};

/// llama.cpp by itself, with the same settings and no callback.
struct alone {
  context_pointer context;
  llama_pos next = 0;
  explicit alone(ggml_type type = GGML_TYPE_F16) {
    struct usual {
      ggml_type type;
      void attach(llama_context_params& params) const {
        params.kv_unified = true;
        params.n_seq_max = 2;
        params.type_k = params.type_v = type;
        params.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_ENABLED;
      }
    } settings{type};
    context = tiny_model().context(1024, 1, settings, 2);
  }
  void feed(const std::vector<llama_token>& tokens) {
    token_batch batch(512);
    for (const llama_token token : tokens) batch.add(token, next++, 0, true);
    tessera::require(llama_decode(context.get(), batch.get()) == 0, "llama_decode", "failed", "0", "see its log");
  }
};

}  // namespace

TEST_CASE("a budget that covers everything leaves llama.cpp's bits") {
  std::mt19937 bits(5);
  const auto first = random_tokens(bits, 200), last = random_tokens(bits, 64), answer = random_tokens(bits, 5);
  for (const ggml_type type : {GGML_TYPE_F16, GGML_TYPE_Q8_0, GGML_TYPE_Q4_0}) {
    watched own(1024, {}, type);
    alone plain(type);
    own.feed(first, false), plain.feed(first);
    own.feed(last, true), plain.feed(last);
    CHECK(own.watcher.evict(own.context.get(), 0, 264).size() == 264);
    for (const llama_token token : answer) {
      own.feed({token}, false), plain.feed({token});
      CHECK(logits_of(own.context.get()) == logits_of(plain.context.get()));
    }
  }
}

TEST_CASE("evicted cells are few, lie side by side, and serve others") {
  std::mt19937 bits(6);
  watched own;
  own.feed(random_tokens(bits, 500), false);
  own.feed(random_tokens(bits, 300), false);
  own.feed(random_tokens(bits, 100), true);
  const std::size_t whole = llama_state_seq_get_size(own.context.get(), 0);
  const auto kept = own.watcher.evict(own.context.get(), 0, 128);
  REQUIRE(kept.size() == 128);
  CHECK(std::is_sorted(kept.begin(), kept.end()));
  for (llama_pos i = 0; i < 32; ++i) CHECK(kept[std::size_t(96 + i)] == 868 + i);  // the window stays
  CHECK(double(llama_state_seq_get_size(own.context.get(), 0)) < 0.16 * double(whole));
  own.feed({3}, false);
  CHECK(own.watcher.attended_cells() == 256);    // llama.cpp's smallest step
  own.feed(random_tokens(bits, 500), false, 1);  // 900 and 500 tokens in 1,024 cells
  CHECK(own.watcher.positions(0).size() == 129);

  own.feed({4}, false);
  for (const float logit : logits_of(own.context.get())) REQUIRE(std::isfinite(logit));
}

TEST_CASE("what stays behind an eviction is what llama.cpp attends to") {
  std::mt19937 bits(10);
  const auto prompt = random_tokens(bits, 400), answer = random_tokens(bits, 6);
  watched own;
  alone plain;
  own.feed(prompt, true), plain.feed(prompt);
  const auto kept = own.watcher.evict(own.context.get(), 0, 100);
  llama_pos from = 0;
  for (const llama_pos position : kept) {
    if (position > from) llama_memory_seq_rm(llama_get_memory(plain.context.get()), 0, from, position);
    from = position + 1;
  }
  for (const llama_token token : answer) {
    own.feed({token}, false), plain.feed({token});
    CHECK(relative_distance(logits_of(own.context.get()), logits_of(plain.context.get())) <
          5e-3);  // cells in another order
  }
}

TEST_CASE("quantised keys choose nearly what keys of fp16 choose") {
  std::mt19937 bits(14);
  const auto prompt = random_tokens(bits, 400), second = random_tokens(bits, 100);
  std::vector<std::vector<llama_pos>> kept;
  for (const ggml_type type : {GGML_TYPE_F16, GGML_TYPE_Q8_0, GGML_TYPE_Q4_0}) {
    watched own(1024, {.pool = 1}, type);
    own.feed(prompt, true);
    kept.push_back(own.watcher.evict(own.context.get(), 0, 132));
    REQUIRE(kept.back().size() == 132);
    own.feed(second, true);  // the scores of a second turn, over cells that were moved
    REQUIRE(own.watcher.evict(own.context.get(), 0, 80).size() == 80);
    own.feed({1}, false);
    for (const float logit : logits_of(own.context.get())) REQUIRE(std::isfinite(logit));
  }
  const auto shared = [&](std::size_t other) {
    std::vector<llama_pos> both;
    std::set_intersection(kept[0].begin(), kept[0].end(), kept[other].begin(), kept[other].end(),
                          std::back_inserter(both));
    return int(both.size()) - 32;  // the window stays in any case
  };
  CHECK(shared(1) >= 96);  // of 100
  CHECK(shared(2) >= 75);  // by chance, 27
}

TEST_CASE("cells of other types are refused in a sentence") {
  std::mt19937 bits(15);
  watched own(1024, {}, GGML_TYPE_Q5_1);
  CHECK_THROWS_WITH(own.feed(random_tokens(bits, 50), false),
                    contains("type of keys is q5_1; expected f16, q8_0 or q4_0"));
  attention full(tiny_model().get(), {"full"});
  cells_of_type<attention> settings{GGML_TYPE_Q8_0, full};
  const auto context = tiny_model().context(512, 1, settings);
  token_batch batch(8);
  batch.add(1, 0, 0, true);
  CHECK_THROWS_WITH(full.decode(context.get(), batch.get()), contains("type of cells is q8_0; expected f16 or f32"));
  CHECK_FALSE(full.has(0));
}

TEST_CASE("a second turn is scored by the cells that hold the first, wherever they lie") {
  std::mt19937 bits(12);
  const auto first = random_tokens(bits, 300), second = random_tokens(bits, 200), other = random_tokens(bits, 90);
  std::vector<llama_pos> kept[2];
  for (const int shares : {0, 1}) {
    watched own;
    if (shares) own.feed({other.begin(), other.begin() + 30}, false, 1);
    own.feed({first.begin(), first.begin() + 150}, false);
    if (shares) own.feed({other.begin() + 30, other.begin() + 60}, false, 1);
    own.feed({first.begin() + 150, first.end()}, true);
    std::vector<llama_pos> even;  // a choice that rounding does not change
    for (llama_pos i = 0; i < 300; ++i)
      if (i % 3 == 0 || i >= 260) even.push_back(i);
    own.watcher.keep_positions(own.context.get(), 0, even);
    if (shares) own.feed({other.begin() + 60, other.end()}, false, 1);
    own.feed(second, true);
    kept[shares] = own.watcher.evict(own.context.get(), 0, 120);
    REQUIRE(kept[shares].size() == 120);
    for (const llama_pos position : kept[shares])
      CHECK((position >= 300 || std::binary_search(even.begin(), even.end(), position)));
  }
  std::vector<llama_pos> both;
  std::set_intersection(kept[0].begin(), kept[0].end(), kept[1].begin(), kept[1].end(), std::back_inserter(both));
  CHECK(both.size() >= 115);
}

TEST_CASE("an evicted sequence that was saved goes on in another context, and can be evicted again") {
  std::mt19937 bits(14);
  watched own, other;
  own.feed(random_tokens(bits, 300), true);
  own.watcher.evict(own.context.get(), 0, 120);
  own.feed({7}, false);
  std::vector<unsigned char> bytes;
  own.watcher.save(own.context.get(), 0, [&](const void* data, std::size_t count) {
    const auto* const first = static_cast<const unsigned char*>(data);
    bytes.insert(bytes.end(), first, first + count);
  });
  const auto load = [&](std::vector<unsigned char> from) {
    std::size_t read = 0;
    other.watcher.load(other.context.get(), 0, [&](void* data, std::size_t wanted) {
      const std::size_t count = std::min(wanted, from.size() - read);
      std::memcpy(data, from.data() + read, count);
      read += count;
      return count;
    });
  };
  auto damaged = bytes;
  damaged[bytes.size() / 2] ^= 1;
  CHECK_THROWS_WITH(load(damaged), contains("saved sequence is damaged"));
  CHECK(other.watcher.positions(0).empty());
  load(bytes);
  CHECK(other.watcher.positions(0) == own.watcher.positions(0));
  other.next[0] = own.next[0];
  const auto second = random_tokens(bits, 200);
  own.feed(second, true), other.feed(second, true);
  const auto kept = own.watcher.evict(own.context.get(), 0, 100);
  const auto kept_there = other.watcher.evict(other.context.get(), 0, 100);
  std::vector<llama_pos> both;
  std::set_intersection(kept.begin(), kept.end(), kept_there.begin(), kept_there.end(), std::back_inserter(both));
  CHECK(both.size() >= 95);  // cells in another order round otherwise
}

TEST_CASE("a refused batch leaves the sequences as they were") {
  std::mt19937 bits(13);
  watched own;
  own.feed(random_tokens(bits, 100), false);
  const std::size_t size = llama_state_seq_get_size(own.context.get(), 0);
  const auto refuses = [&](llama_seq_id sequence, llama_pos position, int count, const char* sentence) {
    token_batch batch(600);
    for (int i = 0; i < count; ++i) batch.add(1, position + i, sequence, false);
    CHECK_THROWS_WITH(own.watcher.decode(own.context.get(), batch.get()), contains(sentence));
    CHECK(llama_state_seq_get_size(own.context.get(), 0) == size);
    CHECK(own.watcher.positions(0).size() == 100);
  };
  refuses(0, 50, 1, "position of a token of sequence 0 is 50; expected 100");
  refuses(-1, 0, 1, "sequence of a token is -1; expected 0 to 1");
  refuses(300, 0, 1, "sequence of a token is 300; expected 0 to 1");
  refuses(0, 100, 513, "tokens of a batch is 513; expected 1 to n_ubatch, which is 512");
  CHECK_THROWS_WITH(own.watcher.keep_positions(own.context.get(), 0, {5, 3, 99}), contains("not ascending"));
  CHECK_THROWS_WITH(own.watcher.keep_positions(own.context.get(), 0, {5, 99, 120}), contains("not all held"));
  CHECK_THROWS_WITH(own.watcher.keep_positions(own.context.get(), 1, {5}),
                    contains("sequence is 1; expected one that has tokens"));
}

TEST_CASE("what stays is what the window's queries look at, by the definition in double") {
  std::mt19937 bits(7);
  const auto prompt = random_tokens(bits, 300);
  constexpr int n = 300, window = 32, keep = 80;
  // Queries and keys of every layer, as the other way in shows them.
  attention full(tiny_model().get(), {"full"});
  const auto context = tiny_model().context(256, 1, full);
  std::vector<std::vector<float>> q(layers), k(layers);
  full.trace([&](const attention::traced_rows& rows) {
    const auto add = [&](std::vector<float>& to, const tessera::rows_view<const float>& from) {
      for (index_t t = 0; t < from.tokens; ++t)
        for (index_t h = 0; h < from.heads; ++h) to.insert(to.end(), from.row(0, t, h), from.row(0, t, h) + dim);
    };
    add(q[std::size_t(rows.layer)], rows.q), add(k[std::size_t(rows.layer)], rows.k);
  });
  watched own;
  for (int done = 0; done < n; done += 100) {
    const std::vector<llama_token> chunk(prompt.begin() + done, prompt.begin() + done + 100);
    own.feed(chunk, done == 200);
    token_batch batch(100);
    for (int i = 0; i < 100; ++i) batch.add(chunk[std::size_t(i)], done + i, 0, false);
    full.decode(context.get(), batch.get());
  }
  std::vector<double> looked(n, 0.0);  // at each token, by all heads of all layers together
  for (int layer = 0; layer < layers; ++layer) {
    for (int kv = 0; kv < kv_heads; ++kv) {
      for (int head = kv * heads / kv_heads; head < (kv + 1) * heads / kv_heads; ++head) {
        for (int t = n - window; t < n; ++t) {
          std::vector<double> weights;
          double sum = 0;
          for (int j = 0; j <= t; ++j) {
            double dot = 0;
            for (int d = 0; d < dim; ++d)
              dot += double(q[std::size_t(layer)][std::size_t((t * heads + head) * dim + d)]) *
                     k[std::size_t(layer)][std::size_t((j * kv_heads + kv) * dim + d)];
            weights.push_back(std::exp(dot / 8));
            sum += weights.back();
          }
          for (int j = 0; j <= t; ++j) looked[std::size_t(j)] += weights[std::size_t(j)] / sum;
        }
      }
    }
  }
  std::vector<double> total(n - window, 0.0);
  for (int j = 0; j < n - window; ++j) {  // the largest of seven neighbours that compete
    for (int i = std::max(0, j - 3); i <= std::min(n - window - 1, j + 3); ++i)
      total[std::size_t(j)] = std::max(total[std::size_t(j)], looked[std::size_t(i)]);
  }
  std::vector<int> order(n - window);
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(),
                   [&](int a, int b) { return total[std::size_t(a)] > total[std::size_t(b)]; });
  const double last = total[std::size_t(order[keep - window - 1])];
  const auto kept = own.watcher.evict(own.context.get(), 0, keep);
  REQUIRE(kept.size() == keep);
  // Pooling makes ties, and llama.cpp's own attention rounds what later layers see: every kept token scores nearly as well as the last one.
  for (int i = 0; i < keep - window; ++i) CHECK(total[std::size_t(kept[std::size_t(i)])] > 0.97 * last);
  int shared = 0;
  for (int i = 0; i < keep - window; ++i)
    shared += std::binary_search(kept.begin(), kept.end(), llama_pos(order[std::size_t(i)]));
  CHECK(shared >= keep - window - 6);
}

TEST_CASE("evictions that cannot be are refused") {
  std::mt19937 bits(8);
  watched own;
  CHECK_THROWS_WITH(own.watcher.evict(own.context.get(), 0, 64), contains("scores of sequence 0 is missing"));
  own.feed(random_tokens(bits, 100), false);
  CHECK_THROWS_WITH(own.feed(random_tokens(bits, 8), true),
                    contains("tokens of the observed sequence in the batch is 8; expected at least the window"));
  own.next[0] = 100;
  own.feed(random_tokens(bits, 40), true);
  CHECK_THROWS_WITH(own.watcher.evict(own.context.get(), 0, 31),
                    contains("tokens to keep is 31; expected at least the window, which is 32"));
  CHECK_THROWS_WITH(own.watcher.keep_positions(own.context.get(), 0, {0, 1}),
                    contains("expected the newest among them"));
  own.feed({1}, false);  // scores are older than the newest token
  CHECK_THROWS_WITH(own.watcher.evict(own.context.get(), 0, 64), contains("scores of sequence 0 is missing"));
  CHECK_THROWS_WITH(watched(1024, {.pool = 4}), contains("pool is 4; expected odd"));
}
