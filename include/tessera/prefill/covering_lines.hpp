// LoopServe's prefill: the few vertical and slash lines that carry the attention of a few sampled rows.
#pragma once

#include "../concepts/prefill.hpp"
#include "../core/host/host_vector.hpp"

TESSERA_NAMESPACE_BEGIN

/// How lines are found: by what each still covers, exactly, which is this library's own search, or by the paper's
/// Algorithm 5, which is what "as published" means.
enum class line_search { coverage, paper };
/// Which rows of a chunk are looked at: evenly spaced ones with the newest among them, or some that a seed draws.
enum class row_sampling { even, random };

/// Samples rows of each chunk and takes lines, the best for their length first, until they carry the share `alpha` of
/// the sampled rows' attention. The nearest 64 slash lines and the first 4 columns are always taken; with alpha 1
/// everything is. The chunk's last `dense_rows` rows attend everything: the answer begins with what they see, and the
/// share that lines may leave out is more than the weight of one sampled row.
///
/// The rows are evenly spaced and end with the newest, where a question often stands; with `sampling` random they
/// follow from `seed` and the chunk's position. They are the same for all heads and layers. A chunk of at most
/// `sampled_rows` rows is looked at whole. A prompt in one chunk thus has one sample; one in several chunks has that
/// many rows of each, since lines are chosen by rows that attend them. Nothing is promised of what other rows look at,
/// unless they are dense.
/// Tokens of earlier turns are keys here, never rows.
/// Errors   alpha outside (0, 1], no rows, a seed out of range: tessera::error.
/// Cost     one pass over K for the sampled rows of each query head, and memory for their attention; then lines *
///          log(lines). Dense rows see every key: a chunk of few rows is mostly dense.
/// Paper    Li et al., LoopServe, arXiv:2507.13681, Sec. 5.1 ("uniformly sampling") and Algorithm 5 (random rows, of
///          which nearly none is a question's). Differs: `coverage` counts what lines cover exactly where the paper has
///          bounds, and starts from the forced lines, which the paper lacks (a row that was not sampled must see
///          something); dense rows (`algorithm` paper with `dense_rows` 0: as published); causal; a slash line is a
///          distance in positions, so blocks may be rectangular.
struct covering_lines {
  static constexpr const char* name = "covering_lines";
  static constexpr bool chooses_lines = true;
  static constexpr index_t forced_slashes = 64, forced_columns = 4;
  /// Added to `alpha`: weights are sums of floats, and lines shall carry `alpha` of the exact weights.
  static constexpr double rounding = 2e-6;
  /// The same on devices, which sum products of 16-bit elements with fewer digits than a float has.
  static constexpr float rounding_on_devices = 1e-5f;

  float alpha = 0.955f;
  index_t sampled_rows = 48;
  index_t seed = 0;
  index_t dense_rows = 16;
  line_search algorithm = line_search::coverage;
  row_sampling sampling = row_sampling::even;

  void sample(index_t first, index_t next, host_vector<index_t>& to) const {
    std::uint64_t state = std::uint64_t(seed) << 32 ^ std::uint64_t(first);
    index_t wanted = (std::min)(sampled_rows, next - first);
    if (sampling == row_sampling::even) {
      for (index_t i = 1; i <= wanted; ++i) to.push_back(first + index_t(offset_t(i) * (next - first) / wanted) - 1);
      return;
    }
    for (index_t at = first; at < next && wanted > 0; ++at) {  // each row with the chance that makes all sets equal
      state += 0x9e3779b97f4a7c15u;
      std::uint64_t word = (state ^ (state >> 30)) * 0xbf58476d1ce4e5b9u;
      word = (word ^ (word >> 27)) * 0x94d049bb133111ebu;
      word ^= word >> 31;
      if (word % std::uint64_t(next - at) >= std::uint64_t(wanted)) continue;
      to.push_back(at);
      --wanted;
    }
  }

  void choose(const sampled_attention& seen, line_cover& cover, line_set& lines) const {
    cover.begin(seen);
    if (alpha >= 1) {
      cover.add_everything();
      cover.add_if_any(0);
    } else if (algorithm == line_search::paper) {
      cover.cover_as_published(alpha + rounding);
      cover.add_forced(forced_slashes, forced_columns);
    } else {
      cover.add_forced(forced_slashes, forced_columns);
      cover.cover(alpha + rounding);
    }
    cover.write(lines);
  }

  TESSERA_HD bool takes_slash(index_t distance) const { return alpha >= 1 ? distance == 0 : distance < forced_slashes; }
  TESSERA_HD bool takes_column(index_t position) const { return alpha >= 1 || position < forced_columns; }
  TESSERA_HD float covered_share() const { return alpha >= 1 ? 0.0f : alpha + rounding_on_devices; }
  TESSERA_HD bool covers_as_published() const { return algorithm == line_search::paper; }

  void check() const { check_parameters(*this); }

  template <class Self, class Visit>
  static void parameters(Self& self, Visit&& visit) {
    visit("alpha", self.alpha, value_range{1e-6f, 1.0f},
          "share of the sampled attention that the lines carry; 1: dense");
    visit("sampled_rows", self.sampled_rows, value_range{1, 1 << 12}, "rows of a prompt chunk that are sampled");
    visit("sampling", self.sampling, one_word_of{"even or random"},
          "which rows: evenly spaced with the newest among them, or drawn by the seed");
    visit("seed", self.seed, value_range{0, max_tokens}, "another seed, other random rows");
    visit("dense_rows", self.dense_rows, value_range{0, max_tokens},
          "last rows of a prompt chunk that attend everything");
    visit("algorithm", self.algorithm, one_word_of{"coverage or paper"},
          "how lines are found: by this library's search, exact on the sample, or as published");
  }
};

static_assert(check_prefill<covering_lines>() && published_pattern<covering_lines>);

TESSERA_NAMESPACE_END
