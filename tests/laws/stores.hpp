// What any store of a layout must keep to, whatever a token takes and wherever its rows lie.
#pragma once

#include "catch.hpp"

#include <vector>

#include <tessera/backend/cpu/store/kv_store.hpp>

#include "support/plain_head.hpp"
#include "support/subsets.hpp"

namespace support {

/// What a row becomes when it is stored.
template <class Encoding>
std::vector<float> decoded_row(const float* row, int dim) {
  std::vector<typename Encoding::stored_type> encoded(static_cast<std::size_t>(dim));
  const float scale = tessera::encode_row<Encoding>(row, dim, encoded.data(), 1);
  std::vector<float> result;
  for (const auto& x : encoded) result.push_back(float(x) * scale);
  return result;
}

template <class Store, class Layout>
void holds(Store& store, index_t layer, index_t id, const std::vector<plain_head>& expected,
           const tessera::cpu::column_set& with) {
  const auto view = store.view({layer, id});
  tessera::offset_t least = 0;
  REQUIRE(view.kv_heads == index_t(expected.size()));
  for (index_t h = 0; h < view.kv_heads; ++h) {
    const plain_head& head = expected[std::size_t(h)];
    REQUIRE(store.lengths({layer, id})[std::size_t(h)] == index_t(head.positions.size()));
    REQUIRE(view.length(0, h) == index_t(head.positions.size()));
    least += index_t(head.positions.size()) * Layout::token_bytes();
    for (index_t s = 0; s < view.length(0, h); ++s) {
      const auto at = std::size_t(s);
      REQUIRE(store.position({layer, id}, h, s) == head.positions[at]);
      REQUIRE(view.position(0, h, s) == head.positions[at]);
      bool same = true;
      for (int d = 0; d < Layout::k_dim; ++d) {
        same &=
            float(view.key(0, h, s)[d * view.k_strides.dim]) * view.key_scale(0, h, s) == head.keys[at][std::size_t(d)];
      }
      for (int d = 0; d < Layout::v_dim; ++d) {
        same &= float(view.value(0, h, s)[d * view.v_strides.dim]) * view.value_scale(0, h, s) ==
                head.values[at][std::size_t(d)];
      }
      REQUIRE(same);
      auto& beside = store.beside({layer, id});
      if (with.scores) REQUIRE(beside.scores()[beside.begins()[std::size_t(h)] + s] == head.scores[at]);
      if (with.segments) REQUIRE(beside.segments()[beside.begins()[std::size_t(h)] + s] == head.segments[at]);
    }
  }
  REQUIRE(store.bytes({layer, id}) >= least);
}

/// Rows, positions, scores and segments stay together through appends and keeps of several layers and sequences, whatever happens
/// to the others; a cleared place is empty and holds no bytes.
template <class Layout>
void obeys_the_laws_of_stores(std::uint64_t seed) {
  using tessera::nhd_rows;
  constexpr int k_dim = Layout::k_dim, v_dim = Layout::v_dim;
  constexpr index_t layers = 2, sequences = 3;
  rng random(seed);
  tessera::cpu::executor workers(2);
  for (index_t i = 0; i < scaled(40); ++i) {
    const index_t kv_heads = random.between(1, 4);
    const tessera::cpu::column_set with{random.chance(0.5), random.chance(0.5)};
    tessera::cpu::kv_store<Layout> store(layers, kv_heads, with);
    const std::vector<plain_head> nothing(static_cast<std::size_t>(kv_heads));
    std::vector<std::vector<plain_head>> places(layers * sequences, nothing);
    std::vector<index_t> next(layers * sequences, 0);
    std::vector<tessera::segment_cursor> texts(layers * sequences);
    for (index_t id = 0; id < sequences; ++id) store.open(id);
    for (int operation = 0; operation < 30; ++operation) {
      const index_t layer = random.between(0, layers - 1), id = random.between(0, sequences - 1);
      const auto at = std::size_t(id * layers + layer);
      auto& place = places[at];
      if (random.chance(0.6)) {
        const index_t tokens = random.pick({1, 1, 3, 40});
        const auto k = normals(random, std::size_t(tokens * kv_heads * k_dim)),
                   v = normals(random, std::size_t(tokens * kv_heads * v_dim));
        std::vector<std::uint8_t> flags;
        for (index_t t = 0; t < tokens; ++t) flags.push_back(random.chance(0.2));
        store.append({layer, id}, nhd_rows<const float>(k.data(), tokens, kv_heads, k_dim),
                     nhd_rows<const float>(v.data(), tokens, kv_heads, v_dim), next[at], {texts[at], flags.data()});
        for (index_t t = 0; t < tokens; ++t) {
          const index_t segment = texts[at].advance(flags[std::size_t(t)] == 1);
          for (index_t h = 0; h < kv_heads; ++h) {
            plain_head& head = place[std::size_t(h)];
            head.positions.push_back(next[at] + t);
            head.scores.push_back(0);
            head.segments.push_back(segment);
            head.keys.push_back(
                decoded_row<typename Layout::encoding_type>(k.data() + (t * kv_heads + h) * k_dim, k_dim));
            head.values.push_back(
                decoded_row<typename Layout::encoding_type>(v.data() + (t * kv_heads + h) * v_dim, v_dim));
          }
        }
        next[at] += tokens;
        for (index_t h = 0; h < kv_heads && with.scores; ++h) {
          auto& beside = store.beside({layer, id});
          for (index_t s = 0; s < store.lengths({layer, id})[std::size_t(h)]; ++s) {
            place[std::size_t(h)].scores[std::size_t(s)] += float(s + operation);
            beside.scores()[beside.begins()[std::size_t(h)] + s] += float(s + operation);
          }
        }
      } else if (random.chance(0.9)) {
        // Now and then everything goes: positions must not start anew.
        const auto lengths = store.lengths({layer, id});
        const auto chosen = random_subset(random, lengths, random.pick({0.0, 0.3, 0.95, 1.0}));
        REQUIRE(store.keep({layer, id}, chosen, workers) == (chosen.counts != lengths));
        for (index_t h = 0; h < kv_heads; ++h) place[std::size_t(h)].keep(chosen.row(h), chosen.counts[std::size_t(h)]);
      } else {
        store.clear(id);
        for (index_t l = 0; l < layers; ++l) {
          places[std::size_t(id * layers + l)] = nothing;
          next[std::size_t(id * layers + l)] = 0;
          texts[std::size_t(id * layers + l)] = {};
          REQUIRE(store.bytes({l, id}) == 0);
        }
      }
      for (index_t s = 0; s < sequences; ++s) {
        for (index_t l = 0; l < layers; ++l) {
          holds<decltype(store), Layout>(store, l, s, places[std::size_t(s * layers + l)], with);
        }
      }
    }
  }
}

}  // namespace support
