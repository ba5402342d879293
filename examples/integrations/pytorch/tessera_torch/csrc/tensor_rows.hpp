// Tensors as the rows that caches take, and what the operators ask of them.
#pragma once

#include <torch/types.h>

#include <tessera/core/error.hpp>

#include "registry.hpp"

namespace tessera_torch {

/// The kind of a dtype that the operators take.
inline tessera::element_kind kind_of(at::ScalarType dtype) {
  tessera::require(dtype == at::kFloat || dtype == at::kHalf || dtype == at::kBFloat16, "dtype", c10::toString(dtype),
                   "torch.float32, torch.float16 or torch.bfloat16", "cast the tensor");
  return dtype == at::kFloat  ? tessera::element_kind::fp32
         : dtype == at::kHalf ? tessera::element_kind::fp16
                              : tessera::element_kind::bf16;
}

/// Rows of a tensor of four axes: sequences, `tokens` and `heads` in either order, elements.
inline tensor_rows rows_of(const Tensor& x, int tokens, int heads) {
  tensor_rows rows;
  rows.data = x.data_ptr();
  rows.element = kind_of(x.scalar_type());
  rows.sequence_stride = x.stride(0), rows.token_stride = x.stride(tokens), rows.head_stride = x.stride(heads);
  rows.sequences = index_t(x.size(0)), rows.tokens = index_t(x.size(tokens)), rows.heads = index_t(x.size(heads));
  rows.dim = index_t(x.size(3));
  return rows;
}

/// Rows of a tensor [sequences, heads, tokens, dim].
inline tensor_rows rows_of(const Tensor& x) { return rows_of(x, 2, 1); }

/// Tokens [first, last) of one sequence.
inline tensor_rows part_of(const tensor_rows& all, std::size_t element_bytes, index_t sequence, index_t first,
                           index_t last) {
  tensor_rows part = all;
  const offset_t begin = sequence * all.sequence_stride + first * all.token_stride;
  part.data = static_cast<char*>(all.data) + begin * offset_t(element_bytes);
  part.sequences = 1;
  part.tokens = last - first;
  return part;
}

/// Rows may have any strides but that of their elements: other tensors are copied.
inline Tensor in_place(const Tensor& x) { return x.stride(3) == 1 || x.size(3) == 1 ? x : x.contiguous(); }

/// Rows must be where the cache is. Errors: rows on another device.
inline void check_device(const conversations& here, const Tensor& x) {
  const bool is_here = here.memory ? x.device() == *here.device : x.is_cpu();
  tessera::require(is_here, "device of rows", x.device().str(), here.memory ? here.device->str() : "cpu",
                   "pass rows on the device that the cache was made for");
}

inline void check_rows(const conversations& here, const Tensor& q, const Tensor& k, const Tensor& v) {
  const auto is_4d = [](const Tensor& x) { return x.dim() == 4; };
  tessera::require(is_4d(q) && is_4d(k) && is_4d(v), "shape of q, k or v", q.sizes(), "[sequences, heads, tokens, dim]",
                   "pass what transformers' attention functions take");
  tessera::require(q.scalar_type() == k.scalar_type() && k.scalar_type() == v.scalar_type(), "dtype of k and v",
                   std::string(c10::toString(k.scalar_type())) + " and " + c10::toString(v.scalar_type()),
                   std::string(c10::toString(q.scalar_type())) + ", that of q", "pass q, k and v of one dtype");
  for (const Tensor& x : {q, k, v}) {
    check_device(here, x);
    tessera::require(x.size(0) == std::int64_t(here.ids.size()), "sequences of the batch", x.size(0),
                     "those that the cache was made for, which are " + std::to_string(here.ids.size()),
                     "make a cache for this batch");
  }
  const auto shape_of = [](const Tensor& x) {
    const tensor_rows rows = rows_of(x);
    return tessera::rows_view<const float>{static_cast<const float*>(rows.data),
                                           rows.sequence_stride,
                                           rows.token_stride,
                                           rows.head_stride,
                                           rows.sequences,
                                           rows.tokens,
                                           rows.heads,
                                           rows.dim};
  };
  const tessera::any_cache_facts& facts = here.cache->facts();
  here.shape.check_rows(shape_of(q), shape_of(k), shape_of(v), facts.k_dim, facts.v_dim);
}

/// [sequences, tokens, q_heads, v_dim], as transformers wants it. The CPU's caches write fp32, CUDA's the model's type.
inline Tensor output_for(const Tensor& q, std::int64_t v_dim, bool zeros) {
  const auto options = q.is_cuda() ? q.options() : q.options().dtype(at::kFloat);
  const std::vector<std::int64_t> shape{q.size(0), q.size(2), q.size(1), v_dim};
  return zeros ? at::zeros(shape, options) : at::empty(shape, options);
}

/// Flags [sequences, tokens] of a call, on the host: after which tokens a segment of the text ends. None: not said.
inline Tensor flags_of(const c10::optional<Tensor>& boundaries, std::int64_t sequences, std::int64_t tokens) {
  if (!boundaries) return {};
  const at::IntArrayRef shape = boundaries->sizes();
  tessera::require(shape.size() == 2 && shape[0] == sequences && shape[1] == tokens &&
                       boundaries->scalar_type() == at::kByte && boundaries->is_cpu(),
                   "boundaries", "of another shape, dtype or device", "[sequences, tokens] of torch.uint8 on the CPU",
                   "pass 1 for a token after which a segment of the text ends, else 0");
  return boundaries->contiguous();
}
inline text_flags row_of(const Tensor& flags, std::size_t sequence, index_t first, index_t last) {
  if (!flags.defined()) return {};
  const std::uint8_t* row = flags.data_ptr<std::uint8_t>() + offset_t(sequence) * flags.size(1);
  return {row + first, row + last};
}

}  // namespace tessera_torch
