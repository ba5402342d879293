// Retrieval by the means of packed blocks on the device.
#pragma once

#include <algorithm>
#include <utility>

#include "../../../../../core/host/host_vector.hpp"
#include "../../../../../scorer/block_mean.hpp"
#include "../../../store/packed/packed_store.cuh"
#include "../../reader.cuh"
#include "../decode_blocks.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {

/// The reader of recipes that read the best blocks of packed rows and all whole rows. The means lie in the segments;
/// the reader stores nothing.
template <class Recipe, class View, class Out>
class block_mean_reader : public reader_without_index<Recipe, View, Out> {
  using T = typename View::element_type;
  using store_type = kv_store<typename Recipe::layout_type>;
  static constexpr bool drops = Recipe::retain_type::drops;

 public:
  struct operation {
    decode_blocks<View, Out> run;
    device_buffer<unsigned char> scratch;
    index_t tokens, block;  // the budget for which it was made, and the length of a prompt's blocks
    index_t more;           // tokens that other blocks may add to a budget
    operation(decode_blocks<View, Out> made, index_t tokens_, index_t block_, index_t more_)
        : run(std::move(made)), scratch(run.workspace_bytes()), tokens(tokens_), block(block_), more(more_) {}
  };

  block_mean_reader(const Recipe& recipe, const model_shape& shape, const cache_options& options,
                    const device_info& device)
      : step_(fit(recipe, shape, options, device)), reads_(options.sequences) {}

  operation fit(const Recipe& recipe, const model_shape& shape, const cache_options& options,
                const device_info& device) const {
    const auto& layout = recipe.layout;
    const auto& read = recipe.retrieve;
    const segment_formats formats = formats_of(layout, read.selector.block);
    const index_t max_block = formats.alike ? formats.block : (std::max)(formats.block, strategy_blocks.front());
    // Where rows are dropped, each segment may end in a block that is not whole.
    const bool alike = formats.alike && !drops;
    index_t tokens = read.tokens;
    if (Recipe::retain_type::plans)  // of all prompts; the first and the last block are read in any case
      tokens = (std::max)(recipe.plan_unchecked(options.tokens).read, 2 * read.selector.block);
    return {{read.scorer, read.selector, tokens, options.sequences, shape.kv_heads, shape.q_heads, options.step_tokens,
             options.tokens, max_device_segments(layout, options.tokens, formats.block, drops),
             segment_limits{formats.widest_k, formats.widest_v, formats.least_block, alike}, device},
            tokens,
            formats.block,
            alike ? 0 : 2 * max_block};
  }
  void adopt(operation&& fitted) { step_ = std::move(fitted); }

  void require_covered(const planned<Recipe>& policies) const {
    require(policies.read.tokens <= step_.tokens, "tokens that a step reads", policies.read.tokens,
            "at most those of the recipe, which are " + std::to_string(step_.tokens), "raise the recipe's budget");
  }
  host_vector<detail::gathered_column> gathered() const { return {reads_.gathered()}; }
  void set_plan(index_t id, const planned<Recipe>& policies, cudaStream_t stream) {
    reads_.set(id, step_.run.reads(policies.read.tokens), stream);
  }
  template <class PoliciesOf>
  void set_reads(const host_vector<index_t>& ids, const PoliciesOf& policies_of, cudaStream_t stream) {
    reads_.set(ids, [&](index_t id) { return step_.run.reads(policies_of(id).read.tokens); }, stream);
  }

  /// Sets `chosen` to blocks.
  bool choose(index_t, const View& view, const rows_view<const T>& q, const index_t* first, const logit_rule& rule,
              const rows_view<Out>& out, const rows_view<float>& lse, selection_view& chosen,
              cudaStream_t stream) const {
    packed_problem<View, Out> problem{view, q, first, rule, out, lse, {}, 1};
    const rotated_rows rotated = step_.run.choose(problem, step_.scratch.data(), stream, reads_.batch());
    step_.run.attend(problem, rotated, step_.scratch.data(), stream);
    chosen = problem.chosen;
    return true;
  }
  static host_vector<index_t> slots(const store_type& store, sequence_layer owner, index_t head,
                                    const host_vector<index_t>& blocks) {
    return store.slots_of_blocks(owner, head, blocks);
  }
  offset_t attended(const planned<Recipe>& policies, offset_t n, const head_place& of) const {
    const offset_t whole = offset_t(ceil_div(policies.read.tokens, step_.block)) * step_.block + step_.more;
    return of.newest + (std::min)(n - of.newest, whole);
  }
  /// 0: means lie in the segments, whose bytes the store counts.
  static offset_t bytes_read(const planned<Recipe>&, offset_t, const head_place&) { return 0; }

 private:
  operation step_;
  id_values<block_reads> reads_;
};

template <class Recipe, class View, class Out>
requires std::same_as<typename Recipe::retrieve_type::scorer_type, block_mean> struct reader_of<Recipe, View, Out> {
  using type = block_mean_reader<Recipe, View, Out>;
};

}  // namespace cuda
TESSERA_NAMESPACE_END
