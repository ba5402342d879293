// What sees segments, weighs values or chooses for a whole layer, on the GPU: step by step against the CPU's bodies.
#include "backend/cuda/device.hpp"
#include "support/choose_case.hpp"
#include "tessera/backend/cpu/choose/score_and_choose.hpp"
#include "tessera/backend/cuda/choose/retain.cuh"
#include "tessera/backend/cuda/device/memory.cuh"
#include "tessera/budget/uniform.hpp"
#include "tessera/scope/per_layer.hpp"
#include "tessera/scorer/accumulated_attention.hpp"
#include "tessera/scorer/by_segment.hpp"
#include "tessera/scorer/value_norm.hpp"
#include "tessera/scorer/weighted_by.hpp"
#include "tessera/selector/adaptive_blocks.hpp"
#include "tessera/selector/top_tokens.hpp"

using namespace tessera;
using namespace gpu_test;
using namespace support;

namespace {

/// A layer of a batch with the segments of its slots: none but the cut, one-token ones, and of any length.
struct segmented_case : layer_case {
  std::vector<index_t> segments;
  std::vector<float> weights;

  segmented_case(support::rng& random, index_t b, index_t h, index_t n, int kind) : layer_case(random, b, h, n) {
    for (index_t row = 0; row < b * h; ++row) {
      segment_cursor text;
      index_t dropped = 0;  // an eviction leaves gaps in the numbers
      for (index_t i = 0; i < n; ++i) {
        const bool ends = kind == 1 || (kind == 2 && random.chance(0.05)) || (kind == 3 && random.chance(0.5));
        if (kind == 3 && random.chance(0.1)) ++dropped;
        segments.push_back(text.advance(ends) + dropped);
      }
    }
    for (std::size_t i = 0; i < scores.size(); ++i) weights.push_back(float(random.between(0, 12)) * 0.5f);
  }
  /// The same scores, each its own: multiples of 1/4 that no two slots share, and none below 0.
  void spread(support::rng& random) {
    for (auto& x : scores) x = 0.25f + std::fabs(random.normal());
  }
  cuda::score_rows rows(const buffer<float>& d_scores, const buffer<index_t>& d_lengths,
                        const buffer<index_t>& d_tails) const {
    cuda::score_rows in;
    in.scores = d_scores.data;
    in.row_stride = capacity;
    in.sequences = sequences, in.kv_heads = heads;
    in.lengths = d_lengths.data, in.length_strides = {heads, 1};
    in.tails = d_tails.data;
    return in;
  }
};

lists downloaded_lists(const selection_view& chosen, index_t rows) {
  cuda::check(cudaDeviceSynchronize(), "choose");
  lists all;
  for (index_t r = 0; r < rows; ++r) {
    const index_t count = cuda::downloaded(chosen.counts + r, 1)[0];
    all.push_back(cuda::downloaded(chosen.indices + r * chosen.row_stride, std::size_t(count)));
  }
  return all;
}

template <class Policy>
lists on_device(const segmented_case& c, const Policy& policy) {
  const buffer<float> scores(c.scores), weights(c.weights);
  const buffer<index_t> lengths(c.lengths), tails(c.tails), segments(c.segments);
  const cuda::choose_kept<Policy> op(policy, c.sequences + 1, c.heads, c.capacity, c.capacity,
                                     cuda::device_info::current());
  buffer<unsigned char> workspace(op.workspace_bytes());
  workspace.fill(0xff);
  const cuda::slot_facts beside{
      {{segments.data, c.heads * c.capacity, c.capacity}, c.heads, c.heads}, weights.data, nullptr, c.capacity};
  return downloaded_lists(op.run(policy, c.rows(scores, lengths, tails), 1, 4, workspace.data, nullptr, beside),
                          c.sequences * c.heads);
}

template <class Policy>
lists on_cpu(const segmented_case& c, const Policy& policy) {
  lists rows;
  for (index_t b = 0; b < c.sequences; ++b) {
    std::vector<offset_t> offsets;
    for (index_t h = 0; h < c.heads; ++h) offsets.push_back(offset_t(b * c.heads + h) * c.capacity);
    layer_scores of{
        1, 4, c.heads, c.tails[std::size_t(b)], c.lengths.data() + b * c.heads, offsets.data(), c.scores.data()};
    selection kept;
    cpu::retain_workspace workspace;
    cpu::choose_kept(policy, of, kept, workspace,
                     {{c.segments.data(), 0, 0, offsets.data()}, {c.weights.data(), 0, 0, offsets.data()}});
    for (index_t h = 0; h < c.heads; ++h) rows.emplace_back(kept.row(h), kept.row(h) + kept.counts[std::size_t(h)]);
  }
  return rows;
}

template <class Policy>
void compare(const Policy& given) {
  support::rng random(13);
  for (const int i : gpu_test::scaled(cases(60), 8)) {
    segmented_case c(random, draw(1, 3), draw(1, 5), i % 4 ? draw(1, 300) : draw(1, gpu_test::scaled(9000, 700)),
                     i % 5);
    if (i % 2) c.spread(random);
    Policy policy = given;
    policy.budget.tokens = draw(1, c.capacity);
    CAPTURE(i, c.sequences, c.heads, c.capacity, policy.budget.tokens);
    REQUIRE(on_device(c, policy) == on_cpu(c, policy));
  }
}

}  // namespace

TEST_CASE("blocks inside segments are those of the CPU, slot by slot", "[gpu]") {
  if (gpu_missing()) return;
  for (const float coverage : {0.0f, 0.5f, 0.9f, 1.0f}) {
    for (const index_t largest : {1, 2, 5, 9, 64, 256}) {
      retain<accumulated_attention, uniform, adaptive_blocks> policy;
      policy.selector.coverage = coverage;
      policy.selector.largest = largest;
      compare(policy);
    }
  }
}

TEST_CASE("segments raise scores as on the CPU, to rounding", "[gpu]") {
  if (gpu_missing()) return;
  support::rng random(14);
  for (const int i : gpu_test::scaled(cases(60), 8)) {
    segmented_case c(random, draw(1, 3), draw(1, 4), i % 3 ? draw(1, 300) : draw(1, gpu_test::scaled(9000, 700)),
                     i % 5);
    if (i % 2) c.spread(random);
    by_segment<accumulated_attention> scorer;
    scorer.form = i % 4 < 2 ? segment_form::product : segment_form::balance;
    const buffer<float> scores(c.scores);
    const buffer<index_t> lengths(c.lengths), tails(c.tails), segments(c.segments);
    const buffer<unsigned> most(std::size_t(c.sequences * c.heads));
    buffer<float> out(c.scores.size());
    out.fill(0xff);
    const cuda::segment_rows beside{{segments.data, c.heads * c.capacity, c.capacity}, c.heads, c.heads};
    const auto in = c.rows(scores, lengths, tails);
    cuda::rescore_segments(in, beside, scorer, c.capacity, out.data, most.data, nullptr);
    cuda::check(cudaDeviceSynchronize(), "rescore_segments");
    const auto apart = out.get();
    cuda::rescore_segments(in, beside, scorer, c.capacity, scores.data, most.data, nullptr);  // in place
    cuda::check(cudaDeviceSynchronize(), "rescore_segments");
    const auto in_place = scores.get();
    for (index_t r = 0; r < c.sequences * c.heads; ++r) {
      const index_t n = std::max(0, c.lengths[std::size_t(r)] - c.tails[std::size_t(r / c.heads)]);
      const std::size_t begin = std::size_t(r) * std::size_t(c.capacity);
      std::vector<float> expected(c.scores.begin() + offset_t(begin), c.scores.begin() + offset_t(begin) + n);
      cpu::rescore_segments(scorer, c.segments.data() + begin, n, expected.data());
      for (index_t s = 0; s < n; ++s) {
        const float want = expected[std::size_t(s)], got = apart[begin + std::size_t(s)];
        CAPTURE(i, r, s, want, got);
        // A statistic is one rounding of a double; six float operations follow it.
        REQUIRE((want != want ? got != got : std::fabs(got - want) <= 8 * 0x1p-23f * std::fabs(want)));
        REQUIRE(bits_as<std::uint32_t>(in_place[begin + std::size_t(s)]) == bits_as<std::uint32_t>(got));
      }
    }
  }
}

TEST_CASE("weighted scores choose what they choose on the CPU", "[gpu]") {
  if (gpu_missing()) return;
  for (const float first : {0.0f, 0.5f, 1.0f}) {
    retain<weighted_by<accumulated_attention, value_norm>, uniform, top_tokens> policy;
    policy.scorer.first = first;
    compare(policy);
  }
}

namespace {

template <over_heads Join>
void compare_joined() {
  support::rng random(15);
  for (const int i : gpu_test::scaled(cases(40), 6)) {
    segmented_case c(random, draw(1, 3), draw(1, 8), draw(1, 400), 2);
    for (index_t r = 0; r < c.sequences * c.heads; ++r)
      c.lengths[std::size_t(r)] = c.lengths[std::size_t(r / c.heads * c.heads)];
    const buffer<float> scores(c.scores);
    // Lists and rows are downloaded whole, so that what lies behind them must have been written.
    const buffer<index_t> lengths(c.lengths), tails(c.tails), slots(std::vector<index_t>(c.scores.size())),
        counts(c.lengths.size());
    buffer<float> out(std::vector<float>(std::size_t(c.sequences * c.capacity)));
    const per_layer<Join> scope;
    const index_t summed = draw(1, 32);
    const auto joined = cuda::join_heads(c.rows(scores, lengths, tails), scope, summed, c.capacity, out.data, nullptr);
    REQUIRE(joined.kv_heads == 1);
    const retain<accumulated_attention, uniform, top_tokens> policy{};
    auto own = policy;
    own.budget.tokens = draw(1, c.capacity);
    const cuda::choose_kept<decltype(own)> op(own, c.sequences, 1, c.capacity, c.capacity,
                                              cuda::device_info::current());
    const buffer<unsigned char> workspace(op.workspace_bytes());
    const auto given = cuda::give_to_heads(op.run(own, joined, 0, 1, workspace.data, nullptr), c.sequences, c.heads,
                                           slots.data, c.capacity, counts.data, nullptr);
    const lists got = downloaded_lists(given, c.sequences * c.heads);
    const auto rows = out.get();
    for (index_t b = 0; b < c.sequences; ++b) {
      const index_t n = c.lengths[std::size_t(b * c.heads)];
      std::vector<offset_t> offsets;
      for (index_t h = 0; h < c.heads; ++h) offsets.push_back(offset_t(b * c.heads + h) * c.capacity);
      layer_scores of{
          0, 1, c.heads, c.tails[std::size_t(b)], c.lengths.data() + b * c.heads, offsets.data(), c.scores.data()};
      host_vector<float> expected;
      cpu::detail::join_heads(scope, of, summed, expected);
      const std::vector<float> own_row(rows.begin() + offset_t(b) * c.capacity,
                                       rows.begin() + offset_t(b) * c.capacity + n);
      CAPTURE(i, b, c.heads, n, summed);
      for (index_t s = 0; s < n; ++s) {
        const float want = expected[std::size_t(s)], is = own_row[std::size_t(s)];
        REQUIRE((want != want ? is != is : is == want));
      }
      selection kept;
      cpu::retain_workspace memory;
      const offset_t begin = 0;
      of.kv_heads = 1, of.offsets = &begin, of.scores = expected.data();
      cpu::choose_kept(own, of, kept, memory);
      const std::vector<index_t> wanted(kept.row(0), kept.row(0) + kept.counts[0]);
      for (index_t h = 0; h < c.heads; ++h) REQUIRE(got[std::size_t(b * c.heads + h)] == wanted);
    }
  }
}

}  // namespace

TEST_CASE("heads that choose together are joined and get their slots as on the CPU", "[gpu]") {
  if (gpu_missing()) return;
  compare_joined<over_heads::sum>();
  compare_joined<over_heads::mean>();
  compare_joined<over_heads::maximum>();
}
