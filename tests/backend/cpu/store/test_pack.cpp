#include "catch.hpp"

#include <tessera/backend/cpu/store/pack.hpp>

#include "support/kv_tensor.hpp"
#include "support/subsets.hpp"

using namespace tessera;

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
    const auto chosen = support::random_subset(random, lengths, random.pick({0.0, 0.2, 0.9, 1.0}));
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
  to.sequences = to.kv_heads = 1;
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
