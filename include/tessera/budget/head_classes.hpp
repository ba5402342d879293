// DuoAttention's budget: heads that need the whole text keep it, the others a fixed number of tokens.
#pragma once

#include <algorithm>
#include <string>

#include "../concepts/budget.hpp"
#include "../core/error.hpp"
#include "../core/parameters.hpp"
#include "../core/plan/share_table.hpp"
#include "../math/share.hpp"

TESSERA_NAMESPACE_BEGIN

/// Gives a streaming head `tokens` tokens, and a retrieval head all that it holds. Of a model's kv_heads the
/// round(`streaming` * heads) with the smallest gates stream; of equal gates those of the higher layer, then of the
/// higher head. Without a table of gates every head streams.
/// Errors   tokens or streaming out of range; a table of another model, or a gate that is no number: tessera::error.
/// Cost     layers * kv_heads comparisons a head, or one once `fitted` has looked at all of them.
/// Paper    DuoAttention, arXiv:2410.10819, Sec. 2.3. Differs: exactly that many heads stream; published, all whose
///          gate lies below a quantile do.
struct head_classes {
  static constexpr const char* name = "head_classes";
  static constexpr bool compares_heads = false;
  static constexpr value_range<index_t> budgets = token_budgets;

  index_t tokens = 1024;  ///< of a streaming head
  float streaming = 0.5f;
  share_table gates{};  ///< how much of what a head looks at lies beyond sinks and newest tokens, in [0, 1]
  index_t last = -1;    ///< the head, layer * kv_heads + head, that is the last to stream; -1: `fitted` has not looked

  TESSERA_HD bool streams(index_t layer, index_t head) const {
    if (!gates.data) return true;
    const index_t own = layer * gates.kv_heads + head;
    return last < 0 ? heads_streaming_first(own) < streaming_heads() : streams_first(own, last) || own == last;
  }

  TESSERA_HD index_t share(const head_extent& head) const {
    return streams(head.layer, head.head) && tokens < head.stored ? tokens : head.stored;
  }

  TESSERA_HD bool fits(const layer_extent& extent) const {
    bool any = false;
    for (index_t h = 0; h < extent.kv_heads; ++h) any |= streams(extent.layer, h);
    return !any || extent.longest <= tokens;
  }

  token_bound upper_bound(const layer_extent& extent) const {
    token_bound bound{0, 0};
    for (index_t h = 0; h < extent.kv_heads; ++h) {
      const index_t stored = streams(extent.layer, h)
                                 ? (std::min)(extent.longest, (std::max)(tokens, extent.protected_tail))
                                 : extent.longest;
      bound.longest = (std::max)(bound.longest, stored);
      bound.total += stored;
    }
    return bound;
  }

  /// The budget with its last streaming head found.
  head_classes fitted(index_t) const {
    head_classes result = *this;
    const index_t streaming_of_all = streaming_heads();
    for (index_t head = 0; gates.data && head < gates.layers * gates.kv_heads; ++head) {
      if (heads_streaming_first(head) + 1 == streaming_of_all) result.last = head;
    }
    return result;
  }

  /// The table, which a backend copies to its own memory.
  share_table& table() { return gates; }

  void check() const {
    budgets.check("budget", tokens, "pass how many tokens a streaming head keeps");
    check_parameters(*this);
    for (index_t l = 0; gates.data && l < gates.layers; ++l) {
      for (index_t h = 0; h < gates.kv_heads; ++h) {
        require(gates.share(l, h) >= 0 && gates.share(l, h) <= 1,
                "gate of layer " + std::to_string(l) + ", kv_head " + std::to_string(h), gates.share(l, h), "in [0, 1]",
                "find the gates again");
      }
    }
  }

  /// Whether the table is one of a model of these counts.
  void check_model(index_t layers, index_t kv_heads) const {
    if (!gates.data) return;
    require(gates.layers == layers && gates.kv_heads == kv_heads, "layers and kv_heads of the profile",
            std::to_string(gates.layers) + " and " + std::to_string(gates.kv_heads),
            "those of the model, " + std::to_string(layers) + " and " + std::to_string(kv_heads),
            "pass the profile of this model");
  }

  template <class Self, class Visit>
  static void parameters(Self& self, Visit&& visit) {
    visit("streaming", self.streaming, value_range{0.0f, 1.0f}, "part of the model's KV heads that stream");
  }

 private:
  TESSERA_HD index_t streaming_heads() const {
    return index_t(decimal_share(streaming).nearest(offset_t(gates.layers) * gates.kv_heads));
  }
  /// Whether head `a` streams rather than head `b`.
  TESSERA_HD bool streams_first(index_t a, index_t b) const {
    return gates.data[a] < gates.data[b] || (gates.data[a] == gates.data[b] && a > b);
  }
  /// How many heads stream before head `own` does.
  TESSERA_HD index_t heads_streaming_first(index_t own) const {
    index_t count = 0;
    for (index_t other = 0; other < gates.layers * gates.kv_heads; ++other) count += streams_first(other, own);
    return count;
  }
};

static_assert(check_budget<head_classes>());

TESSERA_NAMESPACE_END
