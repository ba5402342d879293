// Reads a text a second time with the model, on the GPU: the text's queries score the tokens of one part of the cache.
#pragma once

#include <algorithm>

#include "../../../../core/model_shape.hpp"
#include "../../../../planned.hpp"
#include "../../../../runtime/layer_roles.hpp"
#include "../../../../runtime/turn/reread_part.hpp"
#include "../../attend/attention.cuh"
#include "../../cache_options.hpp"
#include "../../device/copy.cuh"
#include "../../score/score.cuh"
#include "../../score/score_rows.cuh"
#include "../../store/kv_store.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {
namespace detail {

/// Lists the slots and positions that a re-reading sees: the sinks, the part and the re-reading itself. A block a head.
/// Shapes   slots, positions [kv_heads, capacity], counts, begins [kv_heads].
template <class View>
__global__ void __launch_bounds__(256)
    list_part_entry(const __grid_constant__ View view, index_t sinks, reread_part part, index_t capacity,
                    index_t* slots, index_t* positions, index_t* counts, offset_t* begins) {
  __shared__ index_t ends[4];  // slots before: end of sinks, part, end of part, re-reading
  const index_t h = blockIdx.x, tokens = view.length(0, h);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (warp < 4) {
    const index_t first = (max)(part.first, sinks);
    const index_t at = warp == 0 ? sinks : warp == 1 ? first : warp == 2 ? (max)(part.end, first) : part.begin;
    const index_t found = slots_before(view, 0, h, at, lane);
    if (lane == 0) ends[warp] = found;
  }
  __syncthreads();
  const index_t of_part = ends[2] - ends[1], count = ends[0] + of_part + tokens - ends[3];
  index_t *to = slots + offset_t(h) * capacity, *at = positions + offset_t(h) * capacity;
  for (index_t i = index_t(threadIdx.x); i < count; i += 256) {
    const index_t slot = i < ends[0]             ? i
                         : i < ends[0] + of_part ? ends[1] + i - ends[0]
                                                 : ends[3] + i - ends[0] - of_part;
    to[i] = slot;
    at[i] = view.position(0, h, slot);
  }
  if (threadIdx.x == 0) {
    counts[h] = count;
    begins[h] = offset_t(h) * capacity;
  }
}

/// Gives tokens of the part the larger one of their two scores. A NaN stays.
template <class View>
__global__ void __launch_bounds__(256) keep_larger_entry(const __grid_constant__ View seen, reread_part part,
                                                         const float* fresh, float* scores, const offset_t* begins) {
  const index_t h = blockIdx.y, tokens = seen.length(0, h);
  for (index_t i = index_t(blockIdx.x * 256 + threadIdx.x); i < tokens; i += index_t(gridDim.x) * 256) {
    const offset_t at = seen.position_begin[h] + i;
    const index_t position = seen.positions[at];
    if (position < part.first || position >= part.end) continue;
    float& score = scores[begins[h] + seen.table.slots[at]];
    if (!(score >= fresh[at])) score = fresh[at];
  }
}

}  // namespace detail

/// Does nothing, for recipes that do not re-read.
template <class Recipe, bool Rereads = Recipe::retain_type::rereads>
class rereading {
 public:
  rereading(const model_shape&, const cache_options&, const device_info&) {}
};

/// The device's cpu::rereading.   Memory   two numbers and a score for kv_heads * tokens, and the workspace of scoring
/// 512 queries.
template <class Recipe>
class rereading<Recipe, true> {
  using store_type = kv_store<typename Recipe::layout_type>;
  using all_view = typename store_type::view_type;
  using T = typename all_view::element_type;
  using scorer = typename Recipe::retain_type::scorer_type;
  using visible_view = kv_view<view_element<typename all_view::encoding_type>, all_view::k_dim,
                               filtered<decltype(all_view::table)>, all_view::v_dim>;
  static constexpr index_t queries_at_once = 512;
  static_assert(joins_rows_by<scorer> == row_join::maximum,
                "tessera: what is read again scores by the maximum over its queries on the device");

 public:
  rereading(const model_shape& shape, const cache_options& options, const device_info& device)
      : heads_(shape.kv_heads),
        capacity_(options.tokens),
        score_(1, shape.kv_heads, shape.q_heads, queries_at_once, options.tokens, device),
        slots_(std::size_t(heads_) * std::size_t(capacity_)),
        positions_(slots_.size()),
        counts_(std::size_t(heads_)),
        begins_(counts_.size()),
        scores_(slots_.size()),
        workspace_(score_.workspace_bytes()) {}

  /// Appends the tokens of a re-reading to a layer that has room for them, attends, scores the part, and drops the
  /// tokens.
  /// Shapes   as those of cuda::cache::reread.   Errors   queries that do not begin on 16 bytes, before anything is
  ///          launched.
  template <class Attention, class Out>
  void pass(sequence_layer owner, store_type& store, const planned<Recipe>& policies, const layer_roles& roles,
            const Attention& attention, const rows_view<const T>& q, const rows_view<const T>& k,
            const rows_view<const T>& v, const rows_view<Out>& out, const reread_part& part,
            cudaStream_t stream) const {
    require_rows_on_16_bytes("q", q);
    const index_t* position = set_number(begin_position_.data(), part.begin, stream);
    store.append_rows(store.view(owner), k, v, position, nullptr, {}, stream);
    store.grew(owner, k.tokens);
    const logit_rule rule = roles.rule(owner.layer);
    attention.prompt(prefill_problem<all_view, Out>{store.view(owner), q, position, rule, out, {}}, stream);
    if (roles.follows_recipe(owner.layer)) score(owner, store, policies, rule, q, part, stream);
    add_number(store.lengths(owner), store.lengths(owner), -k.tokens, heads_, stream);
    store.drop_newest(owner, k.tokens);
  }

 private:
  /// Raises the scores of the part's tokens to those that the queries give them, where these are larger.
  void score(sequence_layer owner, const store_type& store, const planned<Recipe>& policies, const logit_rule& rule,
             const rows_view<const T>& q, const reread_part& part, cudaStream_t stream) const {
    const auto& policy = policies.first.scorer;
    const all_view all = store.view(owner);
    detail::list_part_entry<all_view><<<unsigned(heads_), 256, 0, stream>>>(
        all, policy.sinks, part, capacity_, slots_.data(), positions_.data(), counts_.data(), begins_.data());
    check(cudaGetLastError(), "launch of list_part");
    score_problem<visible_view> problem;
    problem.view = visible(all);
    problem.first_position = position_.data();
    problem.rule = rule;
    problem.scores = scores_.data();
    problem.row_stride = capacity_;
    for (index_t done = 0; done < q.tokens; done += queries_at_once) {
      problem.q = q;
      problem.q.data += done * q.token_stride;
      problem.q.tokens = (std::min)(queries_at_once, q.tokens - done);
      problem.accumulate = done > 0;
      set_number(position_.data(), part.begin + done, stream);
      score_.run(problem, policy, workspace_.data(), stream);
    }
    const dim3 grid{unsigned(std::clamp(ceil_div(part.end - part.first, 256), 1, 64)), unsigned(heads_)};
    detail::keep_larger_entry<visible_view>
        <<<grid, 256, 0, stream>>>(problem.view, part, scores_.data(), store.scores(), all.position_begin);
    check(cudaGetLastError(), "launch of keep_larger");
  }

  visible_view visible(const all_view& all) const {
    visible_view view;
    view.k = all.k;
    view.v = all.v;
    view.k_strides = all.k_strides;
    view.v_strides = all.v_strides;
    view.scales = all.scales;
    view.sequences = 1;
    view.kv_heads = heads_;
    view.lengths = counts_.data();
    view.length_strides = {heads_, 1};
    view.positions = positions_.data();
    view.position_begin = begins_.data();
    view.order = slot_order::ascending;
    view.table = {all.table, slots_.data(), begins_.data(), heads_};
    return view;
  }

  index_t heads_, capacity_;
  attentive_score<visible_view, scorer> score_;
  device_buffer<index_t> slots_, positions_, counts_;
  device_buffer<offset_t> begins_;
  device_buffer<float> scores_;
  device_buffer<unsigned char> workspace_;
  device_buffer<index_t> position_{1}, begin_position_{1};
};

}  // namespace cuda
TESSERA_NAMESPACE_END
