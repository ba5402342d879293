// What a cache launches on the device: one object for prompts that end, one for decode steps of a batch.
#pragma once

#include <algorithm>
#include <type_traits>
#include <utility>

#include "../../../core/model_shape.hpp"
#include "../attend/decode/decode_attention.cuh"
#include "../choose/retain.cuh"
#include "../device/memory.cuh"
#include "../read/exact/retrieve_by_scores.cuh"
#include "../read/extrema/retrieve_by_pages.cuh"
#include "../score/score.cuh"
#include "../score/score_positions.cuh"
#include "../store/append.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {
namespace detail {

template <int Threads>
__global__ void __launch_bounds__(Threads) set_number_entry(index_t* to, index_t value) {
  if (threadIdx.x == 0) *to = value;
}

/// Of every sequence of a step: where it begins, and where the next one will.
template <int Threads>
__global__ void __launch_bounds__(Threads)
    advance_positions_entry(index_t* next, index_t* first, index_t sequences, index_t tokens) {
  const index_t b = index_t(blockIdx.x * Threads + threadIdx.x);
  if (b >= sequences) return;
  first[b] = next[b];
  next[b] += tokens;
}

}  // namespace detail

inline const index_t* set_number(index_t* to, index_t value, cudaStream_t stream) {
  detail::set_number_entry<32><<<1, 32, 0, stream>>>(to, value);
  check(cudaGetLastError(), "launch of set_number");
  return to;
}

/// The most tokens that one head keeps under a budget, whatever its scores.
template <class Budget>
index_t most_kept(const Budget& budget, index_t longest_tail, const model_shape& shape, index_t capacity) {
  index_t most = std::min(capacity, budget.tokens);
  for (index_t layer = 0; layer < shape.layers; ++layer) {
    // A turn of few queries has a short tail, which leaves the first layers of a pyramid more and the last ones less.
    for (const index_t tail : {0, longest_tail}) {
      most = std::max(most, bound_kept(budget, layer, shape.layers, tail, shape.kv_heads, capacity).longest);
    }
  }
  return most;
}

/// Scores and chooses what every (sequence, kv_head) of a batch keeps, whatever the recipe's scorer observes.
/// Memory   scores of sequences * kv_heads * capacity, and what scoring, budget and selection need.
template <class Policy, class View>
class retain_operations {
  using T = typename View::element_type;
  using policy = Policy;
  using scorer = typename policy::scorer_type;
  static constexpr observes observed = scorer::observed;
  static constexpr bool attentive = observed != observes::nothing;
  static constexpr bool persistent = observed == observes::every_query;  // scores live beside the tokens
  struct no_score {};
  template <class S, bool Attentive>
  struct score_of {
    using type = no_score;
  };
  template <class S>
  struct score_of<S, true> {
    using type = attentive_score<View, S>;
  };
  using score_type = typename score_of<scorer, attentive>::type;

 public:
  /// `queries`: the most that one call observes; 0 for the scorer's window. `kept`: the most that a head keeps.
  retain_operations(const Policy& policy, const model_shape& shape, index_t sequences, index_t queries,
                    index_t capacity, index_t kept, const device_info& device)
      : shape_(shape),
        sequences_(sequences),
        capacity_(capacity),
        score_(made_score(policy, shape, sequences, queries, capacity, device)),
        choose_(policy, sequences, shape.kv_heads, capacity, kept, device),
        mover_(sequences, shape.kv_heads, kept, device),
        in_place_(sequences, shape.kv_heads, kept, device),
        raw_(persistent ? 0 : std::size_t(sequences) * std::size_t(shape.kv_heads) * std::size_t(capacity)),
        score_scratch_(score_bytes()),
        choose_scratch_(choose_.workspace_bytes()),
        in_place_scratch_(in_place_.workspace_bytes()) {
    // Zeros, as device_buffer makes them, are what in_place_.prepare would write.
  }

  /// Adds what `q` makes of every stored token to the scores that are stored beside them.
  void observe(const Policy& policy, const logit_rule& rule, const View& view, const rows_view<const T>& q,
               const index_t* first_position, float* scores, const offset_t* begins, cudaStream_t stream) const {
    score(policy, rule, view, q, first_position, scores, begins, 0, true, stream);
  }

  /// Chooses what to keep. `q` and `position`: the window and its first position; for scorers of positions, `position`
  /// is that of the next token. The result lies in this object's memory until the next call.
  selection_view choose(const Policy& policy, const logit_rule& rule, const View& view, const rows_view<const T>& q,
                        const index_t* position, const float* stored_scores, index_t tail, index_t layer,
                        cudaStream_t stream) const {
    score_rows in;
    in.sequences = view.sequences;
    in.kv_heads = view.kv_heads;
    in.lengths = view.lengths;
    in.length_strides = {view.length_strides.sequence, view.length_strides.head};
    in.tail = tail;
    if constexpr (persistent) {
      in.scores = stored_scores;
      in.offsets = view.table.begin;
    } else {
      in.scores = raw_.data();
      in.row_stride = capacity_;
      if constexpr (attentive) {
        score(policy, rule, view, q, position, raw_.data(), nullptr, capacity_, false, stream);
      } else {
        score_positions(view, position, policy.scorer, raw_.data(), capacity_, stream);
      }
    }
    return choose_.run(policy, in, layer, shape_.layers, choose_scratch_.data(), stream);
  }

  const pack<View, View>& mover() const { return mover_; }

  /// Drops everything but the chosen slots where it lies. `columns`: positions, and scores where there are any.
  void keep_in_place(const View& view, const selection_view& chosen, const slot_column<index_t>& positions,
                     const slot_column<float>& scores, index_t* lengths, cudaStream_t stream) const {
    in_place_.run({view, chosen, view, positions, {scores.data, 0, 0, scores.begin}, scores, lengths},
                  in_place_scratch_.data(), stream);
  }

 private:
  static score_type made_score(const Policy& policy, const model_shape& shape, index_t sequences, index_t queries,
                               index_t capacity, const device_info& device) {
    if constexpr (attentive) {
      if constexpr (observed == observes::window) queries = policy.scorer.window;
      return score_type(sequences, shape.kv_heads, shape.q_heads, queries, capacity, device);
    } else {
      return {};
    }
  }
  std::size_t score_bytes() const {
    if constexpr (attentive) return score_.workspace_bytes();
    return 0;
  }
  void score(const Policy& policy, const logit_rule& rule, const View& view, const rows_view<const T>& q,
             const index_t* first_position, float* scores, const offset_t* begins, offset_t stride, bool accumulate,
             cudaStream_t stream) const {
    score_problem<View> problem;
    problem.view = view;
    problem.q = q;
    problem.first_position = first_position;
    problem.rule = rule;
    problem.scores = scores;
    problem.offsets = begins;
    problem.row_stride = stride;
    problem.accumulate = accumulate;
    score_.run(problem, policy.scorer, score_scratch_.data(), stream);
  }

  model_shape shape_;
  index_t sequences_, capacity_;
  score_type score_;
  choose_kept<policy> choose_;
  pack<View, View> mover_;
  pack<View, View, true> in_place_;
  device_buffer<float> raw_;
  device_buffer<unsigned char> score_scratch_, choose_scratch_, in_place_scratch_;
};

/// All that one layer of a decode step launches behind the append: what a plan comes to for a batch.
template <class Recipe, class View, class ReadView, class Out>
class step_operations {
  static constexpr bool retains = Recipe::retains && Recipe::schedule_type::after_steps;
  using first_stage = decltype(std::declval<Recipe>().first_stage(stage_plan{}));
  struct nothing {
    template <class... Any>
    explicit nothing(const Any&...) {}
  };
  static auto retrieve_of() {
    if constexpr (Recipe::estimates) {
      return std::type_identity<retrieve_by_pages<Recipe, ReadView, Out>>{};
    } else if constexpr (Recipe::retrieves) {
      return std::type_identity<retrieve_by_scores<Recipe, ReadView>>{};
    } else {
      return std::type_identity<nothing>{};
    }
  }
  static auto retain_of() {
    if constexpr (retains)
      return std::type_identity<retain_operations<first_stage, View>>{};
    else
      return std::type_identity<nothing>{};
  }

 public:
  step_operations(const Recipe& recipe, const stage_plan& plan, const model_shape& shape, index_t sequences,
                  index_t tokens, index_t capacity, index_t kept, const device_info& device)
      : attend_(sequences, shape.kv_heads, shape.q_heads, tokens, device),
        scratch_(attend_.workspace_bytes()),
        retrieve_(made_retrieve(recipe, plan, shape, sequences, tokens, capacity, device)),
        retain_(recipe.first_stage(plan), shape, sequences, tokens, capacity, kept, device) {
    attend_.prepare(scratch_.data(), nullptr);
    check(cudaStreamSynchronize(nullptr), "cudaStreamSynchronize");
  }

  const auto& retrieve() const { return retrieve_; }
  const auto& retain() const { return retain_; }
  void attend(const decode_problem<ReadView, Out>& problem, cudaStream_t stream) const {
    attend_.run(problem, scratch_.data(), stream);
  }

 private:
  static auto made_retrieve(const Recipe& recipe, const stage_plan& plan, const model_shape& shape, index_t sequences,
                            index_t tokens, index_t capacity, const device_info& device) {
    using made = typename decltype(retrieve_of())::type;
    if constexpr (Recipe::estimates) {
      read_bounds bounds{capacity};
      bounds.cover(made::plan_for(recipe, plan), std::min(capacity, plan.capacity + tokens));
      return made(recipe, bounds, shape, sequences, tokens, device);
    } else {
      return made(recipe, plan.read, shape, sequences, tokens, capacity, device);
    }
  }

  decode_attention<ReadView, Out> attend_;
  device_buffer<unsigned char> scratch_;
  typename decltype(retrieve_of())::type retrieve_;
  typename decltype(retain_of())::type retain_;
};

}  // namespace cuda
TESSERA_NAMESPACE_END
