// LoopServe's published greedy choice between two lists of lines, for both backends.
#pragma once

#include "../core/types.hpp"

TESSERA_NAMESPACE_BEGIN

/// A line of a list, by what the sampled rows give it. Weight 0 ends a list.
struct weighed_line {
  double weight, largest;  ///< the sum of its entries, and the largest of them
  index_t length;          ///< its entries in the whole chunk
};

/// The state of Algorithm 5; all zeros at the start. The paper leaves some steps open. Here they are:
///   - slashes and verticals are two lists, each by falling weight; lines without weight are left out;
///   - the gain of a list's first line is its weight less the largest entries of all chosen lines of the other kind;
///   - its length is its entries less the number of those lines, at least 1;
///   - the line with the larger gain for its length, of equals the slash, is chosen and leaves its list, and its gain,
///     at least 0, is added up;
///   - it ends when the sum of gains, a lower bound of what is covered, comes to what is wanted.
/// Quotients are compared by their cross products, which are the same on both sides and need no division.
/// Paper    Li et al., LoopServe, arXiv:2507.13681, Algorithm 5.
struct published_walk {
  index_t slashes, verticals;  ///< chosen so far: so many of each list's first
  double largest_of_slashes, largest_of_verticals, sum_of_gains;

  /// Continues with the first `count` remaining lines of each list; nothing after a list's end is read. Returns false
  /// if all of these lines of one list are chosen and more are needed.
  TESSERA_HD bool go_on(double wanted, const weighed_line* slash, const weighed_line* vertical, index_t count) {
    const weighed_line *const slash_end = slash + count, *const vertical_end = vertical + count;
    while (sum_of_gains < wanted) {
      if (slash == slash_end || vertical == vertical_end) return false;
      const bool has_slash = slash->weight > 0, has_vertical = vertical->weight > 0;
      if (!has_slash && !has_vertical) return true;
      const double by_slash = slash->weight - largest_of_verticals, by_vertical = vertical->weight - largest_of_slashes;
      const bool takes_slash = !has_vertical || (has_slash && by_slash * left_of(vertical->length, slashes) >=
                                                                  by_vertical * left_of(slash->length, verticals));
      const double gain = takes_slash ? by_slash : by_vertical;
      if (gain > 0) sum_of_gains += gain;
      if (takes_slash) {
        largest_of_slashes += slash->largest;
        ++slash, ++slashes;
      } else {
        largest_of_verticals += vertical->largest;
        ++vertical, ++verticals;
      }
    }
    return true;
  }

 private:
  TESSERA_HD static double left_of(index_t length, index_t crossing) {
    return length - crossing > 1 ? double(length - crossing) : 1.0;
  }
};

TESSERA_NAMESPACE_END
