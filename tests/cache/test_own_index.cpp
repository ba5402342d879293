// An index that exists in this file only, in the unchanged cache: the mean key of each page.
#include "catch.hpp"

#include <algorithm>
#include <numeric>

#include <tessera/attention/dense_decode.hpp>
#include <tessera/attention/gathered_decode.hpp>
#include <tessera/budget/uniform.hpp>
#include <tessera/cache.hpp>
#include <tessera/layout/dense.hpp>
#include <tessera/layout/fixed_pages.hpp>
#include <tessera/layout/fp8_rows.hpp>
#include <tessera/schedule/once.hpp>
#include <tessera/scorer/observation_window.hpp>
#include <tessera/selector/top_tokens.hpp>

#include "support/oracle.hpp"
#include "support/random.hpp"
#include "support/tolerance.hpp"

using namespace tessera;

// [index]
/// Scores the tokens of a page by the best logit that a query of the step has with the mean of the page's keys.
struct page_mean {
  static constexpr const char* name = "page_mean";
  static constexpr observes observed = observes::step;
  static constexpr bool comparable_across_heads = true;
  index_t page = 8;

  TESSERA_HD float weigh(float logit, float) const { return logit; }
  index_t protected_tail(index_t) const { return 0; }
  void check(index_t) const { check_parameters(*this); }
  template <class Self, class Visit>
  static void parameters(Self& self, Visit&& visit) {
    visit("page", self.page, value_range{1, 4096}, "tokens of a page");
  }
};

/// Holds the sum of the keys of each page, [kv_heads][pages][k_dim].
template <class Recipe>
class page_mean_reader {
  static constexpr int k_dim = Recipe::layout_type::k_dim;
  struct head {
    std::vector<float> sums;
    index_t slots = 0;  // that are in the sums
  };

 public:
  explicit page_mean_reader(const model_shape& shape) : heads_(std::size_t(shape.kv_heads)) {}

  void open(std::size_t at) { place(at).assign(heads_, {}); }
  void clear(std::size_t at) { open(at); }   // of as many heads as before: needs no memory
  void forget(std::size_t at) { open(at); }  // what stands here no longer fits the views
  void copy(std::size_t from, std::size_t to) { places_[to] = places_[from]; }  // of a fork

  template <class View>
  void refresh(std::size_t at, const View& view, const planned<Recipe>& policies, bool moved) {
    page_ = policies.read.scorer.page;
    if (moved) clear(at);
    append(at, view, 0);
  }
  template <class View>
  void append(std::size_t at, const View& view, index_t) {
    for (index_t h = 0; h < view.kv_heads; ++h) {
      auto& [sums, slots] = place(at)[std::size_t(h)];
      sums.resize(std::size_t(ceil_div(view.length(0, h), page_)) * k_dim);
      for (; slots < view.length(0, h); ++slots) {
        const auto* key = view.key(0, h, slots);
        for (int d = 0; d < k_dim; ++d) {
          sums[std::size_t(slots / page_ * k_dim + d)] +=
              float(key[d * view.k_strides.dim]) * view.key_scale(0, h, slots);
        }
      }
    }
  }
  template <class View, class Q>
  offset_t choose(std::size_t at, const View& all, const cpu::query_rows<Q>& queries, const logit_rule& rule,
                  const planned<Recipe>& policies, selection& chosen, cpu::executor&) {
    const index_t tokens = queries.q.tokens, group = queries.q.heads / all.kv_heads, tail = tokens > 1 ? tokens : 0;
    offset_t bytes = 0;
    for (index_t h = 0; h < all.kv_heads; ++h) {
      const index_t n = all.length(0, h);
      const auto& sums = place(at)[std::size_t(h)].sums;
      std::vector<float> scores(std::size_t(n), -infinity);
      for (index_t row = 0; row < tokens * group; ++row) {
        const Q* q = queries.q.row(0, row / group, h * group + row % group);
        for (index_t slot = 0; slot < n; ++slot) {
          const index_t p = slot / page_, in_page = std::min(page_, n - p * page_);
          float dot = 0;
          for (int d = 0; d < k_dim; ++d) dot += float(q[d]) * sums[std::size_t(p * k_dim + d)] / float(in_page);
          float& score = scores[std::size_t(slot)];
          score = std::max(score, policies.read.scorer.weigh(dot * rule.scale_for(k_dim), 0));
        }
      }
      chosen.counts[std::size_t(h)] =
          choose_slots(policies.read.selector, scores.data(), n, tail, policies.read.tokens, chosen.row(h), top_k_);
      bytes += offset_t(sums.size() * sizeof(float));
    }
    return bytes;
  }
  template <class... Any>
  void complete(const Any&...) {}

  offset_t list_bytes(std::size_t, index_t, index_t count) const { return count * offset_t(sizeof(index_t)); }
  offset_t side_bytes() const { return 0; }
  offset_t bytes(std::size_t at) const {
    offset_t total = 0;
    for (const head& one : places_[at]) total += offset_t(one.sums.capacity() * sizeof(float));
    return total;
  }
  offset_t upper_bound(const planned<Recipe>& policies, const kept_bound& readable) const {
    offset_t total = 0;  // a vector that grows doubles
    for (const index_t tokens : readable.by_head)
      total += 2 * offset_t(ceil_div(tokens, policies.read.scorer.page)) * k_dim * offset_t(sizeof(float));
    return total;
  }

 private:
  std::vector<head>& place(std::size_t at) {
    if (places_.size() <= at) places_.resize(at + 1, std::vector<head>(heads_));
    return places_[at];
  }
  std::size_t heads_;
  index_t page_ = 1;
  std::vector<std::vector<head>> places_;
  top_k_scratch top_k_;
};

template <class Recipe>
requires std::same_as<typename Recipe::retrieve_type::scorer_type, page_mean> struct cpu::reader_of<Recipe> {
  using type = page_mean_reader<Recipe>;
};
// [index]

namespace {

constexpr int dim = 64;
constexpr index_t kv_heads = 2, q_heads = 6;

template <class First, class Layout>
using by_means = recipe<First, Layout, retrieve<page_mean, top_tokens>, gathered_decode, once>;

/// Turns of prompts in chunks and of steps, every step against its definition in double over what the cache says it stores.
template <class Recipe>
void reads_by_means(std::uint64_t seed) {
  using encoding = typename Recipe::layout_type::encoding_type;
  support::rng random(seed);
  for (index_t round = 0; round < support::scaled(25); ++round) {
    Recipe policies;
    policies.retrieve.tokens = random.pick({3, 7, 20, 500});
    policies.retrieve.scorer.page = random.pick({1, 5, 8, 16});
    if constexpr (Recipe::retain_type::chooses) policies.retain.budget.tokens = random.between(33, 90);
    cache<Recipe> kv({1, q_heads, kv_heads}, policies, std::make_shared<cpu::executor>(1));
    index_t id = kv.open();
    std::vector<float> k, v;  // [tokens, kv_heads, dim] as they are stored
    const auto store = [&](std::vector<float>& rows, const std::vector<float>& more) {
      std::vector<typename encoding::stored_type> stored(dim);
      for (std::size_t row = 0; row < more.size(); row += dim) {
        const float scale = encode_row<encoding>(more.data() + row, dim, stored.data(), 1);
        for (const auto& x : stored) rows.push_back(float(x) * scale);
      }
    };
    for (int turn = 0; turn < 2; ++turn) {
      for (int chunk = 0; chunk < 2; ++chunk) {
        const index_t n = random.between(1, 80);
        const auto q = support::normals(random, std::size_t(n * q_heads * dim)),
                   key = support::normals(random, std::size_t(n * kv_heads * dim)),
                   value = support::normals(random, std::size_t(n * kv_heads * dim));
        store(k, key), store(v, value);
        kv.prefill(0, id, nhd_rows(q.data(), n, q_heads, dim), nhd_rows(key.data(), n, kv_heads, dim),
                   nhd_rows(value.data(), n, kv_heads, dim));
      }
      kv.end_prefill(id);
      const index_t first = id;
      id = kv.fork(first);  // steps go on in a copy
      kv.close(first);
      for (int step = 0; step < 4; ++step) {
        const index_t n = random.pick({1, 1, 3});
        const auto q = support::normals(random, std::size_t(n * q_heads * dim)),
                   key = support::normals(random, std::size_t(n * kv_heads * dim)),
                   value = support::normals(random, std::size_t(n * kv_heads * dim));
        store(k, key), store(v, value);
        std::vector<float> out(std::size_t(n * q_heads * dim));
        kv.trace_attended(true);
        kv.decode(0, kv.prepare_step({id}, n), nhd_rows(q.data(), n, q_heads, dim),
                  nhd_rows(key.data(), n, kv_heads, dim), nhd_rows(value.data(), n, kv_heads, dim),
                  nhd_rows(out.data(), n, q_heads, dim), {});
        for (index_t h = 0; h < kv_heads; ++h) {
          const auto held = kv.positions(0, id, h);
          const auto page = std::size_t(policies.retrieve.scorer.page);
          std::vector<double> scores(held.size(), -HUGE_VAL);
          for (index_t t = 0; t < n; ++t) {
            for (index_t g = 0; g < q_heads / kv_heads; ++g) {
              const float* query = q.data() + (t * q_heads + h * (q_heads / kv_heads) + g) * dim;
              for (std::size_t begin = 0; begin < held.size(); begin += page) {
                const std::size_t last = std::min(begin + page, held.size());
                double dot = 0;
                for (std::size_t i = begin; i < last; ++i) {
                  for (int d = 0; d < dim; ++d)
                    dot += double(query[d]) * double(k[std::size_t((held[i] * kv_heads + h) * dim + d)]) /
                           double(last - begin);
                }
                for (std::size_t i = begin; i < last; ++i) scores[i] = std::max(scores[i], dot);
              }
            }
          }
          const std::size_t tail = n > 1 ? std::size_t(n) : 0,
                            most = std::min(held.size(), std::size_t(policies.retrieve.tokens));
          std::vector<std::size_t> order(held.size());
          std::iota(order.begin(), order.end(), std::size_t(0));
          for (std::size_t i = held.size() - std::min(tail, held.size()); i < held.size(); ++i) scores[i] = HUGE_VAL;
          std::stable_sort(order.begin(), order.end(),
                           [&](std::size_t a, std::size_t b) { return scores[a] > scores[b]; });
          std::vector<index_t> expected;
          for (std::size_t i = 0; i < most; ++i) expected.push_back(held[order[i]]);
          std::sort(expected.begin(), expected.end());
          auto got = kv.attended(0, id)[std::size_t(h)];
          REQUIRE(got == expected);
          std::vector<const float*> keys, values;
          for (const index_t at : expected) {
            keys.push_back(k.data() + (at * kv_heads + h) * dim);
            values.push_back(v.data() + (at * kv_heads + h) * dim);
          }
          for (index_t row = 0; row < n * (q_heads / kv_heads); ++row) {
            const index_t t = row / (q_heads / kv_heads),
                          q_head = h * (q_heads / kv_heads) + row % (q_heads / kv_heads);
            const auto attended =
                support::oracle::attend(q.data() + (t * q_heads + q_head) * dim, kv.next_position(id) - n + t, keys,
                                        values, expected, dim, dim);
            REQUIRE(support::row_error(out.data() + (t * q_heads + q_head) * dim, attended.out) < 1e-5);
          }
        }
      }
    }
  }
}

}  // namespace

TEST_CASE("an index of a test's own is read by the unchanged cache") {
  reads_by_means<by_means<retain_all, dense<fp32, dim>>>(301);
  reads_by_means<
      by_means<retain<observation_window, uniform, top_tokens>, stored<fp8_rows<fp32, dim>, fixed_pages<16>>>>(302);
}
