// bytes() and bytes_read() against counts by hand. A token of one kv_head is 2 * 64 * 4 = 512 bytes of K and V.
#include "catch.hpp"

#include "methods/conversation.hpp"

using namespace methods_test;

namespace {

struct run {
  std::unique_ptr<any_cache> cache;
  model_data data;
  index_t id;

  explicit run(const settings& chosen)
      : cache(make_cache(chosen, {3, 4, 2}, std::make_shared<tessera::cpu::executor>(1))), data(make_data()), id(cache->open()) {
    prefill(*cache, id, data, 0, 200);
  }
  offset_t end_prefill() {
    cache->end_prefill(id);
    return cache->bytes(id);
  }
  offset_t step(index_t at) {
    decode(*cache, id, data, at, 1);
    return cache->bytes_read(id);
  }

 private:
  static model_data make_data() {
    rng random(151);
    return {random, {3, 4, 2}, 204};
  }
};

constexpr offset_t heads = 3 * 2;         // layers * kv_heads
constexpr offset_t with_room = 200 + 16;  // growth leaves room for 16 tokens more

}  // namespace

TEST_CASE("full holds every token, with room for 16 more, and reads every token") {
  run full({"full", 0});
  CHECK(full.cache->bytes(full.id) == heads * with_room * 512);
  CHECK(full.end_prefill() == heads * with_room * 512);
  CHECK(full.step(200) == heads * 201 * 512);
  CHECK(full.cache->full_bytes(201) == heads * 201 * 512);
}

TEST_CASE("snapkv frees what it drops, and the queries that it observed") {
  run snapkv({"snapkv", 50, {{"window", 8}}});
  // 8 rows of 4 query heads in each layer are remembered while the prompt lasts.
  CHECK(snapkv.cache->bytes(snapkv.id) >= heads * with_room * 512 + 3 * 8 * 4 * 64 * 4);
  CHECK(snapkv.end_prefill() == heads * 50 * (512 + 4));
  CHECK(snapkv.step(200) == heads * 51 * 512);
  CHECK(snapkv.cache->bytes(snapkv.id) == heads * (51 + 16) * (512 + 4));
}

TEST_CASE("streaming_llm and h2o hold their budget, positions and scores, and read one token more") {
  run streaming({"streaming_llm", 50});
  CHECK(streaming.cache->bytes(streaming.id) == heads * with_room * 512);
  CHECK(streaming.end_prefill() == heads * 50 * (512 + 4));
  CHECK(streaming.step(200) == heads * 51 * 512);
  CHECK(streaming.cache->bytes(streaming.id) <= heads * 67 * (512 + 4));

  run h2o({"h2o", 50});
  CHECK(h2o.cache->bytes(h2o.id) == heads * with_room * (512 + 4));
  CHECK(h2o.end_prefill() == heads * 50 * (512 + 4 + 4));
  CHECK(h2o.step(200) == heads * 51 * (512 + 4));
  CHECK(h2o.cache->bytes(h2o.id) <= heads * 67 * (512 + 4 + 4));
}

TEST_CASE("pyramidkv and ada_snapkv hold what their budgets allot, head by head") {
  run pyramidkv({"pyramidkv", 50, {{"window", 8}}});
  // base 42: least 2, most 82, step 40.
  CHECK(pyramidkv.end_prefill() == 2 * (90 + 50 + 10) * (512 + 4));
  run ada({"ada_snapkv", 50, {{"window", 8}}});
  const offset_t held = ada.end_prefill();
  offset_t tokens = 0;
  for (index_t layer = 0; layer < 3; ++layer) {
    for (index_t head = 0; head < 2; ++head) tokens += offset_t(ada.cache->positions(layer, ada.id, head).size());
  }
  CHECK(held == tokens * (512 + 4));
  CHECK(std::abs(tokens - heads * 50) <= heads);
}

TEST_CASE("exact_topk holds everything, reads every key and the values of what it attends") {
  run exact({"exact_topk", 10});
  CHECK(exact.end_prefill() == heads * with_room * 512);
  CHECK(exact.step(200) == heads * (201 * 256 + 10 * 256));
}

TEST_CASE("a closed sequence's bytes are gone, and another's are its own") {
  run snapkv({"snapkv", 50, {{"window", 8}}});
  const offset_t held = snapkv.end_prefill();
  const index_t other = snapkv.cache->open();
  CHECK(snapkv.cache->bytes(other) == 0);
  CHECK(snapkv.cache->bytes(snapkv.id) == held);
  snapkv.cache->close(snapkv.id);
  CHECK(snapkv.cache->open() == snapkv.id);
  CHECK(snapkv.cache->bytes(snapkv.id) == 0);
}
