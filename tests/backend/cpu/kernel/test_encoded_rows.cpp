// Every operation over encoded rows gives what it gives over fp32 rows of the decoded values, behind every table.
#include "catch.hpp"

#include <cstring>
#include <limits>

#include <tessera/backend/cpu/attend/attend.hpp>
#include <tessera/backend/cpu/read/extrema/page_index.hpp>
#include <tessera/backend/cpu/read/extrema/page_scores.hpp>
#include <tessera/backend/cpu/score/score.hpp>
#include <tessera/backend/cpu/store/pack.hpp>
#include <tessera/scorer/chosen_channels.hpp>
#include <tessera/scorer/exact_score.hpp>
#include <tessera/scorer/hybrid_min_max.hpp>
#include <tessera/selector/tokens_or_pages.hpp>

#include "encoded_rows.hpp"
#include "support/tolerance.hpp"

using namespace tessera;
using support::half_elements;
using support::integer_elements;

namespace {

constexpr float not_a_number = std::numeric_limits<float>::quiet_NaN();

struct step {
  index_t tokens, q_heads, sequences;
  std::vector<float> q;
  std::vector<index_t> first;

  template <class View>
  step(support::rng& random, const View& view, index_t tokens_, index_t group)
      : tokens(tokens_),
        q_heads(view.kv_heads * group),
        sequences(view.sequences),
        q(support::normals(random, std::size_t(sequences * tokens * q_heads * View::k_dim))) {
    for (index_t b = 0; b < sequences; ++b) {
      index_t newest = 0;
      for (index_t h = 0; h < view.kv_heads; ++h) newest = std::max(newest, view.length(b, h) - 1);
      first.push_back(std::max(0, newest - tokens + 1));
    }
  }
  template <int D>
  cpu::query_rows<float> rows() const {
    return {nhd_rows(q.data(), tokens, q_heads, D, sequences), first.data()};
  }
};

struct attended {
  std::vector<float> out, lse;
};

template <class View>
attended attend(const View& view, const step& now, const logit_rule& rule, const selection* chosen, bool prompt) {
  attended result;
  result.out.assign(std::size_t(now.sequences * now.tokens * now.q_heads * View::v_dim), 1e9f);
  result.lse.assign(std::size_t(now.sequences * now.tokens * now.q_heads), 1e9f);
  const cpu::attention_output to{nhd_rows(result.out.data(), now.tokens, now.q_heads, View::v_dim, now.sequences),
                                 nhd_rows(result.lse.data(), now.tokens, now.q_heads, 1, now.sequences)};
  cpu::executor workers(1);
  if (prompt) {
    cpu::prefill_attention(view, now.rows<View::k_dim>(), rule, to, workers);
  } else {
    cpu::decode_workspace workspace;
    const selection_view read = chosen ? chosen->view() : selection_view{};
    cpu::decode_attention(view, now.rows<View::k_dim>(), rule, chosen ? &read : nullptr, to, workspace, workers);
  }
  return result;
}

/// Same NaN, and numbers within rounding of each row's largest.
void close(const attended& got, const attended& expected, int dim) {
  for (std::size_t row = 0; row < got.lse.size(); ++row) {
    const auto from = expected.out.begin() + offset_t(row) * dim;
    REQUIRE(support::row_error(got.out.data() + row * std::size_t(dim), std::vector<float>(from, from + dim)) < 1e-5);
    REQUIRE(support::number_error(got.lse[row], expected.lse[row]) < 1e-5);
  }
}

selection random_selection(support::rng& random, const std::vector<index_t>& lengths) {
  selection chosen;
  chosen.reset(lengths);
  for (index_t r = 0; r < index_t(lengths.size()); ++r) {
    for (index_t slot = 0; slot < lengths[std::size_t(r)]; ++slot) {
      if (random.chance(0.6)) chosen.row(r)[chosen.counts[std::size_t(r)]++] = slot;
    }
  }
  return chosen;
}

template <class E, int D, int Dv, bool every = true>
void attention_agrees(std::uint64_t seed) {
  support::rng random(seed);
  for (index_t i = 0; i < support::scaled(12); ++i) {
    const index_t sequences = random.between(1, 2), group = random.pick({1, 3, 4});
    std::vector<index_t> lengths;
    for (index_t r = 0; r < 2 * sequences; ++r) lengths.push_back(random.pick({1, 63, 64, 65, random.between(1, 150)}));
    if (i == 0) lengths[0] = 1100;
    const std::vector<float> sinks = support::normals(random, std::size_t(2 * group));
    logit_rule rule;
    if (random.chance(0.3)) rule.soft_cap = 5;
    if (random.chance(0.4)) rule.sliding_window = random.between(1, 90);
    if (random.chance(0.4)) rule.sink_logits = sinks.data();
    const auto chosen = random_selection(random, lengths);
    support::behind_every_table<E, D, Dv, every>(random, sequences, lengths, [&](auto& pair) {
      const auto encoded = pair.reading();
      const auto decoded = pair.reading_decoded();
      for (const index_t tokens : {1, 3, 8}) {  // 8 tokens of a group of 3 or 4 take the kernels for many rows
        const step now(random, encoded, tokens, group);
        CAPTURE(i, tokens, group, rule.sliding_window);
        close(attend(encoded, now, rule, nullptr, false), attend(decoded, now, rule, nullptr, false), Dv);
        close(attend(encoded, now, rule, &chosen, false), attend(decoded, now, rule, &chosen, false), Dv);
        const auto got = attend(encoded, now, rule, nullptr, true), want = attend(decoded, now, rule, nullptr, true);
        REQUIRE((support::same_bits(got.out, want.out) && support::same_bits(got.lse, want.lse)));
      }
    });
  }
}

template <class E, int D>
void scores_agree(std::uint64_t seed) {
  support::rng random(seed);
  const std::vector<index_t> lengths{70, 1, 33, 520};
  support::behind_every_table<E, D, D>(random, 2, lengths, [&](auto& pair) {
    const step now(random, pair.encoded, 5, 3);
    const auto scores = [&](const auto& view) {
      std::vector<float> result(4 * 520, 0.0f);
      const std::vector<offset_t> offsets{0, 520, 1040, 1560};
      cpu::score_workspace<D> workspace;
      cpu::executor workers(1);
      cpu::score_rows(view, now.template rows<D>(), {}, exact_score{}, result.data(), offsets.data(), workspace,
                      workers);
      return result;
    };
    REQUIRE(support::same_bits(scores(pair.reading()), scores(pair.reading_decoded())));
  });
}

/// Extrema of decoded keys, in the element type; and what paged scorers choose by them.
template <class E, int D, bool every = true>
void pages_agree(std::uint64_t seed) {
  using T = typename E::element_type;
  support::rng random(seed);
  support::behind_every_table<E, D, D, every>(random, 1, {70, 1, 33}, [&](auto& pair) {
    const auto encoded = pair.reading();
    const auto decoded = pair.reading_decoded();
    for (const index_t page : {1, 2, 16}) {
      cpu::page_index<T, D> index;
      index.reset(3, page);
      index.extend(encoded);
      for (index_t h = 0; h < 3 && page > 1; ++h) {
        for (index_t first = 0; first < encoded.length(0, h); first += page) {
          for (int d = 0; d < D; ++d) {
            float low = infinity, high = -infinity;
            for (index_t s = first; s < std::min(first + page, encoded.length(0, h)); ++s) {
              low = std::min(low, decoded.key(0, h, s)[d]);
              high = std::max(high, decoded.key(0, h, s)[d]);
            }
            REQUIRE(float(index.view().lower(h, d)[first / page]) == float(T(low)));
            REQUIRE(float(index.view().upper(h, d)[first / page]) == float(T(high)));
          }
        }
      }
      if constexpr (std::is_same_v<T, fp32>) {
        const step now(random, encoded, 2, 2);
        for (index_t h = 0; h < 3; ++h) {
          const auto choose = [&](const auto& view) {
            std::vector<index_t> chosen(71);
            std::vector<float> mass(4);
            cpu::page_workspace<D> memory;
            const auto choice = cpu::choose_by_pages(
                view, 0, h, index.view(), now.template rows<D>(), {}, hybrid_min_max{page, 20},
                tokens_or_pages{selection_unit::token, page}, 2, 10, chosen.data(), mass.data(), memory);
            chosen.resize(std::size_t(choice.count));
            return std::pair{chosen, mass};
          };
          REQUIRE(choose(encoded) == choose(decoded));
        }
      }
    }
  });
}

template <class E>
bool same_row(const typename E::stored_type* a, const typename E::stored_type* b, offset_t stride, int dim) {
  for (int d = 0; d < dim; ++d) {
    if (std::memcmp(a + d * stride, b + d * stride, sizeof(*a)) != 0) return false;
  }
  return true;
}

template <class E, int D, int Dv>
void rows_move_as_they_are(std::uint64_t seed) {
  support::rng random(seed);
  const std::vector<index_t> lengths{70, 1, 33, 20};
  const auto chosen = random_selection(random, lengths);
  support::behind_every_table<E, D, Dv>(random, 2, lengths, [&](auto& pair) {
    using pair_type = std::remove_reference_t<decltype(pair)>;
    pair_type packed(2, lengths, offset_t(pair.k.size()) / D, pair.encoded.table, pair.encoded.k_strides,
                     pair.encoded.v_strides);
    cpu::executor workers(1);
    cpu::pack(pair.reading(), chosen.view(), packed.encoded, workers);
    const auto check = [&](const auto& view, index_t row, index_t slot, const auto& original, index_t from) {
      const index_t b = row / 2, h = row % 2;
      REQUIRE(same_row<E>(view.key(b, h, slot), original.key(b, h, from), view.k_strides.dim, D));
      REQUIRE(same_row<E>(view.value(b, h, slot), original.value(b, h, from), view.v_strides.dim, Dv));
      REQUIRE(view.key_scale(b, h, slot) == original.key_scale(b, h, from));
      REQUIRE(view.value_scale(b, h, slot) == original.value_scale(b, h, from));
    };
    for (index_t row = 0; row < 4; ++row) {
      for (index_t i = 0; i < chosen.counts[std::size_t(row)]; ++i) {
        check(packed.encoded, row, i, pair.encoded, chosen.row(row)[i]);
      }
    }
    cpu::pack(pair.reading(), chosen.view(), pair.encoded, workers);
    for (index_t row = 0; row < 4; ++row) {
      for (index_t i = 0; i < chosen.counts[std::size_t(row)]; ++i) check(pair.encoded, row, i, packed.encoded, i);
    }
  });
}

template <class E, int D, int Dv>
void appended_rows_are_encoded(std::uint64_t seed) {
  support::rng random(seed);
  const auto k = support::normals(random, 2 * 5 * 2 * D, 3), v = support::normals(random, 2 * 5 * 2 * Dv);
  support::behind_every_table<E, D, Dv>(random, 2, {20, 20, 20, 20}, [&](auto& pair) {
    pair.lengths = {4, 15, 0, 7};
    cpu::append(pair.encoded, nhd_rows<const float>(k.data(), 5, 2, D, 2),
                nhd_rows<const float>(v.data(), 5, 2, Dv, 2));
    for (index_t b = 0; b < 2; ++b) {
      for (index_t h = 0; h < 2; ++h) {
        for (index_t t = 0; t < 5; ++t) {
          const index_t slot = pair.encoded.length(b, h) + t;
          const auto row = std::size_t((b * 5 + t) * 2 + h);
          const auto near = [](const float* given, const auto* stored, offset_t stride, float scale, int dim) {
            float largest = 0;
            for (int d = 0; d < dim; ++d) largest = std::max(largest, std::abs(given[d]));
            // e4m3 keeps 4 significant bits; of 8-bit integers 127 steps make the largest.
            for (int d = 0; d < dim; ++d) {
              const float error = std::abs(float(stored[d * stride]) * scale - given[d]);
              REQUIRE(error <= std::max(std::abs(given[d]) / 16, largest / 250));
            }
          };
          near(k.data() + row * D, pair.encoded.key(b, h, slot), pair.encoded.k_strides.dim,
               pair.encoded.key_scale(b, h, slot), D);
          near(v.data() + row * Dv, pair.encoded.value(b, h, slot), pair.encoded.v_strides.dim,
               pair.encoded.value_scale(b, h, slot), Dv);
        }
      }
    }
  });
}

}  // namespace

TEST_CASE("vectors of e4m3 are what each element converts to") {
  for (int base = 0; base < 256; base += cpu::lane_count) {
    fp8 stored[cpu::lane_count];
    float lanes[cpu::lane_count];
    for (int i = 0; i < cpu::lane_count; ++i) stored[i].bits = std::uint8_t(base + i);
    cpu::store(lanes, cpu::load(stored));
    for (int i = 0; i < cpu::lane_count; ++i) {
      const float expected = float(stored[i]);
      REQUIRE(((std::isnan(lanes[i]) && std::isnan(expected)) || std::memcmp(lanes + i, &expected, 4) == 0));
    }
  }
}

TEST_CASE("attention over encoded rows is attention over what they decode to") {
  attention_agrees<fp8_elements<bf16>, 80, 64>(301);
  attention_agrees<int8_elements<fp32>, 80, 64>(302);
  attention_agrees<integer_elements<bf16>, 64, 64, false>(316);
  attention_agrees<half_elements<bf16>, 80, 64, false>(303);
}

TEST_CASE("scores over encoded rows are those over what they decode to, to the bit") {
  scores_agree<fp8_elements<bf16>, 80>(304);
  scores_agree<integer_elements<fp32>, 80>(305);
}

TEST_CASE("page extrema and choices over encoded rows are those of what they decode to") {
  pages_agree<fp8_elements<bf16>, 64>(306);
  pages_agree<fp8_elements<fp32>, 64, false>(307);
  pages_agree<integer_elements<fp32>, 64>(308);
}

TEST_CASE("pack moves encoded rows and their scales as they are, also in place") {
  rows_move_as_they_are<fp8_elements<bf16>, 64, 80>(310);
  rows_move_as_they_are<int8_elements<fp32>, 80, 64>(311);
}

TEST_CASE("append encodes rows and writes their scales") {
  appended_rows_are_encoded<fp8_elements<bf16>, 64, 80>(312);
  appended_rows_are_encoded<int8_elements<fp32>, 80, 64>(313);
}

TEST_CASE("what is not a number in an encoded row, or in its scale, reaches the queries that see it and no other") {
  support::rng random(314);
  for (index_t i = 0; i < support::scaled(40); ++i) {
    const index_t n = random.between(2, 100), slot = std::max(0, n - random.between(1, 8));
    const int where = random.between(0, 3);
    const logit_rule rule{.sliding_window = random.pick({0, 2, 5})};
    const index_t tokens = std::min(n, random.pick({1, 5}));
    support::behind_every_table<fp8_elements<bf16>, 80, 64, false>(random, 1, {n}, [&](auto& pair) {
      const auto at = std::size_t(pair.encoded.scales.index(pair.encoded.table.locate(0, 0, slot), 0));
      if (where == 0) pair.encoded.key(0, 0, slot)[5] = fp8(not_a_number);
      if (where == 1) pair.encoded.value(0, 0, slot)[0] = fp8(not_a_number);
      if (where == 2) pair.k_scales[at] = not_a_number;
      if (where == 3) pair.v_scales[at] = not_a_number;
      pair.decode(0, 0, slot);
      const step now(random, pair.encoded, tokens, 2);
      CAPTURE(i, n, slot, where, tokens, rule.sliding_window);
      for (const bool prompt : {false, true}) {
        close(attend(pair.reading(), now, rule, nullptr, prompt),
              attend(pair.reading_decoded(), now, rule, nullptr, prompt), 64);
      }
    });
  }
}

TEST_CASE("an estimate from single keys counts the bytes of their copy by channel, however rows are encoded") {
  support::rng random(315);
  support::behind_every_table<fp8_elements<bf16>, 64, 64, false>(random, 1, {100}, [&](auto& pair) {
    const step now(random, pair.encoded, 1, 1);
    cpu::page_index<bf16, 64> index;
    index.reset(1, 1);
    index.extend(pair.reading());
    cpu::page_workspace<64> memory;
    std::vector<index_t> chosen(100);
    const auto choice =
        cpu::choose_by_pages(pair.reading(), 0, 0, index.view(), now.rows<64>(), {}, chosen_channels{8, 0},
                             tokens_or_pages{selection_unit::token, 1}, 4, 10, chosen.data(), nullptr, memory);
    CHECK(choice.bytes_read == 100 * 8 * 2);
  });
}
