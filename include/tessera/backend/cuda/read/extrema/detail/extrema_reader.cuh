// Retrieval by an estimate of the keys on the device: pages of extrema.
#pragma once

#include <algorithm>
#include <string>
#include <utility>

#include "../../../../../core/host/host_vector.hpp"
#include "../../../../../core/stored/page_extrema.hpp"
#include "../../../device/copy.cuh"
#include "../../reader.cuh"
#include "../page_index.cuh"
#include "../retrieve_by_pages.cuh"
#include "mean_value.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {

/// The reader of recipes that read an estimate of the keys, in pages. Every entry, a (layer, sequence), has its own
/// index with room for any plan.
/// Bytes    an index has 2 * k_dim elements a page, or k_dim if pages have one slot.
template <class Recipe, class View, class Out>
class extrema_reader : public slot_reader {
  using T = typename View::element_type;
  using operation = retrieve_by_pages<Recipe, View, Out>;
  using index_type = page_extrema_view<T, View::k_dim>;
  static constexpr int k_dim = View::k_dim, v_dim = View::v_dim;
  static constexpr bool averages = Recipe::retrieve_type::scorer_type::adds_mean_value;
  static constexpr index_t room_step = 16;  // pages: vector loads stay inside a row

 public:
  /// Sums of V are rounded in the order in which steps added them.
  static constexpr bool steps_are_settled = averages;

  extrema_reader(const Recipe& recipe, const model_shape& shape, const cache_options& options,
                 const device_info& device)
      : shape_(shape),
        sequences_(options.sequences),
        tokens_(index_tokens(recipe, options)),
        bounds_(bounds_of(recipe, options, {options.tokens})),
        row_elements_(elements_of(bounds_, tokens_)),
        choose_(recipe, bounds_, shape, options.sequences, options.step_tokens, device),
        data_(std::size_t(shape.layers) * std::size_t(options.sequences) * std::size_t(shape.kv_heads) *
              std::size_t(row_elements_)),
        plans_(options.sequences),
        begins_(shape.layers, options.sequences, shape.kv_heads),
        rooms_(1, options.sequences, shape.kv_heads),
        sums_(averages
                  ? std::size_t(shape.layers) * std::size_t(options.sequences) * std::size_t(shape.kv_heads) * v_dim
                  : 0),
        sums_scratch_(averages ? mean_value<View>(options.sequences * shape.kv_heads).workspace_bytes() : 0) {
    host_vector<offset_t> begins(std::size_t(shape.layers) * std::size_t(options.sequences) *
                                 std::size_t(shape.kv_heads));
    for (std::size_t row = 0; row < begins.size(); ++row) begins[row] = offset_t(row) * row_elements_;
    check(cudaMemcpy(begins_.entry({}), begins.data(), begins.size() * sizeof(offset_t), cudaMemcpyHostToDevice),
          "cudaMemcpy");
  }

  /// Makes the operation for another budget; `adopt` uses it from then on.
  /// Errors   pages that are smaller than the index was made for.
  struct fitted_operation {
    read_bounds bounds;
    operation choose;
  };
  fitted_operation fit(const Recipe& recipe, const model_shape& shape, const cache_options& options,
                       const device_info& device) const {
    read_bounds bounds = bounds_of(recipe, options, bounds_);
    require(elements_of(bounds, tokens_) <= row_elements_, "page of the budget's plans", bounds.page,
            "at least " + std::to_string(bounds_.page), "make a new cache for this budget");
    require_indexed(recipe, options, tokens_);
    return {bounds, operation(recipe, bounds, shape, options.sequences, options.step_tokens, device)};
  }
  void adopt(fitted_operation&& fitted) {
    bounds_ = fitted.bounds;
    choose_ = std::move(fitted.choose);
  }

  void require_covered(const planned<Recipe>& policies) const {
    const read_plan fitted = plan(policies);
    require(fitted.page <= bounds_.largest_page, "page of a sequence's plan", fitted.page,
            "at most " + std::to_string(bounds_.largest_page) + ", for which the cache was made",
            "pass the smallest budget of a sequence as cache_options::smallest_budget");
    choose_.require_covered(fitted);
  }
  /// Errors   more tokens than the index was made for.
  void require_fits(offset_t tokens) const { require_index_fits(tokens, tokens_); }
  host_vector<detail::gathered_column> gathered() const {
    return {plans_.gathered(), begins_.gathered(), rooms_.gathered()};
  }
  void set_plan(index_t id, const planned<Recipe>& policies, cudaStream_t stream) {
    const read_plan fitted = plan(policies);
    plans_.set(id, fitted, stream);
    const index_t room = index_t(row_elements_ / page_row_elements(fitted.page, k_dim, 1) / room_step * room_step);
    for (index_t h = 0; h < shape_.kv_heads; ++h) set_number(rooms_.entry({0, id}) + h, room, stream);
  }

  /// What a step reads. The page and the channels are those of the plan.
  template <class PoliciesOf>
  void set_reads(const host_vector<index_t>& ids, const PoliciesOf& policies_of, cudaStream_t stream) {
    plans_.set(ids, [&](index_t id) { return plan(policies_of(id)); }, stream);
  }

  /// Clears the sums, so that the next sequence with this id begins without any, even if steps come before any prompt.
  void clear(index_t id, cudaStream_t stream) {
    for (index_t layer = 0; averages && layer < shape_.layers; ++layer) {
      check(cudaMemsetAsync(sums({layer, id}), 0, std::size_t(shape_.kv_heads) * v_dim * sizeof(double), stream),
            "cudaMemsetAsync");
    }
  }

  /// Copies the sums of V, bit by bit as the earlier steps left them.
  void copy(index_t from, index_t to, cudaStream_t stream) const {
    for (index_t layer = 0; averages && layer < shape_.layers; ++layer)
      copy_on_device(sums({layer, to}), sums({layer, from}), std::size_t(shape_.kv_heads) * v_dim, stream);
  }

  /// Builds the index of one sequence's layer anew. `longest`: an upper bound of a head's tokens.
  void refresh(sequence_layer owner, const View& view, index_t longest, cudaStream_t stream) const {
    const index_type index{data_.data(), 1, 0, begins_.entry(owner), rooms_.entry({0, owner.id})};
    index_pages<View>{}.build(view, index, plans_.entry(owner.id), ceil_div(longest, bounds_.page), stream);
    if constexpr (averages) {
      mean_value<View>(shape_.kv_heads).build(view, sums(owner), sums_scratch_.data(), stream);
    }
  }
  /// The same for a batch, after slots have moved in place.
  void rebuild(index_t layer, const index_t* ids, const View& view, cudaStream_t stream) const {
    index_pages<View>{}.build(view, batch_index(layer), plans_.batch(), bounds_.max_pages(), stream);
    if constexpr (averages) {
      mean_value<View>(view.sequences * shape_.kv_heads)
          .build(view, sums({layer, 0}), sums_scratch_.data(), stream, ids);
    }
  }

  bool choose(index_t layer, const View& view, const rows_view<const T>& q, const index_t* first, const logit_rule&,
              const rows_view<Out>& out, const rows_view<float>& lse, selection_view& chosen,
              cudaStream_t stream) const {
    if (choose_.attends()) {
      chosen = choose_.choose_and_attend(view, plans_.batch(), batch_index(layer), q, first, out, lse, stream);
      return true;
    }
    chosen = choose_.choose(view, plans_.batch(), batch_index(layer), q, first, stream);
    return false;
  }

  /// Mixes a step's outputs with the mean of V: each becomes mass * out + (1 - mass) * mean, where mass is the share of
  /// the row's probabilities that its attended tokens hold.
  void complete(index_t layer, const index_t* ids, const View& view, const rows_view<Out>& out,
                cudaStream_t stream) const {
    if constexpr (averages) {
      mean_value_problem<View, Out> problem;
      problem.view = view;
      problem.sums = sums({layer, 0});
      problem.ids = ids;
      problem.mass = choose_.mass();
      problem.out = out;
      problem.tokens = out.tokens;
      mean_value<View, Out>(view.sequences * shape_.kv_heads).run(problem, nullptr, stream);
    }
  }

  /// Bytes of the index of heads with `longest` tokens, and of the sums of one entry.
  offset_t bytes(const planned<Recipe>& policies, index_t longest) const {
    const read_plan fitted = plan(policies);
    const index_t pages = ceil_div(fitted.pages_of(longest), room_step) * room_step;
    return shape_.kv_heads * (page_row_elements(fitted.page, k_dim, pages) * offset_t(sizeof(T)) +
                              (averages ? v_dim * offset_t(sizeof(double)) : 0));
  }
  offset_t attended(const planned<Recipe>& policies, offset_t n, const head_place&) const {
    return (std::min)(n, choose_.max_read(plan(policies)));
  }
  offset_t bytes_read(const planned<Recipe>& policies, offset_t n, const head_place&) const {
    return operation::bytes_read(plan(policies), n) + (averages ? v_dim * offset_t(sizeof(double)) : 0);
  }

 private:
  static read_plan plan(const planned<Recipe>& policies) {
    return read_plan::fitted_to(policies.read.scorer, policies.plan.read);
  }
  static read_bounds bounds_of(const Recipe& recipe, const cache_options& options, read_bounds bounds) {
    const auto fitted = [&](const stage_plan& given) {
      return read_plan::fitted_to(recipe.retrieve.planned(given, k_dim).scorer, given.read);
    };
    for_each_plan(recipe, options, [&](const stage_plan& given) {
      const offset_t tokens = (std::min<offset_t>)(options.tokens, offset_t(given.capacity) + 16);
      bounds.cover(fitted(given), index_t(tokens));
    });
    // Plans of smaller budgets have larger pages. So have plans of conversations that have dropped tokens. Rows are not
    // longer.
    const auto cover_pages = [&](const stage_plan& given) { bounds.cover(fitted(given), 0); };
    if (Recipe::retain_type::drops) for_each_plan(recipe, options.tokens, max_tokens, cover_pages);
    if (options.smallest_budget > 0 && options.smallest_budget < recipe.budget()) {
      Recipe smallest = recipe;
      smallest.set_budget(options.smallest_budget);
      for_each_plan(smallest, options.first_prompt, Recipe::retain_type::drops ? max_tokens : options.tokens,
                    cover_pages);
    }
    return bounds;
  }
  /// Elements of one row of the index, whatever the page.
  static offset_t elements_of(const read_bounds& bounds, index_t tokens) {
    const auto rounded = [](index_t pages) { return ceil_div(pages, room_step) * room_step; };
    const index_t two_sided = (std::max<index_t>)(2, bounds.page);
    const offset_t two = page_row_elements(two_sided, k_dim, rounded(ceil_div(tokens, two_sided)));
    return bounds.page == 1 ? (std::max)(two, page_row_elements(1, k_dim, rounded(tokens))) : two;
  }
  index_type batch_index(index_t layer) const { return {data_.data(), 1, 0, begins_.batch(layer), rooms_.batch(0)}; }
  double* sums(sequence_layer owner) const {
    return sums_.data() + (offset_t(owner.layer) * sequences_ + owner.id) * shape_.kv_heads * v_dim;
  }

  model_shape shape_;
  index_t sequences_, tokens_;
  read_bounds bounds_;
  offset_t row_elements_;
  operation choose_;
  device_buffer<T> data_;
  id_values<read_plan> plans_;
  id_column<offset_t> begins_;  // constant: every entry has room for any plan
  id_column<index_t> rooms_;    // in pages, by the plan
  device_buffer<double> sums_;  // of V by id, for a scorer that adds the mean value
  device_buffer<unsigned char> sums_scratch_;
};

template <class Recipe, class View, class Out>
requires(Recipe::retrieve_type::estimates) struct reader_of<Recipe, View, Out> {
  using type = extrema_reader<Recipe, View, Out>;
};

}  // namespace cuda
TESSERA_NAMESPACE_END
