// The GPU numbers segments as segment_cursor does, and moves their column as it moves scores.
#include "backend/cuda/device.hpp"
#include "tessera/backend/cuda/store/append.cuh"
#include "tessera/backend/cuda/store/pack.cuh"

using namespace tessera;
using namespace gpu_test;

namespace {

using view_type = kv_view<bf16, 64, ragged>;

/// K and V of a batch and its segment column; what lies in K and V does not matter here.
struct batch_of_texts {
  index_t sequences, heads, capacity;
  std::vector<offset_t> begins;
  std::vector<index_t> lengths, segments;
  buffer<bf16> k, v;
  buffer<index_t> d_lengths, d_segments;
  buffer<offset_t> d_begins;

  batch_of_texts(index_t b, index_t h, index_t n)
      : sequences(b),
        heads(h),
        capacity(n),
        lengths(std::size_t(b * h)),
        segments(std::size_t(b * h) * std::size_t(n), -7),
        k(segments.size() * 64),
        v(segments.size() * 64),
        d_lengths(lengths.size()),
        d_segments(segments),
        d_begins(lengths.size()) {
    for (index_t r = 0; r < b * h; ++r) begins.push_back(offset_t(r) * n), lengths[std::size_t(r)] = draw(0, 40);
    d_begins.set(begins), d_lengths.set(lengths);
    k.fill(0), v.fill(0);
  }
  view_type view() const {
    view_type all;
    all.k = k.data, all.v = v.data;
    all.k_strides = all.v_strides = {0, 0, 64, 1};
    all.sequences = sequences, all.kv_heads = heads;
    all.lengths = d_lengths.data, all.length_strides = {heads, 1};
    all.table = {d_begins.data, heads};
    return all;
  }
  slot_column<index_t> column() const { return {d_segments.data, 0, 0, d_begins.data}; }
};

/// Flags of a text: none, all, rare, frequent, or after exactly so many tokens that the cut and the flag meet.
std::vector<std::uint8_t> flags_of(int kind, index_t count) {
  std::vector<std::uint8_t> flags;
  for (index_t t = 0; t < count; ++t) {
    flags.push_back(kind == 0   ? 0
                    : kind == 1 ? 1
                    : kind == 2 ? draw(0, 400) == 0
                    : kind == 3 ? draw(0, 12) == 0
                                : t % max_segment_tokens == max_segment_tokens - 1);
  }
  return flags;
}

void compare_numbers(int kind, index_t chunk, bool some) {
  batch_of_texts c(draw(1, 3), draw(1, 4), 40 + 4 * chunk);
  buffer<bf16> rows(std::size_t(c.sequences * chunk * c.heads) * 64);
  rows.fill(0);
  std::vector<segment_cursor> texts(std::size_t(c.sequences));
  for (auto& text : texts) text = {draw(0, 9), draw(0, max_segment_tokens - 1)};
  buffer<segment_cursor> d_texts(texts);
  for (int step = 0; step < 4; ++step) {
    const auto flags = flags_of(kind, c.sequences * chunk);
    std::vector<index_t> added;
    for (index_t b = 0; b < c.sequences; ++b) added.push_back(some ? draw(0, chunk) : chunk);
    const buffer<std::uint8_t> d_flags(flags);
    const buffer<index_t> d_added(added);
    append_problem<view_type, bf16> problem;
    problem.view = c.view();
    problem.k = problem.v = nhd_rows<const bf16>(rows.data, chunk, c.heads, 64, c.sequences);
    problem.lengths = c.d_lengths.data;
    if (some) problem.new_tokens = d_added.data;
    problem.segments = c.column();
    problem.boundaries = d_flags.data;
    problem.texts = d_texts.data;
    cuda::append<view_type, bf16>(c.sequences, c.heads).run(problem, nullptr, nullptr);
    cuda::check(cudaDeviceSynchronize(), "append");
    for (index_t b = 0; b < c.sequences; ++b) {
      for (index_t t = 0; t < added[std::size_t(b)]; ++t) {
        const index_t number = texts[std::size_t(b)].advance(flags[std::size_t(b * chunk + t)] != 0);
        for (index_t h = 0; h < c.heads; ++h) {
          const auto row = std::size_t(b * c.heads + h);
          c.segments[std::size_t(c.begins[row] + c.lengths[row] + t)] = number;
        }
      }
      for (index_t h = 0; h < c.heads; ++h) c.lengths[std::size_t(b * c.heads + h)] += added[std::size_t(b)];
    }
    CAPTURE(kind, chunk, some, step);
    REQUIRE(c.d_segments.get() == c.segments);
    REQUIRE(c.d_lengths.get() == c.lengths);
    const auto after = d_texts.get();
    for (std::size_t b = 0; b < texts.size(); ++b) {
      REQUIRE(after[b].segment == texts[b].segment);
      REQUIRE(after[b].tokens == texts[b].tokens);
    }
  }
}

}  // namespace

TEST_CASE("segments are numbered as the host's cursor numbers them, whatever the chunks", "[gpu]") {
  if (gpu_missing()) return;
  for (const int kind : cases(5)) {
    for (const index_t chunk : {1, 31, 32, 33, 255, 256, 257, 1023, 1024, 1025, 3000}) {
      compare_numbers(kind, chunk, false);
      compare_numbers(kind, chunk, true);
    }
  }
}

TEST_CASE("a column of segments is packed with its tokens, in place too", "[gpu]") {
  if (gpu_missing()) return;
  for (int i = 0; i < scaled(20, 4); ++i) {
    batch_of_texts c(draw(1, 3), draw(1, 4), draw(1, 700));
    for (auto& segment : c.segments) segment = draw(0, 1 << 20);
    c.lengths.assign(c.lengths.size(), c.capacity);
    c.d_segments.set(c.segments), c.d_lengths.set(c.lengths);
    std::vector<index_t> slots(c.segments.size(), -1), counts;
    auto expected = c.segments;
    for (std::size_t r = 0; r < c.lengths.size(); ++r) {
      index_t count = 0;
      for (index_t slot = 0; slot < c.capacity; ++slot) {
        if (draw(0, 2) == 0) continue;
        slots[std::size_t(c.begins[r] + count)] = slot;
        expected[std::size_t(c.begins[r] + count)] = c.segments[std::size_t(c.begins[r] + slot)];
        ++count;
      }
      counts.push_back(count);
    }
    const buffer<index_t> d_slots(slots), d_counts(counts);
    cuda::pack_problem<view_type, view_type> problem{
        c.view(), {d_slots.data, d_counts.data, nullptr, c.capacity}, c.view()};
    problem.source_segments = {c.d_segments.data, 0, 0, c.d_begins.data};
    problem.segments = c.column();
    problem.lengths = c.d_lengths.data;
    const cuda::pack<view_type, view_type, true> op(c.sequences, c.heads, c.capacity, cuda::device_info::current());
    const buffer<unsigned char> workspace(op.workspace_bytes());
    op.prepare(workspace.data, nullptr);
    op.run(problem, workspace.data, nullptr);
    cuda::check(cudaDeviceSynchronize(), "pack");
    REQUIRE(c.d_segments.get() == expected);
    REQUIRE(c.d_lengths.get() == counts);
  }
}
