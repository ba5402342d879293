// The pages of a pool that several tables may hold: which are idle, and how many tables hold each of the others.
#pragma once

#include <algorithm>

#include "../core/host/host_vector.hpp"
#include "../core/types.hpp"

TESSERA_NAMESPACE_BEGIN

/// Pages are numbers from 0 on; the owner of the memory maps them to addresses. A page that no table holds is idle, and
/// is acquired again before new numbers are. A page that several tables hold is shared: it must not be written.
/// Errors   out of memory, in `make_room` alone: std::bad_alloc, and nothing changes.
class counted_pages {
 public:
  /// `count`: pages for which there is memory on the host.
  explicit counted_pages(index_t count = 0) { make_room(count); }

  /// Allocates the memory that counts `count` pages in all. Copies have it too: `acquire` and `release` need none.
  void make_room(index_t count) {
    if (std::size_t(count) <= holders_.size()) return;
    idle_pages_.resize(std::size_t(count), 0);
    holders_.resize(std::size_t(count), 0);
  }

  /// A page that no table holds, for one that will.
  index_t acquire() {
    const index_t page = idle_ > 0 ? idle_pages_[std::size_t(--idle_)] : made_++;
    holders_[std::size_t(page)] = 1;
    return page;
  }
  /// One more table holds a page.
  void share(index_t page) { ++holders_[std::size_t(page)], ++shares_; }
  /// A table no longer holds a page. Returns whether none does.
  bool release(index_t page) {
    if (--holders_[std::size_t(page)] > 0) return --shares_, false;
    idle_pages_[std::size_t(idle_++)] = page;
    return true;
  }

  index_t holders(index_t page) const { return holders_[std::size_t(page)]; }
  bool is_shared(index_t page) const { return holders(page) > 1; }
  bool any_shared() const { return shares_ > 0; }
  /// How many pages were ever acquired: every page number is below it.
  index_t made() const { return made_; }
  /// Released pages that nothing has acquired since.
  index_t idle() const { return idle_; }
  /// Pages that tables hold; a shared one counts once.
  index_t used() const { return made_ - idle_; }
  /// Pages of a table from `first` to below `last` that other tables hold too.
  index_t shared_of(const host_vector<index_t>& table, std::size_t first, std::size_t last) const {
    index_t count = 0;
    for (std::size_t i = first; any_shared() && i < (std::min)(last, table.size()); ++i) count += is_shared(table[i]);
    return count;
  }
  /// What a table's pages come to if the tables that share a page each count their part of it, rounded up.
  offset_t bytes(const host_vector<index_t>& table, offset_t page_bytes) const {
    offset_t total = 0;
    for (const index_t page : table) total += (page_bytes + holders(page) - 1) / holders(page);
    return total;
  }

 private:
  index_t made_ = 0, idle_ = 0;
  offset_t shares_ = 0;              // holders beyond the first, of all pages
  host_vector<index_t> holders_;     // by page: tables that hold it
  host_vector<index_t> idle_pages_;  // the first `idle_` of them
};

TESSERA_NAMESPACE_END
