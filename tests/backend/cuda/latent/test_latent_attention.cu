// Attention over latent rows on the GPU against the CPU's: groups up to 128, tables, selections, several tokens, caps,
// windows, sinks, prompts, special values, launches that are split among few and many blocks, errors.
#include "backend/cuda/attend/decode_case.hpp"
#include "tessera/backend/cuda/attend/prefill/prefill_attention.cuh"

using namespace tessera;
using namespace gpu_test;
using namespace decode_test;

namespace {

template <class T, class Table = contiguous, class Out = float>
using latent_case = decode_case<latent_elements<T>, 576, Table, 512, Out>;

/// Whether the card runs the kernel; says so where it does not.
bool kernel_missing() {
  if (gpu_missing()) return true;
  const auto device = cuda::device_info::current();
  if (device.compute_capability == 90) return false;
  WARN("skipped: latent rows need compute capability 9.0, this device has " << device.compute_capability);
  return true;
}

template <class Case>
void try_latent(int cases, double bound) {
  for (int i = 0; i < scaled(cases, 7); ++i) {
    const index_t groups[] = {1, 3, 16, 20, 64, 100, 128};
    decode_shape s{.sequences = draw(1, 4), .heads = 1, .group = groups[draw(0, 6)], .tokens = draw(1, 4)};
    s.capacity = draw(8, shrunk(1500, 500));
    if (i % 7 == 1) s.soft_cap = 20;
    if (i % 7 == 2) s.window = 100;
    s.gather = i % 7 == 3 || i % 7 == 4;
    s.sinks = i % 7 == 5;
    if (i % 7 == 6) s.multiprocessors = draw(1, 7);
    if (i % 2) s.most_sequences = s.sequences + draw(0, 3), s.max_tokens = s.tokens + draw(0, 8);
    INFO("sequences " << s.sequences << " group " << s.group << " tokens " << s.tokens << " capacity " << s.capacity
                      << " case " << i << " multiprocessors " << s.multiprocessors);
    CHECK(error_of<Case>(s) < bound);
  }
}

template <class F>
std::string refusal(const F& run) {
  try {
    run();
  } catch (const tessera::error& e) {
    return e.what();
  }
  return "";
}

}  // namespace

TEST_CASE("GPU attention over latent rows equals the CPU's, and repeats to the bit") {
  if (kernel_missing()) return;
  try_latent<latent_case<bf16>>(28, 6e-3);
  try_latent<latent_case<bf16, block_table>>(28, 6e-3);
  try_latent<latent_case<fp16, block_table, fp16>>(14, 2e-3);
  try_latent<latent_case<bf16, contiguous, bf16>>(7, 8e-3);
}

TEST_CASE("GPU attention over latent rows of long and of many sequences") {
  if (kernel_missing()) return;
  for (const int multiprocessors : {0, 1, 5, 31}) {
    decode_shape s{.sequences = 2, .heads = 1, .group = 128, .tokens = 1, .capacity = scaled(9000, 700)};
    s.multiprocessors = multiprocessors;
    CHECK(error_of<latent_case<bf16, block_table>>(s) < 6e-3);
  }
  for (const index_t sequences : scaled(std::vector<index_t>{33, 150, 300}, 1))
    CHECK(error_of<latent_case<bf16>>({.sequences = sequences, .heads = 1, .group = 16, .capacity = 200}) < 6e-3);
}

TEST_CASE("GPU attention over latent rows: what is not a number reaches those that see it alone") {
  if (kernel_missing()) return;
  for (const float special : {std::nanf(""), std::numeric_limits<float>::infinity()}) {
    const decode_shape s{.sequences = 2, .heads = 1, .group = 20, .tokens = 4, .capacity = 300};
    // The last tokens are hidden from the first rows of the step: their keys are values too.
    latent_case<bf16> one(s);
    one.set_lengths(std::vector<index_t>(std::size_t(one.rows), one.capacity));
    for (index_t row = 0; row < one.rows; ++row) {
      for (const index_t back : {1, 2})
        one.k[std::size_t((row * one.capacity + one.capacity - back) * 576 + draw(0, 575))] = bf16(special);
    }
    one.d_k.set(one.k);
    const auto op = one.operation();
    buffer<unsigned char> workspace(op.workspace_bytes());
    op.prepare(workspace.data, nullptr);
    one.poison();
    op.run(one.problem(), workspace.data, nullptr);
    cuda::check(cudaDeviceSynchronize(), "latent attention");
    const auto got = one.out.get();
    for (index_t token = 0; token < 4; ++token) {
      for (index_t i = 0; i < one.q_heads * 512; ++i) {
        const float x = got[std::size_t(token * one.q_heads * 512 + i)];
        if (token < 2) REQUIRE(std::isfinite(x));
        if (token == 3 && std::isnan(special)) REQUIRE(std::isnan(x));
      }
    }
  }
}

TEST_CASE(
    "GPU prompts over latent rows equal the CPU's, in one chunk and in several, with the lse of the newest tokens") {
  if (kernel_missing()) return;
  using view_type = kv_view<const latent_elements<bf16>, 576, contiguous, 512>;
  for (const index_t heads : {1, 16, 128}) {
    for (const index_t tokens : scaled(std::vector<index_t>{1, 63, 150, 400}, 3)) {
      const index_t stored = draw(0, 300), all = stored + tokens, wanted = draw(1, tokens);
      const auto rows = normal<bf16>(std::size_t(all) * 576), q = normal<bf16>(std::size_t(tokens * heads) * 576);
      const std::size_t outs = std::size_t(tokens * heads) * 512, lses = std::size_t(wanted * heads);
      std::vector<float> expected(outs), expected_lse(std::size_t(tokens * heads));
      view_type view;
      view.k = rows.data(), view.k_strides = {offset_t(all) * 576, 0, 576, 1};
      view.sequences = view.kv_heads = 1;
      view.lengths = &all;
      cpu::executor workers;
      cpu::prefill_attention(
          view, cpu::query_rows<bf16>{nhd_rows<const bf16>(q.data(), tokens, heads, 576), &stored}, logit_rule{},
          {nhd_rows(expected.data(), tokens, heads, 512), nhd_rows(expected_lse.data(), tokens, heads, 1)}, workers);
      buffer<bf16> d_rows(rows), d_q(q);
      buffer<index_t> length(std::vector<index_t>{all}), first(std::vector<index_t>{stored});
      buffer<float> out(outs), lse(lses);
      const cuda::prefill_attention<view_type> op(1, 1, heads, cuda::device_info::current());
      buffer<unsigned char> workspace(op.workspace_bytes());
      workspace.fill(0xff), out.fill(0xff), lse.fill(0xff);
      view.k = d_rows.data, view.lengths = length.data;
      op.run({view, nhd_rows<const bf16>(d_q.data, tokens, heads, 576), first.data, logit_rule{},
              nhd_rows(out.data, tokens, heads, 512), nhd_rows(lse.data, wanted, heads, 1)},
             workspace.data, nullptr);
      cuda::check(cudaDeviceSynchronize(), "latent prompt");
      const auto got = out.get(), got_lse = lse.get();
      double difference = 0, size = 0;
      for (std::size_t i = 0; i < outs; ++i)
        difference += std::pow(double(got[i]) - expected[i], 2), size += std::pow(double(expected[i]), 2);
      INFO("heads " << heads << " tokens " << tokens << " stored " << stored);
      CHECK(std::sqrt(difference / size) < 6e-3);
      for (std::size_t i = 0; i < lses; ++i)
        REQUIRE(std::abs(got_lse[i] - expected_lse[expected_lse.size() - lses + i]) < 0.02f);
    }
  }
}

TEST_CASE("GPU attention over latent rows refuses what it cannot read, in a sentence") {
  if (kernel_missing()) return;
  latent_case<bf16> one({.sequences = 2, .heads = 1, .group = 16, .capacity = 100});
  const auto op = one.operation();
  buffer<unsigned char> workspace(op.workspace_bytes());
  op.prepare(workspace.data, nullptr);
  const auto said = [&](const auto& change) {
    auto p = one.problem();
    change(p);
    return refusal([&] { op.run(p, workspace.data, nullptr); });
  };
  CHECK(said([](auto& p) { p.view.k_strides.token += 1; }).find("stride of latent rows") != std::string::npos);
  CHECK(said([](auto& p) { p.view.k = nullptr; }).find("memory of the problem") != std::string::npos);
  CHECK(said([](auto& p) { p.q.heads = 8; }).find("q_heads") != std::string::npos);
  CHECK(said([](auto& p) { p.q.tokens = 9; }).find("tokens") != std::string::npos);
  CHECK(said([](auto& p) { p.lse.tokens = 3; }).find("lse") != std::string::npos);
  CHECK(said([](auto&) {}).empty());
  auto device = cuda::device_info::current();
  device.shared_memory = cuda::shared_memory_of(86);
  CHECK(refusal([&] { decltype(op) small(1, 1, 16, 1, device); }).find("shared memory") != std::string::npos);
}
