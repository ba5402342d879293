// Types that miss one clause each: no concept may be satisfied by them. The complete type beside them proves why.
#include "catch.hpp"

#include <tessera/concepts/attention.hpp>
#include <tessera/concepts/budget.hpp>
#include <tessera/concepts/layout.hpp>
#include <tessera/concepts/schedule.hpp>
#include <tessera/concepts/scorer.hpp>
#include <tessera/concepts/selector.hpp>
#include <tessera/layout/dense.hpp>

using namespace tessera;

namespace {

// What every scorer has, apart from what it is tested for.
struct named {
  static constexpr const char* name = "named";
};
struct scorer_parts : named {
  static constexpr observes observed = observes::window;
  static constexpr bool comparable_across_heads = true;
  index_t window = 8;
  float weigh(float logit, float) const { return logit; }
  index_t protected_tail(index_t) const { return 0; }
  void check(index_t) const {}
};
static_assert(scorer<scorer_parts>);

struct nameless_scorer : scorer_parts {
  int name;
};
struct scorer_of_nothing : scorer_parts {
  static constexpr observes observed = observes::nothing;  // and no score(position, next_position)
};
struct scorer_by_position : scorer_of_nothing {
  float score(index_t at, index_t) const { return float(at); }
};
struct scorer_in_double : scorer_parts {
  double weigh(float logit, float) const { return logit; }
};
struct scorer_with_wide_tail : scorer_parts {
  offset_t protected_tail(index_t) const { return 0; }
};
struct scorer_without_tail : scorer_parts {
  void protected_tail(index_t) = delete;
};
struct scorer_that_finishes_wrongly : scorer_parts {
  void finish() const {}
};
struct scorer_that_finishes_slots_in_double : scorer_parts {
  double finish_at(const float* in, index_t, index_t i) const { return in[i]; }
};
struct scorer_that_pools_by_a_number : scorer_parts {
  index_t pooled() const { return 7; }
};
struct scorer_that_finishes_on_the_host : scorer_parts {
  void finish(const float*, index_t, float*, host_vector<float>&) const {}
};
struct scorer_that_finishes_anywhere : scorer_that_finishes_on_the_host {
  float finish_at(const float* in, index_t, index_t i) const { return in[i]; }
};
struct scorer_without_check : scorer_parts {
  void check() const {}
};
struct scorer_that_owns : scorer_parts {
  std::vector<float> memory;
};
struct scorer_of_a_constant_window : named {
  static constexpr observes observed = observes::window;
  [[maybe_unused]] static constexpr bool comparable_across_heads = true;
  static constexpr index_t window = 8;
  float weigh(float logit, float) const { return logit; }
  index_t protected_tail(index_t) const { return 0; }
  void check(index_t) const {}
};
struct scorer_silent_about_heads : named {
  static constexpr observes observed = observes::step;
  float weigh(float logit, float) const { return logit; }
  index_t protected_tail(index_t) const { return 0; }
  void check(index_t) const {}
};
static_assert(scorer<scorer_by_position> && positional_scorer<scorer_by_position>);
static_assert(!attentive_scorer<scorer_by_position>);
static_assert(!scorer<nameless_scorer>);
static_assert(!scorer<scorer_of_nothing>);
static_assert(!scorer<scorer_in_double>);
static_assert(!scorer<scorer_with_wide_tail>);
static_assert(!scorer<scorer_without_tail>);
static_assert(!scorer<scorer_that_finishes_wrongly>);
static_assert(!scorer<scorer_that_finishes_slots_in_double>);
static_assert(!scorer<scorer_that_pools_by_a_number>);
static_assert(device_scorer<scorer_parts> && device_scorer<scorer_that_finishes_anywhere>);
static_assert(scorer<scorer_that_finishes_on_the_host> && !device_scorer<scorer_that_finishes_on_the_host>);
static_assert(!scorer<scorer_without_check>);
static_assert(!scorer<scorer_that_owns>);
static_assert(!scorer<scorer_of_a_constant_window>);
static_assert(!scorer<scorer_silent_about_heads>);

// Scorers of what is stored, of segments and of weights.
struct scorer_of_contents : scorer_of_nothing {
  static constexpr stored_rows reads = stored_rows::values;
  static constexpr int measures = 2;
  void measure(float x, float, float* sums) const { sums[0] += x; }
  float score(const float* sums) const { return sums[0]; }
};
struct scorer_of_contents_in_double : scorer_of_contents {
  double score(const float* sums) const { return double(sums[0]); }
};
struct scorer_of_an_anchor : scorer_of_contents {
  float anchor_scale(const float*) const { return 1; }
};
struct scorer_of_contents_by_window : scorer_of_contents {
  static constexpr observes observed = observes::window;
};
static_assert(scorer<scorer_of_contents> && contents_scorer<scorer_of_contents>);
static_assert(!positional_scorer<scorer_of_contents> && !anchored_scorer<scorer_of_contents>);
static_assert(anchored_scorer<scorer_of_an_anchor>);
static_assert(!scorer<scorer_of_contents_in_double>);
static_assert(!contents_scorer<scorer_of_contents_by_window> && attentive_scorer<scorer_of_contents_by_window>);

struct scorer_of_segments : scorer_parts {
  segment_statistics describe_segment(const float*, index_t) const { return {}; }
  float rescored(float score, const segment_statistics&, float) const { return score; }
};
struct scorer_that_describes_in_numbers : scorer_of_segments {
  float describe_segment(const float*, index_t) const { return 0; }
};
static_assert(scorer<scorer_of_segments> && segment_scorer<scorer_of_segments>);
static_assert(!segment_scorer<scorer_parts> && !segment_scorer<scorer_that_describes_in_numbers>);

struct scorer_with_weights : scorer_parts {
  scorer_of_contents weight{};
  float weighted(float score, float own) const { return score * own; }
  index_t taken_first(index_t keep) const { return keep / 2; }
};
struct scorer_with_anchored_weights : scorer_parts {
  scorer_of_an_anchor weight{};
  float weighted(float score, float own) const { return score * own; }
  index_t taken_first(index_t keep) const { return keep / 2; }
};
static_assert(weighted_scorer<scorer_with_weights> && !weighted_scorer<scorer_with_anchored_weights>);

struct scorer_of_the_mean : scorer_parts {
  static constexpr row_join rows = row_join::mean;
};
struct scorer_of_the_newest_in_a_window : scorer_parts {
  static constexpr row_join rows = row_join::newest;
};
static_assert(scorer<scorer_of_the_mean> && joins_rows_by<scorer_of_the_mean> == row_join::mean);
static_assert(joins_rows_by<scorer_parts> == row_join::sum && !scorer<scorer_of_the_newest_in_a_window>);

struct selector_parts : named {
  using unit = token_unit;
  index_t select(const float*, index_t, index_t, index_t, index_t*, top_k_scratch&) const { return 0; }
  void check() const {}
};
static_assert(selector<selector_parts>);

struct selector_of_segments : named {
  using unit = block_unit;
  index_t choose_in_segment(const float*, index_t, index_t, index_t*) const { return 1; }
  void check() const {}
};
struct selector_of_segments_that_does_not_answer : selector_of_segments {
  void choose_in_segment(const float*, index_t, index_t, index_t*) const {}
};
static_assert(selector<selector_of_segments> && segment_selector<selector_of_segments>);
static_assert(!selector<selector_of_segments_that_does_not_answer> && !segment_selector<selector_parts>);

struct nameless_selector : selector_parts {
  int name;
};
struct selector_without_unit : named {
  index_t select(const float*, index_t, index_t, index_t, index_t*, top_k_scratch&) const { return 0; }
  void check() const {}
};
struct selector_that_does_not_count : selector_parts {
  void select(const float*, index_t, index_t, index_t, index_t*, top_k_scratch&) const {}
};
struct selector_that_changes_itself : selector_parts {
  index_t select(const float*, index_t, index_t, index_t, index_t*, top_k_scratch&) { return 0; }
};
struct selector_without_check : selector_parts {
  void check(int) const {}
};
struct selector_that_owns : selector_parts {
  std::vector<index_t> memory;
};
static_assert(!selector<nameless_selector>);
static_assert(!selector<selector_without_unit>);
static_assert(!selector<selector_that_does_not_count>);
static_assert(!selector<selector_that_changes_itself>);
static_assert(!selector<selector_without_check>);
static_assert(!selector<selector_that_owns>);

struct budget_parts : named {
  static constexpr bool compares_heads = false;
  index_t tokens = 1;
  void allot(const layer_scores&, index_t*) const {}
  void check() const {}
};
static_assert(budget<budget_parts>);

struct nameless_budget : budget_parts {
  int name;
};
struct budget_silent_about_heads : named {
  index_t tokens = 1;
  void allot(const layer_scores&, index_t*) const {}
  void check() const {}
};
struct budget_in_floats : budget_parts {
  float tokens = 1;
};
struct budget_without_allot : budget_parts {
  void allot() const {}
};
struct budget_without_check : budget_parts {
  void check(int) const {}
};
static_assert(!budget<nameless_budget>);
static_assert(!budget<budget_silent_about_heads>);
static_assert(!budget<budget_in_floats>);
static_assert(!budget<budget_without_allot>);
static_assert(!budget<budget_without_check>);

struct row_format_parts : named {
  using encoding_type = raw_elements<bf16>;
  static constexpr int k_dim = 64, v_dim = 64;
};
static_assert(row_format<row_format_parts>);

struct nameless_row_format : row_format_parts {
  int name;
};
struct row_format_of_doubles : row_format_parts {
  struct encoding_type {
    using element_type = double;
    using stored_type = double;
    static constexpr bool scaled = false;
  };
};
struct row_format_without_encoding : named {
  static constexpr int k_dim = 64, v_dim = 64;
};
struct row_format_without_scales : row_format_parts {
  struct encoding_type : fp8_elements<bf16> {
    static void scale_of();
  };
};
struct row_format_without_dims : named {
  using encoding_type = raw_elements<bf16>;
};
static_assert(!row_format<nameless_row_format>);
static_assert(!row_format<row_format_of_doubles>);
static_assert(!row_format<row_format_without_encoding>);
static_assert(!row_format<row_format_without_scales>);
static_assert(!row_format<row_format_without_dims>);

struct placement_parts : named {
  using table_type = ragged;
};
struct placement_without_table : named {};
static_assert(placement<placement_parts>);
static_assert(!placement<placement_without_table>);

struct layout_of_labels : named {
  using element_type = bf16;
  static constexpr int k_dim = 64, v_dim = 64;
  static offset_t token_bytes() { return 256; }
};
static_assert(!layout<layout_of_labels>);
static_assert(layout<stored<row_format_parts, placement_parts>>);

struct attention_parts : named {
  static constexpr bool gathers = false;
  logit_rule rule{};
};
static_assert(attention<attention_parts>);

struct nameless_attention : attention_parts {
  int name;
};
struct attention_without_rule : named {
  static constexpr bool gathers = false;
};
struct attention_silent_about_gathering : named {
  logit_rule rule{};
};
struct attention_with_constant_rule : named {
  static constexpr bool gathers = false;
  const logit_rule rule{};
};
static_assert(!attention<nameless_attention>);
static_assert(!attention<attention_without_rule>);
static_assert(!attention<attention_silent_about_gathering>);
static_assert(!attention<attention_with_constant_rule>);

struct schedule_parts : named {
  static constexpr bool fires_at(moment) { return true; }
  bool due(moment, const turn_clock&) const { return true; }
};
static_assert(schedule<schedule_parts>);

struct nameless_schedule : schedule_parts {
  int name;
};
struct schedule_silent_about_moments : named {
  bool due(moment, const turn_clock&) const { return true; }
};
struct schedule_that_fires_unforeseen : schedule_parts {
  static bool fires_at(moment) { return true; }  // not known when compiling
};
struct schedule_that_answers_in_ints : schedule_parts {
  int due(moment, const turn_clock&) const { return 1; }
};
struct schedule_without_clock : schedule_parts {
  bool due(moment) const { return true; }
};
struct schedule_without_due : named {
  static constexpr bool fires_at(moment) { return true; }
};
static_assert(!schedule<nameless_schedule>);
static_assert(!schedule<schedule_silent_about_moments>);
static_assert(!schedule<schedule_that_fires_unforeseen>);
static_assert(!schedule<schedule_without_clock>);
static_assert(!schedule<schedule_that_answers_in_ints>);
static_assert(!schedule<schedule_without_due>);

template <class T>
concept storable = element<T>;
static_assert(storable<fp32> && storable<fp16> && storable<bf16>);
static_assert(!storable<double> && !storable<int>);
static_assert(supported_head_dim<192> && !supported_head_dim<100> && !supported_head_dim<0>);

}  // namespace

TEST_CASE("a type that misses one clause of a concept does not satisfy it") { SUCCEED("checked while compiling"); }
