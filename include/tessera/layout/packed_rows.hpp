// Rows of which only some elements are stored.
#pragma once

#include <algorithm>
#include <string>

#include "../concepts/channels.hpp"
#include "../concepts/host_only.hpp"
#include "../concepts/layout.hpp"
#include "../core/parameters.hpp"
#include "../core/stored/segment_strategy.hpp"
#include "one_strategy.hpp"

TESSERA_NAMESPACE_BEGIN

/// K and V in segments: each holds the elements that its channel selectors keep, in a basis of its own. The newest
/// tokens, and a prompt until it ends, are rows of another format, `Whole`, in the basis in which the engine hands them
/// over.
///
/// A prompt becomes segments when it ends, if it is the first or has at least 4,096 tokens: of `segment` tokens each. A
/// shorter one, and what is decoded, joins the last segment in its basis and format, once `Tail` says so.
/// Bytes    see packed_format, and a basis for each segment.
/// Errors   channels that leave no element, that are no multiple of the group or that exceed what truncation leaves;
///          blocks that do not divide the tail: tessera::error.
/// Paper    MosaicKV, arXiv:2607.00760, Sec. 4.2, 5.1-5.3; ThinK, arXiv:2407.21018.
template <class Whole, class KeyChannels, class ValueChannels, class Basis, class Tail, class Strategy = one_strategy>
struct packed_rows {
  static_assert(check_row_format<Whole>());
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

  packed_format key_format() const { return format(key, k_dim); }
  packed_format value_format() const { return format(value, v_dim); }

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
    require(block == 0 || tail.tail % block == 0, "block", block,
            "a divisor of the tail, which is " + std::to_string(tail.tail), "pack whole blocks");
    if constexpr (Strategy::searches) {
      if (strategy.searched()) check_search(block);
    }
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
    packed_rows widest = *this;
    widest.key.channels = widest.value.channels = strategy_shares.back();
    widest.key.group = widest.value.group = 1;
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
concept packing_rows = requires {
  requires Rows::packs;
};
template <class Layout>
concept packing_layout = packing_rows<typename Layout::rows_type>;
template <class Layout>
concept searching_layout = packing_layout<Layout> && Layout::rows_type::strategy_type::searches;

TESSERA_NAMESPACE_END
