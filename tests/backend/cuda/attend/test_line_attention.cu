// GPU attention along lines against the CPU's, over the same lines: every head dim, every table, evictions, chunks.
#include <memory>

#include "backend/cuda/attend/prefill_case.hpp"
#include "catch.hpp"
#include "prefill/line_case.hpp"
#include "tessera/backend/cpu/attend/line_attention.hpp"
#include "tessera/backend/cuda/attend/prefill/line_attention.cuh"

using namespace tessera;
using namespace gpu_test;

namespace {

/// Some of [0, next): single ones, or runs, or all.
std::vector<index_t> random_lines(index_t next, int kind) {
  std::vector<index_t> all;
  if (kind == 0) return all;
  const int share = draw(1, 90), run = kind == 1 ? 1 : draw(2, 200);
  bool taken = false;
  for (index_t at = 0; at < next; ++at) {
    if (at % run == 0) taken = kind == 3 || draw(1, 100) <= share;
    if (taken) all.push_back(at);
  }
  return all;
}

/// Lines as the device has them.
struct uploaded_lines {
  index_t words;
  std::unique_ptr<buffer<std::uint32_t>> slash, vertical;
  std::unique_ptr<buffer<index_t>> columns, counts, order;
  index_t dense_rows;

  /// `slot_at(head, position)`: no_index where a position is not stored.
  template <class SlotAt>
  uploaded_lines(const prompt_lines& lines, index_t group, const SlotAt& slot_at)
      : words(ceil_div(lines.next, 32) + draw(0, 2)), dense_rows(lines.next - lines.dense_from) {
    const std::size_t heads = lines.heads.size(), each = std::size_t(words);
    std::vector<std::uint32_t> s(heads * (each + 1)), v(heads * each);
    std::vector<index_t> c(heads * each * 32, -1), n(heads), o(heads);
    for (std::size_t h = 0; h < heads; ++h) {
      for (const index_t distance : lines.heads[h].slash) {
        const std::size_t bit = each * 32 - 1 - std::size_t(distance);
        s[h * (each + 1) + bit / 32] |= 1u << bit % 32;
      }
      for (const index_t position : lines.heads[h].vertical) {
        const index_t slot = slot_at(index_t(h) / group, position);
        if (slot == no_index) continue;
        v[h * each + std::size_t(slot) / 32] |= 1u << slot % 32;
        c[h * each * 32 + std::size_t(n[h]++)] = slot;
      }
      o[h] = index_t(heads - 1 - h);
    }
    slash = std::make_unique<buffer<std::uint32_t>>(s), vertical = std::make_unique<buffer<std::uint32_t>>(v);
    columns = std::make_unique<buffer<index_t>>(c), counts = std::make_unique<buffer<index_t>>(n);
    order = std::make_unique<buffer<index_t>>(o);
  }
  cuda::line_tables tables(bool ordered) const {
    return {words,     slash->data, vertical->data, columns->data, counts->data, ordered ? order->data : nullptr,
            dense_rows};
  }
};

template <class T, int D, int Dv, class Table, class Out>
struct line_trial {
  using pools_type = pools<T, D, Dv, Table>;
  using view_type = typename pools_type::view_type;
  shape s;
  pools_type stored;
  std::vector<T> q;
  std::vector<float> sinks;
  prompt_lines lines;

  explicit line_trial(const shape& of)
      : s(of),
        stored(of),
        q(normal<T>(of.query_rows() * D, of.spread)),
        sinks(normal<float>(std::size_t(of.q_heads()))) {
    lines.first = stored.first[0], lines.next = lines.first + s.tokens;
    lines.dense_from = lines.next - (draw(0, 2) ? 0 : draw(0, s.tokens));
    for (index_t h = 0; h < s.q_heads(); ++h) {
      const index_t kv_head = h / s.group;
      line_set set{{}, random_lines(lines.next, draw(0, 3))};
      // Of the CPU's too, only stored positions are columns.
      for (const index_t at : random_lines(lines.next, draw(0, 3) ? draw(0, 2) : 3)) {
        if (slot_at(kv_head, at) != no_index) set.vertical.push_back(at);
      }
      lines.heads.push_back(std::move(set));
    }
  }
  index_t slot_at(index_t head, index_t position) const {
    const view_type view = stored.host();
    if (!s.evicted) return position < view.length(0, head) ? position : no_index;
    for (index_t slot = 0; slot < view.length(0, head); ++slot) {
      if (view.position(0, head, slot) == position) return slot;
    }
    return no_index;
  }

  std::vector<Out> out;
  std::vector<float> lse;
  index_t gathered = 0;     ///< rows of vertical lines for which there is memory
  int multiprocessors = 0;  ///< that the operation believes in, so that blocks attend many items; 0: those there are
  /// Runs on the device; with a stream, recorded and replayed.
  void run(bool split, bool ordered, cudaStream_t recorded = nullptr) {
    const buffer<T> d_k(stored.k), d_v(stored.v), d_q(q);
    const buffer<index_t> lengths(stored.lengths), positions(stored.positions), first(stored.first),
        blocks(stored.blocks), indptr(stored.indptr);
    const buffer<offset_t> begin(stored.begin);
    const buffer<float> d_sinks(sinks);
    buffer<Out> to(s.query_rows() * Dv);
    buffer<float> lse_to(s.query_rows());
    to.fill(0xff), lse_to.fill(0xff);
    const uploaded_lines up(lines, s.group, [&](index_t head, index_t at) { return slot_at(head, at); });
    logit_rule rule = s.rule;
    if (s.sinks) rule.sink_logits = d_sinks.data;
    const cuda::prefill_problem<view_type, Out> problem{
        stored.at(d_k.data, d_v.data, lengths.data, positions.data, blocks.data, indptr.data, begin.data),
        nhd_rows<const T>(d_q.data, s.tokens, s.q_heads(), D),
        first.data,
        rule,
        nhd_rows(to.data, s.tokens, s.q_heads(), Dv),
        nhd_rows(lse_to.data, s.tokens, s.q_heads(), 1)};
    auto device = cuda::device_info::current();
    if (multiprocessors > 0) device.multiprocessors = multiprocessors;
    const cuda::line_attention<view_type, Out> op(s.heads, s.q_heads(), device);
    const std::size_t gathered_bytes = std::size_t(gathered) * (D + Dv) * sizeof(T);
    buffer<unsigned char> workspace(split ? op.workspace_bytes() : 0), columns(gathered_bytes);
    workspace.fill(0xff), columns.fill(0xff);
    const auto launch = [&](cudaStream_t stream) {
      op.run(problem, up.tables(ordered), split ? workspace.data : nullptr, stream, {columns.data, gathered_bytes});
    };
    if (recorded) {
      graph replay(recorded, [&] { launch(recorded); });
      replay.launch();
    } else {
      launch(nullptr);
    }
    cuda::check(cudaDeviceSynchronize(), "attention along lines");
    out = to.get(), lse = lse_to.get();
  }

  double error() const {
    std::vector<float> expected(s.query_rows() * Dv), expected_lse(s.query_rows());
    logit_rule rule = s.rule;
    if (s.sinks) rule.sink_logits = sinks.data();
    cpu::executor workers;
    cpu::line_attention(stored.host(),
                        cpu::query_rows<T>{nhd_rows(q.data(), s.tokens, s.q_heads(), D), stored.first.data()}, rule,
                        lines,
                        cpu::attention_output{nhd_rows(expected.data(), s.tokens, s.q_heads(), Dv),
                                              nhd_rows(expected_lse.data(), s.tokens, s.q_heads(), 1)},
                        workers);
    double worst = 0;
    for (std::size_t row = 0; row < s.query_rows(); ++row) {
      double difference = 0, size = 0;
      for (std::size_t i = row * Dv; i < (row + 1) * Dv; ++i) {
        const float x = expected[i], y = float(out[i]);
        if (std::isfinite(x) != std::isfinite(y) || (!std::isfinite(x) && std::isinf(x) && x != y)) return 1e9;
        if (!std::isfinite(x)) continue;
        difference += std::pow(double(x) - y, 2), size += std::pow(double(x), 2);
      }
      if (size == 0 && difference != 0) return 1e8;
      if (size > 0) worst = std::max(worst, std::sqrt(difference / size));
      const float a = expected_lse[row], b = lse[row];
      const bool same = std::isfinite(a) ? std::abs(a - b) < 1e-3f * std::max(1.0f, std::abs(a))
                                         : (std::isnan(a) ? std::isnan(b) : a == b);
      if (!same) return 1e7;
    }
    return worst;
  }
};

shape random_chunk(int kind) {
  const index_t groups[] = {1, 2, 4, 8};
  shape s{1, draw(1, 3), groups[draw(0, 3)], draw(1, scaled(400)), draw(0, scaled(900))};
  s.evicted = draw(0, 2) == 0;
  if (kind % 6 == 1) s.rule.soft_cap = 15;
  if (kind % 6 == 2) s.rule.sliding_window = draw(1, 300);
  if (kind % 6 == 3) s.sinks = true;
  if (kind % 6 == 4) s.spread = 6;
  if (kind % 6 == 5) s.rule.scale = draw(0, 1) ? 0.3f : -0.2f;
  return s;
}

template <class T, int D, int Dv, class Table, class Out = float>
void try_lines() {
  for (const int kind : scaled(cases(12), 3)) {
    const shape s = random_chunk(kind);
    line_trial<T, D, Dv, Table, Out> of(s);
    INFO("head dims " << D << ", " << Dv << " heads " << s.heads << " group " << s.group << " tokens " << s.tokens
                      << " stored " << s.stored << " evicted " << s.evicted << " case " << kind % 6 << " window "
                      << s.rule.sliding_window << " dense from " << of.lines.dense_from << " of " << of.lines.next);
    for (const bool split : {false, true}) {
      of.gathered = draw(0, 1) * 50'000, of.multiprocessors = 0;
      of.run(split, draw(0, 1) == 1);
      CHECK(of.error() < 1.2e-2);
      const auto once = of.out;
      of.gathered = draw(0, 2) * 1'000;  // none, of some heads, of all
      if (!split) of.multiprocessors = draw(1, 3);
      of.run(split, true);
      CHECK(same_bits(once, of.out));
    }
  }
}

}  // namespace

TEST_CASE("GPU attention along lines equals the CPU's at every head dim, over every table", "[gpu][lines]") {
  if (gpu_missing()) return;
  try_lines<bf16, 64, 64, contiguous>();
  try_lines<fp16, 64, 64, ragged>();
  try_lines<bf16, 80, 80, block_table, fp16>();
  try_lines<bf16, 128, 128, block_table, bf16>();
  try_lines<fp16, 128, 128, ragged>();
  try_lines<bf16, 192, 128, csr_table>();
  try_lines<fp16, 256, 256, contiguous, fp16>();
}

TEST_CASE("GPU attention along lines holds at the edges of tiles and chunks of slots", "[gpu][lines]") {
  if (gpu_missing()) return;
  for (const index_t tokens : scaled(std::vector<index_t>{1, 2, 31, 32, 33, 63, 64, 65, 127, 128, 129}, 3)) {
    for (const index_t stored : scaled(std::vector<index_t>{0, 1, 31, 32, 63, 64, 127, 128}, 2)) {
      for (const bool evicted : {false, true}) {
        shape s{1, 1, draw(0, 1) ? 4 : 1, tokens, stored};
        s.evicted = evicted;
        line_trial<bf16, 128, 128, contiguous, float> wide(s);
        line_trial<bf16, 96, 96, contiguous, float> any(s);
        INFO("tokens " << tokens << " stored " << stored << " group " << s.group << " evicted " << evicted);
        wide.run(false, false), any.run(true, true);
        CHECK(wide.error() < 1.2e-2);
        CHECK(any.error() < 1.2e-2);
      }
    }
  }
}

TEST_CASE("GPU attention along lines lists what it reads in as many pieces as it takes", "[gpu][lines]") {
  if (gpu_missing()) return;
  // 2,048 entries are 64K slots of the general kernel, 8,192 are 256K of the Hopper kernel; columns need as many entries.
  shape s{1, 1, 1, 130, shrunk(70'000, 3'000)};
  for (const int kind : {1, 2, 3}) {
    line_trial<bf16, 80, 80, contiguous, float> of(s);
    of.lines.heads[0] = {random_lines(of.lines.next, kind), random_lines(of.lines.next, 4 - kind)};
    of.lines.dense_from = of.lines.next;
    of.run(false, false);
    CHECK(of.error() < 1.2e-2);
    of.gathered = 200'000;
    of.run(true, true);
    CHECK(of.error() < 1.2e-2);
  }
}

TEST_CASE("blocks of attention along lines attend many items, some of them again", "[gpu][lines]") {
  if (gpu_missing()) return;
  for (int i = 0; i < scaled(6, 4); ++i) {
    line_trial<bf16, 128, 128, contiguous, float> of({1, 2, 2, draw(300, 700), draw(0, 300)});
    of.gathered = draw(0, 1) * 50'000;  // rows behind a tile's last are other ones then, and spoil it too
    for (int spoilt = i / 2; spoilt > 0; --spoilt) {
      const std::size_t slot = std::size_t(draw(0, of.lines.next - 1)) * 2 + std::size_t(draw(0, 1));
      of.stored.v[slot * 128 + std::size_t(draw(0, 127))] = spoilt == 1 ? bf16(NAN) : bf16(infinity);
    }
    std::vector<std::vector<float>> all;
    for (const int multiprocessors : {0, 1, 2, 5}) {
      INFO("case " << i << " on " << multiprocessors << " tokens " << of.s.tokens << " stored " << of.s.stored);
      of.multiprocessors = multiprocessors;
      of.run(multiprocessors > 0 && i % 2, true);  // a workspace: in the order in which blocks come
      CHECK(of.error() < 1.2e-2);
      all.push_back(of.out);
      CHECK(same_bits(all[0], of.out));
    }
  }
}

TEST_CASE("a recorded attention along lines gives the bits of a plain one", "[gpu][lines]") {
  if (gpu_missing()) return;
  cudaStream_t stream{};
  cuda::check(cudaStreamCreate(&stream), "cudaStreamCreate");
  line_trial<bf16, 128, 128, contiguous, float> of({1, 2, 4, 200, 300});
  of.run(true, true);
  const auto plain = of.out;
  of.run(true, true, stream);
  CHECK(same_bits(plain, of.out));
  cudaStreamDestroy(stream);
}

TEST_CASE("a value that is no number reaches the rows whose lines meet it, and no other", "[gpu][lines]") {
  if (gpu_missing()) return;
  for (int i = 0; i < scaled(12, 3); ++i) {
    line_trial<bf16, 128, 128, contiguous, float> wide({1, 1, 2, draw(1, 200), draw(0, 300)});
    line_trial<fp16, 96, 96, contiguous, float> any({1, 1, 2, draw(1, 200), draw(0, 300)});
    const auto spoil = [&](auto& of, auto special) {
      const std::size_t slot = std::size_t(draw(0, of.lines.next - 1)),
                        dim = of.stored.v.size() / std::size_t(of.lines.next);
      of.stored.v[slot * dim + 7] = special;
      of.gathered = draw(0, 1) * 10'000;
      of.run(false, false);
      CHECK(of.error() < 1.2e-2);
    };
    spoil(wide, bf16(NAN)), spoil(any, fp16(infinity));
  }
}

TEST_CASE("rows without a key on their lines give zeros", "[gpu][lines]") {
  if (gpu_missing()) return;
  line_trial<bf16, 128, 128, contiguous, float> of({1, 1, 1, 100, 0});
  of.lines.heads[0] = {{40}, {}}, of.lines.dense_from = 100;
  of.run(false, false);
  CHECK(of.error() < 1.2e-2);
  CHECK((of.out[0] == 0 && of.lse[0] == -infinity));
  CHECK(of.lse[40] > -infinity);
}
