// Random arguments of a cache's calls, right ones and ones in which a single thing is wrong.
#pragma once

#include <utility>
#include <vector>

#include "called_cache.hpp"
#include "support/random.hpp"

namespace support {

/// What the calls must know of a method.
struct called_method {
  bool has_budget = false;
  bool has_two = false;        ///< a budget of its own for what stays: `set_budget` leaves what a step reads alone
  bool exact = false;          ///< steps read by exact scores
  bool accumulates = false;    ///< every query is scored when it comes
  index_t read = 0;            ///< what a step of exact retrieval may read
  bool segments = false;       ///< prompts come with the boundaries of segments
  bool step_segments = false;  ///< and steps
};

/// What a backend adds to the contract.
struct called_limits {
  bool on_device = false;   ///< queries on 16 bytes, steps as the device counts them, inputs that bf16 holds exactly
  index_t sequences = 0;    ///< that are open at a time; 0: any
  index_t step_tokens = 8;  ///< of one step
  index_t tokens = 0;       ///< that a head holds; 0: any
  bool is_tight = false;    ///< whether the pools may run out of room before that
};

/// What random calls draw.
class call_arguments {
 public:
  static constexpr int dim = 64;

  /// Where all rows come from.
  static const std::vector<float>& inputs(bool in_bf16) {
    static const auto drawn = [] {
      rng own(50515);
      auto exact = normals(own, 1 << 16), rounded = exact;
      for (float& x : rounded) x = float(tessera::bf16(x));
      return std::pair{exact, rounded};
    }();
    return in_bf16 ? drawn.second : drawn.first;
  }

 protected:
  using rows_type = called_cache::rows;
  using results_type = called_cache::results;

  call_arguments(rng& random, const tessera::model_shape& shape, const called_limits& limits)
      : random_(random), shape_(shape), limits_(limits) {}

  index_t some_layer() {
    return random_.chance(0.9) ? random_.between(0, shape_.layers - 1)
                               : random_.pick({-1, int(shape_.layers), 1 << 30});
  }
  index_t some_head() {
    return random_.chance(0.9) ? random_.between(0, shape_.kv_heads - 1)
                               : random_.pick({-1, int(shape_.kv_heads), 1 << 30});
  }
  bool is_layer(index_t layer) const { return layer >= 0 && layer < shape_.layers; }
  bool is_head(index_t head) const { return head >= 0 && head < shape_.kv_heads; }

  rows_type rows(index_t tokens, index_t heads, index_t sequences = 1) {
    index_t first = random_.between(0, 20000);
    if (limits_.on_device && random_.chance(0.97)) first -= first % 8;
    return tessera::nhd_rows<const float>(inputs(limits_.on_device).data() + first, tokens, heads, dim, sequences);
  }
  bool is_aligned(const rows_type& rows) const {
    return !limits_.on_device || (rows.data - inputs(true).data()) % 8 == 0;
  }
  // One thing of a shape is wrong in a way that every call must refuse.
  template <class Rows>
  void spoil(Rows& shape) {
    switch (random_.between(0, 4)) {
      case 0:
        shape.data = nullptr;
        return;
      case 1:
        shape.dim = random_.pick({32, 128, -1});
        return;
      case 2:
        shape.heads = random_.pick({int(shape.heads) + 1, 0, -1, 1 << 30});
        return;
      case 3:
        shape.sequences += random_.pick({-1, 1, 1 << 20});
        return;
      default:
        shape.tokens = random_.chance(0.5) ? -shape.tokens : shape.tokens + 1;
    }
  }
  // An output for whoever's turn it is. `wanted`: its shape, of which `data` says whether it is there at all.
  results_type written(results_type wanted, std::vector<float>& to, index_t tokens, index_t heads, index_t width,
                       index_t sequences) const {
    to.assign(std::size_t(std::max(0, tokens) * heads * width * std::max(0, sequences)) + 1, 0.0f);
    if (wanted.data) wanted.data = to.data();
    return wanted;
  }
  struct wanted_output {
    results_type out, lse;
    index_t tokens, sequences;
  };
  // `right` becomes false where the shape is spoiled.
  wanted_output some_output(index_t tokens, index_t sequences, double wrong, bool& right) {
    static float somewhere;
    wanted_output wanted{tessera::nhd_rows(&somewhere, tokens, shape_.q_heads, dim, sequences), {}, tokens, sequences};
    if (random_.chance(0.5)) wanted.lse = tessera::nhd_rows(&somewhere, tokens, shape_.q_heads, 1, sequences);
    if (!random_.chance(wrong)) return wanted;
    right = false;
    if (!wanted.lse.data || random_.chance(0.5)) {
      spoil(wanted.out);
    } else {
      auto& size = *std::vector{&wanted.lse.tokens, &wanted.lse.heads,
                                &wanted.lse.sequences}[std::size_t(random_.between(0, 2))];
      size += random_.pick({-1, 1});
    }
    return wanted;
  }

  rng& random_;
  tessera::model_shape shape_;
  called_limits limits_;
};

}  // namespace support
