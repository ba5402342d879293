// The pages of a pool by sequence and group of heads, and the pages reserved for each sequence.
#pragma once

#include <algorithm>
#include <span>
#include <string>

#include "../core/error.hpp"
#include "../core/host/host_vector.hpp"
#include "../core/types.hpp"

TESSERA_NAMESPACE_BEGIN

/// A page is a number; the owner of the memory maps it to an address. A sequence can always acquire the pages reserved
/// for it. Beyond these it can acquire only pages that no sequence has acquired or reserved.
/// Errors   more pages than the pool has: tessera::error; out of memory: std::bad_alloc. In both cases nothing changes.
class ragged_pool {
 public:
  /// `capacity`: pages of the pool; 0: no bound.
  explicit ragged_pool(index_t groups = 0, index_t capacity = 0)
      : groups_(groups), capacity_(capacity), idle_pages_(std::size_t(capacity)) {}

  /// Adds a sequence without pages; one that exists keeps its pages.
  void open(index_t id) {
    while (index_t(sequences_.size()) <= id)
      sequences_.push_back({host_vector<host_vector<index_t>>(std::size_t(groups_)), 0, 0});
  }
  /// Releases all pages and reservations of a sequence. Needs no memory.
  void close(index_t id) {
    for (index_t group = 0; group < groups_; ++group) release(id, group, 0);
    reserve(id, 0);
  }

  /// Reserves `pages` for a sequence, counting the pages that it already has. Replaces its earlier reservation.
  void reserve(index_t id, index_t pages) {
    sequence& owner = sequences_[std::size_t(id)];
    const offset_t claimed = claimed_ - claim(owner) + (std::max)(owner.page_count, pages);
    const bool fits = capacity_ == 0 || pages <= owner.reserved || claimed <= capacity_;
    if (!fits) {  // a branch instead of require(): the message is built, and needs memory, only on failure
      fail("pages of the pool", capacity_,
           "at least " + std::to_string(claimed) + ", with " + std::to_string((std::max)(owner.page_count, pages)) +
               " for this sequence",
           "close a sequence, shorten the prompt, or give the pool more pages");
    }
    claimed_ = claimed;
    owner.reserved = pages;
  }

  /// Allocates host memory in advance, so that a later `acquire` of `pages` for the group allocates none. Holds for
  /// pools with a bound.
  void make_room(index_t id, index_t group, index_t pages) {
    host_vector<index_t>& table = sequences_[std::size_t(id)].tables[std::size_t(group)];
    if (std::size_t(pages) > table.capacity()) table.reserve((std::max)(std::size_t(pages), 2 * table.size()));
  }
  /// Adds pages to a group until it has at least `pages`.
  void acquire(index_t id, index_t group, index_t pages) {
    sequence& owner = sequences_[std::size_t(id)];
    host_vector<index_t>& table = owner.tables[std::size_t(group)];
    const index_t more = pages - index_t(table.size());
    if (more <= 0) return;
    const index_t page_count = owner.page_count + more;
    const offset_t claimed = claimed_ - claim(owner) + (std::max)(page_count, owner.reserved);
    if (capacity_ > 0 && claimed > capacity_) {
      fail("pages of the pool", capacity_, "at least " + std::to_string(claimed),
           "close a sequence, or give the pool more pages");
    }
    const index_t new_pages = (std::max)(0, more - idle_);
    table.reserve(std::size_t(pages));
    idle_pages_.resize((std::max)(idle_pages_.size(), std::size_t(made_ + new_pages)));
    for (index_t i = 0; i < more; ++i) table.push_back(idle_ > 0 ? idle_pages_[std::size_t(--idle_)] : made_++);
    owner.page_count = page_count;
    claimed_ = claimed;
  }
  /// Releases pages of a group, the last ones first, until it has at most `pages`. Needs no memory.
  void release(index_t id, index_t group, index_t pages) {
    sequence& owner = sequences_[std::size_t(id)];
    host_vector<index_t>& table = owner.tables[std::size_t(group)];
    claimed_ -= claim(owner);
    while (index_t(table.size()) > pages) {
      idle_pages_[std::size_t(idle_++)] = table.back();
      table.pop_back();
      --owner.page_count;
    }
    claimed_ += claim(owner);
  }

  index_t groups() const { return groups_; }
  /// Pages of the pool; 0: no bound.
  index_t capacity() const { return capacity_; }
  std::span<const index_t> pages(index_t id, index_t group) const {
    return sequences_[std::size_t(id)].tables[std::size_t(group)];
  }
  index_t page_count(index_t id) const { return sequences_[std::size_t(id)].page_count; }
  index_t reserved(index_t id) const { return sequences_[std::size_t(id)].reserved; }
  /// How many pages were ever acquired: every page number is below it.
  index_t made() const { return made_; }
  /// Released pages, which are acquired again before new ones are made.
  index_t idle() const { return idle_; }
  /// Pages that sequences have or have reserved.
  offset_t claimed() const { return claimed_; }

 private:
  struct sequence {
    host_vector<host_vector<index_t>> tables;  // by group
    index_t page_count = 0, reserved = 0;
  };
  static offset_t claim(const sequence& owner) { return (std::max)(owner.page_count, owner.reserved); }

  index_t groups_, capacity_, made_ = 0, idle_ = 0;
  offset_t claimed_ = 0;
  host_vector<index_t> idle_pages_;  // has capacity for all pages, in copies too, so that a release allocates nothing
  host_vector<sequence> sequences_;
};

TESSERA_NAMESPACE_END
