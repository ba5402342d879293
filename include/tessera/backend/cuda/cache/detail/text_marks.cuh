// The segments of a cache's new tokens, on the device.
#pragma once

#include <algorithm>

#include "../../../../core/host/host_vector.hpp"
#include "../../device/copy.cuh"
#include "../../store/kv_store.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {

/// Does nothing, for recipes without segments.
template <bool Needed>
class text_marks {
 public:
  text_marks(index_t, index_t, index_t, index_t) {}
  new_segments of_chunk(const segment_marks&, index_t, cudaStream_t) const { return {}; }
  void set(const host_vector<segment_cursor>&, const host_vector<std::uint8_t>&, cudaStream_t) const {}
  new_segments of_step(index_t) const { return {}; }
};

/// Flags of a prompt chunk and the state of texts, copied from the host, which counts segments.
template <>
class text_marks<true> {
 public:
  text_marks(index_t layers, index_t sequences, index_t tokens, index_t step_tokens)
      : layers_(layers),
        sequences_(sequences),
        flags_(std::size_t(tokens)),
        step_flags_(std::size_t(sequences) * std::size_t(step_tokens)),
        texts_(std::size_t(layers) * std::size_t(sequences)) {}

  /// The flags may be freed when this returns.
  new_segments of_chunk(const segment_marks& marks, index_t tokens, cudaStream_t stream) const {
    check(cudaMemcpyAsync(flags_.data(), marks.boundaries, std::size_t(tokens), cudaMemcpyHostToDevice, stream),
          "cudaMemcpyAsync");
    set_number(text_.data(), marks.start, stream);
    return {flags_.data(), text_.data()};
  }

  /// Called on the host before a step: copies the state of its sequences' texts, which is the same in every layer, and
  /// the step's flags [sequences, tokens], where the recipe has flags in steps.
  void set(const host_vector<segment_cursor>& texts, const host_vector<std::uint8_t>& boundaries,
           cudaStream_t stream) const {
    if (!boundaries.empty())
      check(cudaMemcpyAsync(step_flags_.data(), boundaries.data(), boundaries.size(), cudaMemcpyHostToDevice, stream),
            "cudaMemcpyAsync");
    constexpr std::size_t most = detail::texts_at_a_time;
    for (std::size_t first = 0; first < texts.size(); first += most) {
      detail::some_texts some{};
      const std::size_t count = (std::min)(texts.size() - first, most);
      std::copy_n(texts.begin() + offset_t(first), count, some.texts);
      detail::set_texts_entry<int(most)>
          <<<unsigned(layers_), unsigned(most), 0, stream>>>(some, index_t(count), sequences_, texts_.data() + first);
      check(cudaGetLastError(), "launch of set_texts");
    }
  }
  /// The segments of a layer of that step. Without flags, only its length ends a segment. It can be recorded.
  new_segments of_step(index_t layer) const {
    return {step_flags_.data(), texts_.data() + offset_t(layer) * sequences_};
  }

 private:
  index_t layers_, sequences_;
  device_buffer<std::uint8_t> flags_, step_flags_;
  device_buffer<segment_cursor> texts_, text_{1};
};

}  // namespace cuda
TESSERA_NAMESPACE_END
