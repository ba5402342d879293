// The page index: filled token by token, in runs, or at once, it holds the extrema of what is stored.
#include "catch.hpp"

#include <cstring>
#include <limits>

#include <tessera/backend/cpu/read/candidates.hpp>
#include <tessera/backend/cpu/read/extrema/page_index.hpp>
#include <tessera/backend/cpu/store/kv_store.hpp>
#include <tessera/layout/dense.hpp>

#include "support/kv_tensor.hpp"

using namespace tessera;

namespace {

template <class T>
bool same(T a, T b) {
  return std::memcmp(&a, &b, sizeof(T)) == 0;
}

/// Every page of the index against the keys themselves.
template <class T, int D>
void holds_the_extrema(const support::kv_tensor<T, D>& kv, const cpu::page_index<T, D>& index) {
  const auto view = index.view();
  for (index_t h = 0; h < kv.kv_heads; ++h) {
    for (index_t slot = 0; view.page == 1 && slot < kv.length(0, h); ++slot) {  // the keys, whatever they are
      for (int d = 0; d < D; ++d) REQUIRE(same(view.lower(h, d)[slot], kv.k[kv.row(0, h, slot) * D + std::size_t(d)]));
    }
    if (view.page == 1) continue;
    for (index_t slot = 0; slot < kv.length(0, h); slot += view.page) {
      for (int d = 0; d < D; ++d) {
        float low = infinity, high = -infinity;
        for (index_t at = slot; at < std::min(kv.length(0, h), slot + view.page); ++at) {
          const float x = kv.k_float[kv.row(0, h, at) * D + std::size_t(d)];
          if (std::isfinite(x)) {
            low = std::min(low, x);
            high = std::max(high, x);
          }
        }
        const float got_low = float(view.lower(h, d)[slot / view.page]),
                    got_high = float(view.upper(h, d)[slot / view.page]);
        if (low > high) {
          REQUIRE((std::isnan(got_low) && std::isnan(got_high)));
        } else {
          REQUIRE((got_low == low && got_high == high));
        }
      }
    }
  }
}

template <class T, int D>
void fill_in_runs(std::uint64_t seed) {
  support::rng random(seed);
  for (index_t i = 0; i < support::scaled(300); ++i) {
    const index_t kv_heads = random.between(1, 3);
    std::vector<index_t> lengths;
    for (index_t h = 0; h < kv_heads; ++h) lengths.push_back(random.pick({0, 1, 31, 32, 33, 200}));
    lengths[0] = std::max(1, lengths[0]);
    support::kv_tensor<T, D> kv(random, 1, kv_heads, lengths);
    if (random.chance(0.3)) {
      for (auto& x : kv.k) {
        if (random.chance(0.2)) x = T(random.pick({std::numeric_limits<float>::quiet_NaN(), infinity, -infinity}));
      }
      kv.remember();
    }
    const index_t page = random.pick({1, 2, 3, 5, 16, 17, 500});
    cpu::page_index<T, D> whole, grown;
    whole.reset(kv_heads, page);
    grown.reset(kv_heads, page);
    whole.extend(kv.view());
    auto now = lengths;
    kv.lengths.assign(lengths.size(), 0);
    while (kv.lengths != now) {
      for (std::size_t h = 0; h < now.size(); ++h) {
        kv.lengths[h] = std::min(now[h], kv.lengths[h] + random.pick({0, 1, 2, 7, 40}));
      }
      grown.extend(kv.view());
    }
    holds_the_extrema(kv, whole);
    for (index_t h = 0; h < kv_heads; ++h) {
      for (int d = 0; d < D; ++d) {
        for (index_t p = 0; p < ceil_div(now[std::size_t(h)], page); ++p) {
          REQUIRE(same(whole.view().lower(h, d)[p], grown.view().lower(h, d)[p]));
          if (page > 1) REQUIRE(same(whole.view().upper(h, d)[p], grown.view().upper(h, d)[p]));
        }
      }
    }
  }
}

}  // namespace

TEST_CASE("an index filled token by token holds the bits of one built at once, which are the keys' extrema") {
  fill_in_runs<fp32, 64>(211);
  fill_in_runs<bf16, 80>(212);
  fill_in_runs<fp16, 64>(213);
}

TEST_CASE("an index of pages of one slot holds keys once more, and others two values per page and channel") {
  support::rng random(214);
  const support::kv_tensor<fp32, 64> kv(random, 1, 2, {100, 40});
  cpu::page_index<fp32, 64> index;
  index.reset(2, 1);
  index.extend(kv.view());
  CHECK(index.bytes() == 64 * 4 * (112 + 48));  // 100 and 40 slots, one to spare, in sixteens
  index.reset(2, 4);
  index.extend(kv.view());
  // 25 and 10 pages, one to spare, in sixteens.
  CHECK(index.bytes() == 2 * 64 * 4 * (32 + 16));
  index.reset(2, 4);
  CHECK(index.bytes() == 0);
}

TEST_CASE("candidates look like a smaller cache, and grow with the store") {
  support::rng random(215);
  using storage = dense<fp32, 64>;
  for (index_t i = 0; i < support::scaled(100); ++i) {
    const index_t heads = random.between(1, 3), tokens = random.between(1, 90);
    const auto rows = support::normals(random, std::size_t((tokens + 40) * heads * 64));
    cpu::kv_store<storage> store(1, heads, {});
    store.open(0);
    const auto at = [&](index_t first, index_t count) {
      return nhd_rows<const float>(rows.data() + first * heads * 64, count, heads, 64);
    };
    store.append({0, 0}, at(0, tokens), at(0, tokens), 0);
    selection passed;
    passed.reset(std::vector<index_t>(std::size_t(heads), tokens));
    std::vector<std::vector<index_t>> expected(static_cast<std::size_t>(heads));
    for (index_t h = 0; h < heads; ++h) {
      for (index_t slot = 0; slot < tokens; ++slot) {
        if (!random.chance(0.4)) continue;
        passed.row(h)[passed.counts[std::size_t(h)]++] = slot;
        expected[std::size_t(h)].push_back(slot);
      }
    }
    cpu::candidates chosen;
    chosen.assign(passed);
    for (index_t next = tokens; next < tokens + 40;) {
      const index_t count = std::min(random.between(1, 8), tokens + 40 - next);
      store.append({0, 0}, at(next, count), at(next, count), next);
      chosen.append(store.lengths({0, 0}), count);
      for (auto& row : expected) {
        for (index_t t = 0; t < count; ++t) row.push_back(next + t);
      }
      next += count;
      const auto all = store.view({0, 0});
      const auto view = chosen.view(all);
      for (index_t h = 0; h < heads; ++h) {
        const auto& want = expected[std::size_t(h)];
        REQUIRE(view.length(0, h) == index_t(want.size()));
        REQUIRE(std::vector<index_t>(chosen.row(h), chosen.row(h) + chosen.count(h)) == want);
        for (index_t s = 0; s < view.length(0, h); ++s) {
          REQUIRE(view.position(0, h, s) == want[std::size_t(s)]);
          REQUIRE(view.key(0, h, s) == all.key(0, h, want[std::size_t(s)]));
          REQUIRE(view.value(0, h, s) == all.value(0, h, want[std::size_t(s)]));
        }
      }
    }
  }
}
