// What rung 10 has on its device: the engine's memory, and the tokens that its model makes.
#pragma once

#include <tessera/backend/cuda/device/memory.cuh>
#include <tessera/backend/cuda/store/append.cuh>

#include "own_pages.hpp"

namespace own_pages {

template <class T>
cuda::device_buffer<T> on_device(const std::vector<T>& host) {
  cuda::device_buffer<T> copy(host.size());
  cuda::check(cudaMemcpy(copy.data(), host.data(), copy.bytes(), cudaMemcpyHostToDevice), "cudaMemcpy");
  return copy;
}

/// Queries of a batch, and their memory.
struct device_queries {
  cuda::device_buffer<bf16> memory;
  rows_view<const bf16> rows;

  device_queries(const model& x, index_t layer, const counts& first, const counts& count)
      : memory(on_device(model::take<bf16>(x.layer[std::size_t(layer)].q, q_heads, first, count))),
        rows(nhd_rows<const bf16>(memory.data(), *std::max_element(count.begin(), count.end()), q_heads, dim,
                                  sequences)) {}
};

/// The engine's memory on the device, and which page is whose on the host.
struct device_engine {
  block_tables tables;
  cuda::device_buffer<bf16> k{layers * pages * page * heads * dim}, v{k.size()};
  cuda::device_buffer<index_t> lengths{layers * rows}, positions{lengths.size() * slots}, blocks, held;
  cuda::device_buffer<index_t> freed{sequences * max_blocks}, freed_count{sequences};

  /// Pages for so many tokens of each sequence.
  explicit device_engine(const counts& tokens) {
    for (index_t b = 0; b < sequences; ++b) tables.reserve(b, tokens[std::size_t(b)]);
    blocks = on_device(tables.blocks);
    held = on_device(tables.held);
  }
  memory<bf16> pools() const { return {k.data(), v.data(), lengths.data(), positions.data(), blocks.data()}; }

  /// New tokens of all sequences, a prompt's or a step's: every head takes them behind what it holds.
  void append(const model& x, const counts& added, counts& next, cudaStream_t stream) const {
    const auto new_tokens = on_device(added), first = on_device(next);
    const index_t most = *std::max_element(added.begin(), added.end());
    for (index_t layer = 0; layer < layers; ++layer) {
      const auto new_k = on_device(model::take<bf16>(x.layer[std::size_t(layer)].k, heads, next, added));
      const auto new_v = on_device(model::take<bf16>(x.layer[std::size_t(layer)].v, heads, next, added));
      const auto problem = appending(pools(), layer, new_k.data(), new_v.data(), most, new_tokens.data(), first.data());
      cuda::append<kv_view<bf16, dim, block_table>, bf16>(sequences, heads).run(problem, nullptr, stream);
      cuda::check(cudaStreamSynchronize(stream), "append");  // new_k and new_v go now
    }
    for (index_t b = 0; b < sequences; ++b) next[std::size_t(b)] += added[std::size_t(b)];
  }
  /// Waits for the freed pages and takes them back; an engine with work to do copies them without waiting and looks later.
  index_t take_back() {
    return tables.take_back(cuda::downloaded(freed.data(), freed.size()),
                            cuda::downloaded(freed_count.data(), sequences));
  }
  /// What `model::worst_error` says of a step's output.
  double worst_error(const model& x, const cuda::device_buffer<float>& out, index_t layer, const counts& newest) const {
    auto held_lengths = cuda::downloaded(lengths.data(), lengths.size());
    auto held_positions = cuda::downloaded(positions.data(), positions.size());
    const memory<bf16> on_host{nullptr, nullptr, held_lengths.data(), held_positions.data(), nullptr};
    return x.worst_error(cuda::downloaded(out.data(), out.size()), layer, on_host, newest);
  }
};

}  // namespace own_pages
