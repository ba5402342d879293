// Packed rows, the choice of blocks and attention over segments of different strategies, against definitions in double.
#include "catch.hpp"

#include <numeric>

#include <tessera/backend/cpu/attend/attend_packed.hpp>
#include <tessera/backend/cpu/read/means/block_mean_reader.hpp>
#include <tessera/backend/cpu/store/packed/packed_store.hpp>
#include <tessera/methods/mosaickv.hpp>

#include "backend/cpu/read/packed_oracle.hpp"
#include "support/random.hpp"
#include "support/tolerance.hpp"

using namespace tessera;
namespace exact = support::packed_oracle;

namespace {

struct tally {
  index_t shapes = 0, rows = 0, choices = 0, close_choices = 0;
};

/// Rows that have a strong basis: few directions carry most of them.
std::vector<float> gathered(support::rng& random, index_t rows, int dim) {
  const auto mix = support::normals(random, std::size_t(8 * dim));
  auto result = support::normals(random, std::size_t(rows * dim), 0.3f);
  for (index_t r = 0; r < rows; ++r) {
    for (int c = 0; c < 8; ++c) {
      const float strength = random.normal() / float(1 + c);
      for (int d = 0; d < dim; ++d) result[std::size_t(r * dim + d)] += strength * mix[std::size_t(c * dim + d)];
    }
  }
  return result;
}

/// Several segments, each of its own strategy, and whole rows behind them.
template <class T, int D>
struct packed_sequence {
  using recipe = mosaickv<T, D>;
  using layout = typename recipe::layout_type;
  using rows_type = typename layout::rows_type;
  using segment = typename cpu::packed_view<layout>::segment_type;

  index_t heads, group;
  std::vector<rows_type> strategies;
  std::vector<index_t> blocks, begins{0};
  std::vector<float> k, v;  // [tokens, heads, D]
  cpu::kv_store<dense<T, D>> raw, tail;
  host_vector<std::shared_ptr<segment>> segments;
  std::vector<index_t> packed, lengths;
  cpu::packed_view<layout> view;
  cpu::executor workers{1};

  explicit packed_sequence(support::rng& random)
      : heads(random.between(1, 2)), group(random.between(1, 3)), raw(1, heads, {}), tail(1, heads, {}) {
    for (index_t s = random.between(1, 3); s > 0; --s) {
      rows_type strategy;
      strategy.key.group = strategy.value.group = random.pick({1, 2, 4});
      strategy.basis.truncate = random.pick({0.0f, 0.25f, 0.5f});
      strategy.key.channels = random.pick({0.125f, 0.25f, 0.375f, 0.5f});
      strategy.value.channels = random.pick({0.125f, 0.25f, 0.375f, 0.5f});
      strategy.element = random.pick({packed_element::same, packed_element::bf16, packed_element::fp16,
                                      packed_element::fp8, packed_element::int4});
      strategies.push_back(strategy);
      blocks.push_back(random.pick({4, 8, 16}));
      begins.push_back(begins.back() + random.between(1, 90));
    }
    const index_t whole = random.between(0, 39), tokens = begins.back() + whole;
    k = gathered(random, tokens * heads, D);
    v = gathered(random, tokens * heads, D);
    const auto part = [&](const std::vector<float>& rows, index_t first, index_t count) {
      return nhd_rows<const float>(rows.data() + offset_t(first) * heads * D, count, heads, D);
    };
    raw.open(0);
    tail.open(0);
    raw.append({0, 0}, part(k, 0, tokens), part(v, 0, tokens), 0);
    if (whole > 0) tail.append({0, 0}, part(k, begins.back(), whole), part(v, begins.back(), whole), 0);
    const auto from = raw.view({0, 0});
    for (std::size_t s = 0; s < strategies.size(); ++s) {
      const cpu::row_packer<layout> packer(strategies[s], blocks[s], from, 0, workers);
      host_vector<host_vector<index_t>> lists(std::size_t(heads),
                                              host_vector<index_t>(std::size_t(begins[s + 1] - begins[s])));
      for (auto& list : lists) std::iota(list.begin(), list.end(), begins[s]);
      segments.push_back(packer.in_own_basis(lists, {}));
    }
    packed.assign(std::size_t(heads), begins.back());
    lengths.assign(std::size_t(heads), tokens);
    view.segments = &segments;
    view.whole = tail.view({0, 0});
    view.packed = packed.data();
    view.kv_heads = heads;
    view.lengths = lengths.data();
  }
};

/// Every row holds the strongest groups of its rotated elements, rounded as its element is. Where two groups differ by less than
/// rounding at the cut, either may be held.
void holds_the_strongest(const exact::numbers& whole, const exact::numbers& held, const packed_format& format,
                         tally& counts) {
  exact::numbers energy(std::size_t(format.groups()), 0.0);
  double total = 0, largest = 0;
  for (index_t c = 0; c < format.channels; ++c) {
    const double x = whole[std::size_t(c)];
    energy[std::size_t(c / format.group)] += x * x;
    total += x * x;
  }
  const auto order = support::oracle::preference(energy);
  const index_t wanted = format.stored_channels / format.group;
  const double margin = 1e-5 * total;
  const double least_kept = energy[std::size_t(order[std::size_t(wanted - 1)])];
  const double most_dropped = wanted < format.groups() ? energy[std::size_t(order[std::size_t(wanted)])] : -1;
  for (index_t c = 0; c < format.channels; ++c) {
    if (energy[std::size_t(c / format.group)] >= least_kept)
      largest = std::max(largest, std::abs(whole[std::size_t(c)]));
  }
  ++counts.rows;
  for (index_t c = 0; c < format.channels; ++c) {
    const double x = whole[std::size_t(c)], got = held[std::size_t(c)], own = energy[std::size_t(c / format.group)];
    double most = 1e-5 * largest;
    if (format.element == packed_element::bf16) most += std::abs(x) / 256;
    if (format.element == packed_element::fp16) most += std::abs(x) / 2048;
    if (format.element == packed_element::fp8) most += std::abs(x) / 16 + largest / 448 / 1024;
    if (format.element == packed_element::int4) most += largest / 14;
    const bool may_be_held = own >= least_kept - margin, may_be_dropped = own <= most_dropped + margin;
    REQUIRE(((may_be_held && std::abs(got - x) <= most * 1.0001) || (may_be_dropped && got == 0)));
  }
}

template <class T, int D>
void packs_rightly(packed_sequence<T, D>& sequence, tally& counts) {
  const auto raw = sequence.raw.view({0, 0});
  for (index_t h = 0; h < sequence.heads; ++h) {
    for (std::size_t s = 0; s < sequence.segments.size(); ++s) {
      const auto& segment = *sequence.segments[s];
      const auto& [k, v, block] = segment.format;
      exact::numbers sum(std::size_t(k.channels), 0.0);
      for (index_t row = 0; row < segment.lengths[std::size_t(h)]; ++row) {
        const index_t slot = sequence.begins[s] + row;
        const auto key = exact::rotated(raw.key(0, h, slot), segment.k_basis(h, D), k.channels, D);
        const auto value = exact::rotated(raw.value(0, h, slot), segment.v_basis(h, D), v.channels, D);
        exact::numbers held(key.size());
        std::vector<float> got(static_cast<std::size_t>(D), 0.0f);
        segment.unpack_key(h, row, got.data());
        std::copy_n(got.begin(), held.size(), held.begin());
        holds_the_strongest(key, held, k, counts);
        held.resize(value.size());
        segment.unpack_value(h, row, got.data());
        std::copy_n(got.begin(), held.size(), held.begin());
        holds_the_strongest(value, held, v, counts);
        for (std::size_t c = 0; c < sum.size(); ++c) sum[c] += key[c];
        if ((row + 1) % block != 0 && row + 1 < segment.lengths[std::size_t(h)]) continue;
        for (double& x : sum) x /= double(row % block + 1);
        holds_the_strongest(sum, exact::mean_of(segment, h, row / block), k, counts);
        std::fill(sum.begin(), sum.end(), 0.0);
      }
    }
  }
}

template <class T, int D>
void reads_rightly(support::rng& random, packed_sequence<T, D>& sequence, tally& counts) {
  using recipe_type = typename packed_sequence<T, D>::recipe;
  const auto& view = sequence.view;
  const index_t q_heads = sequence.heads * sequence.group, n = sequence.lengths[0], tokens = random.between(1, 8);
  const auto q = support::normals(random, std::size_t(tokens * q_heads * D), 1.5f),
             sinks = support::normals(random, std::size_t(q_heads));
  const index_t first = n - tokens;  // the step's own tokens may lie in segments here: only positions count
  const cpu::query_rows<float> queries{nhd_rows<const float>(q.data(), tokens, q_heads, D), &first};
  logit_rule rule;
  rule.soft_cap = random.pick({0.0f, 0.0f, 5.0f});
  rule.sliding_window = random.pick({0, 0, 40});
  rule.scale = random.pick({0.0f, 0.1f});
  rule.sink_logits = random.chance(0.3) ? sinks.data() : nullptr;

  recipe_type recipe;
  recipe.set_budget(random.between(16, 200));
  recipe.retrieve.scorer.reduce = random.pick({row_reduction::sum, row_reduction::max});
  cpu::block_mean_reader<recipe_type> reader(model_shape{1, q_heads, sequence.heads});
  selection chosen;
  chosen.reset(sequence.lengths);
  reader.choose(0, view, queries, rule, planned<recipe_type>(recipe, n), chosen, sequence.workers);

  std::vector<float> out(std::size_t(tokens * q_heads * D), 7.0f), lse(std::size_t(tokens * q_heads), 7.0f);
  const cpu::attention_output to{nhd_rows(out.data(), tokens, q_heads, D), nhd_rows(lse.data(), tokens, q_heads, 1)};
  cpu::decode_workspace workspace;
  const selection_view chosen_view = chosen.view();
  cpu::decode_attention(view, queries, rule, &chosen_view, to, workspace, sequence.workers);
  std::vector<index_t> positions(static_cast<std::size_t>(n));
  std::iota(positions.begin(), positions.end(), 0);
  for (index_t h = 0; h < sequence.heads; ++h) {
    std::vector<const float*> asked;
    for (index_t row = 0; row < tokens * sequence.group; ++row) {
      asked.push_back(queries.q.row(0, row / sequence.group, h * sequence.group + row % sequence.group));
    }
    bool close = false;
    auto expected = exact::chosen_blocks(
        exact::blocks_of(view, h, asked, recipe.retrieve.scorer.reduce == row_reduction::sum), recipe.budget(), close);
    if (view.packed[h] <= recipe.budget()) {
      expected.resize(std::size_t(view.packed[h]));
      std::iota(expected.begin(), expected.end(), 0);
      close = false;
    }
    for (index_t slot = view.packed[h]; slot < n; ++slot) expected.push_back(slot);
    const std::vector<index_t> got(chosen.row(h), chosen.row(h) + chosen.counts[std::size_t(h)]);
    ++counts.choices;
    counts.close_choices += close;
    if (!close) REQUIRE(got == expected);
    const auto held = exact::tokens_of(view, h);
    for (index_t row = 0; row < tokens * sequence.group; ++row) {
      const index_t token = row / sequence.group, q_head = h * sequence.group + row % sequence.group;
      const auto answer = exact::attend(asked[std::size_t(row)], first + token, held, got, positions, rule, q_head);
      REQUIRE(support::row_error(out.data() + (token * q_heads + q_head) * D, answer.out) < 1e-5);
      REQUIRE(support::number_error(lse[std::size_t(token * q_heads + q_head)], answer.lse) < 1e-5);
    }
  }
}

template <class T, int D>
tally agree_with_double(std::uint64_t seed, index_t shapes) {
  tally counts;
  for (index_t i = 0; i < shapes; ++i) {
    support::rng random(seed + std::uint64_t(i));
    CAPTURE(seed, i);
    packed_sequence<T, D> sequence(random);
    packs_rightly(sequence, counts);
    reads_rightly(random, sequence, counts);
    ++counts.shapes;
  }
  CHECK(counts.rows > 10 * counts.shapes);
  if (support::scaled(100) == 100) CHECK(counts.close_choices * 5 < counts.choices);  // of fewer shapes it says nothing
  return counts;
}

}  // namespace

TEST_CASE("segments of different strategies are packed, chosen from and attended as in double") {
  const auto shapes = [](index_t count) { return support::scaled(count); };
  agree_with_double<fp32, 64>(1'000'000, shapes(250));
  agree_with_double<bf16, 64>(2'000'000, shapes(60));
  agree_with_double<fp16, 96>(3'000'000, shapes(40));
  agree_with_double<bf16, 128>(4'000'000, shapes(40));
  agree_with_double<fp32, 256>(5'000'000, shapes(10));
}
