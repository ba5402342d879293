// MInference's vertical-slash pattern: fixed numbers of lines, by the attention of a prompt's last rows.
#pragma once

#include "../concepts/prefill.hpp"
#include "../core/host/host_vector.hpp"
#include "../math/top_k.hpp"

TESSERA_NAMESPACE_BEGIN

/// Takes the `vertical` columns and the `slash` diagonals with most attention of a chunk's last 64 rows. The first 30
/// columns and the nearest 100 diagonals come first, whatever their weight; at least 30 and 50 lines are taken, as far
/// as there are any.
/// Ties     to the lower position and the nearer diagonal.
/// Errors   counts out of range: tessera::error.   Cost  one pass over K for 64 rows of each query head.
/// Paper    Jiang et al., MInference 1.0, arXiv:2407.02490, its released code's forced lines and default counts.
///          Differs: the lines themselves are attended, not the blocks of 64 that its kernel rounds them to; one pair
///          of counts for all heads where its search gives each head a pair of its own.
struct vertical_slash {
  static constexpr const char* name = "vertical_slash";
  static constexpr bool chooses_lines = true;
  static constexpr index_t observed_rows = 64, forced_columns = 30, forced_slashes = 100, least_vertical = 30,
                           least_slash = 50;

  index_t vertical = 1000;
  index_t slash = 6096;

  void sample(index_t first, index_t next, host_vector<index_t>& rows) const {
    for (index_t at = (std::max)(first, next - observed_rows); at < next; ++at) rows.push_back(at);
  }

  void choose(const sampled_attention& seen, line_cover& cover, line_set& lines) const {
    cover.begin(seen);
    host_vector<float> columns, diagonals;
    for (index_t slot = 0; slot < seen.slots(); ++slot) {
      const bool forced = seen.positions[std::size_t(slot)] < forced_columns;
      columns.push_back(forced ? infinity : float(cover.weight(cover.vertical(slot))));
    }
    host_vector<index_t> distances;  // of diagonals on which something is stored
    for (index_t distance = 0; distance < seen.next; ++distance) {
      if (cover.length(distance) == 0) continue;
      distances.push_back(distance);
      diagonals.push_back(distance < forced_slashes ? infinity : float(cover.weight(distance)));
    }
    for (const index_t slot : best(columns, this->columns())) cover.add(cover.vertical(slot));
    for (const index_t i : best(diagonals, this->diagonals())) cover.add(distances[std::size_t(i)]);
    cover.write(lines);
  }

  TESSERA_HD index_t columns() const { return vertical > least_vertical ? vertical : least_vertical; }
  TESSERA_HD index_t diagonals() const { return slash > least_slash ? slash : least_slash; }
  TESSERA_HD bool takes_slash(index_t distance) const { return distance < forced_slashes && distance < diagonals(); }
  TESSERA_HD bool takes_column(index_t position) const { return position < forced_columns; }

  void check() const { check_parameters(*this); }

  template <class Self, class Visit>
  static void parameters(Self& self, Visit&& visit) {
    visit("vertical", self.vertical, value_range{0, max_tokens}, "columns that a head attends, at least 30");
    visit("slash", self.slash, value_range{0, max_tokens}, "diagonals that a head attends, at least 50");
  }

 private:
  static host_vector<index_t> best(const host_vector<float>& weights, index_t count) {
    top_k_scratch scratch;
    host_vector<index_t> chosen(std::size_t((std::min)(count, index_t(weights.size()))));
    top_k(weights.data(), index_t(weights.size()), index_t(chosen.size()), chosen.data(), scratch);
    return chosen;
  }
};

static_assert(check_prefill<vertical_slash>() && counted_pattern<vertical_slash>);

TESSERA_NAMESPACE_END
