// Random arguments of a cache's calls, right ones and ones in which a single thing is wrong.
#pragma once

#include <algorithm>
#include <vector>

#include "cache_call.hpp"
#include "support/random.hpp"

namespace support {

/// What random calls draw.
class call_arguments {
 protected:
  static constexpr int dim = cache_call::dim;

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

  called_cache::rows rows(index_t tokens, index_t heads, index_t sequences = 1) {
    index_t first = random_.between(0, 20000);
    if (limits_.on_device && random_.chance(0.97)) first -= first % 8;
    return tessera::nhd_rows<const float>(call_inputs(limits_.on_device).data() + first, tokens, heads, dim, sequences);
  }
  tessera::token_budget some_budget() {
    if (random_.chance(0.05)) return {random_.between(-1, 1), random_.pick({-0.5, 1.5, 0.5})};
    const index_t tokens = random_.chance(0.5) ? random_.between(1, 60) : 0;
    return {tokens, tokens > 0 ? 0 : random_.pick({0.01, 0.07, 1.0 / 9, limits_.on_device ? 0.1 : 2.0 / 3})};
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
  // Sets `is_wrong` where the shape is spoiled.
  wanted_output some_output(index_t tokens, index_t sequences, double wrong, bool& is_wrong) {
    static float somewhere;
    wanted_output wanted{tessera::nhd_rows(&somewhere, tokens, shape_.q_heads, dim, sequences), {}, tokens, sequences};
    if (random_.chance(0.5)) wanted.lse = tessera::nhd_rows(&somewhere, tokens, shape_.q_heads, 1, sequences);
    if (!random_.chance(wrong)) return wanted;
    is_wrong = true;
    if (!wanted.lse.data || random_.chance(0.5)) {
      spoil(wanted.out);
    } else {
      auto& size = *std::vector{&wanted.lse.tokens, &wanted.lse.heads,
                                &wanted.lse.sequences}[std::size_t(random_.between(0, 2))];
      size += random_.pick({-1, 1});
    }
    return wanted;
  }

  /// Rows of the call's sequences, and where their results go.
  void give_rows(cache_call& call, index_t tokens) {
    const index_t sequences = index_t(call.ids.size());
    call.q = rows(tokens, shape_.q_heads, sequences);
    call.k = rows(tokens, shape_.kv_heads, sequences);
    call.v = rows(tokens, shape_.kv_heads, sequences);
    if (limits_.on_device) call.q.data -= (call.q.data - call_inputs(true).data()) % 8;
    call.wanted = some_output(tokens, sequences, 0, call.is_wrong);
  }
  /// From a token of a draft back to the beginning, or nothing.
  std::vector<index_t> path(const std::vector<index_t>& parents) {
    std::vector<index_t> nodes;
    for (index_t node = random_.between(-1, index_t(parents.size()) - 1); node >= 0; node = parents[std::size_t(node)])
      nodes.insert(nodes.begin(), node);
    return nodes;
  }

  rng& random_;
  tessera::model_shape shape_;
  called_limits limits_;
};

}  // namespace support
