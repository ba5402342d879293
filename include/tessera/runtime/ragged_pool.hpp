// The pages of a pool by sequence and group of heads, and the pages reserved for each sequence.
#pragma once

#include <algorithm>
#include <span>
#include <string>
#include <utility>

#include "../core/error.hpp"
#include "../core/host/host_vector.hpp"
#include "../core/types.hpp"
#include "counted_pages.hpp"

TESSERA_NAMESPACE_BEGIN

/// A page is a number; the owner of the memory maps it to an address. A sequence can always acquire the pages reserved
/// for it, and pages of its own for those that it shares. Beyond these it can acquire only pages that no sequence has
/// acquired or reserved.
/// Errors   more pages than the pool has: tessera::error; out of memory: std::bad_alloc. In both cases nothing changes.
class ragged_pool {
 public:
  /// `capacity`: pages of the pool; 0: no bound.
  explicit ragged_pool(index_t groups = 0, index_t capacity = 0)
      : groups_(groups), capacity_(capacity), counted_(capacity) {}

  /// Adds a sequence without pages; one that exists keeps its pages.
  void open(index_t id) {
    while (index_t(sequences_.size()) <= id)
      sequences_.push_back({host_vector<host_vector<index_t>>(std::size_t(groups_))});
  }
  /// Releases all pages and reservations of a sequence. Needs no memory.
  void close(index_t id) {
    for (index_t group = 0; group < groups_; ++group) release(id, group, 0);
    reserve(id, 0);
  }

  /// Reserves `pages` for a sequence, counting the pages that it already has, and `copies` more that it may need in
  /// place of shared ones. Replaces its earlier reservation.
  void reserve(index_t id, index_t pages, index_t copies = 0) {
    sequence& owner = sequences_[std::size_t(id)];
    const offset_t promise = promise_of(owner.page_count, pages, copies);
    require_room(promise > promised(owner) ? promise - promised(owner) : 0,
                 [&] { return ", with " + std::to_string(promise + owner.page_count) + " for this sequence"; });
    set_promise(owner, pages, copies);
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
    require_room(more + promise_of(page_count, owner.reserved, owner.copies) - promised(owner));
    counted_.make_room(counted_.used() + more);
    table.reserve(std::size_t(pages));
    for (index_t i = 0; i < more; ++i) table.push_back(counted_.acquire());
    promised_ -= promised(owner);
    owner.page_count = page_count;
    promised_ += promised(owner);
  }
  /// Releases pages of a group, the last ones first, until it has at most `pages`. Needs no memory. What others share
  /// stays with them: it does not return to the sequence's reservation.
  void release(index_t id, index_t group, index_t pages) {
    sequence& owner = sequences_[std::size_t(id)];
    host_vector<index_t>& table = owner.tables[std::size_t(group)];
    promised_ -= promised(owner);
    while (index_t(table.size()) > pages) {
      if (!counted_.release(table.back())) {
        if (owner.copies > 0)
          --owner.copies;
        else if (owner.reserved >= owner.page_count)
          --owner.reserved;
      }
      table.pop_back();
      --owner.page_count;
    }
    promised_ += promised(owner);
  }

  // --- shared pages --------------------------------------------------------------------------------------------------

  bool any_shared() const { return counted_.any_shared(); }
  /// How many pages of the pool more pages and copies of a sequence would claim.
  offset_t claim_of(index_t id, index_t pages, index_t copies) const {
    const sequence& owner = sequences_[std::size_t(id)];
    const index_t copies_left = (std::max)(0, owner.copies - copies);
    return pages + copies + promise_of(owner.page_count + pages, owner.reserved, copies_left) - promised(owner);
  }
  /// Gives a sequence without pages those of another one, which then share them. Reservations stay as they are.
  void share(index_t from, index_t to) {
    const sequence& source = sequences_[std::size_t(from)];
    auto tables = source.tables;
    for (const auto& table : tables) {
      for (const index_t page : table) counted_.share(page);
    }
    sequence& target = sequences_[std::size_t(to)];
    promised_ -= promised(target);
    target.tables = std::move(tables);
    target.page_count = source.page_count;
    promised_ += promised(target);
  }
  /// Pages of a group from the `first` one to below the `last` one that other sequences have too.
  index_t shared_pages(index_t id, index_t group, index_t first, index_t last) const {
    return counted_.shared_of(sequences_[std::size_t(id)].tables[std::size_t(group)], std::size_t(first),
                              std::size_t(last));
  }
  index_t shared_pages(index_t id) const {
    index_t count = 0;
    if (!any_shared()) return 0;
    for (const auto& table : sequences_[std::size_t(id)].tables) count += counted_.shared_of(table, 0, table.size());
    return count;
  }
  /// Allocates host memory for `copies` calls of `replace`, which then cannot fail.
  /// Errors   the pool has too few pages.
  void plan_copies(index_t id, index_t copies) {
    const sequence& owner = sequences_[std::size_t(id)];
    require_room((std::max)(0, copies - owner.copies));
    counted_.make_room(counted_.used() + copies);
  }
  /// Gives a group another page for its i-th one, which is shared, and returns it. The caller copies the rows.
  index_t replace(index_t id, index_t group, index_t i) {
    sequence& owner = sequences_[std::size_t(id)];
    index_t& page = owner.tables[std::size_t(group)][std::size_t(i)];
    set_promise(owner, owner.reserved, (std::max)(0, owner.copies - 1));
    counted_.release(page);
    return page = counted_.acquire();
  }

  index_t groups() const { return groups_; }
  /// Pages of the pool; 0: no bound.
  index_t capacity() const { return capacity_; }
  std::span<const index_t> pages(index_t id, index_t group) const {
    return sequences_[std::size_t(id)].tables[std::size_t(group)];
  }
  index_t page_count(index_t id) const { return sequences_[std::size_t(id)].page_count; }
  index_t reserved(index_t id) const { return sequences_[std::size_t(id)].reserved; }
  index_t reserved_copies(index_t id) const { return sequences_[std::size_t(id)].copies; }
  /// How many pages were ever acquired: every page number is below it.
  index_t made() const { return counted_.made(); }
  /// Released pages, which are acquired again before new ones are made.
  index_t idle() const { return counted_.idle(); }
  /// Pages that sequences have or have reserved. A page that several have counts once.
  offset_t claimed() const { return counted_.used() + promised_; }
  /// What the pages of a group come to if those that share a page each count their part of it.
  offset_t bytes(index_t id, index_t group, offset_t page_bytes) const {
    return counted_.bytes(sequences_[std::size_t(id)].tables[std::size_t(group)], page_bytes);
  }

 private:
  struct sequence {
    host_vector<host_vector<index_t>> tables;  // by group
    index_t page_count = 0, reserved = 0;
    index_t copies = 0;  // of the reservation, in place of shared pages
  };
  static offset_t promise_of(index_t page_count, index_t reserved, index_t copies) {
    return offset_t((std::max)(0, reserved - page_count)) + copies;
  }
  static offset_t promised(const sequence& owner) { return promise_of(owner.page_count, owner.reserved, owner.copies); }
  void set_promise(sequence& owner, index_t reserved, index_t copies) {
    promised_ -= promised(owner);
    owner.reserved = reserved;
    owner.copies = copies;
    promised_ += promised(owner);
  }
  template <class Details>
  void require_room(offset_t more, const Details& details) const {
    if (capacity_ == 0 || more <= 0 || claimed() + more <= capacity_) return;
    // The message is built, and needs memory, only here.
    fail("pages of the pool", capacity_, "at least " + std::to_string(claimed() + more) + details(),
         "close a sequence, shorten the prompt, or give the pool more pages");
  }
  void require_room(offset_t more) const {
    if (capacity_ == 0 || more <= 0 || claimed() + more <= capacity_) return;
    fail("pages of the pool", capacity_, "at least " + std::to_string(claimed() + more),
         "close a sequence, or give the pool more pages");
  }

  index_t groups_, capacity_;
  offset_t promised_ = 0;  // pages that sequences have reserved and do not have
  counted_pages counted_;  // of a pool with a bound, has memory for all of its pages
  host_vector<sequence> sequences_;
};

TESSERA_NAMESPACE_END
