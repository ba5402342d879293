// Selector: which slots are kept. It turns scores and a count into an ascending list of slots.
#pragma once

#include <concepts>
#include <type_traits>

#include "../core/types.hpp"
#include "../core/units.hpp"
#include "../math/top_k.hpp"

TESSERA_NAMESPACE_BEGIN

/// A selector of the best units of `unit_slots` consecutive slots, as top_blocks chooses blocks (1: as top_tokens
/// chooses tokens). Backends may search for them in their own way.
///   unit_slots() -> index_t     at least 1; 1 where the unit is token_unit
template <class S>
concept best_units_selector = requires(const S s) {
  { s.unit_slots() } -> std::same_as<index_t>;
};

/// A selector with one body for all backends; on a device one thread runs it for each head.
///   choose(scores, n, tail, keep, out) -> index_t     as `select` below; TESSERA_HD
template <class S>
concept plain_selector = requires(const S s, const float* scores, index_t n, index_t* out) {
  { s.choose(scores, n, n, n, out) } -> std::same_as<index_t>;
};

/// A selector that chooses in each segment of the text. The best `keep` candidates (as top_tokens chooses) fix how many
/// slots each segment gets; the selector chooses which, segment by segment.
///   choose_in_segment(scores, n, keep, out) -> index_t
///       scores [n] of the segment's candidates in slot order, 1 <= keep <= n <= max_segment_tokens: writes exactly
///       `keep` strictly ascending indexes in [0, n); returns the size of the chosen blocks. TESSERA_HD, for all
///       backends; needs no memory of the caller. Beside it, for devices: choose_in_segment(team, scores, n, keep, out,
///       sums), the same by a team of lanes (core/one_lane.hpp); sums [max_segment_tokens / 2], of double, is theirs
///       to use.
template <class S>
concept segment_selector = requires(const S s, const float* scores, index_t n, index_t* out) {
  { s.choose_in_segment(scores, n, n, out) } -> std::same_as<index_t>;
};

/// A selector with a body of its own for the host.
template <class S>
concept host_selector = requires(const S s, const float* scores, index_t n, index_t* out, top_k_scratch& scratch) {
  { s.select(scores, n, n, n, out, scratch) } -> std::same_as<index_t>;
};

/// A policy that chooses slots of one head.
///   name, unit                                        its name; token_unit or block_unit
///   select(scores, n, tail, keep, out, scratch)       writes strictly ascending slots, returns how many: min(keep, n).
///       The newest `tail` of the n slots are always chosen (the newest `keep` of them when keep < tail).
///       Deterministic: score descending, ties to the lower index, NaN last. Or `choose`, see above.
///   choose_in_segment                                 in place of `select`, for a selector of segments: see above
///   check()                                           throws tessera::error on parameters that make no sense
template <class S>
concept selector = std::is_trivially_copyable_v<S> && (host_selector<S> || plain_selector<S> || segment_selector<S>) &&
                   requires(const S s) {
                     typename S::unit;
                     { S::name } -> std::convertible_to<const char*>;
                     s.check();
                   };

/// The choice of a selector without segments, on the host.
template <class S>
index_t choose_slots(const S& selector, const float* scores, index_t n, index_t tail, index_t keep, index_t* out,
                     top_k_scratch& scratch) {
  if constexpr (host_selector<S>) {
    return selector.select(scores, n, tail, keep, out, scratch);
  } else {
    return selector.choose(scores, n, tail, keep, out);
  }
}

/// Whether a type is a selector. A sentence says what it lacks.
template <class S>
constexpr bool check_selector() {
  static_assert(std::is_trivially_copyable_v<S>, "tessera: a selector must be trivially copyable");
  static_assert(requires { S::name; }, "tessera: a selector must name itself: static constexpr const char* name");
  static_assert(requires { typename S::unit; }, "tessera: a selector must name its unit: token_unit or block_unit");
  static_assert(selector<S>,
                "tessera: a selector needs index_t select(scores, n, tail, keep, out, scratch), "
                "index_t choose(scores, n, tail, keep, out) or, to see segments, "
                "index_t choose_in_segment(scores, n, keep, out), and check()");
  return selector<S>;
}

/// Whether devices can run it.
template <class S>
constexpr bool check_device_selector() {
  static_assert(best_units_selector<S> || plain_selector<S>,
                "tessera: this selector runs on the host only; a device needs index_t unit_slots(), or "
                "index_t choose(scores, n, tail, keep, out) with TESSERA_HD");
  return best_units_selector<S> || plain_selector<S>;
}

TESSERA_NAMESPACE_END
