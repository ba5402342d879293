// Drafts: tokens of a step that may be taken back, as a chain or as a tree of branches.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <string>
#include <utility>

#include "../../core/error.hpp"
#include "../../core/host/host_vector.hpp"
#include "../../core/types.hpp"
#include "batch.hpp"

TESSERA_NAMESPACE_BEGIN

/// The largest number of tokens of a draft.
inline constexpr index_t max_draft_tokens = 64;

/// Which token of a draft follows which. A token sees what the cache stores, its ancestors in the draft, and itself.
class draft_tree {
 public:
  draft_tree() = default;
  /// parents[t]: the draft's token before token t, less than t; -1: t follows what the cache stores.
  /// Errors   no tokens, more than 64, a parent that does not come before its child: tessera::error.
  explicit draft_tree(const host_vector<index_t>& parents) {
    check_count(offset_t(parents.size()));
    for (index_t t = 0; t < index_t(parents.size()); ++t) {
      const index_t parent = parents[std::size_t(t)];
      if (parent < -1 || parent >= t)
        fail("parent of draft token " + std::to_string(t), parent, "-1, or a token before it",
             "list parents before their children");
      ancestors_.push_back((parent < 0 ? 0 : ancestors_[std::size_t(parent)]) | std::uint64_t(1) << t);
    }
  }
  /// Each token follows the one before it.
  static draft_tree chain(index_t tokens) {
    check_count(tokens);
    draft_tree made;
    for (index_t t = 0; t < tokens; ++t) made.ancestors_.push_back(~std::uint64_t(0) >> (63 - t));
    return made;
  }

  index_t tokens() const { return index_t(ancestors_.size()); }
  /// Bit i: token t sees token i. Bit t is set.
  std::uint64_t ancestors(index_t t) const { return ancestors_[std::size_t(t)]; }
  /// The position of token t, counted from the first position behind what the cache stores.
  index_t depth(index_t t) const { return index_t(std::popcount(ancestors(t))) - 1; }
  /// Tokens of the longest branch.
  index_t longest_branch() const {
    index_t longest = 0;
    for (index_t t = 0; t < tokens(); ++t) longest = (std::max)(longest, depth(t) + 1);
    return longest;
  }
  /// Errors   tokens that are not, in this order, the first of a branch: tessera::error.
  void check_path(const host_vector<index_t>& nodes) const {
    std::uint64_t before = 0;
    for (const index_t node : nodes) {
      if (node < 0 || node >= tokens())
        fail("accepted token of a draft", node, "0 to " + std::to_string(tokens() - 1), "pass indices into the draft");
      const std::uint64_t with_own = before | std::uint64_t(1) << node;
      if (ancestors(node) != with_own || with_own == before)
        fail("accepted token of a draft", node, "one that follows the accepted token before it",
             "pass a path from the beginning of the tree, each token behind its parent");
      before = with_own;
    }
  }

  friend bool operator==(const draft_tree&, const draft_tree&) = default;

 private:
  static void check_count(offset_t tokens) {
    require(tokens >= 1 && tokens <= max_draft_tokens, "tokens of a draft", tokens,
            "1 to " + std::to_string(max_draft_tokens), "draft at least one token, or fewer at once");
  }
  host_vector<std::uint64_t> ancestors_;  // by token
};

/// A step whose tokens wait beside the cache until they are accepted. `prepare_draft` makes it, every layer gets it. An
/// engine that records drafts keys its graphs by the number of sequences and `step.tokens`.
struct draft_step {
  batch step;                     ///< its tokens are those of the largest tree
  host_vector<draft_tree> trees;  ///< one for all sequences, or one for each

  index_t sequences() const { return step.sequences(); }
  const draft_tree& tree_of(index_t b) const { return trees[trees.size() == 1 ? 0 : std::size_t(b)]; }
  /// Whether there is a tree for each sequence: false if somebody has changed the draft.
  bool is_whole() const {
    bool whole = trees.size() == 1 || trees.size() == step.ids.size();
    for (const draft_tree& tree : trees) whole = whole && tree.tokens() >= 1 && tree.tokens() <= step.tokens;
    return whole;
  }
};

/// What is accepted of the draft of one sequence.
struct accepted_tokens {
  index_t id = 0;
  host_vector<index_t> nodes;  ///< a path from the tree's beginning; empty: nothing is accepted
};

TESSERA_NAMESPACE_END
