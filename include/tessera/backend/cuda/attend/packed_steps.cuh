// The attention of a cache of packed rows on the device.
#pragma once

#include <algorithm>
#include <optional>

#include "../attend/packed/packed_attention.cuh"
#include "../store/packed/packed_store.cuh"
#include "attention.cuh"
#include "../device/numbers.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {

/// A first prompt, and layers that never pack, are attended as plain rows are. A later turn's prompt attends to
/// segments and whole rows by the step's kernel, a few tokens at a time; so do steps that read everything.
template <class Whole, class Out>
class attention<packed_view<Whole>, packed_view<Whole>, Out> {
  using view_type = packed_view<Whole>;
  using T = typename view_type::element_type;
  static constexpr index_t rows_at_once = 64;  // of queries of a prompt and kv_head: bounds the scratch

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
                most_segments(recipe.layout, options.tokens), recipe.layout, device) {
    if constexpr (!Recipe::retrieve_type::retrieves) {
      step_.emplace(shape, options.sequences, options.step_tokens, most_segments(recipe.layout, options.tokens),
                    recipe.layout, device);
    }
  }

  void prompt(const prefill_problem<view_type, Out>& p, cudaStream_t stream) const {
    if (p.view.packed == 0) return plain_.prompt({p.view.whole, p.q, p.first_position, p.rule, p.out, p.lse}, stream);
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
    if (p.view.most_segments == 0) {
      plain_.step(decode_problem<Whole, Out>{p.view.whole, p.q, p.first_position, p.rule, p.out, p.lse, {}}, stream);
    } else if (step_) {
      step_->run({p.view, p.q, p.first_position, p.rule, p.out, p.lse, {}, 1}, stream);
    }
  }

 private:
  attention<Whole, Whole, Out> plain_;
  operation prompt_;
  std::optional<operation> step_;  // of recipes whose steps read everything; others attend where they choose
  device_buffer<index_t> position_{1};
};

}  // namespace cuda
TESSERA_NAMESPACE_END
