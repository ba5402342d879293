// Counts of heads in whole pages, for engines whose heads share the length of a sequence.
#pragma once

#include "../config.hpp"
#include "../types.hpp"

TESSERA_NAMESPACE_BEGIN

/// Turns what the heads of a layer keep into whole pages. Each head gets the full pages of its count, and at least
/// those of what it must keep. The tokens that are left over are given out a page at a time, to the head whose
/// remainder is largest; ties go to the lower head. A head that keeps everything keeps it. So the heads keep no more
/// than before, but for pages that a head must have.
/// Shapes   counts [heads], changed; tokens_of(head): what it stores; least_of(head): what it must keep.
/// Cost     a look at every head for each page that is given out; fewer than `heads`, unless heads are full.
template <class Tokens, class Least>
TESSERA_HD void count_whole_pages(index_t heads, index_t page, const Tokens& tokens_of, const Least& least_of,
                                  index_t* counts) {
  offset_t left = 0;
  for (index_t h = 0; h < heads; ++h) {
    const index_t tokens = tokens_of(h), least = least_of(h);
    if (counts[h] >= tokens) continue;
    const index_t needed = least / page + (least % page > 0);
    if (needed > counts[h] / page) {
      const index_t taken = offset_t(needed) * page < tokens ? needed * page : tokens;
      left -= taken - counts[h];
      counts[h] = taken;
    } else {
      left += counts[h] % page;
    }
  }
  for (; left >= page; left -= page) {
    index_t best = -1, most = -1;
    for (index_t h = 0; h < heads; ++h) {
      const index_t remainder = counts[h] % page;
      if (remainder > most && tokens_of(h) - (counts[h] - remainder) >= page && counts[h] < tokens_of(h))
        most = remainder, best = h;
    }
    if (best < 0) break;
    counts[best] += page - most;
  }
  for (index_t h = 0; h < heads; ++h) {
    if (counts[h] < tokens_of(h)) counts[h] -= counts[h] % page;
  }
}

TESSERA_NAMESPACE_END
