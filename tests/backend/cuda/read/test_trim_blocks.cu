// Lists of blocks of several sizes that are cut down to a budget of tokens on the GPU: against the CPU's choice.
#include "backend/cuda/device.hpp"
#include "tessera/backend/cuda/choose/top_k.cuh"
#include "tessera/backend/cuda/read/means/detail/trim_blocks.cuh"
#include "tessera/selector/top_tokens.hpp"
#include "tessera/selector/whole_blocks.hpp"

using namespace tessera;
using namespace gpu_test;

namespace {

using view_type = cuda::packed_view<kv_view<const bf16, 64>>;

/// Segments of random lengths and block sizes, the same for all heads of a sequence.
struct case_of_sizes {
  index_t sequences, heads, most;
  std::vector<index_t> counts, rows;           // [sequences]; [sequences, most, heads]
  std::vector<cuda::device_segment> segments;  // [sequences, most]
  buffer<index_t> d_rows, d_counts;
  buffer<cuda::device_segment> d_segments;

  case_of_sizes(index_t sequences_, index_t heads_, index_t most_, index_t longest)
      : sequences(sequences_),
        heads(heads_),
        most(most_),
        segments(std::size_t(sequences_ * most_)),
        d_rows(segments.size() * std::size_t(heads_)),
        d_counts(std::size_t(sequences_)),
        d_segments(segments.size()) {
    for (index_t b = 0; b < sequences; ++b) {
      counts.push_back(draw(0, 5) == 0 ? 0 : draw(1, most));
      for (index_t s = 0; s < most; ++s) {
        cuda::device_segment& one = segments[std::size_t(b * most + s)];
        one.block = std::vector<index_t>{4, 8, 16, 5, 128}[std::size_t(draw(0, draw(0, 2) ? 2 : 4))];
        one.rows = d_rows.data + (b * most + s) * heads;
        rows.insert(rows.end(), std::size_t(heads), draw(0, 9) == 0 ? 1 : draw(1, longest));
      }
    }
    d_rows.set(rows), d_counts.set(counts), d_segments.set(segments);
  }
  view_type view() const {
    view_type made;
    made.segments = d_segments.data, made.counts = d_counts.data, made.max_segments = most;
    made.whole.sequences = sequences, made.whole.kv_heads = heads;
    return made;
  }
  /// Rows of every block of a sequence, and where each segment's begin.
  std::vector<index_t> sizes(index_t b, std::vector<index_t>& begins) const {
    std::vector<index_t> all;
    begins.clear();
    for (index_t s = 0; s < counts[std::size_t(b)]; ++s) {
      begins.push_back(index_t(all.size()));
      const index_t block = segments[std::size_t(b * most + s)].block;
      for (index_t left = rows[std::size_t((b * most + s) * heads)]; left > 0; left -= block)
        all.push_back(std::min(left, block));
    }
    begins.push_back(index_t(all.size()));
    return all;
  }
};

void compare(const case_of_sizes& of, index_t tokens, int kind) {
  const auto device = cuda::device_info::current();
  const index_t lanes = of.sequences * of.heads;
  std::vector<std::vector<index_t>> sizes(std::size_t(of.sequences)), begins(sizes.size());
  index_t capacity = 4;
  for (index_t b = 0; b < of.sequences; ++b) {
    sizes[std::size_t(b)] = of.sizes(b, begins[std::size_t(b)]);
    capacity = std::max(capacity, ceil_div(index_t(sizes[std::size_t(b)].size()), 4) * 4);
  }
  const index_t read = std::min(cuda::trim_blocks<view_type>::max_chosen(tokens, 4, of.most), capacity);
  std::vector<float> scores(std::size_t(lanes * capacity));
  std::vector<index_t> units;
  for (index_t lane = 0; lane < lanes; ++lane) {
    units.push_back(index_t(sizes[std::size_t(lane / of.heads)].size()));
    for (index_t i = 0; i < units.back(); ++i) {
      float& x = scores[std::size_t(lane * capacity + i)] = std::min(score(kind, rng()), 3.4e38f);
      if (i == 0 || i + 1 == units.back()) x = infinity;
    }
  }
  const cuda::select_slots<top_tokens> select(top_tokens{}, lanes, capacity, device);
  const cuda::trim_blocks<view_type> trim(lanes, read, of.most, device);
  buffer<float> d_scores(scores);
  buffer<index_t> d_units(units), lists(std::size_t(lanes) * std::size_t(read)),
      counts(static_cast<std::size_t>(lanes)), got_begins(std::size_t(lanes) * std::size_t(of.most + 1));
  buffer<unsigned char> work(trim.workspace_bytes());
  lists.fill(0xff), got_begins.fill(0xff);
  cuda::select_problem problem;
  problem.scores = d_scores.data, problem.score_stride = capacity;
  problem.n = {d_units.data};
  problem.keep = {nullptr, read}, problem.tail = {nullptr, 0};
  problem.out = lists.data, problem.out_stride = read, problem.counts = counts.data, problem.rows = lanes;
  select.run(problem, nullptr, nullptr);
  trim.run({of.view(), d_scores.data, capacity, tokens, lists.data, read, counts.data, got_begins.data}, work.data,
           nullptr);
  cuda::check(cudaDeviceSynchronize(), "trimming");
  const auto got = lists.get(), got_counts = counts.get(), where = got_begins.get();
  top_k_scratch scratch;
  int wrong = 0;
  for (index_t lane = 0; lane < lanes; ++lane) {
    const auto& own = sizes[std::size_t(lane / of.heads)];
    const auto& segment_begins = begins[std::size_t(lane / of.heads)];
    std::vector<index_t> right(own.size() + 1);
    right.resize(std::size_t(whole_blocks{}.choose_blocks(scores.data() + lane * capacity, own.data(),
                                                          index_t(own.size()), tokens, right.data(), scratch)));
    const index_t count = got_counts[std::size_t(lane)];
    wrong += count != index_t(right.size()) || !std::equal(right.begin(), right.end(), got.begin() + lane * read);
    for (index_t s = 0; s <= of.most; ++s) {
      const index_t before = s < index_t(segment_begins.size()) ? segment_begins[std::size_t(s)] : index_t(own.size());
      wrong += where[std::size_t(lane * (of.most + 1) + s)] !=
               index_t(std::lower_bound(right.begin(), right.end(), before) - right.begin());
    }
  }
  INFO("sequences " << of.sequences << " heads " << of.heads << " segments " << of.most << " tokens " << tokens
                    << " scores " << kind);
  CHECK(wrong == 0);
}

}  // namespace

TEST_CASE("lists of blocks are cut down on the GPU to those that the CPU takes for as many tokens") {
  if (gpu_missing()) return;
  for (int i = 0; i < scaled(200, 6); ++i) {
    const case_of_sizes of(draw(1, 3), draw(1, 3), draw(1, 40), i % 10 == 9 ? shrunk(20000, 200) : draw(1, 300));
    for (const index_t tokens : {16, draw(16, 300), draw(16, 6000), 1000000}) compare(of, tokens, i % 8);
  }
}

TEST_CASE("lists that shared memory has no room for are cut down alike") {
  if (gpu_missing()) return;
  const case_of_sizes of(1, 2, 3, shrunk(150000, 300));
  for (const index_t tokens : {1000, 150000, 300000}) compare(of, tokens, 0);
}
