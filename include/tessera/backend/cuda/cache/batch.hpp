// Batches of sequences that lie side by side, cut from batches that do not.
#pragma once

#include <utility>
#include <vector>

#include "../../../core/views.hpp"

TESSERA_NAMESPACE_BEGIN
namespace cuda {
namespace detail {

/// Runs of ids that follow one another and are `alike`, in the order of `ids`: first id, count.
template <class Alike>
std::vector<std::pair<index_t, index_t>> runs(const std::vector<index_t>& ids, const Alike& alike) {
  std::vector<std::pair<index_t, index_t>> result;
  for (const index_t id : ids) {
    if (!result.empty() && result.back().first + result.back().second == id && alike(result.back().first, id)) {
      ++result.back().second;
    } else {
      result.push_back({id, 1});
    }
  }
  return result;
}

/// Sequences `first` ... `first + count - 1` of a batch of rows.
template <class T>
rows_view<T> part(rows_view<T> rows, index_t first, index_t count) {
  rows.data += rows.data ? first * rows.sequence_stride : 0;
  rows.sequences = count;
  return rows;
}

}  // namespace detail
}  // namespace cuda
TESSERA_NAMESPACE_END
