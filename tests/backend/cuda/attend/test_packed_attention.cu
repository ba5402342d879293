// Scores of blocks and attention over packed rows on the GPU: against double over the same packed rows.
#include "backend/cuda/attend/packed_step.hpp"

using namespace tessera;
using namespace gpu_test;

namespace {

/// Two segments of the default's shape, and a third of another strategy.
std::vector<segment_plan> three_segments(packed_element element) {
  return {{format_of(element, 96, 1, 32), format_of(element, 96, 1, 32), 8, shrunk(400, 88)},
          {format_of(element, 96, 1, 32), format_of(element, 96, 1, 32), 8, 64},
          {format_of(element, 96, 4, 48), format_of(element, 96, 2, 16), 8, 40}};
}

}  // namespace

TEST_CASE("blocks score on the GPU what their packed means and the step's queries give") {
  if (gpu_missing()) return;
  for (const auto element : {as_bf16, as_fp8, as_int4}) {
    packed_step<bf16, 128> step(2, three_segments(element), {3, 1, 0}, {8, 8, 8}, 2, 4);
    step.check_scores(row_reduction::sum);
    step.check_scores(row_reduction::max);
  }
  packed_step<fp16, 64> small(1, {{format_of(as_fp16, 48, 1, 16), format_of(as_fp16, 48, 1, 16), 4, shrunk(9000, 300)}},
                              {1}, {3}, 1, 1);
  small.check_scores(row_reduction::sum);
}

TEST_CASE("packed attention on the GPU is attention over what is stored, segment by segment") {
  if (gpu_missing()) return;
  for (const auto element : {as_bf16, as_fp8, as_int4}) {
    packed_step<bf16, 128> step(2, three_segments(element), {3, 1, 2, 0}, {8, 33, 1, 5}, 1, 4);
    step.template check_attention<float>({}, 1, 1.2e-2);
    step.template check_attention<float>(step.random_units(8, 30), 8, 1.2e-2);
    step.template check_attention<bf16>(step.random_units(1, 20), 1, 1.6e-2);
  }
}

TEST_CASE("packed rows are walked along where their values lie far apart") {
  if (gpu_missing()) return;
  for (const auto element : {as_bf16, as_fp8, as_int4}) {
    packed_step<bf16, 128> step(1,
                                {{format_of(element, 96, 1, 4), format_of(element, 96, 1, 3), 8, 200},
                                 {format_of(element, 128, 1, 5), format_of(element, 90, 1, 7), 8, 64},
                                 {format_of(element, 96, 2, 4), format_of(element, 128, 2, 6), 8, 72}},
                                {3, 1, 2}, {8, 3, 0}, 1, 4);
    step.check_scores(row_reduction::sum);
    step.template check_attention<float>({}, 1, 1.2e-2);
    step.template check_attention<float>(step.random_units(8, 30), 8, 1.2e-2);
  }
}

TEST_CASE("packed attention reads more segments than a launch has blocks for") {
  if (gpu_missing()) return;
  const packed_format format = format_of(as_bf16, 96, 1, 32);
  const index_t most = 2 * cuda::detail::segments_rotated_together + 6;
  packed_step<bf16, 128> step(1, std::vector<segment_plan>(std::size_t(most), {format, format, 8, 16}),
                              {most, cuda::detail::segments_rotated_together + 1, 9, 1, 0}, {8, 3, 1, 32, 5}, 1, 4);
  step.check_scores(row_reduction::sum);
  step.check_attention<float>({}, 1, 1.2e-2);
  const auto units = step.random_units(8, 60);
  step.check_attention<float>(units, 8, 1.2e-2);
  step.device.shared_memory = 163 * 1024;  // an A100's: blocks that merge have their tables in the workspace
  step.check_attention<float>({}, 1, 1.2e-2);
  step.check_attention<float>(units, 8, 1.2e-2);
}

TEST_CASE("packed attention that a block has no shared memory for is refused when it is made") {
  if (gpu_missing()) return;
  using view_type = typename packed_batch<bf16, 128, 128>::view_type;
  using attention = cuda::attend_packed<view_type, float>;
  const packed_format format{packed_element::bf16, 128, 1, 32, true};
  auto device = cuda::device_info::current();
  device.shared_memory = 163 * 1024;  // an A100's
  const std::size_t few = attention(1, 1, 1, 1, 2, format, format, device).workspace_bytes();
  CHECK(attention(1, 1, 1, 1, 40, format, format, device).workspace_bytes() > few);
  // 8 million tokens in turns of 4,096; and where strategies are searched.
  CHECK_NOTHROW(attention(32, 8, 32, 8, 2'200, format, format, device));
  device = cuda::device_info::current();
  CHECK_NOTHROW(attention(4, 8, 32, 1, 8'400, format, format, device));
  CHECK_THROWS_WITH(attention(1, 1, 1, 1, 20'000, format, format, device), contains("over 20000 segments"));
  CHECK_THROWS_WITH((cuda::score_blocks<view_type>(64, 1'000'000)), contains("of 1000000 segments"));
  CHECK_THROWS_WITH((cuda::trim_blocks<view_type>(1, 64, 1'000'000, device)), contains("over 1000000 segments"));
}

TEST_CASE("packed attention takes steps of several tokens, caps, windows and sinks") {
  if (gpu_missing()) return;
  const auto plans = three_segments(as_bf16);
  for (const index_t tokens : {2, 5, 8}) {
    packed_step<bf16, 128> step(1, plans, {3, 2}, {8, 20}, tokens, 3);
    buffer<float> sinks(normal<float>(3));
    step.template check_attention<float>({}, 1, 1.2e-2);
    step.rule.soft_cap = 5, step.rule.scale = 0.2f;
    step.template check_attention<float>(step.random_units(8, 50), 8, 1.2e-2);
    step.rule.sink_logits = sinks.data;
    step.template check_attention<float>(step.random_units(8, 50), 8, 1.2e-2);
    step.rule.sliding_window = 30;
    step.template check_attention<float>({}, 1, 1.2e-2);
  }
}

TEST_CASE("packed attention takes other dims, elements, groups and shared bits") {
  if (gpu_missing()) return;
  packed_step<fp16, 64> small(2, {{format_of(as_fp16, 48, 1, 16), format_of(as_fp16, 48, 1, 16), 4, 50}}, {1}, {7}, 1,
                              1);
  small.check_attention<float>({}, 1, 2e-3);
  small.check_attention<fp16>(small.random_units(4, 40), 4, 3e-3);
  // bf16 elements in a cache of fp16
  packed_step<fp16, 64> mixed(1, {{format_of(as_bf16, 48, 1, 16), format_of(as_bf16, 48, 1, 16), 8, 64}}, {1}, {7}, 1,
                              8);
  mixed.check_attention<float, bf16>({}, 1, 1.2e-2);
  // A rotation that leaves an odd number of channels; K longer than V.
  packed_step<bf16, 128, 64> uneven(1, {{format_of(as_bf16, 90, 1, 25), format_of(as_int4, 50, 2, 12), 8, 48}}, {1},
                                    {4}, 1, 2);
  uneven.check_attention<float>({}, 1, 1.2e-2);
  packed_step<bf16, 256> large(1, {{format_of(as_bf16, 192, 1, 64), format_of(as_bf16, 192, 1, 64), 8, 40}}, {1}, {4},
                               1, 2);
  large.check_attention<float>({}, 1, 1.2e-2);
  // Few elements of all channels: words of bits without any between others. A row's remainder of 8, and half of them.
  for (const index_t kept : {4, 8, 20, 24}) {
    packed_step<bf16, 128> few(2, {{format_of(as_bf16, 128, 1, kept), format_of(as_fp8, 128, 1, kept), 8, 72}}, {1},
                               {4}, 1, 4);
    few.check_attention<float>({}, 1, 1.2e-2);
    few.check_scores(row_reduction::sum);
  }
  packed_step<bf16, 64> pairs(1, {{format_of(as_fp8, 64, 2, 24), format_of(as_bf16, 64, 4, 8), 8, 50}}, {1}, {4}, 2, 4);
  pairs.check_attention<float>({}, 1, 1.2e-2);
  pairs.check_scores(row_reduction::max);
  // ThinK: keys of one set of channels, values as they are, no basis.
  packed_step<bf16, 96> think(2, {{format_of(as_bf16, 96, 1, 58, false), format_of(as_bf16, 96, 1, 96), 0, 70, false}},
                              {1}, {32}, 1, 4);
  think.check_attention<float>({}, 1, 1.2e-2);
}

TEST_CASE("a chunk of many queries attends to packed rows that are turned back, piece by piece") {
  if (gpu_missing()) return;
  for (const auto element : {as_bf16, as_fp8, as_int4}) {
    for (const index_t tokens : {1, 40, 200}) {
      packed_step<bf16, 128> step(2, three_segments(element), {3}, {tokens + 9}, tokens, 4);
      step.check_prompt(64, 33, 1.6e-2);
      step.check_prompt(1024, 1024, 1.6e-2);
    }
  }
  packed_step<bf16, 128> ruled(1, three_segments(as_bf16), {2}, {70}, 64, 3);
  buffer<float> sinks(normal<float>(3));
  ruled.rule.soft_cap = 5, ruled.rule.scale = 0.2f, ruled.rule.sink_logits = sinks.data;
  ruled.check_prompt(128, 20, 1.6e-2);
  ruled.rule.sliding_window = 90;
  ruled.check_prompt(128, 64, 1.6e-2);
  packed_step<fp16, 64> small(2, {{format_of(as_fp16, 48, 1, 16), format_of(as_fp16, 48, 1, 16), 4, 50}}, {1}, {33}, 30,
                              1);
  small.check_prompt(32, 7, 2e-3);
  packed_step<bf16, 128, 64> uneven(1, {{format_of(as_bf16, 90, 1, 25), format_of(as_int4, 50, 2, 12), 8, 100}}, {1},
                                    {20}, 17, 2);
  uneven.check_prompt(64, 8, 1.6e-2);
  packed_step<bf16, 96> think(2, {{format_of(as_bf16, 96, 1, 58, false), format_of(as_bf16, 96, 1, 96), 0, 130, false}},
                              {1}, {32}, 16, 4);
  think.check_prompt(64, 16, 1.6e-2);
}

TEST_CASE("packed attention with all channels is dense attention") {
  if (gpu_missing()) return;
  for (const index_t group : {1, 2, 4}) {
    packed_step<bf16, 128> step(1, {{format_of(as_bf16, 128, group, 128), format_of(as_bf16, 128, group, 128), 8, 96}},
                                {1}, {8}, 1, 4);
    step.check_attention<float>({}, 1, 1.2e-2);
  }
}

TEST_CASE("a decode step over packed rows reads the best blocks of all segments, the first and the last") {
  if (gpu_missing()) return;
  const packed_format format = format_of(as_bf16, 96, 1, 32);
  const std::vector<segment_plan> plans = {{format, format, 8, shrunk(2048, 128)}, {format, format, 8, 64}};
  for (const index_t tokens : {1, 3}) {
    packed_step<bf16, 128> step(2, plans, {2, 1, 0}, {8, 33, 5}, tokens, 4);
    for (const index_t budget : {16, 61, shrunk(512, 96), 100000}) step.check_decoding(8, budget);
  }
}

TEST_CASE("a decode step over packed rows refuses a budget under two blocks") {
  if (gpu_missing()) return;
  using view_type = packed_batch<bf16, 64>::view_type;
  using decode = cuda::decode_blocks<view_type, float>;
  const packed_format format = format_of(as_bf16, 48, 1, 16);
  CHECK_THROWS_WITH(
      decode(block_mean{}, whole_blocks{8}, 15, 1, 1, 1, 1, 64, 1, {format, format, 8}, cuda::device_info::current()),
      contains("budget is 15; expected at least two blocks"));
}
