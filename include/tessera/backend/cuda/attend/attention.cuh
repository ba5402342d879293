// The attention of a cache on the device: prompt chunks and decode steps over the views of its store.
#pragma once

#include <algorithm>
#include <memory>
#include <optional>
#include <type_traits>

#include "../../../core/model_shape.hpp"
#include "../cache_options.hpp"
#include "../device/copy.cuh"
#include "../device/memory.cuh"
#include "../store/packed/packed_store.cuh"
#include "decode/decode_attention.cuh"
#include "packed/packed_attention.cuh"
#include "packed/unpacked_attention.cuh"
#include "prefill/prefill_attention.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {

/// `AllView` is the view of all stored tokens, `ReadView` that of the tokens that steps may read. They are often the
/// same type.
template <class AllView, class ReadView, class Out>
class attention {
  template <class View>
  struct step_operation {
    decode_attention<View, Out> run;
    device_buffer<unsigned char> scratch;  // zeroed: its counters start at 0
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
  /// A step over all stored tokens, for recipes whose steps otherwise read a view of candidates.
  void step(const decode_problem<AllView, Out>& problem, cudaStream_t stream) const requires(!alike) {
    all_.run.run(problem, all_.scratch.data(), stream);
  }

 private:
  prefill_attention<AllView, Out> prompt_;
  device_buffer<unsigned char> prompt_scratch_;
  step_operation<ReadView> read_;
  std::conditional_t<alike, none, step_operation<AllView>> all_;
};

/// Attention over packed rows. A first prompt is attended like plain rows, and so are layers that never pack. A later
/// turn's prompt attends to segments and whole rows with the decode step's kernel, a few tokens at a time; a longer one
/// to pieces of segments that are turned back into whole rows. Steps that read everything use the decode step's kernel.
template <class Whole, packed_rows_in Memory, class Out>
class attention<packed_view<Whole, Memory>, packed_view<Whole, Memory>, Out> {
  using view_type = packed_view<Whole, Memory>;
  using T = typename view_type::element_type;
  static constexpr index_t rows_at_once = 64;  // query rows of a prompt per kv_head and launch; bounds the scratch
  /// Longer chunks attend to rows that are turned back.
  static constexpr index_t launches_before_unpacking = 2;

  struct operation {
    index_t tokens;
    rotate_queries<view_type> rotate;
    attend_packed<view_type, Out> attend;
    device_buffer<unsigned char> rotating, attending;

    template <class Layout>
    operation(const model_shape& shape, index_t sequences, index_t tokens_at_once, index_t most, const Layout& layout,
              const device_info& device)
        : tokens(tokens_at_once),
          rotate(sequences, shape.kv_heads, shape.q_heads, tokens, most),
          attend(sequences, shape.kv_heads, shape.q_heads, tokens, most, formats_of(layout, 0).widest_k,
                 formats_of(layout, 0).widest_v, device),
          rotating(rotate.workspace_bytes()),
          attending(attend.workspace_bytes()) {}
    void run(const packed_problem<view_type, Out>& problem, cudaStream_t stream) const {
      const rotated_rows rotated = rotate.run(problem.view, problem.q, rotating.data(),
                                              attend.part_segments(attending.data()), attend.parts(), stream);
      attend.run(problem, rotated, attending.data(), stream);
    }
  };

 public:
  template <class Recipe>
  attention(const model_shape& shape, index_t reading_heads, const cache_options& options, const device_info& device,
            const Recipe& recipe)
      : plain_(shape, reading_heads, options, device, recipe),
        prompt_(shape, 1, (std::max<index_t>)(1, rows_at_once / (shape.q_heads / shape.kv_heads)),
                segments_of(recipe, options), recipe.layout, device),
        unpacked_(shape, options.tokens, device) {
    if constexpr (!Recipe::retrieve_type::retrieves) {
      step_.emplace(shape, options.sequences, options.step_tokens, segments_of(recipe, options), recipe.layout, device);
    }
  }

  void prompt(const prefill_problem<view_type, Out>& p, cudaStream_t stream) const {
    if (p.view.packed == 0) return plain_.prompt({p.view.whole, p.q, p.first_position, p.rule, p.out, p.lse}, stream);
    require(!p.lse.data || p.lse.tokens == p.q.tokens, "lse [sequences, tokens, q_heads]", shape_text(p.lse),
            shape_text(p.q), "give lse the shape of q, or no data");
    if (p.q.tokens > launches_before_unpacking * prompt_.tokens) return unpacked_.run(p, stream);
    for (index_t done = 0; done < p.q.tokens; done += prompt_.tokens) {
      const auto some = [&](auto rows) {
        if (rows.data) rows.data += done * rows.token_stride;
        rows.tokens = (std::min)(prompt_.tokens, rows.tokens - done);
        return rows;
      };
      const index_t* first = add_number(position_.data(), p.first_position, done, 1, stream);
      prompt_.run({p.view, some(p.q), first, p.rule, some(p.out), some(p.lse), {}, 1}, stream);
    }
  }
  void step(const decode_problem<view_type, Out>& p, cudaStream_t stream) const {
    if (p.view.max_segments == 0) {
      plain_.step(decode_problem<Whole, Out>{p.view.whole, p.q, p.first_position, p.rule, p.out, p.lse, {}}, stream);
    } else if (step_) {
      step_->run({p.view, p.q, p.first_position, p.rule, p.out, p.lse, {}, 1}, stream);
    }
  }

 private:
  template <class Recipe>
  static index_t segments_of(const Recipe& recipe, const cache_options& options) {
    return max_device_segments(recipe.layout, options.tokens, recipe.retrieve.mean_block(), Recipe::retain_type::drops);
  }

  attention<Whole, Whole, Out> plain_;
  operation prompt_;
  unpacked_attention<Whole, Out> unpacked_;
  std::optional<operation> step_;  // only for recipes whose steps read everything; others attend after the selection
  device_buffer<index_t> position_{1};
};

}  // namespace cuda
TESSERA_NAMESPACE_END
