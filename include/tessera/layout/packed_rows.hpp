// Rows of which only some elements are stored.
#pragma once

#include <algorithm>
#include <numeric>
#include <string>

#include "../concepts/channels.hpp"
#include "../concepts/host_only.hpp"
#include "../concepts/layout.hpp"
#include "../core/parameters.hpp"
#include "../core/plan/layer_peak.hpp"
#include "../core/stored/packing_moment.hpp"
#include "../core/stored/segment_strategy.hpp"
#include "packed/one_strategy.hpp"

TESSERA_NAMESPACE_BEGIN

/// How the chunks of a prompt are stored until it ends: as whole rows, or packed when the next chunk arrives, which
/// then attends to packed rows.
enum class prefill_rows { whole, packed };

/// What becomes of whole rows that `Tail` would pack.
enum class due_rows { stay_whole, join_last_segment, begin_segments };

/// What a layer of a sequence has packed: rows of its longest head, and those of them in the basis that new rows join.
struct packed_so_far {
  index_t rows = 0, in_last_basis = 0;
};

/// K and V in segments: each holds the elements that its channel selectors keep, in a basis of its own. The newest
/// tokens, and a prompt until it ends, are rows of another format, `Whole`, in the basis in which the engine hands them
/// over.
///
/// The first prompt, and every later one of at least 4,096 tokens, becomes segments of `segment` tokens when it ends.
/// Shorter prompts and decoded tokens join the last segment, in its basis and format, when `Tail` says so. Rows are
/// packed only in a basis that fits them (`fate`): rows of a sequence stay whole until there are four times as many as
/// a vector has elements; behind a segment of fewer than 2,048 rows they stay whole until they are as many as all
/// packed ones, at most 2,048, and become a segment of their own. No number exceeds `segment`. The second rule is not
/// for tokens of which some have been dropped; neither is for rows that are not rotated.
/// `prefill=packed`: the rows of a chunk are packed when the next one arrives, and join the last segment until it is
/// full. So a prompt's peak is its packed rows, the whole rows of two chunks and up to 2,048 that wait for a basis.
/// Bytes    see packed_format, and a basis for each segment.
/// Errors   channels that leave no element, that are no multiple of the group or that exceed what truncation leaves;
///          blocks that do not divide the tail: tessera::error.
/// Paper    MosaicKV, arXiv:2607.00760, Sec. 4.2, 5.1-5.3; ThinK, arXiv:2407.21018.
template <class Whole, class KeyChannels, class ValueChannels, class Basis, class Tail, class Strategy = one_strategy>
struct packed_rows {
  static_assert(check_row_format<Whole>());
  static_assert(Whole::k_dim <= largest_head_dim && Whole::v_dim <= largest_head_dim,
                "tessera: rows of a head dim above 256 are not packed; take dense rows");
  static_assert(check_channels<KeyChannels>() && check_channels<ValueChannels>());
  static constexpr const char* name = "packed_rows";
  static constexpr bool packs = true;
  static constexpr bool host_only = !raw_encoding<typename Whole::encoding_type> ||
                                    !runs_on_devices<KeyChannels, ValueChannels, Basis, Tail, Strategy>;
  using whole_rows = Whole;
  using key_channels = KeyChannels;
  using value_channels = ValueChannels;
  using basis_type = Basis;
  using strategy_type = Strategy;
  using encoding_type = typename Whole::encoding_type;
  using element_type = typename encoding_type::element_type;
  static constexpr int k_dim = Whole::k_dim;
  static constexpr int v_dim = Whole::v_dim;
  /// Prompt tokens of a later turn from which on they are segments of their own.
  static constexpr index_t own_segment_tokens = 4096;

  KeyChannels key{};
  ValueChannels value{};
  Basis basis{};
  Tail tail{};
  index_t segment = 65536;
  packed_element element = packed_element::same;
  Strategy strategy{};
  prefill_rows prefill = prefill_rows::whole;

  packed_format key_format() const { return format(key, k_dim); }
  packed_format value_format() const { return format(value, v_dim); }

  bool packs_chunks() const { return prefill == prefill_rows::packed; }
  /// What becomes of `due` rows of the longest head, in a turn with a prompt of `prompt` tokens.
  due_rows fate(const packed_so_far& packed, index_t due, packing_moment when, index_t prompt) const {
    const index_t least = fewest_basis_rows();
    if (packed.rows == 0) return due < least ? due_rows::stay_whole : due_rows::begin_segments;
    const bool ends = when == packing_moment::prompt_end;
    if (ends && !packs_chunks() && prompt >= own_segment_tokens && due >= least) return due_rows::begin_segments;
    if (packed.in_last_basis < lasting_basis_rows()) {
      const index_t wanted = (std::max)(least, (std::min)(packed.rows, lasting_basis_rows()));
      return due < wanted ? due_rows::stay_whole : due_rows::begin_segments;
    }
    if (packs_chunks() && when != packing_moment::step_end && packed.in_last_basis >= segment) {
      if (due >= (ends ? least : lasting_basis_rows())) return due_rows::begin_segments;
      if (!ends) return due_rows::stay_whole;
    }
    return due_rows::join_last_segment;
  }
  /// Rows of the shortest segment that others join.
  index_t lasting_basis_rows() const { return Basis::rotates ? (std::min)(index_t(2048), segment) : 0; }
  /// How many segments at most begin before one is that long, besides the first.
  index_t growing_segments() const {
    index_t count = 0, last = fewest_basis_rows(), all = last;
    for (; last < lasting_basis_rows(); ++count) all += last = (std::max)(last, (std::min)(all, lasting_basis_rows()));
    return count;
  }

  /// The fewest rows by which a basis is found.
  index_t fewest_basis_rows() const { return Basis::rotates ? (std::min)(4 * (std::max)(k_dim, v_dim), segment) : 0; }
  /// How many of `left` rows of a prompt, which become segments of their own, the next one gets.
  index_t segment_rows(index_t left) const { return left - segment < fewest_basis_rows() ? left : segment; }
  /// Calls visit(first, count) for the segments that `due` rows become: as many as they fill where it `cuts`, else one.
  template <class Visit>
  void for_each_segment(index_t due, bool cuts, const Visit& visit) const {
    for (index_t first = 0, count = 0; first < due; first += count) {
      count = cuts ? segment_rows(due - first) : due;
      visit(first, count);
    }
  }
  index_t segments_of(index_t due, bool cuts) const {
    index_t count = 0;
    for_each_segment(due, cuts, [&](index_t, index_t) { ++count; });
    return count;
  }
  /// Rows of the longest of these segments.
  offset_t longest_segment() const { return offset_t(segment) + fewest_basis_rows(); }

  /// How many of a prompt's last queries the channel selectors see.
  static constexpr index_t window() { return (std::max)(window_of<KeyChannels>(), window_of<ValueChannels>()); }

  /// `block` of means that are kept beside keys; 0: none are.
  void check(index_t block) const {
    key.check();
    value.check();
    basis.check();
    tail.check();
    strategy.check();
    segments.check("segment", segment, "pass how many tokens of a prompt share a basis");
    check_format(key, k_dim, key_format());
    check_format(value, v_dim, value_format());
    require(!packs_chunks() || window() == 0, "prefill", "packed",
            "whole where a prompt's last queries choose channels", "leave prefill out");
    require(!packs_chunks() || !searches(), "prefill", "packed", "whole where strategies are searched",
            "take strategy=fixed, or leave prefill out");
    require(block == 0 || tail.tail % block == 0, "block", block,
            "a divisor of the tail, which is " + std::to_string(tail.tail), "pack whole blocks");
    if constexpr (Strategy::searches) {
      if (strategy.searched()) check_search(block);
    }
  }
  bool searches() const {
    if constexpr (Strategy::searches) return strategy.searched();
    return false;
  }
  /// Blocks of a searched strategy divide it, but for the smallest ones, where none does.
  index_t searched_block_unit() const { return std::gcd(tail.tail, segment); }
  /// The same rows by a strategy that a search has found.
  packed_rows by_strategy(const segment_strategy& found) const {
    packed_rows own = *this;
    own.key.channels = own.value.channels = found.channels;
    own.key.group = own.value.group = found.group;
    return own;
  }

  template <class Self, class Visit>
  static void parameters(Self& self, Visit&& visit) {
    KeyChannels::parameters(self.key, visit);
    ValueChannels::parameters(self.value, visit);
    Basis::parameters(self.basis, visit);
    Tail::parameters(self.tail, visit);
    visit("segment", self.segment, segments, "tokens of a prompt that share a basis");
    visit("element", self.element, one_word_of{"same or bf16 or fp16 or fp8 or int4"},
          "how packed elements are stored; same: as the cache's own type");
    Strategy::parameters(self.strategy, visit);
    visit("prefill", self.prefill, one_word_of{"whole or packed"},
          "how chunks of a prompt are stored until it ends; packed: later chunks attend to packed rows");
  }
  template <class Visit>
  static void policies(Visit&& visit) {
    visit("key channels", KeyChannels::name);
    visit("value channels", ValueChannels::name);
    visit("basis", Basis::name);
    visit("tail", Tail::name);
    visit("strategy", Strategy::name);
    visit("whole rows", Whole::name);
  }

 private:
  static constexpr value_range<index_t> segments{1, max_tokens};

  template <class Channels>
  static constexpr index_t window_of() {
    if constexpr (head_channels_selector<Channels>) return Channels::window;
    return 0;
  }
  template <class Channels>
  packed_format format(const Channels& channels, int dim) const {
    return {resolved<element_type>(element), basis.channels(dim), channels.group_size(), channels.stored_channels(dim),
            vector_channels<Channels>};
  }
  /// What a search may choose always fits.
  void check_search(index_t block) const {
    require(Basis::rotates, "strategy", "searched", "fixed for rows that are not rotated", "take strategy=fixed");
    const packed_rows widest = by_strategy({strategy_shares.back(), 1, strategy_blocks.back()});
    check_format(widest.key, k_dim, widest.key_format());
    check_format(widest.value, v_dim, widest.value_format());
    require(block == 0 || tail.tail % strategy_blocks.back() == 0, "tail", tail.tail,
            "a multiple of the smallest block that is searched, which is " + std::to_string(strategy_blocks.back()),
            "pack whole blocks");
  }
  template <class Channels>
  void check_format(const Channels& channels, int dim, const packed_format& made) const {
    const std::string cure = "pass another share of the head dim, which is " + std::to_string(dim);
    require(made.stored_channels >= 1, "channels", std::to_string(made.stored_channels) + " elements",
            "at least 1 element", cure);
    require(made.stored_channels % made.group == 0, "channels", std::to_string(made.stored_channels) + " elements",
            "a multiple of the group, which is " + std::to_string(made.group), cure);
    require(made.stored_channels <= made.channels, "channels", std::to_string(made.stored_channels) + " elements",
            "at most what truncate leaves, which is " + std::to_string(made.channels), cure + ", or lower truncate");
    require(made.channels % made.group == 0, "truncate", std::to_string(made.channels) + " channels left",
            "a multiple of the group, which is " + std::to_string(channels.group_size()), "pass another share");
  }
};

template <class Rows>
concept packing_rows = requires { requires Rows::packs; };
template <class Layout>
concept packing_layout = packing_rows<typename Layout::rows_type>;
template <class Layout>
concept searching_layout = packing_layout<Layout> && Layout::rows_type::strategy_type::searches;

// What the segments of a layout take at most, for the stores of both backends.

/// Whether strategies are searched.
template <packing_layout Layout>
bool searches_strategies(const Layout& layout) {
  return layout.rows.searches();
}
/// The fewest decoded tokens of a segment that a thread searches.
template <searching_layout Layout>
index_t fewest_searched_rows(const Layout& layout) {
  return (std::min)(layout.rows.strategy.least_segment, layout.rows.segment);
}
/// Whether such a segment may be too short for rows to join its basis.
template <packing_layout Layout>
bool searches_short_segments(const Layout& layout) {
  if constexpr (searching_layout<Layout>)
    return layout.rows.searches() && fewest_searched_rows(layout) < layout.rows.lasting_basis_rows();
  return false;
}
/// How many segments `decoded` tokens become at most while strategies are searched. Each may end in two parts. One that
/// is searched may be followed by one that waits for a basis of its own.
template <searching_layout Layout>
offset_t searched_segments(const Layout& layout, offset_t decoded) {
  const auto parts = [&](offset_t least) { return (decoded + least - 1) / least; };
  const offset_t waited = searches_short_segments(layout) ? parts(layout.rows.lasting_basis_rows()) : 0;
  return 2 * (parts(fewest_searched_rows(layout)) + waited);
}

/// The rows of a layout with the longest format that a segment may have.
template <packing_layout Layout>
auto widest_rows(const Layout& layout) {
  auto widest = layout.rows;
  if constexpr (searching_layout<Layout>) {
    if (layout.rows.strategy.searched()) {
      widest.key.channels = (std::max)(widest.key.channels, strategy_shares.back());
      widest.value.channels = (std::max)(widest.value.channels, strategy_shares.back());
      widest.key.group = widest.value.group = 1;
    }
  }
  return widest;
}

/// An upper bound of the segments of a conversation of at most `tokens` tokens. They are those of its prompts, each cut
/// at its own end. Where strategies are searched, one of decoded tokens follows each, and others as they end, in two
/// parts if a strategy was found meanwhile.
template <packing_layout Layout>
index_t max_segments(const Layout& layout, index_t tokens) {
  // Chunks that are packed may leave a short segment behind each full one, and another one behind that.
  const index_t of_chunks = layout.rows.packs_chunks() ? 2 * ceil_div(tokens, layout.rows.segment) : 0;
  const index_t of_prompts = of_chunks + ceil_div(tokens, layout.rows.segment) + 1 +
                             tokens / Layout::rows_type::own_segment_tokens + layout.rows.growing_segments();
  if constexpr (searching_layout<Layout>) {
    if (searches_strategies(layout)) return index_t(2 * of_prompts + searched_segments(layout, tokens));
  }
  return of_prompts;
}

/// Upper bounds of what a layer that packs its rows stores at any moment.
struct packed_peak {
  index_t whole = 0;      ///< whole rows of a head: a prompt until it ends, then a tail
  index_t segments = 0;   ///< segments with a basis of their own
  index_t originals = 0;  ///< original rows of a head that a search may read, whatever it waits for
};

/// Follows the tail through the turn of a layer that stores at most `longest` tokens of a head.
/// Cost     the tokens of a full tail.
template <packing_layout Layout>
packed_peak packed_peak_of(const Layout& layout, const turn_extent& turn, index_t longest) {
  const auto& rows = layout.rows;
  index_t full = 1;  // whole rows of which a step packs some
  while (full < turn.tokens() && rows.tail.packed_after_step(full) == 0) ++full;
  // A prompt from which nothing is dropped may end in a segment that is long enough for a basis that lasts.
  index_t last = rows.tail.packed_after_prompt(turn.prompt);
  while (last > rows.segment_rows(last)) last -= rows.segment_rows(last);
  const bool lasts = longest >= turn.tokens() && last >= rows.lasting_basis_rows() && !searches_short_segments(layout);
  const offset_t waiting =
      lasts && !rows.packs_chunks() ? 0 : (std::max)(rows.fewest_basis_rows(), rows.lasting_basis_rows());
  const offset_t in_steps = full + waiting + 2 * turn.step, decoded = offset_t(turn.answer) + full;
  const offset_t chunk = turn.chunk > 0 ? turn.chunk : turn.prompt;
  const offset_t in_prompt =
      rows.packs_chunks() ? (std::min<offset_t>)(turn.prompt, full + waiting + 2 * chunk) : turn.prompt;
  packed_peak peak;
  peak.whole = index_t((std::max)(in_prompt, (std::min<offset_t>)(turn.tokens(), in_steps)));
  peak.segments = (rows.packs_chunks() ? 3 : 1) * ceil_div(turn.prompt, rows.segment) + 1 + rows.growing_segments();
  if constexpr (searching_layout<Layout>) {
    if (searches_strategies(layout)) {
      // Decoded rows form segments that end, each perhaps in two parts. A segment ends when it is full; the rows of the
      // one before may wait for their search.
      peak.segments += index_t(searched_segments(layout, decoded)) + 1;
      peak.originals = index_t((std::min<offset_t>)(decoded, 2 * (offset_t(layout.rows.segment) + in_steps)));
    }
  }
  return peak;
}

/// The whole rows of these layers: those that follow the recipe are packed.
template <packing_layout Layout>
host_vector<layer_peak> whole_peaks(const Layout& layout, host_vector<layer_peak> peaks) {
  for (layer_peak& peak : peaks) {
    if (!peak.follows_recipe) continue;
    const index_t whole = packed_peak_of(layout, peak.turn, peak.stored.longest).whole;
    peak.stored.longest = (std::min)(peak.stored.longest, whole);
    offset_t total = 0;
    for (index_t& tokens : peak.stored.by_head) total += tokens = (std::min)(tokens, whole);
    peak.stored.total = (std::min)(peak.stored.total, total);
  }
  return peaks;
}

TESSERA_NAMESPACE_END
