// The operators by which layers of a model read the keys and values of another layer: nothing is stored, observed or chosen to stay.
#include <ATen/DeviceGuard.h>
#include <torch/library.h>
#include <torch/types.h>

#include "tensor_rows.hpp"

namespace tessera_torch {
namespace {

std::int64_t v_dim_of(const Tensor& handle) {
  return guarded([&](registry& all) { return std::int64_t(all.find(handle).cache->facts().v_dim); });
}

/// Of sequence b, rows [first[b], last[b]) of q are the newest tokens of the prompt that layer `layer` has had.
Tensor attend_prompt(const Tensor& handle, std::int64_t layer, const Tensor& q0, at::IntArrayRef first,
                     at::IntArrayRef last) {
  const Tensor q = in_place(q0);
  const at::OptionalDeviceGuard device(at::device_of(q));
  const Tensor out = output_for(q, v_dim_of(handle), true);
  guarded([&](registry& all) {
    conversations& here = all.find(handle);
    check_device(here, q);
    const tensor_rows q_rows = rows_of(q), out_rows = rows_of(out.transpose(1, 2));
    for (std::size_t b = 0; b < here.ids.size(); ++b) {
      const auto begin = index_t(first[b]), end = index_t(last[b]);
      if (begin == end) continue;
      here.cache->prefill_attention(index_t(layer), here.ids[b],
                                    part_of(q_rows, q.element_size(), index_t(b), begin, end),
                                    part_of(out_rows, out.element_size(), index_t(b), begin, end), {}, here.stream());
    }
  });
  return out.to(q.scalar_type());
}

/// In the step that layer `layer` has just decoded.
Tensor attend_step(const Tensor& handle, std::int64_t layer, const Tensor& q0) {
  const Tensor q = in_place(q0);
  const at::OptionalDeviceGuard device(at::device_of(q));
  const Tensor out = output_for(q, v_dim_of(handle), false);
  guarded([&](registry& all) {
    conversations& here = all.find(handle);
    check_device(here, q);
    here.cache->attend(index_t(layer), here.step, rows_of(q), rows_of(out.transpose(1, 2)), {}, here.stream());
  });
  return out.to(q.scalar_type());
}

}  // namespace
}  // namespace tessera_torch

TORCH_LIBRARY_FRAGMENT(tessera, m) {
  m.def("attend_prompt(Tensor(a!) cache, int layer, Tensor q, int[] first, int[] last) -> Tensor");
  m.def("attend_step(Tensor(a!) cache, int layer, Tensor q) -> Tensor");
}
TORCH_LIBRARY_IMPL(tessera, CPU, m) {
  m.impl("attend_prompt", &tessera_torch::attend_prompt);
  m.impl("attend_step", &tessera_torch::attend_step);
}
#ifdef TESSERA_TORCH_CUDA
TORCH_LIBRARY_IMPL(tessera, CUDA, m) {
  m.impl("attend_prompt", &tessera_torch::attend_prompt);
  m.impl("attend_step", &tessera_torch::attend_step);
}
#endif
