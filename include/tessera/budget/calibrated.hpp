// TANGRAM's budget: each head keeps a share of a prompt that is known before the prompt comes.
#pragma once

#include "../concepts/budget.hpp"
#include "../core/error.hpp"
#include "../core/parameters.hpp"
#include "../core/plan/share_table.hpp"
#include "../math/share.hpp"

TESSERA_NAMESPACE_BEGIN

/// Gives every kv_head ceil(B * n) of a turn's n prompt tokens, on top of what it held when the turn began: that stays.
/// B is the head's entry of a table that was calibrated once (runtime/profile.hpp), as a decimal (math/share.hpp).
/// Without a table B is the same for all heads: `tokens` of all that the conversation has taken when the turn's prompt
/// ends. It is not known before a prompt was announced or has ended.
/// Errors   tokens out of range; a table of another model, or with a share outside (0, 1]: tessera::error.
/// Cost     one multiplication a head; `check` looks at every entry of the table.
/// Paper    TANGRAM, arXiv:2606.06302, Sec. 4.1. Differs: a head never keeps less than the scorer's window.
struct calibrated {
  static constexpr const char* name = "calibrated";
  static constexpr bool compares_heads = false;
  static constexpr value_range<index_t> budgets = token_budgets;

  index_t tokens = 1024;  ///< counts where there is no table
  share_table shares{};
  index_t prompt = 0;  ///< tokens that the conversation has taken; 0: not known

  /// What a head keeps of `seen` tokens of a turn's prompt.
  TESSERA_HD index_t share_of(index_t layer, index_t head, index_t seen) const {
    if (shares.data) {
      const offset_t kept = decimal_share(shares.share(layer, head)).up(seen);
      return kept < seen ? index_t(kept) : seen;
    }
    if (tokens >= prompt && prompt > 0) return seen;
    if (prompt == 0) return tokens < seen ? tokens : seen;
    // In whole numbers: of the prompt it is exactly `tokens`.
    return index_t((offset_t(tokens) * seen + prompt - 1) / prompt);
  }

  TESSERA_HD index_t share(const head_extent& head) const {
    return head.earlier + share_of(head.layer, head.head, head.stored - head.earlier + head.dropped);
  }

  TESSERA_HD bool fits(const layer_extent& asked) const {
    bool whole = true;
    for (index_t h = 0; h < asked.kv_heads; ++h) {
      whole &= share_of(asked.layer, h, asked.longest) >= asked.longest;
    }
    return whole;
  }

  /// The same, for a conversation that has taken so many tokens.
  calibrated fitted(index_t taken) const {
    calibrated result = *this;
    result.prompt = taken;
    return result;
  }
  /// The table, for a backend that keeps a copy of it in its own memory.
  share_table& table() { return shares; }
  /// Whether it can say what a head keeps of a part of a prompt.
  bool knows_shares() const { return shares.data || prompt > 0; }

  void check() const {
    budgets.check("budget", tokens, "pass how many tokens each head may keep on average");
    for (index_t l = 0; shares.data && l < shares.layers; ++l) {
      for (index_t h = 0; h < shares.kv_heads; ++h) {
        if (shares.share(l, h) > 0 && shares.share(l, h) <= 1) continue;  // names are made where they are needed alone
        fail("share of layer " + std::to_string(l) + ", kv_head " + std::to_string(h), shares.share(l, h), "in (0, 1]",
             "calibrate the profile again");
      }
    }
  }

  /// Whether the table is one of a model of these counts.
  void check_model(index_t layers, index_t kv_heads) const {
    if (!shares.data) return;
    require(shares.kv_heads == kv_heads, "kv_heads of the profile", shares.kv_heads,
            "those of the model, which are " + std::to_string(kv_heads), "pass the profile of this model");
    require(shares.layers == layers, "layers of the profile", shares.layers,
            "those of the model, which are " + std::to_string(layers),
            "pass the profile of this model, or one layer's row where that one is compressed alone");
  }

  template <class Self, class Visit>
  static void parameters(Self&, Visit&&) {}
};

static_assert(check_budget<calibrated>());
static_assert(share_budget<calibrated>);

TESSERA_NAMESPACE_END
