// Tokens of sequences that may leave no trace: drafts that wait to be accepted, and steps that were cancelled.
#pragma once

#include <algorithm>
#include <span>
#include <string>

#include "conversations.hpp"
#include "draft.hpp"

TESSERA_NAMESPACE_BEGIN

/// The drafts and the cancelled steps of a cache's sequences.
template <class Recipe>
class detours {
 public:
  /// Errors   the sequence has a draft, or its step was cancelled and has layers left: tessera::error.
  void require_none(index_t id) const {
    if (const pending* draft = find(id); draft && draft->number != 0)
      fail("draft of sequence " + std::to_string(id), "pending", "one that was accepted", "call accept, or cancel");
    if (std::find(cancelled_.begin(), cancelled_.end(), id) != cancelled_.end())
      fail("cancelled step of sequence " + std::to_string(id), "under way", "one that has ended",
           "finish the layers of the other sequences, or cancel these too");
  }
  bool has_draft(index_t id) const {
    const pending* draft = find(id);
    return draft && draft->number != 0;
  }
  /// Of a sequence that is closed, or whose draft has ended.
  void forget(index_t id) {
    if (has_draft(id)) drafts_[std::size_t(id)].number = 0;
    std::erase(cancelled_, id);
  }

  // --- drafts --------------------------------------------------------------------------------------------------------

  /// Checks a draft that is to begin. `largest`: tokens of a draft that the backend takes.
  /// Errors   no or equal ids, another number of trees, a branch longer than a step, a sequence that cannot take a step
  ///          now or stores nothing, boundaries that are not one for each token: tessera::error.
  void check(const draft_step& draft, const conversations<Recipe>& known, index_t largest, index_t longest_step,
             std::span<const std::uint8_t> boundaries) const {
    const host_vector<index_t>& ids = draft.step.ids;
    require(!ids.empty(), "sequences of a draft", 0, "at least 1", "pass the ids of a batch");
    batch::require_different(ids);
    require(draft.trees.size() == 1 || draft.trees.size() == ids.size(), "trees of a draft", draft.trees.size(),
            "one, or one for each sequence, which are " + std::to_string(ids.size()), "pass the tree of each sequence");
    require(largest > 0, "draft", "asked for", "none where cache_options::draft_tokens is 0",
            "pass the tokens of the largest draft as cache_options::draft_tokens");
    for (index_t b = 0; b < draft.sequences(); ++b) {
      const index_t id = ids[std::size_t(b)];
      const draft_tree& tree = draft.tree_of(b);
      require_none(id);
      known.sequence(id).check_step(id, (std::max)(index_t(1), tree.longest_branch()));
      require(known.sequence(id).front().next_position > 0, "tokens of sequence " + std::to_string(id), 0,
              "at least 1 before a draft", "write a prompt first");
      require(tree.tokens() >= 1 && tree.tokens() <= largest, "tokens of a draft", tree.tokens(),
              "1 to " + std::to_string(largest), "draft fewer tokens at once, or raise cache_options::draft_tokens");
      require(tree.longest_branch() <= longest_step, "longest branch of a draft", tree.longest_branch(),
              "at most the tokens of a step, which are " + std::to_string(longest_step),
              "draft shorter branches, or raise cache_options::step_tokens");
    }
    if constexpr (Recipe::needs_step_segments) require_boundaries(boundaries, draft.sequences() * draft.step.tokens);
  }
  /// Notes a draft that has begun. Takes memory first.
  void begin(const draft_step& draft, std::span<const std::uint8_t> boundaries) {
    host_vector<pending> made;
    for (index_t b = 0; b < draft.sequences(); ++b) {
      pending one{draft.step.number, draft.tree_of(b), {}};
      if constexpr (Recipe::needs_step_segments) {
        const auto own = boundaries.subspan(std::size_t(b * draft.step.tokens), std::size_t(draft.step.tokens));
        one.boundaries.assign(own.begin(), own.end());
      }
      made.push_back(std::move(one));
    }
    const index_t last = *std::max_element(draft.step.ids.begin(), draft.step.ids.end());
    if (drafts_.size() <= std::size_t(last)) drafts_.resize(std::size_t(last) + 1);
    for (std::size_t b = 0; b < made.size(); ++b) std::swap(drafts_[std::size_t(draft.step.ids[b])], made[b]);
  }
  /// Errors   a draft that is not the pending one of its sequences: tessera::error.
  void require_pending(const draft_step& draft) const {
    if (!draft.is_whole()) fail("draft", "changed", "what prepare_draft returned", "pass the draft as it is");
    for (index_t b = 0; b < draft.sequences(); ++b) {
      const index_t id = draft.step.ids[std::size_t(b)];
      const pending* held = find(id);
      if (draft.step.number == 0 || !held || held->number != draft.step.number || held->tree != draft.tree_of(b))
        fail("draft of sequence " + std::to_string(id), draft.step.number, "the one that prepare_draft returned for it",
             "call prepare_draft before the layers of a draft");
    }
  }
  const draft_tree& tree(index_t id) const {
    require(has_draft(id), "draft of sequence " + std::to_string(id), "none", "one that is pending",
            "call prepare_draft first");
    return drafts_[std::size_t(id)].tree;
  }
  /// The number of a sequence's draft; 0: none.
  std::uint64_t number(index_t id) const { return has_draft(id) ? drafts_[std::size_t(id)].number : 0; }
  /// The step that the accepted tokens make; no sequences where nothing is accepted.
  /// Errors   a sequence twice, or without a draft; tokens that are no path of it: tessera::error.
  batch step_of(const host_vector<accepted_tokens>& accepted) const {
    batch step;
    host_vector<index_t> ids;
    for (const accepted_tokens& part : accepted) {
      tree(part.id).check_path(part.nodes);
      ids.push_back(part.id);
      if (part.nodes.empty()) continue;
      step.ids.push_back(part.id);
      step.lengths.push_back(index_t(part.nodes.size()));
      step.tokens = (std::max)(step.tokens, step.lengths.back());
    }
    batch::require_different(ids);
    step.drop_equal_lengths();
    return step;
  }
  /// Flags of segment ends of the accepted tokens, [sequences, tokens], of the sequences of `step`.
  host_vector<std::uint8_t> boundaries_of(const host_vector<accepted_tokens>& accepted, const batch& step) const {
    host_vector<std::uint8_t> flags;
    if constexpr (Recipe::needs_step_segments) {
      for (const accepted_tokens& part : accepted) {
        if (part.nodes.empty()) continue;
        for (index_t t = 0; t < step.tokens; ++t) {
          const bool is_own = std::size_t(t) < part.nodes.size();
          flags.push_back(is_own ? drafts_[std::size_t(part.id)].boundaries[std::size_t(part.nodes[std::size_t(t)])]
                                 : 0);
        }
      }
    }
    return flags;
  }

  // --- cancelled steps -----------------------------------------------------------------------------------------------

  /// Notes that a sequence's step will be taken back. Takes memory first.
  void cancel(index_t id) { cancelled_.push_back(id); }
  /// A cancelled sequence of a step; -1: none.
  index_t cancelled_of(const batch& step) const {
    for (const index_t id : cancelled_) {
      if (std::find(step.ids.begin(), step.ids.end(), id) != step.ids.end()) return id;
    }
    return -1;
  }
  /// A cancelled sequence whose step has no other sequence left: all are cancelled or closed; -1: none.
  index_t cancelled_alone(const conversations<Recipe>& known) const {
    for (const index_t id : cancelled_) {
      bool is_alone = true;
      for (index_t other = 0; other < known.size() && is_alone; ++other) {
        is_alone = !known.is_open(other) || known.sequence(other).step != known.sequence(id).step ||
                   std::find(cancelled_.begin(), cancelled_.end(), other) != cancelled_.end();
      }
      if (is_alone) return id;
    }
    return -1;
  }

 private:
  struct pending {
    std::uint64_t number = 0;  ///< of the draft's step; 0: none
    draft_tree tree;
    host_vector<std::uint8_t> boundaries;  ///< [tokens], of a recipe that needs them in steps
  };
  const pending* find(index_t id) const {
    return id >= 0 && std::size_t(id) < drafts_.size() ? &drafts_[std::size_t(id)] : nullptr;
  }

  host_vector<pending> drafts_;  // by id
  host_vector<index_t> cancelled_;
};

TESSERA_NAMESPACE_END
