// Rows of blocks with their own scales, as llama.cpp's cells are, against a decoder and attention in double.
#include "catch.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <vector>

#include <tessera/backend/cpu/attend/attend.hpp>
#include <tessera/backend/cpu/choose/score_and_choose.hpp>
#include <tessera/backend/cpu/read/extrema/page_index.hpp>
#include <tessera/backend/cpu/store/pack.hpp>
#include <tessera/budget/uniform.hpp>
#include <tessera/scorer/exact_score.hpp>
#include <tessera/scorer/key_norm.hpp>
#include <tessera/scorer/observation_window.hpp>
#include <tessera/selector/top_tokens.hpp>
#include <tessera/stages.hpp>

#include "support/random.hpp"
#include "support/tolerance.hpp"

using namespace tessera;
using support::rng;

namespace {

/// A half and what its bits say, made from its parts: 11 bits of mantissa, an exponent.
struct half {
  std::uint16_t bits;
  double value;
};
half random_half(rng& random) {
  const index_t mantissa = random.between(0, 1023), exponent = random.between(4, 12), sign = random.between(0, 1);
  return {std::uint16_t(sign << 15 | exponent << 10 | mantissa),
          (sign ? -1 : 1) * std::ldexp(1024.0 + mantissa, exponent - 25)};
}

/// Writes one block as ggml's q8_0 or q4_0 says, byte by byte, and what it means.
template <class Block>
void write_block(rng& random, unsigned char* bytes, double* means) {
  const half scale = random_half(random);
  bytes[0] = scale.bits & 255, bytes[1] = scale.bits >> 8;
  for (int i = 0; i < 32; ++i) {
    if (std::is_same_v<Block, int8_block>) {
      const int value = random.between(-128, 127);
      bytes[2 + i] = value < 0 ? value + 256 : value;
      means[i] = scale.value * value;
    } else {
      const int value = random.between(0, 15);
      unsigned char& pair = bytes[2 + i % 16];
      pair = i < 16 ? value : pair + 16 * value;
      means[i] = scale.value * (value - 8);
    }
  }
}

/// Cells of one sequence as an engine has them, [cells, kv_heads, blocks], of which a list says which are the sequence's.
template <class E, int D>
struct cells {
  using block = typename E::stored_type;
  static constexpr int blocks = D / 32;
  index_t heads, length, count;
  std::vector<unsigned char> k_bytes, v_bytes;
  std::vector<double> k, v;  // [cells, kv_heads, D]
  std::vector<index_t> slots;
  std::vector<offset_t> begins;

  cells(rng& random, index_t heads_, index_t length_)
      : heads(heads_), length(length_), count(length_ + random.between(0, 20)), slots(std::size_t(count)) {
    for (auto [bytes, means] : {std::pair{&k_bytes, &k}, std::pair{&v_bytes, &v}}) {
      bytes->resize(std::size_t(count * heads * blocks) * sizeof(block));
      means->resize(std::size_t(count * heads * D));
      for (std::size_t i = 0; i < std::size_t(count * heads * blocks); ++i)
        write_block<block>(random, bytes->data() + i * sizeof(block), means->data() + i * 32);
    }
    std::iota(slots.begin(), slots.end(), 0);
    for (std::size_t i = slots.size(); i > 1; --i)
      std::swap(slots[i - 1], slots[std::size_t(random.between(0, index_t(i) - 1))]);
    slots.resize(std::size_t(length));
    begins.assign(std::size_t(heads), 0);  // the heads share the list
  }
  kv_view<const E, D, filtered<contiguous>> view() const {
    kv_view<const E, D, filtered<contiguous>> view;
    view.k = reinterpret_cast<const block*>(k_bytes.data());
    view.v = reinterpret_cast<const block*>(v_bytes.data());
    view.k_strides = view.v_strides = {0, blocks, offset_t(heads) * blocks};
    view.sequences = 1;
    view.kv_heads = heads;
    view.lengths = &length;
    view.table = {{}, slots.data(), begins.data(), heads};
    return view;
  }
  const double* row(const std::vector<double>& rows, index_t head, index_t slot) const {
    return rows.data() + (offset_t(slots[std::size_t(slot)]) * heads + head) * D;
  }
};

/// The probabilities of one query over slots [0, visible) of some, by the definition.
template <class E, int D>
std::vector<double> probabilities(const cells<E, D>& stored, index_t head, const float* q, double scale,
                                  const std::vector<index_t>& slots, double& lse) {
  std::vector<double> p;
  for (const index_t slot : slots) {
    double dot = 0;
    for (int d = 0; d < D; ++d) dot += double(q[d]) * stored.row(stored.k, head, slot)[d];
    p.push_back(dot * scale);
  }
  const double top = *std::max_element(p.begin(), p.end());
  double sum = 0;
  for (double& x : p) sum += x = std::exp(x - top);
  for (double& x : p) x /= sum;
  lse = top + std::log(sum);
  return p;
}

struct asked {
  index_t tokens, heads, first;
  std::vector<float> q;
  asked(rng& random, index_t stored, index_t tokens_, index_t heads_, int dim)
      : tokens(std::min(tokens_, stored)),
        heads(heads_),
        first(stored - tokens),
        q(support::normals(random, std::size_t(tokens * heads * dim), 0.1f)) {}
};

template <class E, int D>
void attends_by_the_definition(std::uint64_t seed) {
  rng random(seed);
  for (index_t i = 0; i < support::scaled(16); ++i) {
    const index_t group = 1 + i % 8, heads = random.between(1, 3);
    const cells<E, D> stored(random, heads, i == 0 ? 1 : random.pick({31, 63, 64, 65, random.between(1, 300), 1030}));
    const asked by(random, stored.length, random.pick({1, 3, 8}), heads * group, D);
    const auto view = stored.view();
    const cpu::query_rows<float> queries{nhd_rows(by.q.data(), by.tokens, by.heads, D), &by.first};
    selection chosen;
    chosen.reset({std::vector<index_t>(std::size_t(heads), stored.length)});
    for (index_t h = 0; h < heads; ++h) {
      for (index_t slot = 0; slot < stored.length; ++slot)
        if (slot == 0 || random.chance(0.5)) chosen.row(h)[chosen.counts[std::size_t(h)]++] = slot;
    }
    const selection_view some = chosen.view();
    std::vector<float> out(by.q.size()), lse(std::size_t(by.tokens * by.heads));
    const cpu::attention_output to{nhd_rows(out.data(), by.tokens, by.heads, D),
                                   nhd_rows(lse.data(), by.tokens, by.heads, 1)};
    cpu::executor workers(2);
    cpu::decode_workspace workspace;
    for (const int way : {0, 1, 2}) {
      if (way == 0) cpu::prefill_attention(view, queries, logit_rule{}, to, workers);
      if (way == 1) cpu::decode_attention(view, queries, logit_rule{}, nullptr, to, workspace, workers);
      if (way == 2) cpu::decode_attention(view, queries, logit_rule{}, &some, to, workspace, workers);
      for (index_t row = 0; row < by.tokens * by.heads; ++row) {
        const index_t token = row / by.heads, head = row % by.heads / group;
        std::vector<index_t> slots;
        for (index_t slot = 0; slot <= by.first + token; ++slot) {
          const index_t *begin = chosen.row(head), *end = begin + chosen.counts[std::size_t(head)];
          if (way < 2 || std::binary_search(begin, end, slot)) slots.push_back(slot);
        }
        double expected_lse;
        const auto p =
            probabilities(stored, head, by.q.data() + row * D, 1 / std::sqrt(double(D)), slots, expected_lse);
        std::vector<double> expected(D);
        for (std::size_t s = 0; s < slots.size(); ++s) {
          for (int d = 0; d < D; ++d) expected[std::size_t(d)] += p[s] * stored.row(stored.v, head, slots[s])[d];
        }
        CAPTURE(i, group, stored.length, way, row);
        REQUIRE(support::row_error(out.data() + row * D, expected) < 1e-4);
        REQUIRE(support::number_error(lse[std::size_t(row)], expected_lse) < 1e-5);
      }
    }
  }
}

template <class E, int D>
void scores_by_the_definition(std::uint64_t seed) {
  rng random(seed);
  for (index_t i = 0; i < support::scaled(6); ++i) {
    const index_t group = random.between(1, 8), heads = random.between(1, 2);
    const cells<E, D> stored(random, heads, i == 0 ? 1 : random.between(1, 200));
    const asked by(random, stored.length, 5, heads * group, D);
    const auto view = stored.view();
    const cpu::query_rows<float> queries{nhd_rows(by.q.data(), by.tokens, by.heads, D), &by.first};
    std::vector<double> sums(std::size_t(heads * stored.length));
    std::vector<double> best(sums.size(), -HUGE_VAL);
    for (index_t row = 0; row < by.tokens * by.heads; ++row) {
      const index_t head = row % by.heads / group;
      std::vector<index_t> slots(std::size_t(by.first + row / by.heads) + 1);
      std::iota(slots.begin(), slots.end(), 0);
      double lse;
      const auto p = probabilities(stored, head, by.q.data() + row * D, 1 / std::sqrt(double(D)), slots, lse);
      for (std::size_t s = 0; s < slots.size(); ++s) {
        sums[std::size_t(head * stored.length) + s] += p[s];
        double& top = best[std::size_t(head * stored.length) + s];
        top = std::max(top, p[s]);
      }
    }
    std::vector<float> scores(sums.size());
    std::vector<offset_t> offsets;
    for (index_t h = 0; h < heads; ++h) offsets.push_back(offset_t(h) * stored.length);
    cpu::score_workspace<D> scratch;
    cpu::executor workers(2);
    cpu::score_rows(view, queries, {}, observation_window{}, scores.data(), offsets.data(), scratch, workers);
    for (std::size_t s = 0; s < scores.size(); ++s) REQUIRE(support::number_error(scores[s], sums[s]) < 1e-4);

    // Of all other scorers: what they say of plain rows of the same numbers, bit for bit.
    std::vector<float> k, v;
    for (index_t h = 0; h < heads; ++h) {
      for (index_t slot = 0; slot < stored.length; ++slot) {
        k.insert(k.end(), stored.row(stored.k, h, slot), stored.row(stored.k, h, slot) + D);
        v.insert(v.end(), stored.row(stored.v, h, slot), stored.row(stored.v, h, slot) + D);
      }
    }
    kv_view<const float, D> plain;
    plain.k = k.data(), plain.v = v.data();
    plain.k_strides = plain.v_strides = {0, offset_t(stored.length) * D, D};
    plain.sequences = 1, plain.kv_heads = heads, plain.lengths = &stored.length;
    const auto same = [&](const auto& scorer) {
      std::vector<float> a(scores.size()), b = a;
      cpu::score_rows(view, queries, {}, scorer, a.data(), offsets.data(), scratch, workers);
      cpu::score_rows(plain, queries, {}, scorer, b.data(), offsets.data(), scratch, workers);
      REQUIRE(support::same_bits(a, b));
    };
    same(exact_score{});
    same(observation_window{});
    const auto chosen_of = [&](const auto& of, auto policy) {
      policy.budget.tokens = std::max(5, stored.length / 2);
      choose_problem<std::remove_cvref_t<decltype(of)>, float> problem;
      problem.view = of, problem.q = queries.q, problem.first_position = &by.first;
      selection kept;
      cpu::choose_workspace<D> memory;
      cpu::score_and_choose(policy, problem, kept, memory, workers);
      return std::pair(kept.indices, kept.counts);
    };
    retain<observation_window, uniform, top_tokens> window;
    window.scorer.window = by.tokens;
    REQUIRE(chosen_of(view, window) == chosen_of(plain, window));
    const retain<key_norm, uniform, top_tokens> norm;
    REQUIRE(chosen_of(view, norm) == chosen_of(plain, norm));

    for (const index_t page : {1, 4}) {
      cpu::page_index<float, D> index;
      index.reset(heads, page);
      index.extend(view);
      for (index_t h = 0; h < heads; ++h) {
        for (index_t slot = 0; slot < stored.length; slot += page) {
          for (int d = 0; d < D; ++d) {
            double low = HUGE_VAL, high = -HUGE_VAL;
            for (index_t s = slot; s < std::min(stored.length, slot + page); ++s) {
              low = std::min(low, stored.row(stored.k, h, s)[d]);
              high = std::max(high, stored.row(stored.k, h, s)[d]);
            }
            REQUIRE(double(index.view().lower(h, d)[slot / page]) == low);
            if (page > 1) REQUIRE(double(index.view().upper(h, d)[slot / page]) == high);
          }
        }
      }
    }
  }
}

}  // namespace

TEST_CASE("attention over blocks of 8 and of 4 bits is that of the definition", "[cpu]") {
  attends_by_the_definition<block_int8_elements<fp16>, 64>(1);
  attends_by_the_definition<block_int8_elements<fp32>, 128>(2);
  attends_by_the_definition<block_int8_elements<fp32>, 256>(3);
  attends_by_the_definition<block_int4_elements<fp16>, 64>(4);
  attends_by_the_definition<block_int4_elements<fp32>, 96>(5);
  attends_by_the_definition<block_int4_elements<fp32>, 128>(6);
}

TEST_CASE("scores, choices and page extrema of blocks are those of the numbers that they hold", "[cpu]") {
  scores_by_the_definition<block_int8_elements<fp32>, 64>(11);
  scores_by_the_definition<block_int8_elements<fp32>, 96>(12);
  scores_by_the_definition<block_int4_elements<fp32>, 128>(13);
  scores_by_the_definition<block_int4_elements<fp32>, 256>(14);
}

TEST_CASE("an element of a key is the block's, rounded to the element type", "[cpu]") {
  rng random(21);
  const cells<block_int4_elements<fp16>, 64> nibbles(random, 2, 7);
  const cells<block_int8_elements<bf16>, 64> bytes(random, 2, 7);
  for (index_t slot = 0; slot < 7; ++slot) {
    for (int d = 0; d < 64; ++d) {
      REQUIRE(nibbles.view().key_element(0, 1, slot, d).bits == fp16(float(nibbles.row(nibbles.k, 1, slot)[d])).bits);
      REQUIRE(bytes.view().key_element(0, 1, slot, d).bits == bf16(float(bytes.row(bytes.k, 1, slot)[d])).bits);
    }
  }
}

TEST_CASE("pack moves whole blocks", "[cpu]") {
  rng random(22);
  const cells<block_int4_elements<fp16>, 96> stored(random, 2, 40);
  std::vector<int4_block> k(2 * 40 * 3), v = k;
  kv_view<block_int4_elements<fp16>, 96> target;
  target.k = k.data(), target.v = v.data();
  target.k_strides = target.v_strides = {0, 40 * 3, 3};
  target.sequences = 1, target.kv_heads = 2, target.lengths = &stored.length;
  selection chosen;
  chosen.reset({std::vector<index_t>(2, 40)});
  for (index_t h = 0; h < 2; ++h) {
    for (index_t slot = h; slot < 40; slot += 3) chosen.row(h)[chosen.counts[std::size_t(h)]++] = slot;
  }
  cpu::executor workers(1);
  cpu::pack(stored.view(), chosen.view(), target, workers);
  for (index_t h = 0; h < 2; ++h) {
    for (index_t i = 0; i < chosen.counts[std::size_t(h)]; ++i) {
      const auto from = stored.view();
      REQUIRE(std::memcmp(target.key(0, h, i), from.key(0, h, chosen.row(h)[i]), 3 * sizeof(int4_block)) == 0);
      REQUIRE(std::memcmp(target.value(0, h, i), from.value(0, h, chosen.row(h)[i]), 3 * sizeof(int4_block)) == 0);
    }
  }
}
