// The sample of docs/engines.md: a decode step's attention over pages of an engine, against its definition in double.
#include "catch.hpp"

#include <cmath>
#include <random>

#include <tessera/backend/cpu/choose/score_and_choose.hpp>
#include <tessera/backend/cpu/store/pack.hpp>
#include <tessera/methods/snapkv.hpp>

// [own_pages]
#include <vector>

#include <tessera/backend/cpu/attend/attend.hpp>

namespace ts = tessera;

/// What an engine has of one layer.
struct own_pages {
  static constexpr int dim = 128;
  static constexpr ts::index_t q_heads = 8, kv_heads = 2, page = 16, max_blocks = 8;

  std::vector<ts::bf16> k, v;        // [pages, kv_heads, page, dim]
  std::vector<ts::index_t> blocks;   // [sequences, max_blocks], pages in any order
  std::vector<ts::index_t> lengths;  // [sequences], stored tokens, those of this step too

  /// The same memory as an operation reads it. Strides count elements. A stride that is left out is 0: then all
  /// sequences have the same length, or the same table.
  ts::kv_view<const ts::bf16, dim, ts::block_table> view() const {
    ts::kv_view<const ts::bf16, dim, ts::block_table> result;
    result.k = k.data();
    result.v = v.data();
    result.k_strides = {.outer = kv_heads * page * dim, .head = page * dim, .token = dim};  // outer: from page to page
    result.v_strides = result.k_strides;
    result.sequences = ts::index_t(lengths.size());
    result.kv_heads = kv_heads;
    result.lengths = lengths.data();
    result.length_strides = {.sequence = 1, .head = 0};  // one length for all heads of a sequence
    result.table = {.blocks = blocks.data(), .page = page, .sequence_stride = max_blocks};
    return result;
  }
};

/// Attention of one decode step: one token of each sequence.
/// Shapes   q, out [sequences, q_heads, dim]; lse [sequences, q_heads]. Queries and keys come after RoPE.
void attend(const own_pages& engine, const float* q, float* out, float* lse, ts::cpu::decode_workspace& scratch,
            ts::cpu::executor& workers) {
  const auto view = engine.view();
  std::vector<ts::index_t> position(engine.lengths);  // of each sequence's query: that of its newest stored token
  for (ts::index_t& newest : position) --newest;

  const ts::cpu::query_rows<float> queries{ts::nhd_rows(q, 1, engine.q_heads, engine.dim, view.sequences),
                                           position.data()};
  const ts::cpu::attention_output output{ts::nhd_rows(out, 1, engine.q_heads, engine.dim, view.sequences),
                                         ts::nhd_rows(lse, 1, engine.q_heads, 1, view.sequences)};  // or {}: not wanted
  const ts::logit_rule rule{};              // scale 1 / sqrt(dim), causal; no soft cap, no window, no sinks
  const ts::selection_view* all = nullptr;  // no selection: everything that is stored
  ts::cpu::decode_attention(view, queries, rule, all, output, scratch, workers);
}
// [own_pages]

namespace {

/// The largest difference of a step's outputs and log-sum-exps from the definition.
double worst_error(const own_pages& engine, const std::vector<float>& q, const std::vector<float>& out,
                   const std::vector<float>& lse) {
  double worst = 0;
  for (std::size_t row = 0; row < lse.size(); ++row) {
    const std::size_t b = row / engine.q_heads, head = row % engine.q_heads / (engine.q_heads / engine.kv_heads);
    std::vector<double> sums(engine.dim, 0.0);
    double weights = 0;
    for (std::size_t t = 0; t < std::size_t(engine.lengths[b]); ++t) {
      const auto id = std::size_t(engine.blocks[b * engine.max_blocks + t / engine.page]);
      const std::size_t at = ((id * engine.kv_heads + head) * engine.page + t % engine.page) * engine.dim;
      double dot = 0;
      for (std::size_t d = 0; d < engine.dim; ++d) dot += double(q[row * engine.dim + d]) * float(engine.k[at + d]);
      const double weight = std::exp(dot / std::sqrt(double(engine.dim)));
      weights += weight;
      for (std::size_t d = 0; d < engine.dim; ++d) sums[d] += weight * float(engine.v[at + d]);
    }
    worst = std::max(worst, std::abs(std::log(weights) - lse[row]));
    for (std::size_t d = 0; d < engine.dim; ++d) {
      worst = std::max(worst, std::abs(sums[d] / weights - out[row * engine.dim + d]));
    }
  }
  return worst;
}

}  // namespace

namespace {

/// An engine with three sequences of random rows.
own_pages random_engine(std::mt19937& bits) {
  constexpr ts::index_t pages = 20;
  std::normal_distribution<float> normal;
  own_pages engine;
  engine.lengths = {100, 16, 33};
  engine.k.resize(pages * own_pages::kv_heads * own_pages::page * own_pages::dim);
  engine.v.resize(engine.k.size());
  for (auto* pool : {&engine.k, &engine.v}) {
    for (ts::bf16& x : *pool) x = ts::bf16(normal(bits));
  }
  engine.blocks.assign(engine.lengths.size() * own_pages::max_blocks, -1);
  ts::index_t taken = 0;
  for (std::size_t b = 0; b < engine.lengths.size(); ++b) {
    for (ts::index_t i = 0; i * own_pages::page < engine.lengths[b]; ++i) {
      engine.blocks[b * own_pages::max_blocks + std::size_t(i)] = taken++ * 7 % pages;
    }
  }
  return engine;
}

}  // namespace

TEST_CASE("a step attends the pages that an engine keeps, as its definition says", "[attend][engine]") {
  std::mt19937 bits(7);
  std::normal_distribution<float> normal;
  const own_pages engine = random_engine(bits);
  std::vector<float> q(engine.lengths.size() * own_pages::q_heads * own_pages::dim), out(q.size());
  std::vector<float> lse(engine.lengths.size() * own_pages::q_heads);
  for (float& x : q) x = normal(bits);

  ts::cpu::decode_workspace scratch;
  ts::cpu::executor workers(2);
  attend(engine, q.data(), out.data(), lse.data(), scratch, workers);
  CHECK(worst_error(engine, q, out, lse) < 2e-6);
}

TEST_CASE("memory that an engine has forgotten to pass is named", "[attend][engine]") {
  using view_type = ts::kv_view<ts::bf16, own_pages::dim, ts::block_table>;
  std::mt19937 bits(7);
  own_pages engine = random_engine(bits);
  const ts::index_t position[] = {99, 15, 32};
  const std::vector<float> q(3 * own_pages::q_heads * own_pages::dim);
  std::vector<float> out(q.size());
  ts::cpu::executor workers(1);
  view_type good;
  const auto of = engine.view();
  good.k = engine.k.data(), good.v = engine.v.data();
  good.k_strides = of.k_strides, good.v_strides = of.v_strides;
  good.sequences = of.sequences, good.kv_heads = of.kv_heads;
  good.lengths = of.lengths, good.length_strides = {1, 0};
  good.table = of.table;

  const auto attends = [&](const view_type& view, const ts::index_t* first_position) {
    ts::cpu::decode_workspace scratch;
    const auto rows = ts::nhd_rows(q.data(), 1, own_pages::q_heads, own_pages::dim, 3);
    ts::cpu::decode_attention(view, ts::cpu::query_rows<float>{rows, first_position}, ts::logit_rule{}, nullptr,
                              {ts::nhd_rows(out.data(), 1, own_pages::q_heads, own_pages::dim, 3), {}}, scratch,
                              workers);
  };
  const auto chooses = [&](const view_type& view, ts::index_t queries) {
    ts::snapkv<ts::bf16, own_pages::dim> method;
    method.set_budget(32);
    ts::selection kept;
    ts::cpu::choose_workspace<own_pages::dim> scratch;
    ts::choose_problem<view_type, float> problem;
    problem.view = view;
    problem.first_position = position;
    if (queries > 0) problem.q = ts::nhd_rows(q.data(), 1, own_pages::q_heads, own_pages::dim, 3);
    ts::cpu::score_and_choose(method.retain, problem, kept, scratch, workers);
  };
  CHECK_NOTHROW(attends(good, position));
  CHECK_NOTHROW(chooses(good, 1));
  CHECK_THROWS_WITH(attends(good, nullptr), contains("first_position is null"));
  CHECK_THROWS_WITH(chooses(good, 0), contains("queries is none; expected the last ones of each prompt"));
  CHECK_THROWS_WITH(ts::cpu::pack(good, {}, good, workers), contains("counts of the selection is null"));
  const auto refuses = [&](const view_type& view, const char* sentence) {
    CHECK_THROWS_WITH(attends(view, position), contains(sentence));
    CHECK_THROWS_WITH(chooses(view, 1), contains(sentence));
    CHECK_THROWS_WITH(ts::cpu::pack(view, {}, view, workers), contains(sentence));
  };
  view_type bad = good;
  bad.lengths = nullptr;
  refuses(bad, "lengths of the view is null");
  bad = good;
  bad.k = nullptr;
  refuses(bad, "k or v of the view is null");
  bad = good;
  bad.table.blocks = nullptr;
  refuses(bad, "blocks of the view's table is null");
  engine.lengths = {0, 0, 0};  // nothing is stored: nothing is read
  CHECK_NOTHROW(attends(bad, position));
}
