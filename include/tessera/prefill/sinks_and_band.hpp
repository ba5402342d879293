// A-shape and Tri-shape: a prompt's first tokens and a band along the diagonal, for every head alike.
#pragma once

#include "../concepts/prefill.hpp"
#include "../core/host/host_vector.hpp"

TESSERA_NAMESPACE_BEGIN

/// Every row attends the first `init` positions and the newest `local`, its own among them; the last `dense_rows` rows
/// of a chunk attend everything (Tri-shape).
/// Errors   parameters out of range: tessera::error.   Cost  nothing is looked at.
/// Paper    A-shape and Tri-shape of MInference, arXiv:2407.02490, and SCBench, arXiv:2412.10319; defaults as LoopServe
///          runs them (arXiv:2507.13681, Table 7). Differs: `local` counts positions, not stored tokens.
struct sinks_and_band {
  static constexpr const char* name = "sinks_and_band";
  static constexpr bool chooses_lines = true;

  index_t init = 128;
  index_t local = 4096;
  index_t dense_rows = 0;

  void sample(index_t, index_t, host_vector<index_t>&) const {}

  void choose(const sampled_attention& seen, line_cover& cover, line_set& lines) const {
    cover.begin(seen);
    cover.add_forced(local, init);
    cover.write(lines);
  }

  TESSERA_HD bool takes_slash(index_t distance) const { return distance < local; }
  TESSERA_HD bool takes_column(index_t position) const { return position < init; }

  void check() const { check_parameters(*this); }

  template <class Self, class Visit>
  static void parameters(Self& self, Visit&& visit) {
    visit("init", self.init, value_range{0, max_tokens}, "first positions that every row attends");
    visit("local", self.local, value_range{1, max_tokens}, "newest positions that a row attends, its own among them");
    visit("dense_rows", self.dense_rows, value_range{0, max_tokens},
          "last rows of a prompt chunk that attend everything");
  }
};

static_assert(check_prefill<sinks_and_band>() && device_line_pattern<sinks_and_band>);

TESSERA_NAMESPACE_END
