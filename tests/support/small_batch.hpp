// Stored rows of a small batch, and calls over them with arguments in which now and then one thing is wrong.
#pragma once

#include <algorithm>
#include <cstdint>
#include <iostream>
#include <string>
#include <vector>

#include <tessera/core/error.hpp>
#include <tessera/core/selection.hpp>
#include <tessera/core/views.hpp>

#include "support/random.hpp"
#include "support/shrink/shortest_failure.hpp"
#include "support/tolerance.hpp"

namespace support {

using tessera::offset_t;
using tessera::rows_view;
using tessera::selection;

/// One call: which operation, and where its arguments are drawn from.
struct operation_call {
  int operation;
  std::uint64_t seed;
};

/// What a test of operations derives from: rows with lengths and positions of their own, and what tells right from wrong.
class small_batch {
 public:
  static constexpr int dim = 64;
  static constexpr index_t room = 26, most_tokens_of_q = 9;
  using view_type = tessera::kv_view<float, dim, tessera::ragged>;

  explicit small_batch(rng& random)
      : random_(random),
        sequences_(random.between(1, 3)),
        kv_heads_(random.between(1, 2)),
        group_(random.between(1, 3)) {
    for (index_t row = 0; row < rows(); ++row) {
      begins_.push_back(offset_t(row) * room);
      lengths_.push_back(random.between(0, 20));
      index_t at = 0;
      for (index_t slot = 0; slot < room; ++slot) positions_.push_back(at += random.between(1, 3));
    }
    k_ = noise(std::size_t(rows() * room * dim));
    v_ = noise(k_.size());
    inputs_ = noise(std::size_t(4 * most_tokens_of_q * 8 * dim));
    sinks_ = normals(random, 8);
    for (index_t s = 0; s < 4; ++s) first_.push_back(random.between(-2, 60));
  }

 protected:
  // A piece of normals that are drawn once.
  std::vector<float> noise(std::size_t count) {
    static const std::vector<float> drawn = [] {
      rng own(60617);
      return normals(own, 1 << 16);
    }();
    const auto from = drawn.begin() + random_.between(0, index_t(drawn.size() - count));
    return {from, from + offset_t(count)};
  }
  index_t rows() const { return sequences_ * kv_heads_; }
  index_t q_heads() const { return kv_heads_ * group_; }
  view_type view(const std::vector<float>& k, const std::vector<float>& v) const {
    view_type all;
    all.k = const_cast<float*>(k.data());
    all.v = const_cast<float*>(v.data());
    all.k_strides = all.v_strides = {0, 0, dim, 1};
    all.sequences = sequences_;
    all.kv_heads = kv_heads_;
    all.lengths = lengths_.data();
    all.length_strides = {kv_heads_, 1};
    all.positions = positions_.data();
    all.position_begin = begins_.data();
    all.table = {begins_.data(), kv_heads_};
    return all;
  }
  view_type view() const { return view(k_, v_); }

  // A shape in which, now and then, one thing is wrong.
  template <class T>
  void spoil(rows_view<T>& shape, bool& right) {
    if (!random_.chance(0.06)) return;
    right = false;
    switch (random_.between(0, 3)) {
      case 0:
        shape.heads += random_.pick({-1, 1}) * (shape.heads == kv_heads_ * group_ && group_ > 1 ? 1 : kv_heads_ + 1);
        break;
      case 1:
        shape.sequences += random_.pick({-1, 1, -sequences_ - 1});
        break;
      case 2:
        shape.tokens = -shape.tokens - 1;
        break;
      default:
        shape.dim = random_.pick({32, 128, -1});
    }
  }

  // Whether the operation was refused. `right`: what the contract says; `out`: what a refused call leaves alone.
  template <class Call>
  bool refused(const char* name, bool right, const std::vector<const std::vector<float>*>& out, Call&& made) {
    std::vector<std::vector<float>> before;
    for (const auto* one : out) before.push_back(*one);
    std::string said;
    try {
      made();
    } catch (const tessera::error& refusal) {
      said = refusal.what();
    }
    must(said.empty() || !right, "what the contract allows is not refused", name, ": ", said);
    if (right) return false;
    must(!said.empty(), "what the contract forbids is refused", name);
    must(said.find("; expected ") != std::string::npos, "a refusal says what is expected", name, ": ", said);
    for (std::size_t i = 0; i < out.size(); ++i)
      must(same_bits(*out[i], before[i]), "a refused call writes nothing", name, ": ", said);
    return true;
  }

  // Slots that a selection may hold: some of each row, ascending.
  selection some_slots() {
    selection chosen;
    chosen.reset(lengths_);
    for (index_t row = 0; row < rows(); ++row) {
      for (index_t slot = 0; slot < lengths_[std::size_t(row)]; ++slot) {
        if (random_.chance(0.6)) chosen.row(row)[chosen.counts[std::size_t(row)]++] = slot;
      }
    }
    return chosen;
  }

  rows_view<const float> queries(index_t tokens, bool& right) {
    auto q = tessera::nhd_rows<const float>(inputs_.data(), tokens, q_heads(), dim, sequences_);
    // Other heads are wrong only where they make no whole groups.
    spoil(q, right);
    if (!right && q.heads >= 1 && q.heads % kv_heads_ == 0 && q.sequences == sequences_ && q.tokens >= 0 &&
        q.dim == dim)
      q.heads = 0;
    return q;
  }

  rng& random_;
  index_t sequences_, kv_heads_, group_;
  std::vector<offset_t> begins_;
  std::vector<index_t> lengths_, positions_, first_;
  std::vector<float> k_, v_, inputs_, sinks_;
};

/// Calls `Operations::call` so often over the batch of a seed. The rule that one breaks, after the shortest list of calls that breaks it has
/// been printed; empty: none. Of the operations `Operations::names` each is as likely.
template <class Operations>
std::string wrong_of_operations(std::uint64_t seed, index_t count) {
  rng random(seed ^ 0x5bd1e995u);
  std::vector<operation_call> calls;
  for (index_t i = 0; i < count; ++i) {
    const int operation = random.between(0, index_t(std::size(Operations::names)) - 1);
    calls.push_back({operation, std::uint64_t(random.between(0, 0x7ffffffe))});
  }
  const auto replay = [&](const std::vector<operation_call>& list) {
    return failure_of([&] {
      rng batch(seed);
      Operations made(batch);
      for (const operation_call& call : list) made.call(call);
    });
  };
  const auto found = replay(calls);
  if (!found) return {};
  const auto as_code = [](const operation_call& call) {
    return "made.call({" + std::to_string(call.operation) + ", " + std::to_string(call.seed) + "u});  // " +
           Operations::names[call.operation];
  };
  std::cout << shortest_failure(calls, *found, replay, as_code) << "where\n  rng batch(" << seed
            << "u);\n  operations made(batch);\n"
            << std::flush;
  return found->rule;
}

}  // namespace support
