// Retrieval by exact scores on the device.
#pragma once

#include <algorithm>
#include <utility>

#include "../../../../../core/host/host_vector.hpp"
#include "../../../device/copy.cuh"
#include "../../reader.cuh"
#include "../retrieve_by_scores.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {

/// Recipes that score every stored key.
template <class Recipe, class View, class Out>
class exact_reader : public slot_reader, public reader_without_index<Recipe, View, Out> {
  using T = typename View::element_type;
  using operation = retrieve_by_scores<Recipe, View>;

 public:
  exact_reader(const Recipe& recipe, const model_shape& shape, const cache_options& options, const device_info& device)
      : choose_(fit(recipe, shape, options, device)), plans_(options.sequences) {}

  /// Makes the operation for another budget; `adopt` uses it from then on.
  operation fit(const Recipe& recipe, const model_shape& shape, const cache_options& options,
                const device_info& device) const {
    return operation(recipe, max_read(recipe, options), shape, options.sequences, options.step_tokens, options.tokens,
                     device);
  }
  void adopt(operation&& fitted) { choose_ = std::move(fitted); }

  void require_covered(const planned<Recipe>& policies) const { choose_.require_covered(plan(policies)); }
  host_vector<detail::gathered_column> gathered() const { return {plans_.gathered()}; }
  void set_plan(index_t id, const planned<Recipe>& policies, cudaStream_t stream) {
    plans_.set(id, plan(policies), stream);
  }
  template <class PoliciesOf>
  void set_reads(const host_vector<index_t>& ids, const PoliciesOf& policies_of, cudaStream_t stream) {
    plans_.set(ids, [&](index_t id) { return plan(policies_of(id)); }, stream);
  }
  bool choose(index_t, const View& view, const rows_view<const T>& q, const index_t* first, const logit_rule&,
              const rows_view<Out>&, const rows_view<float>&, selection_view& chosen, cudaStream_t stream) const {
    chosen = choose_.choose(view, plans_.batch(), nullptr, q, first, stream);
    return false;
  }
  static offset_t attended(const planned<Recipe>& policies, offset_t n, const head_place&) {
    return (std::min)(n, operation::max_read(plan(policies)));
  }
  static offset_t bytes_read(const planned<Recipe>& policies, offset_t n, const head_place&) {
    return operation::bytes_read(plan(policies), n);
  }

 private:
  static read_plan plan(const planned<Recipe>& policies) { return read_plan(policies.plan.read); }
  static index_t max_read(const Recipe& recipe, const cache_options& options) {
    index_t most = 1;
    for_each_plan(recipe, options, [&](const stage_plan& plan) { most = (std::max)(most, plan.read); });
    return most;
  }

  operation choose_;
  id_values<read_plan> plans_;
};

}  // namespace cuda
TESSERA_NAMESPACE_END
