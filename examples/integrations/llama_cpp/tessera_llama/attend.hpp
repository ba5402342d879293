// llama.cpp with Tessera's attention: every method of the library in an unpatched libllama.
#pragma once

#include <algorithm>
#include <functional>
#include <map>
#include <memory>
#include <optional>

#include <tessera/backend/cpu/named_cache.hpp>
#include <tessera/runtime/saved/archive.hpp>

#include "observe.hpp"

#if defined(__GLIBC__)
#include <malloc.h>
#endif

namespace tessera_llama {

/// Which method, and with what.
struct attention_options {
  std::string method = "snapkv";
  std::optional<index_t> budget{};                          ///< tokens of a kv_head
  tessera::host_vector<tessera::named_setting> settings{};  ///< the method's parameters by name
  int threads = 1;                                          ///< of the attention
  bool trims = true;  ///< memory that prompts' ends free goes back to the system (glibc), and not to the next prompt
};

/// Owns the keys and values of a context's sequences. Each pass through the model hands queries, keys and values of every layer to a
/// tessera::any_cache, which writes what the attention gives; llama.cpp's own attention goes over the pass's tokens alone and is thrown
/// away. Its cells are emptied behind every pass, so a context needs cells for one batch: n_ctx = n_ubatch.
///
///   attention own(model, {.method = "snapkv", .budget = 256});
///   own.attach(params);
///   llama_context* context = llama_init_from_model(model, params);
///   own.decode(context, batch);   // in place of llama_decode: chunks of prompts and steps of any sequences
///   own.end_prompt(sequence);     // the method chooses what stays
///
/// A sequence's tokens are its prompt until `end_prompt`; then up to 8 tokens a pass are a step, until `begin_prompt` begins another
/// turn. Rows of a batch: each token has one sequence, a sequence's tokens stand together, with positions that go on where it ends.
class attention final : public graph_observer {
 public:
  /// Errors   an unknown method; a model that is not read: tessera::error. The first pass refuses what the method does not take.
  attention(const llama_model* model, attention_options options)
      : graph_observer(model), vocabulary_(llama_model_get_vocab(model)), options_(std::move(options)) {
    tessera::require_cache_method(options_.method);
    tessera::require(options_.threads >= 1, "threads", options_.threads, "at least 1", "pass how many threads attend");
    workers_ = std::make_shared<tessera::cpu::executor>(options_.threads);
  }

  /// As graph_observer's. A pass's rows go through cells, which must not round them more than fp16 does.
  void attach(llama_context_params& params) {
    graph_observer::attach(params);
    params.type_k = params.type_v = GGML_TYPE_F16;
  }

  /// One pass through the model, in place of llama_decode. Where it throws, no sequence has any of the pass's tokens.
  /// Errors   a batch of other rows than those above; what the cache refuses; what llama_decode says: tessera::error.
  void decode(llama_context* context, const llama_batch& batch) {
    const llama_memory_t memory = llama_get_memory(context);
    plan(context, batch);
    begin_pass();
    const int status = llama_decode(context, batch);
    for (const row_run& run : runs_) llama_memory_seq_rm(memory, run.sequence, -1, -1);
    try {
      end_pass(status);
    } catch (...) {
      take_back();
      throw;
    }
    for (const row_run& run : runs_) {
      sequence& held = sequences_.at(run.sequence);
      held.has_prompt = held.has_prompt || run.is_prompt;
    }
    opened_.clear();
  }

  /// Ends a sequence's prompt: the method chooses what stays.
  void end_prompt(llama_seq_id id) {
    sequence& held = find(id);
    tessera::require(held.in_prompt && held.has_prompt, "prompt of sequence " + std::to_string(id), "none",
                     "one that has begun", "decode the prompt first");
    const std::int64_t bytes = cache_->bytes(held.id);
    cache_->end_prefill(held.id);
    held.in_prompt = held.has_prompt = false;
    held.ended = cache_->next_position(held.id);
#if defined(__GLIBC__)
    // Rows of a layer are smaller than what malloc maps by itself: without this all of the prompt stayed resident, 90 MB
    // in place of 19 behind 3,000 tokens.
    if (options_.trims && bytes - cache_->bytes(held.id) > 1 << 20) malloc_trim(0);
#endif
  }
  /// The sequence's next tokens are another turn's prompt.
  void begin_prompt(llama_seq_id id) { find(id).in_prompt = true; }

  /// Takes back tokens from `position` on, as llama_memory_seq_rm(memory, id, position, -1) does; 0: the whole sequence. Where that cuts
  /// a prompt that had ended, what comes next is prompt again, until `end_prompt`.
  /// Errors   a position that the method has settled: tessera::error.
  void remove(llama_seq_id id, llama_pos position) {
    const auto found = sequences_.find(id);
    if (found == sequences_.end()) return;
    if (position > 0) {
      cache_->truncate(found->second.id, position);
      found->second.in_prompt = found->second.in_prompt || position < found->second.ended;
      return;
    }
    cache_->close(found->second.id);
    sequences_.erase(found);
  }
  /// A copy of a sequence under another id, between two turns or steps: llama_memory_seq_cp.
  void copy(llama_seq_id from, llama_seq_id to) {
    tessera::require(from != to, "copy of sequence " + std::to_string(from), to, "another id",
                     "pass an id that is free");
    sequence made = find(from);
    made.id = cache_->fork(made.id);
    remove(to, 0);
    sequences_.emplace(to, made);
  }

  /// Writes a sequence as bytes, between two turns or steps: llama_state_seq_get_data, which has nothing of these rows.
  /// Errors   a prompt that has not ended: tessera::error. The sink's exceptions pass through.
  void save(llama_seq_id id, const std::function<void(const void*, std::size_t)>& sink) {
    sequence held = find(id);
    {
      tessera::saved_writer archive(sink);
      transfer(held, archive);
      archive.end();
    }
    cache_->save(held.id, sink);
  }
  /// Reads a sequence that `save` wrote, in this process or another one, in place of the one of this id. The source fills memory and
  /// returns the bytes that it had.
  /// Errors   bytes that are cut or damaged; another model, method or parameter: tessera::error, and nothing has changed.
  void load(llama_seq_id id, const std::function<std::size_t(void*, std::size_t)>& source) {
    sequence made;
    const bool is_first = !cache_;  // which makes the cache by what the bytes say of the model
    try {
      tessera::saved_reader archive(source);
      transfer(made, archive);
      archive.end();
      made.id = cache_->load(source);
    } catch (...) {
      if (is_first) cache_.reset();
      throw;
    }
    remove(id, 0);
    sequences_.emplace(id, made);
  }

  bool has(llama_seq_id id) const { return sequences_.count(id) > 0; }
  /// The position of a sequence's next token.
  llama_pos next_position(llama_seq_id id) const { return has(id) ? cache_->next_position(sequences_.at(id).id) : 0; }
  /// Bytes that a sequence takes; that its last step read; that its tokens would take whole.
  std::int64_t bytes(llama_seq_id id) const { return has(id) ? cache_->bytes(sequences_.at(id).id) : 0; }
  std::int64_t bytes_read(llama_seq_id id) const { return has(id) ? cache_->bytes_read(sequences_.at(id).id) : 0; }
  std::int64_t full_bytes(llama_seq_id id) const { return has(id) ? cache_->full_bytes(next_position(id)) : 0; }
  /// What one sequence of a pass gave and got in a layer.
  struct traced_rows {
    index_t layer = 0;
    llama_seq_id sequence = 0;
    bool is_prompt = true;
    tessera::rows_view<const float> q, k, v, out;  ///< [tokens, heads, dim]
  };
  /// From now on every layer of every pass is shown; an empty function ends it.
  void trace(std::function<void(const traced_rows&)> shown) { shown_ = std::move(shown); }
  /// The cache; null before the first pass. Its ids are not llama.cpp's: `id_of` has them.
  tessera::any_cache* cache() { return cache_.get(); }
  index_t id_of(llama_seq_id id) const { return sequences_.at(id).id; }

 private:
  struct sequence {
    index_t id = 0;  // of the cache
    bool in_prompt = true, has_prompt = false;
    llama_pos ended = 0;  // the position behind the last prompt that has ended
  };
  /// Rows of one sequence in a batch.
  struct row_run {
    llama_seq_id sequence = 0;
    index_t tokens = 0;
    llama_pos first = 0;
    bool is_prompt = true;
  };

  sequence& find(llama_seq_id id) {
    const auto found = sequences_.find(id);
    tessera::require(found != sequences_.end(), "sequence", id, "one that has tokens", "decode its prompt first");
    return found->second;
  }

  void plan(llama_context* context, const llama_batch& batch) {
    require_batch(context, batch);
    runs_.clear(), text_.clear(), opened_.clear(), seen_layers_ = 0;
    for (int i = 0; i < batch.n_tokens; ++i) {
      const llama_seq_id id = batch.seq_id[i][0];
      if (runs_.empty() || runs_.back().sequence != id) {
        for (const row_run& run : runs_)
          tessera::require(run.sequence != id, "rows of sequence " + std::to_string(id), "apart", "side by side",
                           "sort the batch");
        const auto found = sequences_.find(id);
        runs_.push_back({id, 0, batch.pos[i], found == sequences_.end() || found->second.in_prompt});
        tessera::require(batch.pos[i] == next_position(id), "position of a token of sequence " + std::to_string(id),
                         batch.pos[i], std::to_string(next_position(id)) + ", where it ends",
                         "positions cannot be skipped or shifted");
      }
      row_run& run = runs_.back();
      tessera::require(batch.pos[i] == run.first + run.tokens, "position of a token of sequence " + std::to_string(id),
                       batch.pos[i], std::to_string(run.first + run.tokens), "positions go on one by one");
      ++run.tokens;
      text_.push_back(batch.token ? batch.token[i] : LLAMA_TOKEN_NULL);
    }
    for (const row_run& run : runs_) {
      tessera::require(run.is_prompt || run.tokens <= 8, "tokens of a step of sequence " + std::to_string(run.sequence),
                       run.tokens, "1 to 8", "call begin_prompt before another prompt");
    }
  }

  void see(index_t layer, const attention_node& node) override {
    require_plain_cells(node);
    if (layer == 0) begin(node);
    tessera::require(node.scale == facts_.scale && node.soft_cap == facts_.soft_cap,
                     "scale of layer " + std::to_string(layer), node.scale,
                     "that of the first layer, " + std::to_string(facts_.scale), "take a model whose layers are alike");
    const auto k = rows_of_cells(*node.k, cells(), k_), v = rows_of_cells(*node.v, cells(), v_);
    seen_layers_ = layer + 1;  // an item of this layer may be through where the next one fails
    cache_->process(layer, work_, node.q, k, v, node.out);
    for (std::size_t i = 0; i < runs_.size() && shown_; ++i) {
      const tessera::rows_view<const float> out{node.out.data,        0,           node.out.token_stride,
                                                node.out.head_stride, 1,           node.out.tokens,
                                                node.out.heads,       node.out.dim};
      shown_({layer, runs_[i].sequence, runs_[i].is_prompt, work_.rows_of(node.q, i), work_.rows_of(k, i),
              work_.rows_of(v, i), work_.rows_of(out, i)});
    }
  }

  /// What a cache must know of the model: the first layer of a pass shows it, or a saved sequence says it.
  struct model_facts {
    index_t heads = 0, kv_heads = 0, dim = 0;
    float scale = 0, soft_cap = 0;
    bool operator==(const model_facts&) const = default;
  };

  void make_cache(const model_facts& facts) {
    tessera::any_cache_request request;
    request.shape = {layers(), facts.heads, facts.kv_heads};
    request.budget = options_.budget;
    request.settings = options_.settings;
    request.rule.scale = facts.scale, request.rule.soft_cap = facts.soft_cap;
    auto made = tessera::make_cache(options_.method, "fp16", facts.dim, request, workers_);
    tessera::require(!made->facts().rereads, "method", "'" + options_.method + "'", "one that reads a prompt once",
                     "this integration passes no prompt through the model twice");
    tessera::require(!made->facts().takes_scores, "method", "'" + options_.method + "'",
                     "one that scores tokens by itself", "this integration computes no gate");
    cache_ = std::move(made);
    facts_ = facts;
  }

  /// Saves or loads what belongs to a sequence beside its cache. Makes the cache where there is none yet.
  template <class Archive>
  void transfer(sequence& held, Archive& archive) {
    std::string model = model_name(), method = options_.method;
    archive.text(model);
    archive.text(method);
    require_same_model(model);
    if (method != options_.method)
      tessera::fail("method of a saved sequence", "'" + method + "'", "'" + options_.method + "'",
                    "ask for the method that the sequence was saved with");
    model_facts facts = facts_;
    for (index_t* number : {&facts.heads, &facts.kv_heads, &facts.dim}) archive.number(*number);
    for (float* number : {&facts.scale, &facts.soft_cap}) archive.number(*number);
    archive.flag(held.in_prompt);
    archive.number(held.ended);
    if constexpr (Archive::loads) {
      archive.require(facts.scale - facts.scale == 0 && facts.soft_cap - facts.soft_cap == 0 && held.ended >= 0,
                      "with numbers that cannot be");
      if (!cache_) make_cache(facts);
      archive.require(facts == facts_, "of a model with other heads");
    }
  }

  /// Errors   a context whose tokens see later ones: tessera::error.
  void require_causal(const attention_node& node) const {
    std::size_t row = 0;
    for (const row_run& run : runs_) {
      if (run.tokens > 1 && node.mask) {
        const auto* mask =
            reinterpret_cast<const ggml_fp16_t*>(static_cast<const char*>(node.mask->data) + row * node.mask->nb[1]);
        tessera::require(ggml_fp16_to_fp32(mask[cells()[row + 1]]) < -1e4f, "attention of the context", "not causal",
                         "causal", "call llama_set_causal_attn(context, true)");
      }
      row += std::size_t(run.tokens);
    }
  }

  /// Makes the cache by what the first layer shows, opens new sequences, and prepares the pass.
  void begin(const attention_node& node) {
    require_causal(node);
    tessera::require(node.v->ne[0] == node.k->ne[0], "channels of values", node.v->ne[0], "those of keys",
                     "take another model");
    const model_facts seen{node.q.heads, node.kv_heads(), index_t(node.k->ne[0]), node.scale, node.soft_cap};
    if (!cache_) make_cache(seen);
    tessera::require(seen == facts_, "attention of the model", "another than that of the loaded sequences", "the same",
                     "load sequences of this model alone");
    tessera::host_vector<tessera::batch_item> items;
    for (const row_run& run : runs_) {
      if (!has(run.sequence)) sequences_[run.sequence] = {cache_->open()}, opened_.push_back(run.sequence);
      items.push_back({sequences_.at(run.sequence).id, run.tokens, run.is_prompt});
    }
    std::vector<std::uint8_t> boundaries;
    if (cache_->facts().needs_segments || cache_->facts().needs_step_segments) {
      tessera::require(llama_vocab_type(vocabulary_) != LLAMA_VOCAB_TYPE_NONE, "vocabulary of the model", "none",
                       "one, as '" + options_.method + "' goes by sentences of the text",
                       "take another model or method");
      tessera::require(std::find(text_.begin(), text_.end(), LLAMA_TOKEN_NULL) == text_.end(), "tokens of the batch",
                       "none", "tokens, as '" + options_.method + "' goes by sentences of the text",
                       "pass tokens, not embeddings");
      for (const llama_token token : text_) boundaries.push_back(ends_segment(token));
    }
    work_ = cache_->prepare(items, boundaries);
  }

  /// A pass has failed: sequences are as they were. One whose method cannot go back ends, rather than go on wrongly.
  void take_back() {
    for (const row_run& run : runs_) {
      const auto found = sequences_.find(run.sequence);
      if (found == sequences_.end()) continue;
      if (std::find(opened_.begin(), opened_.end(), run.sequence) != opened_.end()) {
        remove(run.sequence, 0);
        continue;
      }
      if (seen_layers_ == 0) continue;
      try {  // some layers have the tokens, or all of them, or none yet
        if (cache_->next_position(found->second.id) == run.first + run.tokens) take_back_of(found->second.id, run);
      } catch (const tessera::error&) {
        remove(run.sequence, 0);
      }
    }
    opened_.clear();
  }
  void take_back_of(index_t id, const row_run& run) {
    if (seen_layers_ < layers()) return cache_->cancel(id);
    try {
      cache_->truncate(id, run.first);
    } catch (const tessera::error&) {  // the last layer does not have them
      cache_->cancel(id);
    }
  }

  /// Whether a segment of the text ends after a token: one that ends with a mark of punctuation, or a line break.
  std::uint8_t ends_segment(llama_token token) {
    const auto found = ends_.find(token);
    if (found != ends_.end()) return found->second;
    char piece[256];
    const int length =
        token == LLAMA_TOKEN_NULL ? 0 : llama_token_to_piece(vocabulary_, token, piece, sizeof piece, 0, false);
    const std::string text(piece, std::size_t(std::max(0, length)));
    bool ends = !text.empty() && std::string(".,;:!?\n\r").find(text.back()) != std::string::npos;
    for (const char* mark : {"。", "，", "；", "：", "！", "？", "、"}) ends = ends || text.ends_with(mark);
    return ends_[token] = ends;
  }

  const llama_vocab* vocabulary_;
  attention_options options_;
  std::shared_ptr<tessera::cpu::executor> workers_;
  std::unique_ptr<tessera::any_cache> cache_;
  std::map<llama_seq_id, sequence> sequences_;
  std::vector<row_run> runs_;      // of the pass
  std::vector<llama_token> text_;  // of the pass
  std::vector<llama_seq_id> opened_;
  index_t seen_layers_ = 0;  // of the pass
  model_facts facts_;
  std::function<void(const traced_rows&)> shown_;
  tessera::mixed_batch work_;
  std::vector<float> k_, v_;
  std::map<llama_token, std::uint8_t> ends_;
};

}  // namespace tessera_llama
