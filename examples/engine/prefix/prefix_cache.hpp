// Beginnings of prompts that later prompts share: a radix tree over tokens that holds sequences of a KV cache.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <tessera/core/error.hpp>
#include <tessera/core/types.hpp>

#include "engine/config.hpp"

namespace engine {

/// Sequences of one cache whose prompts have not ended, found by their tokens. A request forks the one that has the longest beginning
/// of its prompt in common, writes the rest and ends the prompt; what a method drops it drops from the fork alone. Where rows lie in
/// pages, the stored sequences and their forks share them.
/// Cache    tessera::cache, cuda::cache or any_cache, which outlives this.
/// Threads  those of the cache: one call at a time.
/// Errors   those of the cache's `fork`; then nothing has changed.
template <class Cache>
class prefix_cache {
 public:
  using index_t = tessera::index_t;

  /// A sequence that was opened for a prompt, and how many of its tokens it has; id -1: no beginning is stored.
  struct match {
    index_t id = -1;
    std::size_t tokens = 0;
  };
  /// What the tree has been asked and has saved.
  struct statistics {
    std::int64_t asked = 0, hits = 0;      ///< prompts
    std::int64_t tokens = 0, saved = 0;    ///< of these prompts, and those that were not written again
    std::int64_t stored = 0, evicted = 0;  ///< sequences, ever
  };

  /// `cuts`: whether the method's prompts can be taken back in part (`cuts_prompts` of the cache). A prompt then shares a beginning
  /// that ends anywhere; otherwise one that ends where a sequence was stored.
  prefix_cache(Cache& cache, bool cuts) : cache_(cache), cuts_(cuts) {}
  prefix_cache(const prefix_cache&) = delete;
  prefix_cache& operator=(const prefix_cache&) = delete;
  ~prefix_cache() { clear(); }

  /// Opens a sequence with the longest stored beginning of a prompt. At least its last token is left to be written, whose logits
  /// begin the answer.
  match fork(std::span<const token_t> prompt) {
    statistics_.asked += 1;
    statistics_.tokens += std::int64_t(prompt.size());
    const std::size_t most = prompt.empty() ? 0 : prompt.size() - 1;
    const descent at = descend(prompt);
    match best;
    node* source = nullptr;
    for (node* stored = at.whole; stored; stored = stored->parent) {
      if (stored->id < 0 || stored->end > std::min(at.tokens, most)) continue;
      best.tokens = stored->end;
      source = stored;
      break;
    }
    const std::size_t common = std::min(at.tokens, most);
    if (cuts_ && common > best.tokens) {
      node* longer = nullptr;  // one that can still go back so far: sliding layers drop rows on the way
      visit(at.partial ? *at.partial : *at.whole, [&](node& each) {
        if (!longer && each.id >= 0 && cache_.settled(each.id) <= index_t(common)) longer = &each;
      });
      if (longer) best.tokens = common, source = longer;
    }
    if (!source || best.tokens == 0) return {};
    best.id = best.tokens == source->end ? cache_.fork(source->id) : cache_.fork(source->id, index_t(best.tokens));
    touch(source);
    statistics_.hits += 1;
    statistics_.saved += std::int64_t(best.tokens);
    return best;
  }

  /// Stores a fork of a sequence that has these tokens and no others, all of them of a first prompt that has not ended.
  /// Returns whether it is new.
  /// Errors   another number of tokens; a prompt that has ended, of which a method may have dropped tokens; an announced prompt,
  ///          whose forks could have no other length: tessera::error.
  bool insert(std::span<const token_t> tokens, index_t id) {
    tessera::require(!tokens.empty() && std::size_t(cache_.next_position(id)) == tokens.size(), "tokens of a prefix",
                     tokens.size(), "those of the sequence, which are " + std::to_string(cache_.next_position(id)),
                     "store a sequence behind a chunk of its prompt, with all of its tokens");
    tessera::require(std::size_t(cache_.prompt_tokens(id)) == tokens.size(), "tokens of the prompt under way",
                     cache_.prompt_tokens(id), "all of the sequence, which are " + std::to_string(tokens.size()),
                     "store a sequence before its first prompt ends");
    tessera::require(cache_.announced(id) == 0, "tokens that the prompt was announced with", cache_.announced(id), "0",
                     "write a prompt that others will go on with without announcing it");
    node* stored = make(tokens);
    const bool is_new = stored->id < 0;
    if (is_new) {
      try {
        stored->id = cache_.fork(id);
      } catch (...) {
        tidy(stored);
        throw;
      }
      statistics_.stored += 1;
    }
    touch(stored);
    return is_new;
  }

  /// Closes the sequence that was asked for longest ago. What others share of its pages stays. Returns whether there was one.
  bool evict() {
    node* oldest = nullptr;
    visit(root_, [&](node& each) {
      // Beginnings are touched with what they begin: of equals the longer one goes first.
      if (each.id >= 0 &&
          (!oldest || each.used < oldest->used || (each.used == oldest->used && each.end > oldest->end)))
        oldest = &each;
    });
    if (!oldest) return false;
    cache_.close(std::exchange(oldest->id, -1));
    tidy(oldest);
    statistics_.evicted += 1;
    return true;
  }
  /// Evicts until enough() holds. Returns whether it does.
  template <class Enough>
  bool evict_until(const Enough& enough) {
    while (!enough()) {
      if (!evict()) return false;
    }
    return true;
  }
  void clear() {
    visit(root_, [&](node& each) {
      if (each.id >= 0) cache_.close(std::exchange(each.id, -1));
    });
    root_.children.clear();
  }

  /// Sequences that are stored now.
  std::size_t size() const {
    std::size_t count = 0;
    visit(root_, [&](const node& each) { count += each.id >= 0; });
    return count;
  }
  const statistics& counts() const { return statistics_; }

 private:
  /// The tokens from a parent's end to its own; `id`: the sequence that stands there, -1: none.
  struct node {
    std::vector<token_t> label;
    std::size_t end = 0;
    node* parent = nullptr;
    std::map<token_t, std::unique_ptr<node>> children;
    index_t id = -1;
    std::uint64_t used = 0;
  };
  /// How far a prompt goes along the tree: the last node whose label it has whole, and the one whose label it leaves.
  struct descent {
    node* whole;
    node* partial = nullptr;
    std::size_t tokens = 0;
  };

  descent descend(std::span<const token_t> prompt) {
    descent at{&root_};
    while (at.tokens < prompt.size()) {
      const auto child = at.whole->children.find(prompt[at.tokens]);
      if (child == at.whole->children.end()) break;
      const std::vector<token_t>& label = child->second->label;
      const auto rest = prompt.subspan(at.tokens);
      const auto same =
          std::size_t(std::mismatch(label.begin(), label.end(), rest.begin(), rest.end()).first - label.begin());
      at.tokens += same;
      if (same < label.size()) {
        at.partial = child->second.get();
        break;
      }
      at.whole = child->second.get();
    }
    return at;
  }
  /// The node that ends with these tokens, made where it is missing.
  node* make(std::span<const token_t> tokens) {
    const descent at = descend(tokens);
    node* parent = at.whole;
    if (at.partial) parent = split(at.partial, at.tokens);
    if (at.tokens == tokens.size()) return parent;
    auto added = std::make_unique<node>();
    added->label.assign(tokens.begin() + std::ptrdiff_t(at.tokens), tokens.end());
    added->end = tokens.size();
    added->parent = parent;
    node* result = added.get();
    parent->children[result->label.front()] = std::move(added);
    return result;
  }
  /// Cuts a node's label in two behind so many tokens of the whole. Returns the upper part.
  node* split(node* lower, std::size_t tokens) {
    const std::size_t kept = tokens - lower->parent->end;
    auto upper = std::make_unique<node>();
    upper->label.assign(lower->label.begin(), lower->label.begin() + std::ptrdiff_t(kept));
    upper->end = tokens;
    upper->parent = lower->parent;
    upper->used = lower->used;
    const token_t first = upper->label.front(), next = lower->label[kept];
    std::unique_ptr<node>& place_of_lower = upper->children[next];
    std::vector<token_t> rest(lower->label.begin() + std::ptrdiff_t(kept), lower->label.end());
    std::unique_ptr<node>& place_of_upper = lower->parent->children.at(first);
    place_of_lower = std::move(place_of_upper);
    lower->label = std::move(rest);
    lower->parent = upper.get();
    place_of_upper = std::move(upper);
    return lower->parent;
  }
  /// Removes a node that stands for nothing, and those above it that then do.
  void tidy(node* from) {
    while (from != &root_ && from->id < 0 && from->children.empty()) {
      node* parent = from->parent;
      parent->children.erase(from->label.front());
      from = parent;
    }
    if (from == &root_ || from->id >= 0 || from->children.size() != 1) return;
    // A node between two others that no sequence stands at: its child takes its place.
    std::unique_ptr<node> child = std::move(from->children.begin()->second);
    child->label.insert(child->label.begin(), from->label.begin(), from->label.end());
    child->parent = from->parent;
    from->parent->children.at(child->label.front()) = std::move(child);
  }
  void touch(node* stored) {
    ++clock_;
    for (; stored; stored = stored->parent) stored->used = clock_;
  }
  template <class Node, class Visit>
  static void visit(Node& from, const Visit& show) {
    show(from);
    for (auto& [token, child] : from.children) visit(*child, show);
  }

  Cache& cache_;
  bool cuts_;
  node root_;
  std::uint64_t clock_ = 0;
  statistics statistics_;
};

}  // namespace engine
