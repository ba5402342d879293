// The operators of observation over an engine's pages: what a method's scorer must see of queries beside a prompt's newest.
//
// Scores [sequences, kv_heads, slots] lie beside the positions, statistics [sequences, ..] where the engine keeps them: it
// gathers both for a batch, as it gathers tables, by request.
#include <ATen/DeviceGuard.h>
#include <torch/library.h>

#include <string>

#include "page_tensors.hpp"

namespace tessera_torch {
namespace {

std::string observes(const Tensor& handle) {
  return guarded([&](registry& all) { return std::string(all.find_pages(handle).pages->observes()); });
}
std::int64_t first_observed(const Tensor& handle) {
  return guarded([&](registry& all) { return std::int64_t(all.find_pages(handle).pages->first_observed()); });
}

void observe(const Tensor& handle, std::int64_t index, const Tensor& k, const Tensor& v, const Tensor& tables,
             const Tensor& lengths, const maybe_tensor& positions, const maybe_tensor& scores, const Tensor& q,
             const Tensor& first_position, const maybe_tensor& valid) {
  const at::OptionalDeviceGuard device(at::device_of(k));
  guarded([&](registry& all) {
    auto& here = all.find_pages(handle);
    const paged_layer layer = layer_of(here, k, v, tables, lengths, positions, scores);
    scratch_tensors scratch{k.device(), {}};
    choice_queries by{rows_beside(here, layer, q, "q", here.q_heads)};
    by.valid = counts_in(valid, "valid", {layer.sequences}, k.device());
    by.first_position = counts_in(first_position, "first_position", {layer.sequences}, k.device());
    here.pages->observe(layer, index_t(index), by, scratch.source(), current_stream(k));
  });
}

void observe_queries(const Tensor& handle, const Tensor& counts, const Tensor& sums, const Tensor& products,
                     const Tensor& q, const Tensor& first_position) {
  const at::OptionalDeviceGuard device(at::device_of(q));
  guarded([&](registry& all) {
    auto& here = all.find_pages(handle);
    paged_layer batch;
    batch.sequences = index_t(counts.size(0));
    const Tensor all_sums[] = {counts, sums, products};
    check_sums(here, batch, all_sums, q.device());
    const tensor_rows rows = rows_beside(here, batch, q, "q", here.q_heads);
    const index_t* first = counts_in(first_position, "first_position", {batch.sequences}, q.device());
    scratch_tensors scratch{q.device(), {}};
    const scratch_memory memory = scratch.source();
    for (index_t b = 0; b < batch.sequences; ++b) {
      const tessera::summed_queries to{counts.data_ptr<std::int64_t>() + b * counts.stride(0),
                                       sums.data_ptr<double>() + b * sums.stride(0),
                                       products.data_ptr<double>() + b * products.stride(0)};
      here.pages->observe_queries(part_of(rows, q.element_size(), b, 0, rows.tokens), first + b, to, memory,
                                  current_stream(q));
    }
  });
}

}  // namespace
}  // namespace tessera_torch

TORCH_LIBRARY_FRAGMENT(tessera, m) {
  m.def("pages_observes(Tensor pages) -> str", &tessera_torch::observes);
  m.def("pages_first_observed(Tensor pages) -> int", &tessera_torch::first_observed);
  m.def(
      "pages_observe(Tensor pages, int layer, Tensor k, Tensor v, Tensor tables, Tensor lengths, Tensor? positions, "
      "Tensor(a!)? scores, Tensor q, Tensor first_position, Tensor? valid=None) -> ()");
  m.def(
      "pages_observe_queries(Tensor pages, Tensor(a!) counts, Tensor(b!) sums, Tensor(c!) products, Tensor q, "
      "Tensor first_position) -> ()");
}

namespace {
void implement_observation(torch::Library& m) {
  m.impl("pages_observe", &tessera_torch::observe);
  m.impl("pages_observe_queries", &tessera_torch::observe_queries);
}
}  // namespace

TORCH_LIBRARY_IMPL(tessera, CPU, m) { implement_observation(m); }
#ifdef TESSERA_TORCH_CUDA
TORCH_LIBRARY_IMPL(tessera, CUDA, m) { implement_observation(m); }
#endif
TORCH_LIBRARY_IMPL(tessera, Meta, m) {
  using at::Tensor;
  using maybe = c10::optional<Tensor>;
  m.impl("pages_observe", [](const Tensor&, std::int64_t, const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                             const maybe&, const maybe&, const Tensor&, const Tensor&, const maybe&) {});
  m.impl("pages_observe_queries",
         [](const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&) {});
}
