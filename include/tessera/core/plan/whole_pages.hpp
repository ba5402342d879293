// Counts of heads in whole pages, for engines whose heads share the length of a sequence.
#pragma once

#include "../config.hpp"
#include "../types.hpp"

TESSERA_NAMESPACE_BEGIN

/// What the heads of a layer store, and what each must keep: the settled slots and the newest ones.
struct stored_heads {
  const index_t* tokens = nullptr;  ///< of head h at tokens[h * stride]
  offset_t stride = 1;
  const index_t* settled = nullptr;  ///< [heads]; null: none
  index_t tail = 0;

  TESSERA_HD index_t tokens_of(index_t h) const { return tokens[h * stride]; }
  TESSERA_HD index_t least_of(index_t h) const {
    const index_t least = (settled ? settled[h] : 0) + tail;
    return least < tokens_of(h) ? least : tokens_of(h);
  }
};

/// Turns what the heads of a layer keep into whole pages. Each head gets the full pages of its count, and at least
/// those of what it must keep. The tokens that are left over are given out a page at a time, to the head whose
/// remainder is largest; ties go to the lower head. A head that keeps everything keeps it. So the heads keep no more
/// than before, but for pages that a head must have.
/// Shapes   counts [heads], changed.
/// Cost     a look at every head for each page that is given out; fewer than `heads`, unless heads are full.
TESSERA_HD inline void count_whole_pages(index_t heads, index_t page, const stored_heads& stored, index_t* counts) {
  offset_t left = 0;
  for (index_t h = 0; h < heads; ++h) {
    const index_t tokens = stored.tokens_of(h), least = stored.least_of(h);
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
      const index_t remainder = counts[h] % page, tokens = stored.tokens_of(h);
      if (remainder > most && tokens - (counts[h] - remainder) >= page && counts[h] < tokens)
        most = remainder, best = h;
    }
    if (best < 0) break;
    counts[best] += page - most;
  }
  for (index_t h = 0; h < heads; ++h) {
    if (counts[h] < stored.tokens_of(h)) counts[h] -= counts[h] % page;
  }
}

TESSERA_NAMESPACE_END
