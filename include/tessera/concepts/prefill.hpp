// Prefill: which keys do a prompt's rows attend? All that they see, or lines that are chosen for each query head.
#pragma once

#include <concepts>
#include <type_traits>

#include "../core/host/host_vector.hpp"
#include "../core/parameters.hpp"
#include "../core/prompt/prompt_lines.hpp"
#include "../core/prompt/sampled_attention.hpp"
#include "../math/line_cover.hpp"

TESSERA_NAMESPACE_BEGIN

/// A policy that says what the rows of a prompt chunk attend.
///   name
///   chooses_lines           static: false where rows attend all that they see
template <class P>
concept prompt_pattern = requires {
  { P::name } -> std::convertible_to<const char*>;
  { P::chooses_lines } -> std::convertible_to<bool>;
};

/// One that chooses lines, anew for every chunk from that chunk's rows, for each query head.
///   sample(first, next, rows)      appends ascending positions in [first, next): whose attention it looks at, the same
///                                  for all heads and layers; none where lines do not hang on attention
///   choose(seen, cover, lines)     of one query head: fills `lines`, in the memory of `cover`. Every row should have a
///                                  key: with slash line 0 its own
///   check(), parameters(self, visit) as every policy has them
/// It may also say
///   dense_rows                     index_t: so many of a chunk's last rows attend everything
template <class P>
concept line_pattern = prompt_pattern<P> && P::chooses_lines && has_parameters<P> &&
    requires(const P p, index_t at, host_vector<index_t>& rows, const sampled_attention& seen, line_cover& cover,
             line_set& lines) {
  p.sample(at, at, rows);
  p.choose(seen, cover, lines);
  p.check();
};

/// How many of a chunk's last rows attend everything.
template <class P>
index_t dense_rows_of(const P& pattern) {
  if constexpr (requires { pattern.dense_rows; }) return pattern.dense_rows;
  return 0;
}

/// A line pattern that says whether vertical lines of all turns are added to what a filter lets decode steps read.
///   adds_to_reading() -> bool
template <class P>
concept lasting_pattern = line_pattern<P> && requires(const P p) {
  { p.adds_to_reading() } -> std::same_as<bool>;
};

/// A line pattern that a device can run: it says of every line whether it is taken whatever its weight. It may be asked
/// to take more by the sampled attention, as covering_pattern or counted_pattern.
///   takes_slash(distance), takes_column(position) -> bool
template <class P>
concept device_line_pattern = line_pattern<P> && std::is_trivially_copyable_v<P> && requires(const P p, index_t at) {
  { p.takes_slash(at) } -> std::same_as<bool>;
  { p.takes_column(at) } -> std::same_as<bool>;
};
/// One whose lines carry a share of the sampled weight: always the line that covers most for its length.
///   covered_share() -> float     with what rounding may take; 0: nothing beside the lines that are always taken
template <class P>
concept covering_pattern = device_line_pattern<P> && requires(const P p) {
  { p.covered_share() } -> std::same_as<float>;
};
/// A covering one that may want its lines as LoopServe published them, by bounds (math/published_walk.hpp), and lines
/// that are always taken beside them.
///   covers_as_published() -> bool     of a chunk whose lines are to be chosen: asked on the host
template <class P>
concept published_pattern = covering_pattern<P> && requires(const P p) {
  { p.covers_as_published() } -> std::same_as<bool>;
};
/// One that takes so many lines of each kind, the heaviest; those that are always taken count.
///   columns(), diagonals() -> index_t
template <class P>
concept counted_pattern = device_line_pattern<P> && requires(const P p) {
  { p.columns() } -> std::same_as<index_t>;
  { p.diagonals() } -> std::same_as<index_t>;
};

/// Whether a prefill policy runs on a device; what it lacks is said in a sentence.
template <class P>
constexpr bool check_device_prefill() {
  static_assert(!P::chooses_lines || device_line_pattern<P>,
                "tessera: a prefill policy that chooses lines runs on a device if it is trivially copyable and has "
                "takes_slash(distance) and takes_column(position) for both sides, TESSERA_HD");
  return !P::chooses_lines || device_line_pattern<P>;
}

/// Whether a type is a prefill policy; what it lacks is said in a sentence.
template <class P>
constexpr bool check_prefill() {
  static_assert(
      requires { P::name; }, "tessera: a prefill policy must name itself: static constexpr const char* name");
  static_assert(
      requires { P::chooses_lines; },
      "tessera: a prefill policy must say whether it chooses lines: static constexpr bool chooses_lines");
  static_assert(prompt_pattern<P>, "tessera: a prefill policy's name and chooses_lines must be static constants");
  static_assert(!P::chooses_lines || line_pattern<P>,
                "tessera: a prefill policy that chooses lines needs sample(first, next, rows), "
                "choose(sampled_attention, line_cover, line_set), check() and parameters(self, visit)");
  return prompt_pattern<P> && (!P::chooses_lines || line_pattern<P>);
}

TESSERA_NAMESPACE_END
