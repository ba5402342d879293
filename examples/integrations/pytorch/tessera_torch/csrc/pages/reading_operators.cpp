// The operators torch.ops.tessera of a second stage over an engine's own pages: an index by page, and what a step reads.
#include <ATen/DeviceGuard.h>
#include <torch/library.h>

#include <algorithm>
#include <limits>
#include <optional>
#include <string>
#include <tuple>

#include "page_tensors.hpp"

namespace tessera_torch {
namespace {

std::int64_t index_page(const Tensor& handle) {
  return guarded([&](registry& all) { return std::int64_t(all.find_pages(handle).pages->index_page()); });
}

/// What the budget, or another one, leaves to each stage behind a prompt: kept, read, page, channels.
std::tuple<std::int64_t, std::int64_t, std::int64_t, std::int64_t> plan(const Tensor& handle, std::int64_t prompt,
                                                                        c10::optional<std::int64_t> budget) {
  return guarded([&](registry& all) {
    constexpr std::int64_t most = tessera::max_tokens;
    tessera::require(prompt >= 0 && prompt <= most, "prompt", prompt, "0 to " + std::to_string(most),
                     "pass how many tokens the prompt has");
    std::optional<index_t> tokens;
    if (budget) tokens = index_t(std::clamp<std::int64_t>(*budget, -1, std::numeric_limits<index_t>::max()));
    const planned_stages made = all.find_pages(handle).pages->plan(index_t(prompt), tokens);
    return std::tuple<std::int64_t, std::int64_t, std::int64_t, std::int64_t>(made.kept, made.read, made.page,
                                                                              made.channels);
  });
}

/// An index [pages * parts of a page, kv_heads, 2, dim] beside the pool k, of any strides but between a row's elements.
index_memory index_in(const engine_pages& here, const Tensor& index, const Tensor& k) {
  const std::int64_t page = here.pages->index_page(), block = k.size(1);
  tessera::require(block % page == 0, "page of the method", page,
                   "a divisor of the engine's page, which is " + std::to_string(block),
                   "pass page=" + std::to_string(block));
  const std::vector<std::int64_t> wanted{k.size(0) * (block / page), k.size(2), 2, k.size(3)};
  tessera::require(index.sizes() == wanted && index.stride(3) == 1, "shape of the index",
                   text_of(index.sizes()) + (index.dim() == 4 && index.stride(3) != 1 ? ", elements apart" : ""),
                   text_of(wanted) + ", the elements of a row side by side", "make it by PageOperations.empty_index");
  tessera::require(index.scalar_type() == k.scalar_type() && index.device() == k.device(),
                   "dtype and device of the index",
                   std::string(c10::toString(index.scalar_type())) + ", " + index.device().str(),
                   std::string(c10::toString(k.scalar_type())) + ", " + k.device().str(), "keep it beside the pools");
  return {index.data_ptr(),
          {index.stride(0) * (block / page), k.size(2) > 1 ? index.stride(1) : 0, index.stride(0), 1},
          index.stride(2)};
}

void index_pages(const Tensor& handle, const Tensor& k, const Tensor& v, const Tensor& tables, const Tensor& lengths,
                 const maybe_tensor& positions, const maybe_tensor& scores, const Tensor& index,
                 const maybe_tensor& first, std::int64_t new_tokens) {
  const at::OptionalDeviceGuard device(at::device_of(k));
  guarded([&](registry& all) {
    auto& here = all.find_pages(handle);
    const paged_layer layer = layer_of(here, k, v, tables, lengths, positions, scores);
    here.pages->index_pages(layer, index_in(here, index, k), counts_in(first, "first", {layer.sequences}, k.device()),
                            index_t(new_tokens), current_stream(k));
  });
}

std::int64_t max_read(const Tensor& handle, std::int64_t tokens, std::int64_t capacity) {
  return guarded([&](registry& all) {
    return std::int64_t(all.find_pages(handle).pages->max_read(index_t(tokens), index_t(capacity)));
  });
}

/// slots [sequences, kv_heads, room], with the room that pages_max_read says. Of each row the first `counts` mean something.
std::tuple<Tensor, Tensor> choose_to_read(const Tensor& handle, std::int64_t layer_index, const Tensor& k,
                                          const Tensor& v, const Tensor& tables, const Tensor& lengths,
                                          const maybe_tensor& positions, const maybe_tensor& scores,
                                          const Tensor& index, const Tensor& q, const Tensor& first_position,
                                          std::int64_t room, const maybe_tensor& reads, const maybe_tensor& channels) {
  const at::OptionalDeviceGuard device(at::device_of(k));
  return guarded([&](registry& all) {
    auto& here = all.find_pages(handle);
    const paged_layer layer = layer_of(here, k, v, tables, lengths, positions, scores);
    const tensor_rows queries = rows_beside(here, layer, q, "q", here.q_heads);
    tessera::require(queries.tokens >= 1 && queries.tokens <= 8, "tokens of q", queries.tokens, "1 to 8",
                     "a step has few; prompts read everything");
    const index_memory memory = index_in(here, index, k);
    const Tensor slots = at::full({layer.sequences, layer.kv_heads, room}, -1, lengths.options());
    const Tensor counts = at::zeros({layer.sequences, layer.kv_heads}, lengths.options());
    scratch_tensors scratch{k.device(), {}};
    here.pages->choose_to_read(layer, index_t(layer_index), memory,
                               {queries, counts_in(first_position, "first_position", {layer.sequences}, k.device()),
                                counts_in(reads, "reads", {layer.sequences}, k.device()),
                                counts_in(channels, "channels", {layer.sequences}, k.device())},
                               chosen_in(slots, counts, layer), scratch.source(), current_stream(k));
    return std::make_tuple(slots, counts);
  });
}

// Shapes alone, for torch.compile.
std::tuple<Tensor, Tensor> choose_to_read_shape(const Tensor&, std::int64_t, const Tensor&, const Tensor&,
                                                const Tensor&, const Tensor& lengths, const maybe_tensor&,
                                                const maybe_tensor&, const Tensor&, const Tensor&, const Tensor&,
                                                std::int64_t room, const maybe_tensor&, const maybe_tensor&) {
  return {at::empty_symint({lengths.sym_size(0), lengths.sym_size(1), room}, lengths.options()),
          at::empty_like(lengths)};
}

}  // namespace
}  // namespace tessera_torch

TORCH_LIBRARY_FRAGMENT(tessera, m) {
  m.def("pages_plan(Tensor pages, int prompt, int? budget=None) -> (int kept, int read, int page, int channels)",
        &tessera_torch::plan);
  m.def("pages_index_page(Tensor pages) -> int", &tessera_torch::index_page);
  m.def("pages_max_read(Tensor pages, int tokens, int capacity) -> int", &tessera_torch::max_read);
  m.def(
      "pages_index(Tensor pages, Tensor k, Tensor v, Tensor tables, Tensor lengths, Tensor? positions, "
      "Tensor? scores, Tensor(a!) index, Tensor? first=None, int new_tokens=0) -> ()");
  m.def(
      "pages_choose_to_read(Tensor pages, int layer, Tensor k, Tensor v, Tensor tables, Tensor lengths, "
      "Tensor? positions, Tensor? scores, Tensor index, Tensor q, Tensor first_position, int room, "
      "Tensor? reads=None, Tensor? channels=None) -> (Tensor slots, Tensor counts)");
}

namespace {
void implement_reading(torch::Library& m) {
  m.impl("pages_index", &tessera_torch::index_pages);
  m.impl("pages_choose_to_read", &tessera_torch::choose_to_read);
}
}  // namespace

TORCH_LIBRARY_IMPL(tessera, CPU, m) { implement_reading(m); }
#ifdef TESSERA_TORCH_CUDA
TORCH_LIBRARY_IMPL(tessera, CUDA, m) { implement_reading(m); }
#endif
TORCH_LIBRARY_IMPL(tessera, Meta, m) {
  using at::Tensor;
  using maybe = c10::optional<Tensor>;
  m.impl("pages_choose_to_read", &tessera_torch::choose_to_read_shape);
  m.impl("pages_index", [](const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&, const maybe&,
                           const maybe&, const Tensor&, const maybe&, std::int64_t) {});
}
