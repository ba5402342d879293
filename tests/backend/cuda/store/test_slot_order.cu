// Positions of an engine on the device: those that do not ascend are reported by a later call; the newest of a long text stay.
#include "backend/cuda/device.hpp"
#include "tessera/backend/cuda/attend/decode/decode_attention.cuh"
#include "tessera/backend/cuda/choose/score_and_choose.cuh"
#include "tessera/backend/cuda/store/append.cuh"
#include "tessera/budget/uniform.hpp"
#include "tessera/math/share.hpp"
#include "tessera/scorer/position.hpp"
#include "tessera/selector/top_tokens.hpp"
#include "tessera/stages.hpp"

using namespace tessera;
using namespace gpu_test;

namespace {

constexpr int dim = 64;
constexpr index_t heads = 2, q_heads = 4, room = 40;
using plain_view = kv_view<const bf16, dim>;
using listed_view = kv_view<const bf16, dim, filtered<contiguous>>;

/// One sequence of `count` slots in every head.
struct memory {
  buffer<bf16> k{normal<bf16>(std::size_t(heads) * room * dim)}, v{normal<bf16>(std::size_t(heads) * room * dim)};
  buffer<index_t> positions, lengths;

  explicit memory(const std::vector<index_t>& of_slots)
      : positions(std::size_t(heads) * room), lengths(std::vector<index_t>(heads, index_t(of_slots.size()))) {
    place(of_slots);
  }
  void place(const std::vector<index_t>& of_slots) {
    std::vector<index_t> all(std::size_t(heads) * room, 0);
    for (index_t h = 0; h < heads; ++h) std::copy(of_slots.begin(), of_slots.end(), all.begin() + h * room);
    positions.set(all);
  }
  template <class View = plain_view>
  View view() const {
    View view;
    view.k = k.data, view.v = v.data;
    view.k_strides = view.v_strides = {offset_t(heads) * room * dim, offset_t(room) * dim, dim, 1};
    view.sequences = 1, view.kv_heads = heads;
    view.lengths = lengths.data, view.length_strides = {heads, 1};
    view.positions = positions.data, view.position_strides = {offset_t(heads) * room, room};
    return view;
  }
};

std::vector<index_t> ring(index_t from, index_t count, index_t turned) {
  std::vector<index_t> at(static_cast<std::size_t>(count));
  std::iota(at.begin(), at.end(), from);
  std::rotate(at.begin(), at.begin() + turned, at.end());
  return at;
}

template <class View>
struct step {
  cuda::decode_attention<View> attention{1, heads, q_heads, 1, cuda::device_info::current()};
  buffer<unsigned char> scratch{attention.workspace_bytes()};
  buffer<bf16> q;
  buffer<float> out{std::size_t(q_heads) * dim};
  buffer<index_t> first;

  step(const std::vector<bf16>& queries, index_t at) : q(queries), first(std::vector<index_t>{at}) {
    attention.prepare(scratch.data, nullptr);
  }
  std::vector<float> run(const View& view) {
    cuda::decode_problem<View> problem{};
    problem.view = view;
    problem.q = nhd_rows<const bf16>(q.data, 1, q_heads, dim);
    problem.first_position = first.data;
    problem.out = nhd_rows(out.data, 1, q_heads, dim);
    attention.run(problem, scratch.data, nullptr);
    cuda::check(cudaDeviceSynchronize(), "decode attention");
    return out.get();
  }
};

const auto late = contains("of an earlier call) is not more than that of the slot before it");

}  // namespace

TEST_CASE("attention over slots out of order is reported by the next call, and then forgotten", "[gpu]") {
  if (gpu_missing()) return;
  memory held(ring(100, 30, 11));
  step<plain_view> decode(normal<bf16>(std::size_t(q_heads) * dim), 129);
  CHECK_NOTHROW(decode.run(held.view()));
  CHECK_THROWS_WITH(decode.run(held.view()), late);
  held.place(ring(100, 30, 0));
  const auto in_order = decode.run(held.view());
  CHECK_NOTHROW(decode.run(held.view()));
  auto said = held.view();
  said.order = slot_order::ascending;
  CHECK(same_bits(decode.run(said), in_order));
  held.place(ring(100, 30, 11));  // nobody looks where the view says that they ascend
  CHECK_NOTHROW(decode.run(said));
  CHECK_NOTHROW(decode.run(said));
}

TEST_CASE("a list of slots by position gives what slots in order give on the device", "[gpu]") {
  if (gpu_missing()) return;
  const index_t count = 30, turned = 11;
  const auto queries = normal<bf16>(std::size_t(q_heads) * dim);
  memory straight(ring(100, count, 0)), other(ring(100, count, turned));
  auto k = straight.k.get(), v = straight.v.get(), turned_k = k, turned_v = v;
  std::vector<index_t> slots;
  std::vector<offset_t> begin{0, count};
  for (index_t h = 0; h < heads; ++h) {
    for (index_t i = 0; i < count; ++i) {
      const index_t slot = (i + count - turned) % count;  // where the i-th position of the ring stands
      slots.push_back(slot);
      std::copy_n(k.begin() + (h * room + i) * dim, dim, turned_k.begin() + (h * room + slot) * dim);
      std::copy_n(v.begin() + (h * room + i) * dim, dim, turned_v.begin() + (h * room + slot) * dim);
    }
  }
  other.k.set(turned_k), other.v.set(turned_v);
  const auto at = ring(100, count, 0);
  std::vector<index_t> both(at);
  both.insert(both.end(), at.begin(), at.end());
  const buffer<index_t> d_slots(slots), d_positions(both);
  const buffer<offset_t> d_begin(begin);
  auto listed = other.view<listed_view>();
  listed.table = {{}, d_slots.data, d_begin.data, heads};
  listed.positions = d_positions.data, listed.position_begin = d_begin.data;
  for (const index_t newest : {129, 115}) {  // some are in the future of the second query
    step<plain_view> plain(queries, newest);
    step<listed_view> through(queries, newest);
    const auto expected = plain.run(straight.view()), got = through.run(listed);
    for (std::size_t i = 0; i < got.size(); ++i) REQUIRE(got[i] == Approx(expected[i]).margin(1e-5));
  }
}

TEST_CASE("a choice among slots out of order is reported by the next call; of a long text the newest stay", "[gpu]") {
  if (gpu_missing()) return;
  const index_t next = (1 << 30) + 17, count = 30;
  memory held(ring(next - count, count, 9));
  retain<position, uniform, top_tokens> policy;
  policy.budget.tokens = 12;
  policy.scorer.sinks = 0;
  const cuda::score_and_choose<plain_view, decltype(policy)> choose(policy, {1, heads, q_heads, 1, room},
                                                                    cuda::device_info::current());
  const buffer<unsigned char> scratch(choose.workspace_bytes());
  const buffer<index_t> d_next(std::vector<index_t>{next});
  choose_problem<plain_view> problem;
  problem.first_position = d_next.data;
  const auto run = [&] {
    problem.view = held.view();
    const selection_view chosen = choose.run(policy, problem, scratch.data, nullptr);
    cuda::check(cudaDeviceSynchronize(), "choice");
    std::vector<index_t> slots(12), counts(heads);
    cuda::check(cudaMemcpy(slots.data(), chosen.indices, 12 * sizeof(index_t), cudaMemcpyDeviceToHost), "cudaMemcpy");
    cuda::check(cudaMemcpy(counts.data(), chosen.counts, heads * sizeof(index_t), cudaMemcpyDeviceToHost),
                "cudaMemcpy");
    REQUIRE(counts == std::vector<index_t>(heads, 12));
    return slots;
  };
  CHECK_NOTHROW(run());
  CHECK_THROWS_WITH(run(), late);
  held.place(ring(next - count, count, 0));
  std::vector<index_t> newest(12);
  std::iota(newest.begin(), newest.end(), count - 12);
  CHECK(run() == newest);
}

TEST_CASE("positions that do not go on behind the stored ones are reported after an append", "[gpu]") {
  if (gpu_missing()) return;
  using view_type = kv_view<bf16, dim>;
  memory held(ring(100, 3, 0));
  const buffer<bf16> rows(normal<bf16>(std::size_t(2) * heads * dim));
  buffer<index_t> first(std::vector<index_t>{102});
  append_problem<view_type, bf16> problem;
  problem.view = held.view<view_type>();
  problem.k = problem.v = nhd_rows<const bf16>(rows.data, 2, heads, dim);
  problem.first_position = first.data;
  problem.positions = {held.positions.data, offset_t(heads) * room, room};
  const cuda::append<view_type, bf16> op(1, heads);
  const auto run = [&] {
    op.run(problem, nullptr, nullptr);
    cuda::check(cudaDeviceSynchronize(), "append");
  };
  CHECK_NOTHROW(run());  // position 102 behind 102
  CHECK_THROWS_WITH(run(), contains("position of slot 3 (sequence 0, kv_head"));
  first.set({103});
  CHECK_NOTHROW(run());
  CHECK_NOTHROW(run());
  problem.view.order = slot_order::ascending;
  first.set({5});
  CHECK_NOTHROW(run());
  CHECK_NOTHROW(run());
}

template <int Threads>
__global__ void __launch_bounds__(Threads) count_shares(const double* shares, const index_t* of, int n, index_t* up) {
  for (int i = int(threadIdx.x); i < n; i += Threads) up[i] = index_t(decimal_share(shares[i]).up(of[i]));
}

TEST_CASE("shares are decimals on the device too", "[gpu]") {
  if (gpu_missing()) return;
  std::vector<double> shares{0.55, 0.28, 0.07};
  std::vector<index_t> counts{100, 200, 10'000}, expected{55, 56, 700};
  for (int i = 0; i < 500; ++i) {
    const int part = draw(1, 1'000);
    shares.push_back(part / 1'000.0);
    counts.push_back(draw(0, 1 << 30));
    expected.push_back(index_t((std::int64_t(part) * counts.back() + 999) / 1'000));
  }
  const buffer<double> d_shares(shares);
  const buffer<index_t> d_counts(counts);
  buffer<index_t> up(counts.size());
  count_shares<128><<<1, 128>>>(d_shares.data, d_counts.data, int(shares.size()), up.data);
  CHECK(up.get() == expected);
}
