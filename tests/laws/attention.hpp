// What any attention must keep to, over any layout.
#pragma once

#include <array>
#include <cstring>

#include <tessera/backend/cpu/attend/attend.hpp>
#include <tessera/backend/cpu/store/kv_store.hpp>
#include <tessera/concepts/attention.hpp>

#include "catch.hpp"
#include "laws/stores.hpp"
#include "support/oracle.hpp"
#include "support/subsets.hpp"
#include "support/tolerance.hpp"

namespace support {

/// A store with random tokens, some of them dropped again, and the queries of one step.
template <class Layout>
struct attention_case {
  static constexpr int k_dim = Layout::k_dim, v_dim = Layout::v_dim;
  index_t kv_heads, group, tokens, next = 0;
  tessera::cpu::kv_store<Layout> store;
  tessera::cpu::executor workers{2};
  std::vector<float> q;

  explicit attention_case(rng& random)
      : kv_heads(random.between(1, 3)),
        group(random.pick({1, 2, 3, 4, 8})),
        tokens(random.pick({1, 1, 2, 5, 8})),
        store(1, kv_heads, {}) {
    store.open(0);
    for (int round = 0; round < 2; ++round) {
      append(random, random.pick({tokens, 40, 200}));
      const auto kept = random_subset(random, store.lengths({0, 0}), random.pick({0.0, 0.5, 1.0}));
      store.keep({0, 0}, kept, workers);
    }
    append(random, tokens);
    q = normals(random, std::size_t(tokens * kv_heads * group * k_dim));
  }

  void append(rng& random, index_t count) {
    const auto k = normals(random, std::size_t(count * kv_heads * k_dim)),
               v = normals(random, std::size_t(count * kv_heads * v_dim));
    store.append({0, 0}, tessera::nhd_rows(k.data(), count, kv_heads, k_dim),
                 tessera::nhd_rows(v.data(), count, kv_heads, v_dim), next);
    next += count;
  }

  struct result {
    std::vector<float> out, lse;
  };
  result attend(const tessera::logit_rule& rule, const tessera::selection* chosen) {
    const index_t heads = kv_heads * group;
    result got{std::vector<float>(std::size_t(tokens * heads * v_dim), 1e9f),
               std::vector<float>(std::size_t(tokens * heads), 1e9f)};
    tessera::cpu::decode_workspace workspace;
    const auto read = chosen ? chosen->view() : tessera::selection_view{};
    const index_t first = next - tokens;
    tessera::cpu::decode_attention(
        store.view({0, 0}),
        tessera::cpu::query_rows<float>{tessera::nhd_rows<const float>(q.data(), tokens, heads, k_dim), &first}, rule,
        chosen ? &read : nullptr,
        tessera::cpu::attention_output{tessera::nhd_rows(got.out.data(), tokens, heads, v_dim),
                                       tessera::nhd_rows(got.lse.data(), tokens, heads, 1)},
        workspace, workers);
    return got;
  }

  /// The largest relative error against the oracle, over the rows as they decode.
  double error(const result& got, const tessera::logit_rule& rule, const tessera::selection* chosen) {
    const auto view = store.view({0, 0});
    double worst = 0;
    for (index_t head = 0; head < kv_heads; ++head) {
      const index_t count = chosen ? chosen->counts[std::size_t(head)] : view.length(0, head);
      std::vector<std::vector<float>> rows;
      std::vector<const float*> keys, values;
      std::vector<index_t> positions;
      for (index_t i = 0; i < count; ++i) {
        const index_t slot = chosen ? chosen->row(head)[i] : i;
        rows.emplace_back(std::size_t(k_dim)), rows.emplace_back(std::size_t(v_dim));
        auto &key = rows[rows.size() - 2], &value = rows.back();
        for (int d = 0; d < k_dim; ++d)
          key[std::size_t(d)] =
              element_of(view.key(0, head, slot), view.k_strides.dim, d, view.key_scale(0, head, slot));
        for (int d = 0; d < v_dim; ++d)
          value[std::size_t(d)] =
              element_of(view.value(0, head, slot), view.v_strides.dim, d, view.value_scale(0, head, slot));
        positions.push_back(view.position(0, head, slot));
      }
      for (std::size_t i = 0; i < rows.size(); i += 2)
        keys.push_back(rows[i].data()), values.push_back(rows[i + 1].data());
      for (index_t t = 0; t < tokens; ++t) {
        for (index_t g = 0; g < group; ++g) {
          const index_t q_head = head * group + g;
          const auto row = std::size_t(t * kv_heads * group + q_head);
          const auto expected = oracle::attend(q.data() + row * k_dim, next - tokens + t, keys, values, positions,
                                               k_dim, v_dim, rule, q_head);
          worst = std::max(
              {worst, row_error(got.out.data() + row * v_dim, expected.out), number_error(got.lse[row], expected.lse)});
        }
      }
    }
    return worst;
  }
};

/// Attention equals the definition in double over what the layout stores, whatever scale, cap, window and sinks the rule has;
/// two parts merge into the whole, with the sinks counted once; nothing to see gives zeros and -infinity.
template <tessera::attention Attention, class Layout>
void obeys_the_laws_of_attention(std::uint64_t seed) {
  CHECK(std::strlen(Attention::name) > 0);
  rng random(seed);
  for (index_t i = 0; i < scaled(60); ++i) {
    attention_case<Layout> now(random);
    const auto lengths = now.store.lengths({0, 0});
    const auto sinks = normals(random, std::size_t(now.kv_heads * now.group));
    Attention policy;
    policy.rule = {.scale = random.pick({0.0f, 0.3f}),
                   .soft_cap = random.pick({0.0f, 5.0f}),
                   .sliding_window = random.pick({0, 0, 1, 50}),
                   .sink_logits = random.chance(0.5) ? sinks.data() : nullptr};
    const auto chosen = random_subset(random, lengths, Attention::gathers ? random.pick({0.0, 0.1, 0.9}) : 1.0);
    const tessera::selection* read = Attention::gathers ? &chosen : nullptr;
    const auto whole = now.attend(policy.rule, read);
    REQUIRE(now.error(whole, policy.rule, read) < 1e-5);

    tessera::selection halves[2];
    for (auto& half : halves) half.reset(lengths);
    for (index_t r = 0; r < now.kv_heads; ++r) {
      for (index_t at = 0; at < chosen.counts[std::size_t(r)]; ++at) {
        auto& half = halves[random.chance(0.3) ? 1 : 0];
        half.row(r)[half.counts[std::size_t(r)]++] = chosen.row(r)[at];
      }
    }
    auto without = policy.rule;
    without.sink_logits = nullptr;
    const auto one = now.attend(without, &halves[0]), other = now.attend(without, &halves[1]);
    const index_t heads = now.kv_heads * now.group;
    const auto part = [&](const auto& of) {
      return tessera::attention_part{tessera::nhd_rows(of.out.data(), now.tokens, heads, Layout::v_dim),
                                     tessera::nhd_rows(of.lse.data(), now.tokens, heads, 1)};
    };
    auto merged = whole;
    const std::array parts{part(one), part(other)};
    tessera::cpu::merge_parts<Layout::v_dim>(parts, policy.rule.sink_logits,
                                             tessera::nhd_rows(merged.out.data(), now.tokens, heads, Layout::v_dim),
                                             tessera::nhd_rows(merged.lse.data(), now.tokens, heads, 1));
    REQUIRE(now.error(merged, policy.rule, read) < 1e-5);
  }

  attention_case<Layout> now(random);
  tessera::selection none;
  none.reset(now.store.lengths({0, 0}));
  const auto nothing = now.attend({}, &none);
  for (const float x : nothing.out) REQUIRE(x == 0);
  for (const float x : nothing.lse) REQUIRE(x == -tessera::infinity);
}

}  // namespace support
