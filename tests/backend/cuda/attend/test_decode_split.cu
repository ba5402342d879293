// GPU decode attention over rows of very uneven length: many parts merged by several blocks, and rows split among blocks
// ahead of the steps.
#include <type_traits>

#include "backend/cuda/attend/decode_case.hpp"

using namespace tessera;
using namespace gpu_test;
using namespace decode_test;

namespace {

/// The worst error of `op` over rows of each of `lengths`, each run four times; large where a run does not repeat the bits of
/// the first. `change(one, workspace)` runs before the lengths of a step are set, with those of the step before.
template <class Case, class Operation, class Change>
double worst_error(Case& one, const Operation& op, const std::vector<std::vector<index_t>>& lengths,
                   const Change& change) {
  buffer<unsigned char> workspace(op.workspace_bytes());
  workspace.fill(0xff);
  op.prepare(workspace.data, nullptr);
  double worst = 0;
  for (const std::vector<index_t>& now : lengths) {
    change(workspace.data);
    one.set_lengths(now);
    std::vector<decltype(one.out.get())> outs;
    for (int run = 0; run < 4; ++run) {
      one.poison();
      op.run(one.problem(), workspace.data, nullptr);
      cuda::check(cudaDeviceSynchronize(), "decode attention");
      outs.push_back(one.out.get());
    }
    worst = std::max(worst, one.error_now());
    for (const auto& out : outs) worst = std::max(worst, same_bits(outs[0], out) ? 0.0 : 1e9);
  }
  return worst;
}
const auto nothing = [](unsigned char*) {};

template <class Case>
void try_long_rows(const decode_shape& given) {
  const index_t all = given.capacity, few = all / 16;
  decode_shape s = given;
  s.heads = 3;
  INFO("group " << s.group << ", tokens " << s.tokens);
  Case one(s);
  // A long row first, in the middle and last; two of them that share a block; all alike; one beside empty ones.
  CHECK(
      worst_error(one, one.operation(),
                  {{all, few, few}, {few, all, few}, {1, few, all}, {all, all - 77, few}, {all, all, all}, {0, all, 0}},
                  nothing) < 5e-3);
}

using split_view = kv_view<const bf16, 64>;
using split_block = cuda::detail::decode_block<split_view, float>;
constexpr auto ahead = cuda::decode_split::ahead;

/// What a split of rows of such lengths among `blocks` is.
std::vector<cuda::detail::split_piece> split_of(const std::vector<index_t>& lengths, index_t blocks,
                                                cuda::split_rule rule = cuda::split_rule::shortest) {
  const buffer<index_t> on_device(lengths);
  buffer<cuda::detail::split_piece> pieces{std::size_t(blocks)};
  cuda::decode_problem<split_view> problem;
  problem.view.lengths = on_device.data, problem.view.length_strides = {1, 1};
  problem.view.sequences = index_t(lengths.size()), problem.view.kv_heads = 1;
  cuda::detail::split_entry<split_view, float><<<1, 32>>>(problem, pieces.data, blocks, rule);
  cuda::check(cudaDeviceSynchronize(), "split of rows");
  return pieces.get();
}

}  // namespace

TEST_CASE("GPU decode attention merges many parts of a row by the blocks that arrive last") {
  if (gpu_missing()) return;
  const index_t capacity = shrunk(16000, 5000);
  try_long_rows<decode_case<bf16, 128>>({.sequences = 1, .group = 4, .capacity = capacity});
  try_long_rows<decode_case<bf16, 128>>({.sequences = 1, .group = 1, .tokens = 3, .capacity = capacity, .sinks = true});
  try_long_rows<decode_case<bf16, 128>>({.sequences = 1, .group = 5, .tokens = 7, .capacity = capacity});
  try_long_rows<decode_case<bf16, 64>>({.sequences = 1, .group = 8, .capacity = capacity * 2});
  try_long_rows<decode_case<bf16, 256>>({.sequences = 1, .group = 16, .capacity = capacity / 2});
  try_long_rows<decode_case<bf16, 128, block_table>>(
      {.sequences = 1, .group = 4, .capacity = capacity, .gather = true});
}

TEST_CASE("GPU decode attention by a split made ahead equals the CPU's while rows grow, shrink and vanish") {
  if (gpu_missing()) return;
  const index_t all = shrunk(12000, 3000), few = all / 9;
  const auto try_split = [&](auto sort, const decode_shape& s) {
    typename decltype(sort)::type one(s);
    const auto op = one.template operation<ahead>();
    // Never split: as each step does. Then by the split of the second lengths, whatever comes.
    int step = 0;
    CHECK(worst_error(one, op,
                      {{few, all / 2, few, few},
                       {few + 1, all / 2 + 1, few + 1, few + 1},
                       {all, few, few + 200, all / 3},
                       {0, all, 1, few},
                       {0, 0, 0, 0},
                       {130, 1, 300, 257}},
                      [&](unsigned char* workspace) {
                        if (++step == 2) op.split(one.problem(), workspace, nullptr);
                        if (step == 3) op.split(one.problem(), workspace, nullptr, cuda::split_rule::rounded);
                      }) < 5e-3);
  };
  try_split(std::type_identity<decode_case<bf16, 128>>{}, {.sequences = 2, .heads = 2, .capacity = all});
  try_split(std::type_identity<decode_case<bf16, 64, block_table>>{},
            {.sequences = 1, .heads = 4, .tokens = 2, .capacity = all});
  // Two blocks for four rows, which are cut in each step.
  try_split(std::type_identity<decode_case<bf16, 128>>{},
            {.sequences = 2, .heads = 2, .capacity = all, .multiprocessors = 2});
}

TEST_CASE(
    "a split gives every row whole blocks, its longest part is as short as can be, and even pieces are no shorter") {
  if (gpu_missing()) return;
  using cuda::detail::split_piece;
  int ahead_of_time = 0;
  for (int i = 0; i < scaled(400, 40); ++i) {
    const index_t rows = draw(1, 40), blocks = draw(1, 150);
    std::vector<index_t> lengths, tiles;
    offset_t sum = 0;
    index_t longest = 1;
    for (index_t row = 0; row < rows; ++row) {
      lengths.push_back(draw(0, 3) == 0 ? draw(0, 100000) : draw(0, 9000));
      tiles.push_back(ceil_div(lengths.back(), index_t(split_block::tile)));
      sum += tiles.back();
      longest = std::max(longest, tiles.back());
    }
    INFO("rows " << rows << " blocks " << blocks << " case " << i);
    // By trying every length of a part.
    index_t best = 0;
    for (index_t most = 1; most <= longest && best == 0; ++most) {
      offset_t parts = 0;
      for (const index_t of : tiles) parts += std::max(1, ceil_div(of, most));
      if (parts <= blocks) best = most;
    }
    const bool better = best > 0 && offset_t(best - 1) * blocks < sum + split_block::restart_tiles * rows;
    const auto split = split_of(lengths, blocks);
    const bool split_now = split[0].kind != split_piece::cut_each_step;
    CHECK(split_now == (better && sum > 4 * rows));
    ahead_of_time += split_now;
    index_t piece = 0;
    for (index_t row = 0; split_now && row < rows; ++row) {
      const index_t parts = std::max(1, ceil_div(tiles[std::size_t(row)], best));
      for (index_t part = 0; part < parts; ++part, ++piece) {
        const split_piece& one = split[std::size_t(piece)];
        CHECK((one.row == row && one.part == part && one.parts == parts && one.kind == split_piece::part_of_row));
      }
    }
    for (; piece < blocks; ++piece) {
      CHECK(split[std::size_t(piece)].kind == (split_now ? split_piece::nothing : split_piece::cut_each_step));
    }
  }
  CHECK(ahead_of_time > 0);
}

TEST_CASE("a rounded split gives every row its share of as many blocks as let all parts have one") {
  if (gpu_missing()) return;
  using cuda::detail::split_piece;
  int fewer = 0;
  for (int i = 0; i < scaled(400, 40); ++i) {
    const index_t rows = draw(1, 40), blocks = draw(1, 150);
    std::vector<index_t> lengths, tiles;
    offset_t sum = 0;
    for (index_t row = 0; row < rows; ++row) {
      lengths.push_back(draw(0, 3) == 0 ? draw(0, 100000) : draw(0, 9000));
      tiles.push_back(ceil_div(lengths.back(), index_t(split_block::tile)));
      sum += tiles.back();
    }
    INFO("rows " << rows << " blocks " << blocks << " case " << i);
    // Algorithm 1, by real numbers; where it wants more blocks than there are, of one block fewer.
    std::vector<index_t> parts;
    offset_t all = 0;
    index_t of = blocks;
    for (; of > 0; --of) {
      parts.clear(), all = 0;
      for (const index_t own : tiles) {
        const double share = sum > 0 ? double(own) * double(of) / double(sum) : 0;
        parts.push_back(std::max<index_t>(1, index_t(std::floor(share + 0.5))));
        all += parts.back();
      }
      if (all <= blocks) break;
    }
    const auto split = split_of(lengths, blocks, cuda::split_rule::rounded);
    if (rows > blocks) {
      for (const split_piece& one : split) CHECK(one.kind == split_piece::cut_each_step);
      continue;
    }
    fewer += of < blocks;
    index_t piece = 0;
    for (index_t row = 0; row < rows; ++row) {
      for (index_t part = 0; part < parts[std::size_t(row)]; ++part, ++piece) {
        const split_piece& one = split[std::size_t(piece)];
        const bool is_it = one.row == row && one.part == part && one.parts == parts[std::size_t(row)] &&
                           one.kind == split_piece::part_of_row;
        CHECK(is_it);
      }
    }
    for (; piece < blocks; ++piece) CHECK(split[std::size_t(piece)].kind == split_piece::nothing);
  }
  CHECK(fewer > 0);
}
