// Packed rows in double: read off their planes bit by bit, rotated back by plain loops, chosen by stable sorts.
#pragma once

#include <cmath>
#include <cstring>
#include <vector>

#include <tessera/backend/cpu/store/packed/packed_view.hpp>

#include "support/oracle.hpp"

namespace support::packed_oracle {

using tessera::index_t;
using tessera::offset_t;
using numbers = std::vector<double>;

template <class Stored>
double stored_at(const std::byte* from, index_t i) {
  Stored x;
  std::memcpy(&x, from + std::size_t(i) * sizeof x, sizeof x);
  return double(float(x));
}

/// The elements of one packed vector in its segment's basis, 0 where none is stored.
inline numbers unpacked(const tessera::packed_format& format, const std::byte* bits, const std::byte* values,
                        const std::byte* scale) {
  using tessera::packed_element;
  numbers row(std::size_t(format.channels), 0.0);
  const double factor = format.scaled() ? stored_at<float>(scale, 0) : 1.0;
  index_t place = 0;
  for (index_t c = 0; c < format.channels; ++c) {
    const index_t g = c / format.group;
    if (((unsigned(bits[g / 8]) >> (g % 8)) & 1u) == 0) continue;
    double x = 0;
    if (format.element == packed_element::single) x = stored_at<float>(values, place);
    if (format.element == packed_element::bf16) x = stored_at<tessera::bf16>(values, place);
    if (format.element == packed_element::fp16) x = stored_at<tessera::fp16>(values, place);
    if (format.element == packed_element::fp8) x = stored_at<tessera::fp8>(values, place);
    if (format.element == packed_element::int4) {
      const int nibble = int((unsigned(values[place / 2]) >> (4 * (place % 2))) & 15u);
      x = nibble < 8 ? nibble : nibble - 16;
    }
    row[std::size_t(c)] = x * factor;
    ++place;
  }
  return row;
}

/// x [channels] of a segment's basis in the engine's; `basis` [channels, dim], null: the same.
inline numbers rotated_back(const numbers& x, const float* basis, index_t dim) {
  if (!basis) return x;
  numbers result(std::size_t(dim), 0.0);
  for (std::size_t c = 0; c < x.size(); ++c) {
    for (index_t d = 0; d < dim; ++d) result[std::size_t(d)] += x[c] * double(basis[offset_t(c) * dim + d]);
  }
  return result;
}
template <class X>
numbers rotated(const X* x, const float* basis, index_t channels, index_t dim) {
  numbers result(std::size_t(channels), 0.0);
  for (index_t c = 0; c < channels; ++c) {
    for (index_t d = 0; d < dim; ++d) {
      result[std::size_t(c)] +=
          basis ? double(basis[offset_t(c) * dim + d]) * double(float(x[d])) : (c == d ? double(float(x[d])) : 0.0);
    }
  }
  return result;
}

/// What one slot of a head holds, in the engine's basis.
struct token {
  numbers key, value;
};

template <class Memory>
const std::byte* bits_of(const tessera::packed_format& format, const Memory& memory,
                         const std::vector<std::uint8_t>& set, tessera::cpu::packed_plane plane, index_t head,
                         index_t row) {
  if (format.own_bits) return memory.address(plane, head, row);
  return reinterpret_cast<const std::byte*>(set.data()) + offset_t(head) * format.set_bytes();
}

template <class Segment>
numbers mean_of(const Segment& segment, index_t head, index_t block) {
  using namespace tessera::cpu;
  return unpacked(segment.format.k, bits_of(segment.format.k, segment.means, segment.basis->k_set, k_bits, head, block),
                  segment.means.address(k_values, head, block), segment.means.address(k_scales, head, block));
}

template <class Layout>
std::vector<token> tokens_of(const tessera::cpu::packed_view<Layout>& view, index_t head) {
  using namespace tessera::cpu;
  constexpr int D = Layout::k_dim, Dv = Layout::v_dim;
  std::vector<token> all;
  for (const auto& segment : *view.segments) {
    const auto& [k, v, block] = segment->format;
    for (index_t row = 0; row < segment->lengths[std::size_t(head)]; ++row) {
      const numbers key =
          unpacked(k, bits_of(k, segment->rows, segment->basis->k_set, k_bits, head, row),
                   segment->rows.address(k_values, head, row), segment->rows.address(k_scales, head, row));
      const numbers value =
          unpacked(v, bits_of(v, segment->rows, segment->basis->v_set, v_bits, head, row),
                   segment->rows.address(v_values, head, row), segment->rows.address(v_scales, head, row));
      all.push_back(
          {rotated_back(key, segment->k_basis(head, D), D), rotated_back(value, segment->v_basis(head, Dv), Dv)});
    }
  }
  for (index_t row = 0; row < view.whole.length(0, head); ++row) {
    token whole{numbers(std::size_t(D)), numbers(std::size_t(Dv))};
    for (int d = 0; d < D; ++d) {
      whole.key[std::size_t(d)] =
          double(float(view.whole.key(0, head, row)[d])) * double(view.whole.key_scale(0, head, row));
    }
    for (int d = 0; d < Dv; ++d) {
      whole.value[std::size_t(d)] =
          double(float(view.whole.value(0, head, row)[d])) * double(view.whole.value_scale(0, head, row));
    }
    all.push_back(whole);
  }
  return all;
}

/// Attention of one query over some slots.
inline oracle::attended attend(const float* q, index_t position, const std::vector<token>& tokens,
                               const std::vector<index_t>& slots, const std::vector<index_t>& positions,
                               const tessera::logit_rule& rule, index_t q_head) {
  // The oracle of plain attention takes floats: logits are made here, and it sees one channel.
  const std::size_t dim = tokens.front().key.size(), v_dim = tokens.front().value.size();
  const double scale = rule.scale != 0 ? double(rule.scale) : 1 / std::sqrt(double(dim));
  numbers logits;
  double top = rule.sink_logits ? double(rule.sink_logits[q_head]) : -oracle::infinite;
  for (const index_t slot : slots) {
    double dot = 0;
    for (std::size_t d = 0; d < dim; ++d) dot += double(q[d]) * tokens[std::size_t(slot)].key[d];
    double logit = dot * scale;
    if (rule.soft_cap > 0) logit = double(rule.soft_cap) * std::tanh(logit / double(rule.soft_cap));
    if (!rule.visible(position, positions[std::size_t(slot)])) logit = -oracle::infinite;
    logits.push_back(logit);
    top = std::max(top, logit);
  }
  oracle::attended result;
  result.out.assign(v_dim, 0.0);
  if (top == -oracle::infinite) return result;
  double total = rule.sink_logits ? std::exp(double(rule.sink_logits[q_head]) - top) : 0;
  for (const double logit : logits) total += std::exp(logit - top);
  for (std::size_t i = 0; i < slots.size(); ++i) {
    const double p = std::exp(logits[i] - top) / total;
    for (std::size_t d = 0; d < v_dim; ++d) result.out[d] += p * tokens[std::size_t(slots[i])].value[d];
  }
  result.lse = top + std::log(total);
  return result;
}

/// Blocks of a head: their scores, by the queries of a step, and their slots.
struct blocks {
  numbers scores;
  std::vector<std::vector<index_t>> slots;
  double rounding = 0;  // how far a score in fp32 may be off
};

template <class Layout>
blocks blocks_of(const tessera::cpu::packed_view<Layout>& view, index_t head, const std::vector<const float*>& queries,
                 bool sum) {
  constexpr int D = Layout::k_dim;
  blocks all;
  index_t begin = 0;
  for (const auto& segment : *view.segments) {
    const index_t length = segment->lengths[std::size_t(head)], size = segment->format.block;
    for (index_t b = 0; b * size < length; ++b) {
      const numbers mean = rotated_back(mean_of(*segment, head, b), segment->k_basis(head, D), D);
      double total = 0, best = -oracle::infinite;
      for (const float* q : queries) {
        double dot = 0, terms = 0;
        for (int d = 0; d < D; ++d) {
          dot += double(q[d]) * mean[std::size_t(d)];
          terms += std::abs(double(q[d]) * mean[std::size_t(d)]);
        }
        total += dot;
        best = std::max(best, dot);
        all.rounding = std::max(all.rounding, 1e-5 * terms * double(queries.size()));
      }
      all.scores.push_back(sum ? total : best);
      all.slots.emplace_back();
      for (index_t i = b * size; i < std::min(length, (b + 1) * size); ++i) all.slots.back().push_back(begin + i);
    }
    begin += length;
  }
  return all;
}

/// The first block, the last, and the best until they hold `keep` slots. `ambiguous`: rounding decides the last one.
inline std::vector<index_t> chosen_blocks(const blocks& all, index_t keep, bool& ambiguous) {
  const index_t n = index_t(all.slots.size());
  index_t held = 0;
  std::vector<bool> taken(std::size_t(n), false);
  const auto take = [&](index_t b) {
    if (taken[std::size_t(b)]) return;
    taken[std::size_t(b)] = true;
    held += index_t(all.slots[std::size_t(b)].size());
  };
  ambiguous = false;
  if (n > 0) {
    take(0);
    take(n - 1);
  }
  double last = oracle::infinite;
  for (const index_t b : oracle::preference(all.scores)) {
    if (taken[std::size_t(b)]) continue;
    const double score = all.scores[std::size_t(b)];
    // A block on either side of any cut that is close: with blocks of several sizes every order counts.
    if (last - score <= 2 * all.rounding) ambiguous = true;
    if (held >= keep) break;
    take(b);
    last = score;
  }
  std::vector<index_t> slots;
  for (index_t b = 0; b < n; ++b) {
    if (!taken[std::size_t(b)]) continue;
    slots.insert(slots.end(), all.slots[std::size_t(b)].begin(), all.slots[std::size_t(b)].end());
  }
  return slots;
}

}  // namespace support::packed_oracle
