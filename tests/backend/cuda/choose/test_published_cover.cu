// The published greedy of weights that are whole eighths, where nothing rounds: the GPU's lines are the CPU's, ties too.
#include "backend/cuda/device.hpp"
#include "catch.hpp"
#include "prefill/line_case.hpp"
#include "tessera/backend/cuda/choose/lines/detail/published_cover.cuh"

using namespace tessera;
using namespace gpu_test;

namespace {

/// Sampled rows of a chunk. Every entry of a row that is seen has the row's weight, one to four eighths: it is what a logit of 0 gets
/// from a state of that weight.
struct eighths {
  index_t first, next, group;
  std::vector<index_t> rows, positions;
  std::vector<std::vector<double>> weights;  // by query head, [rows, slots]

  eighths(index_t of_next, index_t fresh, index_t row_count, index_t of_group, bool gaps)
      : first(of_next - fresh), next(of_next), group(of_group) {
    for (index_t at = 0; at < next; ++at) {
      if (at >= first || !gaps || draw(0, 2) > 0) positions.push_back(at);
    }
    for (index_t left = fresh, at = first; at < next; ++at, --left) {
      if (draw(0, left - 1) < row_count - index_t(rows.size())) rows.push_back(at);
    }
    weights.resize(std::size_t(group));
    for (auto& of_head : weights) {
      const index_t rare = draw(1, 6);
      std::vector<bool> column(positions.size()), stripe(std::size_t(next), false);
      for (int i = draw(0, 9); i > 0; --i) column[std::size_t(draw(0, index_t(positions.size()) - 1))] = true;
      for (int i = draw(0, 9); i > 0; --i) stripe[std::size_t(draw(0, next - 1))] = true;
      for (const index_t row : rows) {
        const double weight = draw(1, 4) / 8.0;
        for (std::size_t slot = 0; slot < positions.size(); ++slot) {
          const index_t distance = row - positions[slot];
          const bool sees = distance >= 0 && (column[slot] || stripe[std::size_t(distance)] || draw(0, rare) == 0);
          of_head.push_back(sees ? weight : 0);
        }
      }
    }
  }

  /// Lines that were there before are given, and stay.
  void check(float share) const {
    const index_t stride = ceil_div(next + 1, 32) * 32, slots = index_t(positions.size()), count = index_t(rows.size());
    const std::size_t all = std::size_t(group) * std::size_t(stride);
    std::vector<float> logits(all * std::size_t(count), -infinity);
    std::vector<float2> states;
    for (index_t h = 0; h < group; ++h) {
      for (index_t r = 0; r < count; ++r) {
        float weight = 0;
        for (index_t slot = 0; slot < slots; ++slot) {
          const float own = float(weights[std::size_t(h)][std::size_t(r * slots + slot)]);
          if (own == 0) continue;
          weight = own;
          logits[std::size_t((h * count + r) * stride + slot)] = 0;
        }
        states.push_back(make_float2(0, weight));
      }
    }
    std::vector<index_t> before(std::size_t(stride) + 1, slots);
    for (index_t at = 0; at <= next; ++at) {
      before[std::size_t(at)] = index_t(std::lower_bound(positions.begin(), positions.end(), at) - positions.begin());
    }
    std::vector<index_t> padded_positions = positions;
    padded_positions.resize(std::size_t(stride), -1);
    std::vector<std::uint8_t> flags(2 * all, 0);  // columns, then slashes
    for (index_t h = 0; h < group; ++h) flags[std::size_t(h * stride + draw(0, slots - 1))] = 1;

    const buffer<float> d_logits(logits);
    const buffer<float2> d_states(states);
    const buffer<index_t> d_rows(rows), d_lengths(std::vector<index_t>{slots}), d_positions(padded_positions),
        d_before(before);
    const buffer<std::uint8_t> d_flags(flags);
    buffer<float> verticals(all), slashes(all);
    buffer<index_t> lists(all * cuda::detail::published_lists::arrays);
    verticals.fill(0xff), slashes.fill(0xff), lists.fill(0xff);
    cuda::detail::line_sample seen{};
    seen.first = first, seen.next = next, seen.rows = d_rows.data, seen.row_count = count;
    seen.group = group, seen.stride = stride, seen.lengths = d_lengths.data, seen.length_stride = 1;
    seen.positions = d_positions.data, seen.stored_before = d_before.data;
    seen.logits = d_logits.data, seen.states = d_states.data;
    seen.verticals = verticals.data, seen.slashes = slashes.data;
    seen.has_vertical = d_flags.data, seen.has_slash = d_flags.data + all;
    const dim3 blocks(unsigned(ceil_div(stride, 256)), unsigned(group));
    cuda::detail::line_columns_entry<256><<<blocks, 256>>>(seen);
    cuda::check(cudaGetLastError(), "launch of line_columns");
    cuda::detail::line_slashes_entry<256><<<blocks, 256>>>(seen);
    cuda::check(cudaGetLastError(), "launch of line_slashes");
    cuda::detail::cover_as_published(share, seen, group, lists.data, nullptr);
    const std::vector<std::uint8_t> chosen = d_flags.get();

    line_cover cover;
    for (index_t h = 0; h < group; ++h) {
      support::sampled_rows host{first, next, rows, positions, weights[std::size_t(h)]};
      cover.begin(host.view());
      cover.cover_as_published(double(share));
      index_t wrong = 0;
      for (index_t i = 0; i < stride; ++i) {
        const std::size_t at = std::size_t(h * stride + i);
        const bool column = i < slots && (cover.has(cover.vertical(i)) || flags[at] != 0);
        const bool slash = i < next && cover.has(i);
        wrong += chosen[at] != std::uint8_t(column);
        wrong += chosen[all + at] != std::uint8_t(slash);
      }
      CHECK(wrong == 0);
    }
  }
};

}  // namespace

TEST_CASE("the published greedy of whole eighths is the CPU's on the GPU", "[gpu][lines]") {
  if (gpu_missing()) return;
  const float shares[] = {1e-5f, 0.3f, 0.7f, 0.955f, 0.9999f, 1.0f};
  const index_t ends[] = {1, 2, 31, 32, 33, 511, 512, 513, 1023, 1024, 1025, 3000};
  for (int i = 0; i < scaled(150, 4); ++i) {
    const index_t next = i < 12 ? ends[i] : draw(1, shrunk(2500, 200));
    const index_t fresh = i % 3 == 0 ? next : i % 5 == 0 ? 1 : draw(1, next);
    const eighths of(next, fresh, draw(1, 48), draw(1, 8), draw(0, 1) == 0);
    const float share = shares[draw(0, 5)];
    INFO("case " << i << " first " << of.first << " next " << of.next << " slots " << of.positions.size() << " rows "
                 << of.rows.size() << " group " << of.group << " share " << share);
    of.check(share);
  }
}
