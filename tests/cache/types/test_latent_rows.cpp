// Latent rows on the CPU: one row is key and value. Against caches of ordinary rows, and attention in double.
#include "catch.hpp"

#include <algorithm>
#include <string>

#include <tessera/layout/fixed_pages.hpp>
#include <tessera/layout/latent_rows.hpp>
#include <tessera/methods/full.hpp>
#include <tessera/methods/quest.hpp>
#include <tessera/methods/snapkv.hpp>
#include <tessera/tessera.hpp>

#include "support/kv_tensor.hpp"
#include "support/oracle.hpp"
#include "support/tolerance.hpp"

using namespace tessera;

namespace {

constexpr index_t tokens = 150, q_heads = 6;
constexpr int dim = 576, v_dim = 512;

/// Latent rows and absorbed queries of one layer; with `position` the last 64 elements are not 0.
struct latents {
  std::vector<float> q, rows;
  std::vector<float> q_of_values, values;  // the first 512 elements of each
  latents(std::uint64_t seed, bool position) {
    support::rng random(seed);
    q = support::normals(random, std::size_t(tokens * q_heads * dim));
    rows = support::normals(random, std::size_t(tokens * dim));
    for (std::size_t i = 0; i < rows.size(); ++i) {
      if (i % dim >= v_dim && !position) rows[i] = 0;
      if (i % dim < v_dim) values.push_back(rows[i]);
    }
    for (std::size_t i = 0; i < q.size(); ++i) {
      if (i % dim < v_dim) q_of_values.push_back(q[i]);
    }
  }
  auto queries(index_t first, index_t count) const {
    return nhd_rows<const float>(q.data() + first * q_heads * dim, count, q_heads, dim);
  }
  auto keys(index_t first, index_t count) const {
    return nhd_rows<const float>(rows.data() + first * dim, count, 1, dim);
  }
  /// The same rows, as the value that a call takes.
  auto as_values(index_t first, index_t count) const {
    auto v = keys(first, count);
    v.dim = v_dim;
    return v;
  }
  auto short_queries(index_t first, index_t count) const {
    return nhd_rows<const float>(q_of_values.data() + first * q_heads * v_dim, count, q_heads, v_dim);
  }
  auto short_rows(index_t first, index_t count) const {
    return nhd_rows<const float>(values.data() + first * v_dim, count, 1, v_dim);
  }
};

template <class Recipe>
cache<Recipe> made(index_t budget) {
  Recipe recipe;
  if (budget > 0) recipe.set_budget(budget);
  recipe.attention.rule.scale = 0.03f;
  return {{1, q_heads, 1}, recipe, std::make_shared<cpu::executor>(2)};
}

/// A prompt in chunks and some steps; the outputs of all.
template <class Cache, class Q, class K, class V>
std::vector<float> talk(Cache& held, index_t id, const Q& q, const K& k, const V& v, index_t chunk) {
  std::vector<float> all;
  std::vector<float> out(std::size_t(tokens * q_heads * v_dim));
  for (index_t first = 0; first < 120; first += chunk) {
    const index_t count = std::min(chunk, 120 - first);
    held.prefill(0, id, q(first, count), k(first, count), v(first, count));
    held.prefill_attention(0, id, q(first, count), nhd_rows(out.data(), count, q_heads, v_dim));
    all.insert(all.end(), out.begin(), out.begin() + count * q_heads * v_dim);
  }
  held.end_prefill(id);
  for (index_t at = 120; at < 140; ++at) {
    held.decode(0, held.prepare_step({id}, 1), q(at, 1), k(at, 1), v(at, 1), nhd_rows(out.data(), 1, q_heads, v_dim));
    all.insert(all.end(), out.begin(), out.begin() + q_heads * v_dim);
  }
  return all;
}
template <class Cache>
std::vector<float> talk(Cache& held, index_t id, const latents& data, index_t chunk) {
  return talk(
      held, id, [&](index_t i, index_t n) { return data.queries(i, n); },
      [&](index_t i, index_t n) { return data.keys(i, n); }, [&](index_t i, index_t n) { return data.as_values(i, n); },
      chunk);
}

/// Without positions in the rows, 512 elements of key and value in ordinary rows are the same text.
template <class Latent, class Ordinary>
void compare(index_t budget) {
  const latents data(311, false);
  for (const index_t chunk : {120, 37}) {
    auto one = made<Latent>(budget);
    auto other = made<Ordinary>(budget);
    const index_t id = one.open(), other_id = other.open();
    const auto got = talk(one, id, data, chunk);
    const auto expected = talk(
        other, other_id, [&](index_t i, index_t n) { return data.short_queries(i, n); },
        [&](index_t i, index_t n) { return data.short_rows(i, n); },
        [&](index_t i, index_t n) { return data.short_rows(i, n); }, chunk);
    CHECK(one.positions(0, id, 0) == other.positions(0, other_id, 0));
    REQUIRE(got.size() == expected.size());
    float error = 0;
    for (std::size_t i = 0; i < got.size(); ++i) error = std::max(error, std::abs(got[i] - expected[i]));
    CHECK(error < 2e-5f);
  }
}

using full_of_latents = full<fp32, dim, v_dim, latent<fp32>>;
using snapkv_of_latents = snapkv<fp32, dim, v_dim, latent<fp32>>;
using snapkv_of_pages = snapkv<fp32, dim, v_dim, stored<latent_rows<fp32>, fixed_pages<16>>>;
using quest_of_latents = quest<fp32, dim, v_dim, latent<fp32>>;

}  // namespace

TEST_CASE("methods over latent rows keep and attend what they do over ordinary rows with the same elements") {
  compare<full_of_latents, full<fp32, v_dim>>(0);
  compare<snapkv_of_latents, snapkv<fp32, v_dim>>(50);
  compare<quest_of_latents, quest<fp32, v_dim>>(64);
  compare<snapkv_of_pages, snapkv<fp32, v_dim>>(50);
}

TEST_CASE("attention over latent rows is that of their keys, and of the first elements as values, in double") {
  const latents data(312, true);
  auto held = made<full_of_latents>(0);
  const index_t id = held.open();
  const auto got = talk(held, id, data, 50);
  std::vector<const float*> rows;
  std::vector<index_t> positions;
  double error = 0;
  for (index_t at = 0; at < 140; ++at) {
    rows.push_back(data.rows.data() + at * dim);
    positions.push_back(at);
    if (at % 9 != 0 && at < 135) continue;
    for (index_t h = 0; h < q_heads; ++h) {
      const auto expected = support::oracle::attend(data.q.data() + (at * q_heads + h) * dim, at, rows, rows, positions,
                                                    dim, v_dim, logit_rule{.scale = 0.03f});
      for (int d = 0; d < v_dim; ++d)
        error = std::max(
            error, std::abs(expected.out[std::size_t(d)] - double(got[std::size_t((at * q_heads + h) * v_dim + d)])));
    }
  }
  CHECK(error < 1e-5);
}

TEST_CASE("a latent row is stored once: bytes, forks, saves and truncations") {
  const latents data(313, true);
  auto held = made<full_of_latents>(0);
  const index_t id = held.open();
  const auto said = talk(held, id, data, 120);
  // 140 rows and their spare room, each 576 numbers and no value beside them; columns are few bytes a token.
  CHECK(held.bytes(id) < offset_t(140 * 1.3) * (dim * 4 + 16));
  CHECK(held.bytes(id) >= offset_t(140) * dim * 4);
  const index_t fork = held.fork(id, 130);
  std::vector<float> out(std::size_t(q_heads * v_dim));
  const auto step = [&](auto& of, index_t sequence) {
    of.decode(0, of.prepare_step({sequence}, 1), data.queries(130, 1), data.keys(130, 1), data.as_values(130, 1),
              nhd_rows(out.data(), 1, q_heads, v_dim));
    return std::vector<float>(out);
  };
  const std::vector<float> expected(said.begin() + 130 * q_heads * v_dim, said.begin() + 131 * q_heads * v_dim);
  CHECK(support::same_bits(step(held, fork), expected));
  held.truncate(fork, 130);
  std::vector<unsigned char> saved;
  held.save(fork, [&](const void* bytes, std::size_t count) {
    const auto* from = static_cast<const unsigned char*>(bytes);
    saved.insert(saved.end(), from, from + count);
  });
  CHECK(offset_t(saved.size()) < offset_t(130) * (dim * 4 + 16) + 4096);
  auto other = made<full_of_latents>(0);
  std::size_t read = 0;
  const index_t loaded = other.load([&](void* bytes, std::size_t count) {
    std::copy_n(saved.data() + read, count, static_cast<unsigned char*>(bytes));
    read += count;
    return count;
  });
  CHECK(support::same_bits(step(other, loaded), expected));
}

TEST_CASE("a value that is not the row itself is refused before anything is stored") {
  const latents data(314, true);
  auto held = made<full_of_latents>(0);
  const index_t id = held.open();
  try {
    held.prefill(0, id, data.queries(0, 10), data.keys(0, 10), data.short_rows(0, 10));
    FAIL("other rows as values");
  } catch (const tessera::error& e) {
    CHECK(std::string(e.what()).find("v of latent rows") != std::string::npos);
  }
  CHECK(held.length(0, id, 0) == 0);
}
