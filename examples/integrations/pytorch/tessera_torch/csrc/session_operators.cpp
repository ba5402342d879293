// The operators that make bytes of a batch's sequences, and sequences of bytes.
#include <ATen/DeviceGuard.h>
#include <torch/library.h>
#include <torch/types.h>

#include <cstring>
#include <tessera/core/error.hpp>

#include "registry.hpp"

namespace tessera_torch {
namespace {

/// A tensor of torch.uint8 for each sequence, on the host.
std::vector<Tensor> save(const Tensor& handle) {
  return guarded([&](registry& all) {
    conversations& here = all.find(handle);
    std::vector<Tensor> saved;
    taking_memory(all, here, [&] {
      for (const index_t id : here.ids) {
        std::vector<unsigned char> bytes;
        here.cache->save(
            id,
            [&](const void* data, std::size_t count) {
              const auto* const first = static_cast<const unsigned char*>(data);
              bytes.insert(bytes.end(), first, first + count);
            },
            here.stream());
        saved.push_back(at::empty({std::int64_t(bytes.size())}, at::kByte));
        std::memcpy(saved.back().data_ptr(), bytes.data(), bytes.size());
      }
    });
    return saved;
  });
}

/// The id of the sequence that lies in these bytes.
index_t loaded_from(const Tensor& saved, conversations& here) {
  const Tensor bytes = saved.contiguous();
  std::size_t read = 0;
  return here.cache->load(
      [&](void* data, std::size_t wanted) {
        const std::size_t count = std::min(wanted, std::size_t(bytes.numel()) - read);
        std::memcpy(data, static_cast<const unsigned char*>(bytes.data_ptr()) + read, count);
        read += count;
        return count;
      },
      here.stream());
}

/// What `save` gave, in place of the sequences of a cache that was made alike.
/// Errors: bytes that are cut, damaged or another cache's. The sequences are then as before; but a cache on a GPU, which has no
/// sequences to spare, has lost one and is of no use any more.
void load(const Tensor& handle, const std::vector<Tensor>& saved) {
  guarded([&](registry& all) {
    conversations& here = all.find(handle);
    tessera::require(saved.size() == here.ids.size(), "saved sequences", saved.size(),
                     "those of the batch, which are " + std::to_string(here.ids.size()), "load the whole batch");
    for (std::size_t b = 0; b < saved.size(); ++b) {
      tessera::require(saved[b].scalar_type() == at::kByte && saved[b].is_cpu() && saved[b].dim() == 1,
                       "saved sequence " + std::to_string(b), "another tensor", "bytes on the CPU",
                       "pass what save gave");
    }
    taking_memory(all, here, [&] {
      const bool can_spare = !(here.cache->available() == tessera::capacity{});
      std::vector<index_t> loaded;
      try {
        for (std::size_t b = 0; b < saved.size(); ++b) {
          if (!can_spare) here.cache->close(here.ids[b], here.stream());
          loaded.push_back(loaded_from(saved[b], here));
        }
      } catch (...) {
        if (can_spare)
          for (const index_t id : loaded) here.cache->close(id, here.stream());
        throw;
      }
      if (can_spare)
        for (const index_t id : here.ids) here.cache->close(id, here.stream());
      here.ids = loaded;
    });
  });
}

}  // namespace
}  // namespace tessera_torch

TORCH_LIBRARY_FRAGMENT(tessera, m) {
  m.def("save(Tensor cache) -> Tensor[]");
  m.def("load(Tensor(a!) cache, Tensor[] sequences) -> ()");
}
TORCH_LIBRARY_IMPL(tessera, CPU, m) {
  m.impl("save", &tessera_torch::save);
  m.impl("load", &tessera_torch::load);
}
