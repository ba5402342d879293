// Prefill: which keys the rows of a prompt attend: all visible keys, or lines that are chosen for each query head.
#pragma once

#include <concepts>
#include <type_traits>

#include "../core/host/host_vector.hpp"
#include "../core/parameters.hpp"
#include "../core/prompt/prompt_lines.hpp"
#include "../core/prompt/sampled_attention.hpp"
#include "../math/line_cover.hpp"

TESSERA_NAMESPACE_BEGIN

/// A policy that says which keys the rows of a prompt chunk attend.
///   name
///   chooses_lines           static: false where rows attend all visible keys
template <class P>
concept prompt_pattern = requires {
  { P::name } -> std::convertible_to<const char*>;
  { P::chooses_lines } -> std::convertible_to<bool>;
};

/// A policy that chooses lines for each query head, for every chunk from the chunk's rows.
///   sample(first, next, rows)      appends ascending positions in [first, next) of the rows whose attention it needs,
///                                  the same for all heads and layers; none where lines do not depend on attention
///   choose(sample, cover, lines)   for one query head: fills `lines`, using the memory of `cover`. Every row should
///                                  attend at least one key; slash line 0 gives each row its own key
///   check(), parameters(self, visit) as every policy has them
/// It may also say
///   dense_rows                     index_t: how many of a chunk's last rows attend everything
template <class P>
concept line_pattern = prompt_pattern<P> && P::chooses_lines && has_parameters<P> &&
                       requires(const P p, index_t at, host_vector<index_t>& rows, const sampled_attention& seen,
                                line_cover& cover, line_set& lines) {
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

/// A line pattern that may add the vertical lines of all turns to a filter's candidates.
///   adds_to_reading() -> bool
/// It may also say
///   adds_slashes() -> bool         whether slash lines join, too: of distance d, key p - d for a step at position p
template <class P>
concept lasting_pattern = line_pattern<P> && requires(const P p) {
  { p.adds_to_reading() } -> std::same_as<bool>;
};

/// Whether slash lines of all turns' prompts join what steps read.
template <class P>
bool adds_slashes(const P& pattern) {
  if constexpr (lasting_pattern<P> && requires { pattern.adds_slashes(); }) return pattern.adds_slashes();
  return false;
}

/// A line pattern that a device can run. It says of every line whether it is always chosen, whatever its weight. A
/// covering_pattern or counted_pattern chooses further lines by the sampled attention.
///   takes_slash(distance), takes_column(position) -> bool
template <class P>
concept device_line_pattern = line_pattern<P> && std::is_trivially_copyable_v<P> && requires(const P p, index_t at) {
  { p.takes_slash(at) } -> std::same_as<bool>;
  { p.takes_column(at) } -> std::same_as<bool>;
};
/// A pattern whose lines cover a share of the sampled attention weight. The line that covers the most weight for its
/// length is chosen first.
///   covered_share() -> float     the share and a margin for rounding; 0: only the lines that are always chosen
template <class P>
concept covering_pattern = device_line_pattern<P> && requires(const P p) {
  { p.covered_share() } -> std::same_as<float>;
};
/// A covering pattern that may choose its lines as LoopServe published them, by bounds (math/published_walk.hpp),
/// beside lines that are always chosen.
///   covers_as_published() -> bool     for the chunk's choice; called on the host
template <class P>
concept published_pattern = covering_pattern<P> && requires(const P p) {
  { p.covers_as_published() } -> std::same_as<bool>;
};
/// A pattern with a fixed number of lines of each kind: the heaviest. Lines that are always chosen count.
///   columns(), diagonals() -> index_t
template <class P>
concept counted_pattern = device_line_pattern<P> && requires(const P p) {
  { p.columns() } -> std::same_as<index_t>;
  { p.diagonals() } -> std::same_as<index_t>;
};

/// Whether a prefill policy runs on a device. A sentence says what it lacks.
template <class P>
constexpr bool check_device_prefill() {
  static_assert(!P::chooses_lines || device_line_pattern<P>,
                "tessera: a prefill policy that chooses lines runs on a device if it is trivially copyable and has "
                "takes_slash(distance) and takes_column(position) for both sides, TESSERA_HD");
  return !P::chooses_lines || device_line_pattern<P>;
}

/// Whether a type is a prefill policy. A sentence says what it lacks.
template <class P>
constexpr bool check_prefill() {
  static_assert(requires { P::name; }, "tessera: a prefill policy must name itself: static constexpr const char* name");
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
