// Which stages, attention and schedule fit together: one error message for each combination that does not.
#pragma once

#include "concepts/attention.hpp"
#include "concepts/layout.hpp"
#include "concepts/prefill.hpp"
#include "concepts/schedule.hpp"
#include "stages.hpp"

TESSERA_NAMESPACE_BEGIN

/// Whether a step's scorer reads the means of packed blocks.
template <class Retrieve>
inline constexpr bool reads_block_means = requires { requires Retrieve::scorer_type::reads_means; };

/// Whether the CUDA backend drops packed rows by this first stage: at the ends of prompts, by what a layer stores or by
/// the prompt's last queries; not in pages that groups of heads share.
template <class Retain, class Layout, class Schedule>
inline constexpr bool drops_packed_on_devices =
    Retain::drops && !fires_in_steps<Schedule> && !Schedule::fires_at(moment::chunk_end) &&
    !requires(const typename Layout::placement_type& where) { where.groups(1, 1); } && !Retain::over_model &&
    !Retain::reuses && !Retain::settles && !Retain::needs_segments && !Retain::follows &&
    (Retain::observed == observes::nothing || Retain::observed == observes::window);

/// Whether the CUDA backend runs these stages over such rows. Steps read all of them or blocks by their means, also
/// behind a first stage that drops. It does not yet score packed rows for a step or for lines (#11).
template <class Retain, class Layout, class Retrieve, class Schedule, class Prefill>
inline constexpr bool rows_fit_on_devices =
    !requires { requires Layout::rows_type::packs; } ||
    (!line_pattern<Prefill> && (!Retain::chooses || drops_packed_on_devices<Retain, Layout, Schedule>) &&
     (!Retrieve::retrieves || reads_block_means<Retrieve>));

/// Checks that these policies fit together. A static assertion says what does not.
template <class Retain, class Layout, class Retrieve, class Attention, class Schedule, class Prefill>
constexpr bool check_recipe() {
  static_assert(check_layout<Layout>() && check_attention<Attention>() && check_schedule<Schedule>() &&
                check_prefill<Prefill>());
  constexpr bool in_steps = fires_in_steps<Schedule>;
  static_assert(Retrieve::retrieves == Attention::gathers,
                "tessera: a recipe that retrieves needs an attention that gathers, and one that does not needs an "
                "attention that reads everything");
  static_assert(Retain::chooses || !in_steps,
                "tessera: a schedule that fires in steps has nothing to do when everything is retained");
  static_assert(Retain::drops || !Retain::chooses || !in_steps || Retain::follows,
                "tessera: a filter is chosen when a turn's prompt ends, not in steps; use once");
  static_assert(!Retain::plans || Retrieve::retrieves,
                "tessera: a budget over two stages needs a second stage; add retrieve, or take a budget of one stage");
  static_assert(!Retain::plans || !in_steps,
                "tessera: a budget over two stages is planned when a prompt ends, not in steps; use once");
  static_assert(!in_steps || !Retain::reuses,
                "tessera: layers that keep another one's choice choose when a prompt ends, not in steps; use once");
  static_assert(
      !in_steps || (!Retain::over_model && !Retain::rereads),
      "tessera: one threshold over the model, and a text that is read again, belong to a prompt's end, not to steps; "
      "use once");
  static_assert(!in_steps || !Retain::takes_scores,
                "tessera: scores that an engine gives are known behind a step, not within it; choose at the ends of "
                "chunks and prompts");
  static_assert(
      !in_steps || (Retain::observed != observes::window && Retain::observed != observes::statistics) ||
          Retain::follows,
      "tessera: a scorer that observes the prompt's window, or its statistics, learns nothing from decode steps; "
      "retain once");
  static_assert(!Schedule::fires_at(moment::step_begin) || !Schedule::fires_at(moment::step_end),
                "tessera: a schedule fires before a step reads or at its end, not at both");
  static_assert(!Schedule::fires_at(moment::step_begin) || Retain::observed == observes::nothing,
                "tessera: before a step reads, only positions can be scored; take a schedule that fires at its end");
  static_assert(
      !reads_block_means<Retrieve> || requires { requires Layout::rows_type::packs; },
      "tessera: block means lie beside packed rows; store packed_rows");
  static_assert(
      !reads_block_means<Retrieve> || !Retain::chooses || Retain::drops,
      "tessera: block means are of everything that is stored, not of what a filter lets through; take retain");
  static_assert(!reads_block_means<Retrieve> || !Schedule::fires_at(moment::step_begin),
                "tessera: block means are of what is stored when a step reads; take a schedule that drops at its end");
  static_assert(
      !Schedule::fires_at(moment::chunk_end) || Retain::settles,
      "tessera: a schedule that fires when a chunk ends needs a first stage that drops tokens by shares of what "
      "is new; take the budget calibrated");
  static_assert(!Retain::settles || !in_steps,
                "tessera: a budget that gives shares of a prompt has none to give in steps; use once or each_chunk");
  static_assert(
      !Retain::settles || !Retain::follows,
      "tessera: a budget that gives shares of what is new needs the queries of what is new; a window that follows "
      "the conversation has older ones too; take observation_window");
  static_assert(!Schedule::fires_at(moment::chunk_end) || !Retain::plans,
                "tessera: a budget over two stages is planned when a prompt ends, not while it comes in; use once");
  static_assert(!Retain::splits || (!Retain::drops && !Retrieve::retrieves),
                "tessera: lists of single query heads can only be read, from a filter without a second stage; take the "
                "scope per_head");
  static_assert(!lasting_pattern<Prefill> || (Retain::chooses && !Retain::drops),
                "tessera: lines that join what decoding reads need a filter to join; take covering_lines");
  return true;
}

TESSERA_NAMESPACE_END
