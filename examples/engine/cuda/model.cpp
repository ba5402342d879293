#include "model.hpp"

#include <algorithm>
#include <atomic>
#include <string>
#include <tessera/core/error.hpp>
#include <utility>

#include "device.hpp"
#include "engine/gate/model_gate.hpp"
#include "engine/ops.hpp"
#include "line_weights.hpp"
#include "ops.hpp"
#include "unusable.hpp"
#include "weights.hpp"
#include "workspace.hpp"

namespace engine::cuda {
namespace {

constexpr int most_rows = std::max<int>(longest_step, llama::most_together);  // of a step

llama_config checked(llama_config config) {
  require_device();
  return config;
}

}  // namespace

class llama::state {
 public:
  state(llama_config shape, weight_source& weights)
      : config(checked(std::move(shape))),
        products_(stream),
        frequencies_(uploaded(rope_frequencies(config))),
        still_(uploaded(std::vector<float>(config.rotates.empty() ? 0 : std::size_t(config.head_dim / 2), 0.0f))),
        step_(config, most_rows),
        logits_(std::size_t(most_rows) * std::size_t(config.vocab_size)),
        best_(most_rows),
        unusable_(stream),
        tokens_in_(most_rows),
        best_out_(most_rows) {
    const std::int32_t hidden = config.hidden_size, inner = config.intermediate_size;
    embedding_ = weights.stacked({{"model.embed_tokens.weight", config.vocab_size}}, hidden);
    if (!config.tie_word_embeddings) head_ = weights.stacked({{"lm_head.weight", config.vocab_size}}, hidden);
    final_norm_ = weights.norm("model.norm.weight", hidden);
    for (std::int32_t index = 0; index < config.num_hidden_layers; ++index) {
      const std::string prefix = "model.layers." + std::to_string(index) + ".";
      const std::string attention = prefix + "self_attn.", mlp = prefix + "mlp.";
      layer loaded;
      loaded.attention_norm = weights.norm(prefix + "input_layernorm.weight", hidden);
      loaded.mlp_norm = weights.norm(prefix + "post_attention_layernorm.weight", hidden);
      loaded.qkv = weights.stacked({{attention + "q_proj.weight", config.q_size()},
                                    {attention + "k_proj.weight", config.kv_size()},
                                    {attention + "v_proj.weight", config.kv_size()}},
                                   hidden);
      loaded.projections = projection_weights(weights, config, attention);
      loaded.attention_out = weights.stacked({{attention + "o_proj.weight", hidden}}, config.q_size());
      loaded.gate_up = weights.stacked({{mlp + "gate_proj.weight", inner}, {mlp + "up_proj.weight", inner}}, hidden);
      loaded.down = weights.stacked({{mlp + "down_proj.weight", hidden}}, inner);
      layers_.push_back(std::move(loaded));
    }
    check(cudaDeviceSynchronize(), "loading the weights");
  }
  void add_gate(const std::vector<gate_layer>& layers) { gate_ = model_gate(config, layers, most_rows); }

  std::int64_t weight_bytes() const {
    std::size_t total = embedding_.values.bytes() + head_.values.bytes() + final_norm_.bytes() + gate_.bytes();
    for (const layer& one : layers_) {
      total += one.attention_norm.bytes() + one.mlp_norm.bytes() + one.qkv.values.bytes() + one.projections.bytes() +
               one.attention_out.values.bytes() + one.gate_up.values.bytes() + one.down.values.bytes();
    }
    return std::int64_t(total);
  }

  std::vector<float> prefill(std::span<const token_t> prompt, kv_cache& cache, const prefill_options& options) {
    require_prompt(config, prompt, options, cache.next_position());
    require_gate(cache.takes_scores(), gate_.is_there());
    const auto longest = std::int32_t(std::min<std::size_t>(prompt.size(), std::size_t(options.chunk)));
    make_room(longest);
    if (cache.takes_scores()) gate_.make_room(config, longest);
    cache.reserve(std::int64_t(prompt.size()), stream);
    std::size_t done = 0;
    std::int32_t count = 0;
    while (done < prompt.size()) {
      count = std::int32_t(std::min(prompt.size() - done, std::size_t(longest)));
      put_tokens(prompt.subspan(done, std::size_t(count)));
      const run_position position{cache.next_position(), nullptr};
      cache.begin_chunk(options.boundaries.empty() ? options.boundaries
                                                   : options.boundaries.subspan(done, std::size_t(count)));
      done += std::size_t(count);
      forward(chunk_, count, position, done == prompt.size() ? 1 : 0, cache.type(), [&](int index) {
        cache.prefill(index, chunk_.q.data(), chunk_.k.data(), chunk_.v.data(), count, chunk_.attended.data(), stream);
        if (cache.takes_scores())
          gate_.score_chunk(products_, config, index, chunk_.normed.data(), count, position.first, cache, stream);
      });
      if (options.progress) {
        stream.wait();
        options.progress(std::int64_t(done), std::int64_t(prompt.size()));
      }
    }
    project(chunk_, count, 1);  // before the working memory is used again
    if (cache.rereads()) reread(prompt, cache, options);
    cache.end_prefill(stream);
    return logits(1);
  }

  void reread(std::span<const token_t> prompt, kv_cache& cache, const prefill_options& options) {
    const std::int64_t end = cache.next_position(), total = std::int64_t(prompt.size());
    for (const repeated_part& part : repeat_in_parts(config, prompt, options.repeat, end)) {
      const auto count = std::int32_t(part.text.size());
      make_room(count);
      put_tokens(part.text);
      forward(chunk_, count, {end, nullptr}, 0, cache.type(), [&](int index) {
        cache.reread(index, part.first, part.count, chunk_.q.data(), chunk_.k.data(), chunk_.v.data(), count,
                     chunk_.attended.data(), stream);
      });
      require_numbers();  // waits: the text goes, and the next part may need more room
      if (options.progress) options.progress(part.first + part.count - (end - total), total);
    }
  }

  std::vector<float> decode(std::span<const token_t> tokens, kv_cache& cache) {
    tessera::require(cache.conversations() == 1, "conversations", cache.conversations(), "1",
                     "call next, which takes a token of each");
    run_step(tokens, cache);
    return logits(std::int32_t(tokens.size()));
  }

  std::vector<token_t> pass(const packed_rows& rows, const packed_attention& attend) {
    const auto total = std::int32_t(rows.tokens.size()), outputs = std::int32_t(rows.wanted.size());
    require_packed(config, rows);
    make_room(total);
    packed_.make_room(config, rows.tokens.size(), rows.wanted.size());
    put_tokens(rows.tokens);
    upload(rows.positions, packed_.positions.data());
    const std::int32_t ending = outputs > 0 ? total - rows.wanted.front() : 0;  // rows that the last layer's end is for
    forward(chunk_, total, {0, packed_.positions.data()}, ending, rows.type, [&](int index) {
      attend(index, chunk_.q.data(), chunk_.k.data(), chunk_.v.data(), chunk_.attended.data());
    });
    std::vector<token_t> best(rows.wanted.size());
    if (outputs > 0) {
      packed_.gather(chunk_.hidden.data(), rows.wanted, config.hidden_size, stream);
      project(packed_.hidden.data(), outputs, chunk_.normed.data(), packed_.logits.data());
      best_tokens(packed_.logits.data(), outputs, config.vocab_size, packed_.best.data(), unusable_.data(), stream);
      packed_.fetch_best(best, stream);
    }
    require_numbers();
    return best;
  }

  std::vector<token_t> next(std::span<const token_t> tokens, kv_cache& cache) {
    tessera::require(int(tokens.size()) == cache.conversations() && tokens.size() <= most_together, "tokens",
                     tokens.size(), "one for each of at most " + std::to_string(most_together) + " conversations",
                     "make a cache of as many conversations");
    run_step(tokens, cache);
    return {best_out_.data(), best_out_.data() + tokens.size()};
  }

  llama_config config;
  cuda::stream stream;

 private:
  struct layer {
    device_array<float> attention_norm, mlp_norm;  // [hidden]
    weight_matrix qkv;                             // q, k and v stacked: [q_size + 2 * kv_size, hidden]
    projection_weights projections;                // biases and norms of q, k and v
    weight_matrix attention_out;                   // [hidden, q_size]
    weight_matrix gate_up;                         // gate and up stacked: [2 * intermediate, hidden]
    weight_matrix down;                            // [hidden, intermediate]
  };

  // Working memory for so many tokens of a prompt.
  void make_room(std::int32_t tokens) {
    if (chunk_.rows >= tokens) return;
    chunk_ = {};  // frees the old one first
    chunk_ = workspace(config, tokens);
  }
  void put_tokens(std::span<const token_t> tokens) { upload(tokens, chunk_.tokens.data()); }
  void upload(std::span<const std::int32_t> values, std::int32_t* to) {
    check(cudaMemcpyAsync(to, values.data(), values.size_bytes(), cudaMemcpyHostToDevice, stream), "cudaMemcpyAsync");
  }

  // Passes tokens through every layer. Afterwards work.hidden holds the final states of the last `wanted` tokens, at
  // their rows; the others stop at the last layer's attention.
  template <class Attend>
  void forward(workspace& work, std::int32_t count, run_position position, std::int32_t wanted, element type,
               const Attend& attend) {
    const std::int32_t width = config.hidden_size;
    gather_rows(work.tokens.data(), count, embedding_, work.hidden.data(), stream);
    for (std::int32_t index = 0; index < config.num_hidden_layers; ++index) {
      const layer& weights = layers_[std::size_t(index)];
      rms_norm(work.hidden.data(), count, width, weights.attention_norm.data(), config.rms_norm_eps, work.normed.data(),
               stream);
      products_.linear(work.normed.data(), count, weights.qkv, work.qkv.data());
      const projection_weights& more = weights.projections;
      if (more.any()) {
        finish_projections(config, more.bias.data(), more.q_norm.data(), more.k_norm.data(), work.qkv.data(), count,
                           stream);
      }
      split_and_rotate(config, config.turns(index) ? frequencies_.data() : still_.data(), work.qkv.data(), count,
                       position, type, work.q.data(), work.k.data(), work.v.data(), index, unusable_.data(), stream);
      attend(index);
      const std::int32_t rows = index + 1 < config.num_hidden_layers ? count : wanted;
      if (rows > 0) finish_layer(work, weights, count - rows, rows);
    }
  }

  // The part of a layer behind its attention, where no token sees another, of `rows` rows from `first` on.
  void finish_layer(workspace& work, const layer& weights, std::int32_t first, std::int32_t rows) {
    float* hidden = work.hidden.data() + std::int64_t(first) * config.hidden_size;
    const float* attended = work.attended.data() + std::int64_t(first) * config.q_size();
    products_.linear(attended, rows, weights.attention_out, hidden, work.rounded.data());
    rms_norm(hidden, rows, config.hidden_size, weights.mlp_norm.data(), config.rms_norm_eps, work.normed.data(),
             stream);
    products_.linear(work.normed.data(), rows, weights.gate_up, work.gate_up.data());
    swiglu(work.gate_up.data(), rows, config.intermediate_size, work.activated.data(), stream);
    products_.linear(work.activated.data(), rows, weights.down, hidden, products::write::add);
  }

  // logits_ [wanted, vocab] of the last `wanted` of `count` rows.
  void project(workspace& work, std::int32_t count, std::int32_t wanted) {
    project(work.hidden.data() + std::int64_t(count - wanted) * config.hidden_size, wanted, work.normed.data(),
            logits_.data());
  }
  void project(const float* hidden, std::int32_t rows, bf16* normed, float* output) {
    rms_norm(hidden, rows, config.hidden_size, final_norm_.data(), config.rms_norm_eps, normed, stream);
    products_.linear(normed, rows, config.tie_word_embeddings ? embedding_ : head_, output);
  }

  std::vector<float> logits(std::int32_t rows) {
    std::vector<float> values(std::size_t(rows) * std::size_t(config.vocab_size));
    check(cudaMemcpyAsync(values.data(), logits_.data(), values.size() * sizeof(float), cudaMemcpyDeviceToHost, stream),
          "cudaMemcpyAsync");
    require_numbers();
    return values;
  }

  // Waits for what was launched. Errors: a number of it that nothing can be computed with, by name.
  void require_numbers() {
    unusable_.fetch();
    stream.wait();
    unusable_.require_none();
  }

  // A whole step, from the tokens in pinned memory to the best ones in pinned memory.
  void launch_step(std::int32_t count, kv_cache& cache) {
    const std::int32_t each = count / cache.conversations();
    check(cudaMemcpyAsync(step_.tokens.data(), tokens_in_.data(), std::size_t(count) * sizeof(token_t),
                          cudaMemcpyHostToDevice, stream),
          "cudaMemcpyAsync");
    cache.begin_step_on_device(each, stream);
    forward(step_, count, {0, cache.step_position(), each}, count, cache.type(), [&](int index) {
      cache.decode(index, step_.q.data(), step_.k.data(), step_.v.data(), each, step_.attended.data(), stream);
      if (cache.takes_scores()) gate_.score_step(products_, config, index, step_.normed.data(), count, each, stream);
    });
    project(step_, count, count);
    best_tokens(logits_.data(), count, config.vocab_size, best_.data(), unusable_.data(), stream);
    unusable_.fetch();
    check(cudaMemcpyAsync(best_out_.data(), best_.data(), std::size_t(count) * sizeof(token_t), cudaMemcpyDeviceToHost,
                          stream),
          "cudaMemcpyAsync");
  }

  cudaGraphExec_t capture_step(std::int32_t count, kv_cache& cache) {
    cudaGraph_t graph = nullptr;
    check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "cudaStreamBeginCapture");
    try {
      launch_step(count, cache);
    } catch (...) {
      cudaStreamEndCapture(stream, &graph);
      if (graph) cudaGraphDestroy(graph);
      throw;
    }
    check(cudaStreamEndCapture(stream, &graph), "cudaStreamEndCapture");
    cudaGraphExec_t made = nullptr;
    const cudaError_t status = cudaGraphInstantiate(&made, graph, 0);
    cudaGraphDestroy(graph);
    check(status, "cudaGraphInstantiate");
    return made;
  }

  void run_step(std::span<const token_t> tokens, kv_cache& cache) {
    const auto count = std::int32_t(tokens.size()), each = count / cache.conversations();
    require_gate(cache.takes_scores(), gate_.is_there());
    std::vector<std::int64_t> first;
    for (int i = 0; i < cache.conversations(); ++i) {
      cache.select(i);
      first.push_back(cache.next_position());
      require_step(config, tokens.subspan(std::size_t(i * each), std::size_t(each)), first.back());
    }
    std::copy(tokens.begin(), tokens.end(), tokens_in_.data());
    cache.begin_step(each, stream);
    captured_steps::step& step = cache.steps().of(number_, count, cache.step_actions());
    // The first step is launched directly: it loads the kernels and lets cuBLAS choose, which cannot be captured.
    if (step.runs++ == 0) {
      launch_step(count, cache);
    } else {
      if (!step.graph) step.graph = capture_step(count, cache);
      check(cudaGraphLaunch(step.graph, stream), "cudaGraphLaunch");
    }
    stream.wait();
    cache.end_step();
    if (cache.takes_scores()) gate_.hand_over(config, first, each, cache, stream);
    unusable_.require_none();
  }

  static std::uint64_t next_number() {
    static std::atomic<std::uint64_t> last{0};
    return ++last;
  }

  const std::uint64_t number_ = next_number();  // tells this model's captured steps from another's
  products products_;
  device_array<float> frequencies_, still_;  // of RoPE [head_dim / 2]; of layers without it, 0
  workspace step_;                           // its addresses are in the captured graphs
  workspace chunk_;                          // grows with the prompts
  packed_workspace packed_;                  // of `pass`
  device_array<float> logits_;
  device_array<token_t> best_;
  unusable_word unusable_;
  pinned_array<token_t> tokens_in_, best_out_;
  weight_matrix embedding_;  // [vocab, hidden]
  weight_matrix head_;       // [vocab, hidden]; empty when tied to the embedding
  device_array<float> final_norm_;
  std::vector<layer> layers_;
  model_gate gate_;
};

llama::llama(std::unique_ptr<state> made) : state_(std::move(made)) {}
llama::llama(llama&&) noexcept = default;
llama& llama::operator=(llama&&) noexcept = default;
llama::~llama() = default;

llama llama::load(const std::filesystem::path& directory) {
  llama_config config = config_of_model(directory);
  require_agreement(directory, config, checkpoint::open(directory));
  const auto gate = load_gate(directory, config);
  checkpoint_weights weights(directory);
  auto loaded = std::make_unique<state>(std::move(config), weights);
  if (gate) loaded->add_gate(*gate);
  return llama(std::move(loaded));
}

llama llama::random(const llama_config& config, std::uint64_t seed) {
  random_weights weights(seed);
  return llama(std::make_unique<state>(config, weights));
}

llama llama::with_lines(const llama_config& config, std::uint64_t seed) {
  line_weights weights(config, seed);
  return llama(std::make_unique<state>(config, weights));
}

const llama_config& llama::config() const { return state_->config; }
stream_t llama::stream() const { return state_->stream; }
std::int64_t llama::weight_bytes() const { return state_->weight_bytes(); }

std::vector<float> llama::prefill(std::span<const token_t> prompt, kv_cache& cache, const prefill_options& options) {
  return state_->prefill(prompt, cache, options);
}

void llama::reread(std::span<const token_t> prompt, kv_cache& cache, const prefill_options& options) {
  state_->reread(prompt, cache, options);
}

std::vector<float> llama::decode(std::span<const token_t> tokens, kv_cache& cache) {
  return state_->decode(tokens, cache);
}

std::vector<token_t> llama::pass(const packed_rows& rows, const packed_attention& attend) {
  return state_->pass(rows, attend);
}

token_t llama::next(token_t token, kv_cache& cache) { return state_->next({&token, 1}, cache)[0]; }
std::vector<token_t> llama::next(std::span<const token_t> tokens, kv_cache& cache) {
  return state_->next(tokens, cache);
}

std::vector<token_t> llama::generate(std::span<const token_t> prompt, kv_cache& cache,
                                     const generate_options& options) {
  tessera::require(options.max_new >= 0, "max_new", options.max_new, "at least 0", "pass a number of tokens");
  require_room(config(), prompt, std::max(options.max_new - 1, 0), cache.next_position());
  return extend(prefill(prompt, cache, options.prefill), cache, options);
}

std::vector<token_t> llama::extend(std::span<const float> logits, kv_cache& cache, const generate_options& options) {
  return answer_greedily(config(), logits, cache.next_position(), options, [&](token_t token) {
    if (!options.ends_segment.empty()) cache.begin_chunk(options.ends_segment.subspan(std::size_t(token), 1));
    return next(token, cache);
  });
}

}  // namespace engine::cuda
