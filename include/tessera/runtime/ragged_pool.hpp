// Who holds which pages of a pool: by sequence and group of heads, with what has been set aside for each sequence.
#pragma once

#include <algorithm>
#include <span>
#include <string>

#include "../core/error.hpp"
#include "../core/host/host_vector.hpp"
#include "../core/types.hpp"

TESSERA_NAMESPACE_BEGIN

/// Pages are numbers; whoever owns memory gives them a meaning. A sequence may hold what has been set aside for it
/// whatever others do; beyond that it takes what nobody holds or has been promised.
/// Errors   more than there is: tessera::error; out of memory: std::bad_alloc. Either way nothing has changed.
class ragged_pool {
 public:
  /// `most`: pages of the pool; 0: no bound.
  explicit ragged_pool(index_t groups = 0, index_t most = 0)
      : groups_(groups), most_(most), idle_pages_(std::size_t(most)) {}

  /// A sequence without pages; one that is there stays as it is.
  void open(index_t id) {
    while (index_t(sequences_.size()) <= id)
      sequences_.push_back({host_vector<host_vector<index_t>>(std::size_t(groups_)), 0, 0});
  }
  /// Gives back all that a sequence holds and was promised. Needs no memory.
  void close(index_t id) {
    for (index_t group = 0; group < groups_; ++group) release(id, group, 0);
    reserve(id, 0);
  }

  /// Sets `pages` aside, those that the sequence holds already included; takes the place of what was set aside before.
  void reserve(index_t id, index_t pages) {
    sequence& one = at(id);
    const offset_t claimed = claimed_ - claim(one) + (std::max)(one.held, pages);
    const bool fits = most_ == 0 || pages <= one.reserved || claimed <= most_;
    if (!fits) {  // in a branch: the message needs memory, and what is set back must not
      fail("pages of the pool", most_,
           "at least " + std::to_string(claimed) + ", with " + std::to_string((std::max)(one.held, pages)) +
               " for this sequence",
           "close a sequence, shorten the prompt, or give the pool more pages");
    }
    claimed_ = claimed;
    one.reserved = pages;
  }

  /// Lets a pool with a bound `take` so many pages for a group without memory of the host.
  void make_room(index_t id, index_t group, index_t pages) {
    host_vector<index_t>& table = at(id).tables[std::size_t(group)];
    if (std::size_t(pages) > table.capacity()) table.reserve((std::max)(std::size_t(pages), 2 * table.size()));
  }
  /// Makes a group hold `pages` at least.
  void take(index_t id, index_t group, index_t pages) {
    sequence& one = at(id);
    host_vector<index_t>& table = one.tables[std::size_t(group)];
    const index_t more = pages - index_t(table.size());
    if (more <= 0) return;
    const index_t held = one.held + more;
    const offset_t claimed = claimed_ - claim(one) + (std::max)(held, one.reserved);
    if (most_ > 0 && claimed > most_) {
      fail("pages of the pool", most_, "at least " + std::to_string(claimed),
           "close a sequence, or give the pool more pages");
    }
    const index_t fresh = (std::max)(0, more - idle_);
    table.reserve(std::size_t(pages));
    idle_pages_.resize((std::max)(idle_pages_.size(), std::size_t(made_ + fresh)));
    for (index_t i = 0; i < more; ++i) table.push_back(idle_ > 0 ? idle_pages_[std::size_t(--idle_)] : made_++);
    one.held = held;
    claimed_ = claimed;
  }
  /// Leaves a group `pages` at most; those beyond go back, the last ones first. Needs no memory.
  void release(index_t id, index_t group, index_t pages) {
    sequence& one = at(id);
    host_vector<index_t>& table = one.tables[std::size_t(group)];
    claimed_ -= claim(one);
    while (index_t(table.size()) > pages) {
      idle_pages_[std::size_t(idle_++)] = table.back();
      table.pop_back();
      --one.held;
    }
    claimed_ += claim(one);
  }

  index_t groups() const { return groups_; }
  std::span<const index_t> pages(index_t id, index_t group) const {
    return sequences_[std::size_t(id)].tables[std::size_t(group)];
  }
  index_t held(index_t id) const { return sequences_[std::size_t(id)].held; }
  index_t reserved(index_t id) const { return sequences_[std::size_t(id)].reserved; }
  /// Numbers of pages that have been given out so far: every page is below it.
  index_t made() const { return made_; }
  /// Pages that lie idle, to be given out before new ones are made.
  index_t idle() const { return idle_; }
  /// Pages that sequences hold or have been promised.
  offset_t claimed() const { return claimed_; }

 private:
  struct sequence {
    host_vector<host_vector<index_t>> tables;  // by group
    index_t held = 0, reserved = 0;
  };
  static offset_t claim(const sequence& one) { return (std::max)(one.held, one.reserved); }
  sequence& at(index_t id) { return sequences_[std::size_t(id)]; }

  index_t groups_, most_, made_ = 0, idle_ = 0;
  offset_t claimed_ = 0;
  host_vector<index_t> idle_pages_;  // room for all, so that giving back needs no memory, in a copy either
  host_vector<sequence> sequences_;
};

TESSERA_NAMESPACE_END
