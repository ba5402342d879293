#include "catch.hpp"

#include <numeric>

#include <tessera/backend/cpu/store/pack.hpp>
#include <tessera/backend/cpu/store/ragged_store.hpp>
#include <tessera/layout/dense.hpp>

#include "support/kv_tensor.hpp"

using namespace tessera;

namespace {

selection random_subset(support::rng& random, const std::vector<index_t>& lengths, double share) {
  selection chosen;
  chosen.reset(lengths);
  for (index_t r = 0; r < index_t(lengths.size()); ++r) {
    for (index_t slot = 0; slot < lengths[std::size_t(r)]; ++slot) {
      if (random.chance(share)) chosen.row(r)[chosen.counts[std::size_t(r)]++] = slot;
    }
  }
  return chosen;
}

using store_type = cpu::ragged_store<dense<float, 64>>;

/// What a store should hold, token by token: position, score, and the first number of each row.
struct expected_head {
  std::vector<index_t> positions;
  std::vector<float> scores, keys, values;
};

void check_store(store_type& store, const std::vector<expected_head>& expected, bool with_scores) {
  const auto view = store.view();
  for (index_t h = 0; h < index_t(expected.size()); ++h) {
    const auto& head = expected[std::size_t(h)];
    REQUIRE(store.length(h) == index_t(head.positions.size()));
    for (index_t i = 0; i < store.length(h); ++i) {
      const auto at = std::size_t(i);
      REQUIRE(store.position(h, i) == head.positions[at]);
      REQUIRE(view.position(0, h, i) == head.positions[at]);
      REQUIRE(view.key(0, h, i)[0] == head.keys[at]);
      REQUIRE(view.key(0, h, i)[63] == head.keys[at] + 63);
      REQUIRE(view.value(0, h, i)[5] == head.values[at] + 5);
      if (with_scores) REQUIRE(store.scores()[store.begins()[std::size_t(h)] + i] == head.scores[at]);
    }
  }
}

}  // namespace

TEST_CASE("pack in place and pack into fresh memory give the same rows") {
  support::rng random(111);
  for (index_t i = 0; i < support::scaled(300); ++i) {
    const index_t sequences = random.between(1, 3), kv_heads = random.between(1, 3);
    std::vector<index_t> lengths;
    for (index_t r = 0; r < sequences * kv_heads; ++r) lengths.push_back(random.between(1, 60));
    const support::kv_tensor<float, 64> source(random, sequences, kv_heads, lengths);
    auto in_place = source, fresh = source;
    const auto writable = [](support::kv_tensor<float, 64>& tensor) {
      const auto reading = tensor.view();
      kv_view<float, 64> view;
      view.k = tensor.k.data();
      view.v = tensor.v.data();
      view.k_strides = reading.k_strides;
      view.v_strides = reading.v_strides;
      view.sequences = reading.sequences;
      view.kv_heads = reading.kv_heads;
      view.lengths = reading.lengths;
      view.length_strides = {reading.length_strides.sequence, reading.length_strides.head};
      return view;
    };
    const auto chosen = random_subset(random, lengths, random.pick({0.0, 0.2, 0.9, 1.0}));
    cpu::executor workers(random.between(1, 3));
    cpu::pack(writable(in_place), chosen.view(), writable(in_place), workers);
    cpu::pack(source.view(), chosen.view(), writable(fresh), workers);
    for (index_t row = 0; row < chosen.rows(); ++row) {
      const index_t count = chosen.counts[std::size_t(row)];
      for (index_t slot = 0; slot < source.slots; ++slot) {
        const index_t from = slot < count ? chosen.row(row)[slot] : slot;
        const auto at = source.row(row / kv_heads, row % kv_heads, slot) * 64;
        const auto original = source.row(row / kv_heads, row % kv_heads, from) * 64;
        REQUIRE(std::equal(fresh.k.begin() + offset_t(at), fresh.k.begin() + offset_t(at) + 64,
                           source.k.begin() + offset_t(original)));
        REQUIRE(std::equal(fresh.v.begin() + offset_t(at), fresh.v.begin() + offset_t(at) + 64,
                           source.v.begin() + offset_t(original)));
      }
    }
    REQUIRE(in_place.k == fresh.k);
    REQUIRE(in_place.v == fresh.v);
  }
}

TEST_CASE("pack gathers from strided rows, a transposed V among them") {
  support::rng random(112);
  const support::kv_tensor<float, 64> source(random, 1, 1, {9});
  std::vector<float> transposed(64 * 9), k(64 * 3), v(64 * 3);
  for (std::size_t t = 0; t < 9; ++t) {
    for (std::size_t d = 0; d < 64; ++d) transposed[d * 9 + t] = source.v[t * 64 + d];
  }
  auto from = source.view();
  from.v = transposed.data();
  from.v_strides = {0, 0, 1, 9};
  kv_view<float, 64> to;
  to.k = k.data();
  to.v = v.data();
  to.k_strides = to.v_strides = {0, 0, 64, 1};
  const std::vector<index_t> slots{1, 4, 8}, counts{3};
  cpu::executor workers(1);
  cpu::pack(from, selection_view{slots.data(), counts.data(), nullptr, 3}, to, workers);
  for (std::size_t i = 0; i < 3; ++i) {
    for (std::size_t d = 0; d < 64; ++d) {
      REQUIRE(k[i * 64 + d] == source.k[std::size_t(slots[i]) * 64 + d]);
      REQUIRE(v[i * 64 + d] == source.v[std::size_t(slots[i]) * 64 + d]);
    }
  }
}

TEST_CASE("a ragged store keeps rows, positions and scores together through appends and evictions") {
  support::rng random(113);
  cpu::executor workers(2);
  for (index_t i = 0; i < support::scaled(150); ++i) {
    const index_t kv_heads = random.between(1, 4);
    const bool with_scores = random.chance(0.5);
    store_type store(kv_heads, with_scores);
    std::vector<expected_head> expected(static_cast<std::size_t>(kv_heads));
    index_t next = 0;
    for (int operation = 0; operation < 12; ++operation) {
      const index_t tokens = random.pick({1, 1, 3, 40});
      std::vector<float> k(std::size_t(tokens * kv_heads * 64)), v(k.size());
      for (index_t t = 0; t < tokens; ++t) {
        for (index_t h = 0; h < kv_heads; ++h) {
          for (index_t d = 0; d < 64; ++d) {
            k[std::size_t((t * kv_heads + h) * 64 + d)] = float((next + t) * 1000 + h * 100 + d);
            v[std::size_t((t * kv_heads + h) * 64 + d)] = float((next + t) * -1000 + h * 100 + d);
          }
          expected[std::size_t(h)].positions.push_back(next + t);
          expected[std::size_t(h)].scores.push_back(0);
          expected[std::size_t(h)].keys.push_back(float((next + t) * 1000 + h * 100));
          expected[std::size_t(h)].values.push_back(float((next + t) * -1000 + h * 100));
        }
      }
      store.append(nhd_rows<const float>(k.data(), tokens, kv_heads, 64),
                   nhd_rows<const float>(v.data(), tokens, kv_heads, 64), next);
      next += tokens;
      check_store(store, expected, with_scores);
      for (index_t h = 0; h < kv_heads && with_scores; ++h) {
        for (index_t s = 0; s < store.length(h); ++s) {
          expected[std::size_t(h)].scores[std::size_t(s)] += float(s + operation);
          store.scores()[store.begins()[std::size_t(h)] + s] += float(s + operation);
        }
      }
      if (random.chance(0.5)) continue;
      // Now and then everything goes: positions must not start anew.
      const auto chosen = random_subset(random, store.lengths(), random.pick({0.0, 0.3, 0.95, 1.0}));
      store.keep(chosen, workers);
      for (index_t h = 0; h < kv_heads; ++h) {
        expected_head kept;
        auto& head = expected[std::size_t(h)];
        for (index_t s = 0; s < chosen.counts[std::size_t(h)]; ++s) {
          const auto from = std::size_t(chosen.row(h)[s]);
          kept.positions.push_back(head.positions[from]);
          kept.scores.push_back(head.scores[from]);
          kept.keys.push_back(head.keys[from]);
          kept.values.push_back(head.values[from]);
        }
        head = kept;
      }
      check_store(store, expected, with_scores);
    }
  }
}

TEST_CASE("a ragged store grows by a 64th, at least 16 tokens, and gives back what a quarter of is unused") {
  cpu::executor workers(1);
  store_type store(2, false);
  CHECK(store.bytes() == 0);
  const std::vector<float> rows(2000 * 2 * 64, 1.0f);
  index_t next = 0;
  const auto append = [&](index_t tokens) {
    const auto view = nhd_rows<const float>(rows.data(), tokens, 2, 64);
    store.append(view, view, next);
    next += tokens;
  };
  const auto keep_first = [&](index_t count) {
    selection chosen;
    chosen.reset({count, count});
    chosen.counts = {count, count};
    for (index_t h = 0; h < 2; ++h) std::iota(chosen.row(h), chosen.row(h) + count, 0);
    store.keep(chosen, workers);
  };
  constexpr offset_t token = 2 * 128 * 4;  // K and V of both heads
  append(184);
  CHECK(store.bytes() == 200 * token);
  append(16);
  CHECK(store.bytes() == 200 * token);
  keep_first(200);
  CHECK(store.bytes() == 200 * token);  // nothing was dropped, so no positions either
  keep_first(150);
  CHECK(store.bytes() == 200 * (token + 2 * 4));
  keep_first(149);  // 149 * 4 < 200 * 3
  CHECK(store.bytes() == 149 * (token + 2 * 4));
  append(1);
  CHECK(store.bytes() == (150 + 16) * (token + 2 * 4));
  CHECK(store.position(1, 149) == 200);
  append(1850);
  CHECK(store.bytes() == (2000 + 31) * (token + 2 * 4));
}

TEST_CASE("appended rows are rounded to the stored type") {
  cpu::ragged_store<dense<bf16, 64, 80>> store(1, false);
  const std::vector<float> k(64, 1.00390625f), v(80, -3.14159f);
  store.append(nhd_rows<const float>(k.data(), 1, 1, 64), nhd_rows<const float>(v.data(), 1, 1, 80), 0);
  CHECK(store.view().key(0, 0, 0)[63].bits == bf16(1.00390625f).bits);
  CHECK(store.view().value(0, 0, 0)[79].bits == bf16(-3.14159f).bits);
}
