// Chunks of prompts and steps in one call on the device, rows packed: the bits of the same chunks and of the same step
// with rows by sequence.
#include <algorithm>
#include <string>
#include <vector>

#include "cases/step_rows.hpp"
#include "tessera/methods/full.hpp"
#include "tessera/methods/quest.hpp"
#include "tessera/methods/snapkv.hpp"

using namespace tessera;
using namespace gpu_test;

namespace {

const model_shape shape{2, 8, 2};
constexpr index_t sequences = 5;

template <class Method>
using device_cache = cuda::cache<Method>;

template <class Method>
device_cache<Method> made_cache() {
  Method method;
  method.set_budget(64);
  cuda::cache_options options;
  options.sequences = sequences;
  options.tokens = 2048;
  options.step_tokens = 8;
  return {shape, method, options};
}

/// Rows of a step by sequence, from packed ones, and its outputs packed again.
template <class T>
struct by_sequence {
  static constexpr index_t D = 64;
  buffer<T> q, k, v;
  buffer<float> out, lse;
  const batch& step;

  by_sequence(const batch& of, const step_rows<T>& packed, const std::vector<index_t>& begins)
      : q(laid_out(of, packed.q, begins, shape.q_heads)),
        k(laid_out(of, packed.k, begins, shape.kv_heads)),
        v(laid_out(of, packed.v, begins, shape.kv_heads)),
        out(q.count),
        lse(q.count / D),
        step(of) {}
  static std::vector<T> laid_out(const batch& of, const std::vector<T>& packed, const std::vector<index_t>& begins,
                                 index_t heads) {
    std::vector<T> rows(std::size_t(of.sequences() * of.tokens * heads * D), T(0.0f));
    for (index_t b = 0; b < of.sequences(); ++b) {
      std::copy_n(packed.begin() + offset_t(begins[std::size_t(b)]) * heads * D, of.tokens_of(b) * heads * D,
                  rows.begin() + offset_t(b) * of.tokens * heads * D);
    }
    return rows;
  }
  void pack(const std::vector<float>& from, index_t width, const std::vector<index_t>& begins,
            std::vector<float>& to) const {
    for (index_t b = 0; b < step.sequences(); ++b) {
      std::copy_n(from.begin() + offset_t(b) * step.tokens * width, step.tokens_of(b) * width,
                  to.begin() + offset_t(begins[std::size_t(b)]) * width);
    }
  }
};

/// `uneven`: steps of different lengths.
template <class Method>
void as_by_sequence(bool uneven) {
  using T = typename Method::layout_type::element_type;
  constexpr index_t D = 64;
  CAPTURE(std::string(Method::name), uneven);
  auto mixed = made_cache<Method>(), apart = made_cache<Method>();
  bool in_prompt[sequences];
  for (index_t id = 0; id < sequences; ++id) {
    REQUIRE(mixed.open() == apart.open());
    in_prompt[id] = true;
  }
  for (index_t round = 0; round < shrunk(16, 6); ++round) {
    CAPTURE(round);
    host_vector<batch_item> items;
    const index_t first_id = draw(0, sequences - 1), count = draw(1, sequences), alike = draw(1, 8);
    for (index_t i = 0; i < count; ++i) {
      const index_t id = (first_id + i) % sequences;
      if (!in_prompt[id]) in_prompt[id] = draw(0, 9) == 0;
      items.push_back({id, in_prompt[id] ? draw(1, 90) : uneven ? draw(1, 8) : alike, in_prompt[id]});
    }
    const mixed_batch work = mixed.prepare(items, nullptr);
    std::vector<index_t> begins;
    host_vector<index_t> ids, lengths;
    for (std::size_t i = 0; i < items.size(); ++i) {
      if (items[i].is_prompt) continue;
      begins.push_back(work.indptr[i]), ids.push_back(items[i].id), lengths.push_back(items[i].tokens);
    }
    batch step;
    for (const batch_item& item : items) {
      if (item.is_prompt) apart.reserve(item.id, item.tokens, nullptr);
    }
    if (!ids.empty()) step = apart.prepare_step(ids, lengths, nullptr);
    if (work.has_step()) mixed.begin_step(work.step, nullptr), apart.begin_step(step, nullptr);
    for (index_t layer = 0; layer < shape.layers; ++layer) {
      const step_rows<T> x(1, work.rows(), shape, D);
      buffer<float> out(x.q.size()), lse(x.q.size() / D), other(out.count), other_lse(lse.count);
      for (buffer<float>* one : {&out, &lse, &other, &other_lse}) one->fill(0xff);
      const auto q = x.rows(x.dq.data, x.q_heads), k = x.rows(x.dk.data, x.kv_heads), v = x.rows(x.dv.data, x.kv_heads);
      mixed.process(layer, work, q, k, v, nhd_rows(out.data, work.rows(), shape.q_heads, D),
                    nhd_rows(lse.data, work.rows(), shape.q_heads, 1), nullptr);
      std::vector<float> expected, expected_lse;
      const auto prompts = [&] {
        for (std::size_t i = 0; i < items.size(); ++i) {
          if (!items[i].is_prompt) continue;
          const index_t id = items[i].id;
          apart.prefill(layer, id, work.rows_of(q, i), work.rows_of(k, i), work.rows_of(v, i), nullptr);
          apart.prefill_attention(layer, id, work.rows_of(q, i),
                                  work.rows_of(nhd_rows(other.data, work.rows(), shape.q_heads, D), i),
                                  work.rows_of(nhd_rows(other_lse.data, work.rows(), shape.q_heads, 1), i), nullptr);
        }
      };
      if (ids.empty()) {
        prompts();
        expected = other.get(), expected_lse = other_lse.get();
      } else {
        const by_sequence<T> rows(step, x, begins);
        const index_t n = step.sequences();
        apart.decode(layer, step, nhd_rows<const T>(rows.q.data, step.tokens, shape.q_heads, D, n),
                     nhd_rows<const T>(rows.k.data, step.tokens, shape.kv_heads, D, n),
                     nhd_rows<const T>(rows.v.data, step.tokens, shape.kv_heads, D, n),
                     nhd_rows(rows.out.data, step.tokens, shape.q_heads, D, n),
                     nhd_rows(rows.lse.data, step.tokens, shape.q_heads, 1, n), nullptr);
        prompts();
        expected = other.get(), expected_lse = other_lse.get();
        rows.pack(rows.out.get(), shape.q_heads * D, begins, expected);
        rows.pack(rows.lse.get(), shape.q_heads, begins, expected_lse);
      }
      REQUIRE(same_bits(out.get(), expected));
      REQUIRE(same_bits(lse.get(), expected_lse));
    }
    for (const batch_item& item : items) {
      if (!item.is_prompt || draw(0, 2) == 0) continue;
      mixed.end_prefill(item.id, nullptr), apart.end_prefill(item.id, nullptr);
      in_prompt[item.id] = false;
    }
    for (index_t id = 0; id < sequences; ++id) {
      REQUIRE(mixed.next_position(id) == apart.next_position(id));
      REQUIRE(mixed.positions(1, id, 1) == apart.positions(1, id, 1));
    }
  }
}

}  // namespace

TEST_CASE("mixed batches on the device have the bits of the same step and the same chunks", "[gpu][cache]") {
  if (gpu_missing()) return;
  for (int i = 0; i < support::scaled(4); ++i) {
    as_by_sequence<full<bf16, 64>>(true);
    as_by_sequence<snapkv<fp16, 64>>(true);
    as_by_sequence<snapkv<fp16, 64>>(false);
    as_by_sequence<quest<bf16, 64>>(false);
  }
}

TEST_CASE("steps of different lengths are refused where a step's queries choose together", "[gpu][cache]") {
  if (gpu_missing()) return;
  auto kv = made_cache<quest<bf16, 64>>();
  kv.open(), kv.open();
  CHECK_THROWS_WITH(kv.prepare_step({0, 1}, host_vector<index_t>{1, 2}, nullptr),
                    contains("lengths of a decode step is different; expected the same of all sequences"));
  CHECK_THROWS_WITH(kv.prepare(host_vector<batch_item>{{0, 1}, {1, 2}}, nullptr), contains("lengths of a decode step"));
  CHECK(kv.next_position(0) == 0);
}
