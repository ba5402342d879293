// What one sequence of a cache may have of its own: budgets.
#pragma once

#include <algorithm>
#include <string>

#include "../../core/error.hpp"
#include "../../core/types.hpp"
#include "../../math/share.hpp"

TESSERA_NAMESPACE_BEGIN

/// A budget of each kv_head: a number of tokens, or a share of some tokens. By default neither: the recipe's number.
struct token_budget {
  index_t tokens = 0;
  double share = 0;  ///< s in (0, 1]: ceil(s * n) of n tokens, computed in decimals (math/share.hpp)

  bool is_given() const { return tokens != 0 || share != 0; }
  bool is_share() const { return share != 0; }

  /// The budget over `n` tokens, at least `least` where it is a share.
  index_t over(index_t n, index_t least) const {
    return is_share() ? (std::max)(least, index_t(decimal_share<double>(share).up(n))) : tokens;
  }

  /// Errors   a share outside (0, 1]; tokens and a share together: tessera::error.
  void check(const std::string& name) const {
    require(!is_share() || (share > 0 && share <= 1), "share of " + name, share, "in (0, 1]",
            "pass a part of the tokens, or 0 for none");
    require(tokens == 0 || !is_share(), name, "tokens and a share", "one of them", "leave the other at 0");
  }
};

/// What a sequence has in place of the recipe's numbers. It is given to `open` of a cache, and holds until `close`.
struct sequence_options {
  /// In place of `recipe.budget()`. What a share is part of:
  ///   a first stage has the budget    the tokens that the sequence has taken since `open`, dropped ones included,
  ///                                   counted whenever the stage chooses
  ///   both stages have one budget     the same, counted when a turn's prompt ends
  ///   steps alone have a budget       the tokens that are stored at the step
  token_budget budget{};
  /// In place of the recipe's `read_tokens`: what a step reads if a first stage has a budget of its own. A share is one
  /// of the tokens that a kv_head stores at the step, the step's own included. Where heads store different numbers of
  /// tokens, it is their mean that the first stage's budget allows.
  token_budget read_tokens{};

  bool is_given() const { return budget.is_given() || read_tokens.is_given(); }
  bool has_shares() const { return budget.is_share() || read_tokens.is_share(); }
};

TESSERA_NAMESPACE_END
