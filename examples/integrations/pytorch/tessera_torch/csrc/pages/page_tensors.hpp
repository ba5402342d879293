// What the operators over an engine's pages make of tensors: a layer, rows beside it, numbers, slots, statistics.
#pragma once

#include <ATen/DeviceGuard.h>
#include <torch/library.h>

#include <string>
#include <vector>

#include "../tensor_rows.hpp"
#include "any_pages.hpp"

namespace tessera_torch {

using maybe_tensor = c10::optional<Tensor>;

inline std::string text_of(at::IntArrayRef sizes) {
  std::string text;
  for (const std::int64_t size : sizes) text += (text.empty() ? "[" : ", ") + std::to_string(size);
  return text.empty() ? "[]" : text + "]";
}

/// Numbers of the engine: int32, on the device of its pools, of a shape whose last size is next to each other.
inline index_t* counts_in(const Tensor& x, const char* name, at::IntArrayRef sizes, c10::Device device) {
  tessera::require(x.scalar_type() == at::kInt && x.device() == device, std::string("dtype and device of ") + name,
                   std::string(c10::toString(x.scalar_type())) + ", " + x.device().str(), "Int, " + device.str(),
                   "keep it beside the pools as torch.int32");
  tessera::require(x.sizes() == sizes && x.is_contiguous(), std::string("shape of ") + name,
                   text_of(x.sizes()) + (x.is_contiguous() ? "" : ", not contiguous"), text_of(sizes),
                   "pass a contiguous tensor of one number for each");
  return x.data_ptr<index_t>();
}
inline const index_t* counts_in(const maybe_tensor& x, const char* name, at::IntArrayRef sizes, c10::Device device) {
  return x ? counts_in(*x, name, sizes, device) : nullptr;
}

/// Tables and lengths alone.
inline paged_layer tables_of(const engine_pages& here, const Tensor& tables, const Tensor& lengths, std::int64_t page) {
  paged_layer layer;
  const bool own = tables.dim() == 3;
  tessera::require(tables.dim() == 2 || (own && tables.size(1) == here.kv_heads), "shape of tables",
                   text_of(tables.sizes()), "[sequences, blocks] or [sequences, kv_heads, blocks]",
                   "pass a row of pages for each sequence, or for each of its kv_heads");
  layer.sequences = index_t(tables.size(0));
  layer.kv_heads = here.kv_heads;
  layer.table.blocks = counts_in(tables, "tables", tables.sizes(), lengths.device());
  layer.table.page = index_t(page);
  layer.table.sequence_stride = tables.stride(0);
  layer.table.head_stride = own ? tables.stride(1) : 0;
  layer.pool.max_blocks = index_t(tables.size(-1));
  return layer;
}

inline paged_layer layer_of(const engine_pages& here, const Tensor& k, const Tensor& v, const Tensor& tables,
                            const Tensor& lengths, const maybe_tensor& positions, const maybe_tensor& scores) {
  tessera::require(k.dim() == 4 && v.sizes() == k.sizes(), "shape of k and v",
                   text_of(k.sizes()) + " and " + text_of(v.sizes()), "[pages, page, kv_heads, dim] both",
                   "permute the pools to it: that copies nothing");
  tessera::require(k.is_cpu() || (k.stride(3) == 1 && v.stride(3) == 1), "strides of k and v from element to element",
                   text_of({k.stride(3), v.stride(3)}), "1 on a GPU: the elements of a row side by side",
                   "lay rows out so; on the CPU a row may have any stride");
  paged_layer layer = tables_of(here, tables, lengths, k.size(1));
  const bool own = layer.table.head_stride != 0;
  tessera::require(k.size(2) == (own ? 1 : here.kv_heads) && k.size(3) == here.pages->head_dim(),
                   "kv_heads and dim of k", text_of(k.sizes().slice(2)),
                   text_of({own ? 1 : here.kv_heads, here.pages->head_dim()}),
                   own ? "pages of one kv_head have one" : "pass the pools of this model");
  for (const Tensor& x : {k, v}) {
    tessera::require(here.takes(x.scalar_type()), "dtype of k and v", c10::toString(x.scalar_type()),
                     c10::toString(here.dtype), "pass what the operations were made for");
  }
  tessera::require(k.device() == v.device() && k.device() == lengths.device(), "device of k, v and lengths",
                   k.device().str() + ", " + v.device().str() + ", " + lengths.device().str(), "one",
                   "keep an engine's tensors together");
  layer.k = k.data_ptr();
  layer.v = v.data_ptr();
  layer.k_strides = {k.stride(0), own ? 0 : k.stride(2), k.stride(1), k.stride(3)};
  layer.v_strides = {v.stride(0), own ? 0 : v.stride(2), v.stride(1), v.stride(3)};
  layer.pool.pages = index_t(k.size(0));
  layer.lengths = counts_in(lengths, "lengths", {layer.sequences, layer.kv_heads}, k.device());
  const auto covers = [&](const Tensor& x) { return x.dim() == 3 && x.size(2) >= layer.capacity(); };
  if (positions) {
    tessera::require(covers(*positions), "shape of positions", text_of(positions->sizes()),
                     "[sequences, kv_heads, at least " + std::to_string(layer.capacity()) + "]",
                     "make room for a position of every slot");
    layer.positions.data =
        counts_in(*positions, "positions", {layer.sequences, layer.kv_heads, positions->size(2)}, k.device());
    layer.positions.sequence_stride = positions->stride(0);
    layer.positions.head_stride = positions->stride(1);
  }
  if (!scores) return layer;
  const std::vector<std::int64_t> beside =
      positions ? positions->sizes().vec()
                : std::vector<std::int64_t>{layer.sequences, layer.kv_heads, layer.capacity()};
  tessera::require(scores->scalar_type() == at::kFloat && scores->device() == k.device() && scores->sizes() == beside &&
                       scores->is_contiguous(),
                   "scores", std::string(c10::toString(scores->scalar_type())) + " " + text_of(scores->sizes()),
                   "Float " + text_of(beside) + ", contiguous, beside the positions",
                   "keep a score of torch.float32 for every position");
  layer.scores = {scores->data_ptr<float>(), scores->stride(0), scores->stride(1)};
  return layer;
}

/// Rows [sequences, tokens, heads, dim] beside a layer.
inline tensor_rows rows_beside(const engine_pages& here, const paged_layer& layer, const Tensor& x, const char* name,
                               index_t heads) {
  tessera::require(x.dim() == 4 && x.size(0) == layer.sequences && x.size(2) == heads &&
                       x.size(3) == here.pages->head_dim() && x.stride(3) == 1,
                   std::string("shape of ") + name, text_of(x.sizes()),
                   text_of({layer.sequences, x.dim() == 4 ? x.size(1) : 1, heads, here.pages->head_dim()}),
                   "pass [sequences, tokens, heads, dim], the elements of a row side by side");
  tessera::require(here.takes(x.scalar_type()), std::string("dtype of ") + name, c10::toString(x.scalar_type()),
                   c10::toString(here.dtype), "pass what the operations were made for");
  return rows_of(x, 1, 2);
}

/// Memory of one operation, which PyTorch may give to later work of the stream once this is gone.
struct scratch_tensors {
  c10::Device device;
  std::vector<Tensor> held;
  scratch_memory source() {
    return [this](std::size_t bytes) -> void* {
      held.push_back(at::empty({std::int64_t(bytes)}, at::TensorOptions().dtype(at::kByte).device(device)));
      return held.back().data_ptr();
    };
  }
};

inline chosen_slots chosen_in(const maybe_tensor& slots, const maybe_tensor& counts, const paged_layer& layer) {
  tessera::require(slots.has_value() == counts.has_value(), "slots and counts", slots ? "slots alone" : "counts alone",
                   "both or none", "pass what pages_choose has returned");
  if (!slots) return {};
  tessera::require(slots->dim() == 3, "shape of slots", text_of(slots->sizes()), "[sequences, kv_heads, capacity]",
                   "pass what pages_choose has returned");
  const std::int64_t each = slots->size(2);
  const c10::Device device = slots->device();
  return {counts_in(*slots, "slots", {layer.sequences, layer.kv_heads, each}, device),
          counts_in(*counts, "counts", {layer.sequences, layer.kv_heads}, device), each};
}

/// counts [sequences, q_heads], sums [.., dim] and products [.., dim, dim] of queries, where they lie.
inline void check_sums(const engine_pages& here, const paged_layer& layer, at::TensorList sums, c10::Device device) {
  const std::int64_t dim = here.pages->head_dim();
  const std::vector<std::int64_t> shapes[] = {
      {layer.sequences, here.q_heads}, {layer.sequences, here.q_heads, dim}, {layer.sequences, here.q_heads, dim, dim}};
  constexpr at::ScalarType types[] = {at::kLong, at::kDouble, at::kDouble};
  tessera::require(sums.size() == 3, "tensors of the statistics", sums.size(), "3: counts, sums and products",
                   "pass what PageOperations.statistics makes");
  for (std::size_t i = 0; i < 3; ++i) {
    tessera::require(sums[i].scalar_type() == types[i] && sums[i].sizes() == shapes[i] && sums[i].is_contiguous() &&
                         sums[i].device() == device,
                     "tensor " + std::to_string(i) + " of the statistics",
                     std::string(c10::toString(sums[i].scalar_type())) + " " + text_of(sums[i].sizes()),
                     std::string(c10::toString(types[i])) + " " + text_of(shapes[i]) + ", contiguous, beside k",
                     "pass what PageOperations.statistics makes");
  }
}
/// Their addresses by sequence, on their device, in the memory of `kept`.
inline const tessera::query_statistics* sums_of(const engine_pages& here, const paged_layer& layer, at::TensorList sums,
                                                c10::Device device, Tensor& kept) {
  static_assert(sizeof(tessera::query_statistics) == 3 * sizeof(std::int64_t));
  check_sums(here, layer, sums, device);
  const Tensor sequence = at::arange(layer.sequences, at::TensorOptions().dtype(at::kLong).device(device));
  std::vector<Tensor> addresses;
  for (const Tensor& x : sums)
    addresses.push_back(sequence * std::int64_t(x.stride(0) * 8) + reinterpret_cast<std::int64_t>(x.data_ptr()));
  kept = at::stack(addresses, 1).contiguous();
  return static_cast<const tessera::query_statistics*>(kept.data_ptr());
}

}  // namespace tessera_torch
