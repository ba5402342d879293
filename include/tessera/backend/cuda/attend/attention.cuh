// The attention of a cache on the device: prompt chunks and decode steps over the views that its store hands out.
#pragma once

#include <memory>
#include <type_traits>

#include "../../../core/model_shape.hpp"
#include "../attend/decode/decode_attention.cuh"
#include "../attend/prefill/prefill_attention.cuh"
#include "../device/memory.cuh"
#include "../cache_options.hpp"

TESSERA_NAMESPACE_BEGIN
namespace cuda {

/// `AllView` is what a store hands out, `ReadView` what steps may read of it: often the same.
template <class AllView, class ReadView, class Out>
class attention {
  template <class View>
  struct step_operation {
    decode_attention<View, Out> run;
    device_buffer<unsigned char> scratch;  // zeros, which is what its counters begin with
    step_operation(const model_shape& shape, index_t q_heads, const cache_options& options, const device_info& device)
        : run(options.sequences, shape.kv_heads, q_heads, options.step_tokens, device),
          scratch(run.workspace_bytes()) {}
  };
  static constexpr bool alike = std::is_same_v<AllView, ReadView>;
  struct none {
    none(const model_shape&, index_t, const cache_options&, const device_info&) {}
  };

 public:
  /// `reading_heads`: query heads that read at once.
  template <class Recipe>
  attention(const model_shape& shape, index_t reading_heads, const cache_options& options, const device_info& device,
            const Recipe&)
      : prompt_(1, shape.kv_heads, shape.q_heads, device),
        prompt_scratch_(prompt_.workspace_bytes()),
        read_(shape, reading_heads, options, device),
        all_(shape, shape.q_heads, options, device) {}

  /// Causal attention of a prompt chunk.
  void prompt(const prefill_problem<AllView, Out>& problem, cudaStream_t stream) const {
    prompt_.run(problem, prompt_scratch_.data(), stream);
  }
  void step(const decode_problem<ReadView, Out>& problem, cudaStream_t stream) const {
    read_.run.run(problem, read_.scratch.data(), stream);
  }
  /// Over everything, where steps otherwise read a view of candidates.
  void step(const decode_problem<AllView, Out>& problem, cudaStream_t stream) const requires(!alike) {
    all_.run.run(problem, all_.scratch.data(), stream);
  }

 private:
  prefill_attention<AllView, Out> prompt_;
  device_buffer<unsigned char> prompt_scratch_;
  step_operation<ReadView> read_;
  std::conditional_t<alike, none, step_operation<AllView>> all_;
};

}  // namespace cuda
TESSERA_NAMESPACE_END
