// Steps that bring the boundaries of segments, on the device: what they make a step read, launched and replayed; and retrieval by
// segments over candidates, encoded pages and slots that move, against the CPU's.
#include <array>
#include <memory>

#include "cases/cache_case.hpp"
#include "tessera/layout/fixed_pages.hpp"
#include "tessera/layout/fp8_rows.hpp"
#include "tessera/methods/sentencekv.hpp"
#include "tessera/schedule/each_step.hpp"
#include "tessera/scorer/accumulated_attention.hpp"

using namespace tessera;
using namespace gpu_test;

namespace {

constexpr int head_dim = 64;
using method = sentencekv<bf16, head_dim>;
const model_shape one_head{1, 1, 1};

/// Budget 8 of 16 that stay; segments 0 to 5, 6 to 9 and 10 to 13 of a prompt, whose keys have `channel` 0 alone.
cuda::cache<method> three_segments(const std::vector<float>& channel) {
  method policies;
  policies.set_budget(8);
  policies.retain.budget.factor = 2;
  policies.retain.scorer.window = 1;
  policies.retrieve.scorer.start = 0;
  policies.retrieve.scorer.recent = 1;
  cuda::cache_options options;
  options.tokens = 64;
  options.step_tokens = 2;
  cuda::cache<method> kv(one_head, policies, options);
  std::vector<std::uint8_t> ends(14, 0);
  ends[5] = ends[9] = ends[13] = 1;
  std::vector<bf16> k(14 * head_dim, bf16(0.0f)), q = k;
  for (std::size_t t = 0; t < 14; ++t)
    k[t * head_dim] = bf16(channel[t < 6 ? 0 : t < 10 ? 1 : 2]), q[t * head_dim] = bf16(1.0f);
  const buffer<bf16> keys(k), queries(q);
  REQUIRE(kv.open() == 0);
  kv.prefill(0, 0, nhd_rows<const bf16>(queries.data, 14, 1, head_dim),
             nhd_rows<const bf16>(keys.data, 14, 1, head_dim), nhd_rows<const bf16>(keys.data, 14, 1, head_dim),
             nullptr, ends);
  kv.end_prefill(0, nullptr);
  return kv;
}

/// An answer's token that asks for channel 0 and is like none of the segments.
struct asking {
  buffer<bf16> q, k;
  buffer<float> out{head_dim};
  asking() : q(row(1)), k(row(-1)) {}
  static std::vector<bf16> row(float x) {
    std::vector<bf16> all(head_dim, bf16(0.0f));
    all[0] = bf16(x);
    return all;
  }
  void step(cuda::cache<method>& kv, const batch& now, cudaStream_t stream) const {
    kv.begin_step(now, stream);
    kv.decode(0, now, nhd_rows<const bf16>(q.data, 1, 1, head_dim), nhd_rows<const bf16>(k.data, 1, 1, head_dim),
              nhd_rows<const bf16>(k.data, 1, 1, head_dim), nhd_rows(out.data, 1, 1, head_dim), {}, stream);
  }
};

/// Of the positions that a step read, so many bytes; and a mean key for each of `segments`.
offset_t bytes_of(index_t tokens, index_t segments) {
  return offset_t(tokens) * method::layout_type::token_bytes() +
         offset_t(segments) * head_dim * offset_t(sizeof(float));
}

}  // namespace

TEST_CASE("a step reads whole the segment that its answer asks for, and of the next best the first tokens",
          "[gpu][cache]") {
  if (gpu_missing()) return;
  cuda::cache<method> kv = three_segments({0.5f, 2, -1});
  kv.trace_attended(true);
  const asking token;
  const auto read = [&](std::uint8_t ends) {
    token.step(kv, kv.prepare_step({0}, 1, nullptr, std::vector<std::uint8_t>{ends}), nullptr);
    return kv.attended(0, 0)[0];
  };
  CHECK(read(0).size() == 15);  // the first token of the answer's segment reads everything
  CHECK(kv.bytes_read(0) == bytes_of(15, 0));
  CHECK(read(0) == std::vector<index_t>{0, 1, 2, 6, 7, 8, 9, 15});
  CHECK(kv.bytes_read(0) == bytes_of(8, 4));
  CHECK(read(1).size() == 8);
  CHECK(read(0).size() == 18);  // a segment ended: this token is a first one again
  CHECK(read(0) == std::vector<index_t>{0, 1, 2, 6, 7, 8, 9, 18});
  CHECK(kv.bytes_read(0) == bytes_of(8, 5));
  // A new turn begins a segment of its own, with the same text going on.
  const buffer<bf16> more(asking::row(-1));
  const auto row = nhd_rows<const bf16>(more.data, 1, 1, head_dim);
  kv.prefill(0, 0, row, row, row, nullptr, std::vector<std::uint8_t>{0});
  kv.end_prefill(0, nullptr);
  const auto first_of_turn = read(0);
  CHECK(first_of_turn == kv.positions(0, 0, 0));
}

TEST_CASE("replays of one recorded step take their flags from prepare_step", "[gpu][cache]") {
  if (gpu_missing()) return;
  cuda::cache<method> kv = three_segments({0.5f, 2, -1});
  const asking token;
  cudaStream_t stream;
  cuda::check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  cuda::check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreate");
  {
    std::unique_ptr<graph> recorded;
    index_t position = 14;
    for (const auto& [ends, tokens, segments] : std::vector<std::array<index_t, 3>>{
             {0, 15, 0}, {0, 8, 4}, {1, 8, 4}, {1, 18, 0}, {1, 19, 0}, {0, 20, 0}, {0, 8, 7}}) {
      CAPTURE(position, ends);
      const batch now = kv.prepare_step({0}, 1, stream, std::vector<std::uint8_t>{std::uint8_t(ends)});
      if (!recorded) recorded = std::make_unique<graph>(stream, [&] { token.step(kv, now, stream); });
      recorded->launch();
      cuda::check(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
      CHECK(kv.bytes_read(0) == bytes_of(tokens, segments));
      CHECK(kv.next_position(0) == ++position);
    }
  }
  cuda::check(cudaStreamDestroy(stream), "cudaStreamDestroy");
}

TEST_CASE("boundaries of a step that are missing, short or no flags are refused on the device before anything changes",
          "[gpu][cache]") {
  if (gpu_missing()) return;
  cuda::cache<method> kv = three_segments({1, 1, 1});
  const auto refused = [&](std::vector<std::uint8_t> flags, const std::string& words) {
    CHECK_THROWS_WITH(kv.prepare_step({0}, 2, nullptr, flags), contains(words));
    CHECK(kv.next_position(0) == 14);
  };
  refused({}, "boundaries is 0; expected one flag for each new token, which are 2");
  refused({1}, "boundaries is 1; expected one flag");
  refused({0, 0, 0}, "boundaries is 3; expected one flag");
  refused({0, 2}, "boundaries[1] is 2; expected 0 or 1");
  CHECK_NOTHROW(kv.prepare_step({0}, 2, nullptr, std::vector<std::uint8_t>{0, 1}));
}

TEST_CASE("segments of a filter's candidates, in encoded pages, are read on the device as on the CPU", "[gpu][cache]") {
  if (gpu_missing()) return;
  using fp8_pages = stored<fp8_rows<bf16, head_dim>, fixed_pages<16>>;
  hold_conversations<recipe<filter<observation_window, uniform, top_tokens>, fp8_pages,
                            tessera::retrieve<segment_mean, top_tokens>, gathered_decode, once>>(20, scales::even);
}
TEST_CASE("segments of slots that move in steps are read on the device as on the CPU", "[gpu][cache]") {
  if (gpu_missing()) return;
  hold_conversations<recipe<retain<accumulated_attention, uniform, top_tokens>, dense<bf16, head_dim>,
                            tessera::retrieve<segment_mean, top_tokens>, gathered_decode, each_step>>(20);
}
