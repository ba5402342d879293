// A model of llama.cpp for the programs of this folder: loading, tokens, batches. Public calls of libllama only.
#pragma once

#include <llama.h>

#include <algorithm>
#include <cstdio>
#include <memory>
#include <string>
#include <vector>

#include <tessera/core/error.hpp>

namespace tessera_llama {

struct context_freed {
  void operator()(llama_context* context) const { llama_free(context); }
};
using context_pointer = std::unique_ptr<llama_context, context_freed>;

class loaded_model {
 public:
  /// Errors   a file that llama.cpp does not load: tessera::error.
  explicit loaded_model(const std::string& path) {
    llama_log_set(
        [](ggml_log_level level, const char* text, void*) {
          if (level == GGML_LOG_LEVEL_ERROR) std::fputs(text, stderr);
        },
        nullptr);
    llama_backend_init();
    llama_model_params params = llama_model_default_params();
    params.n_gpu_layers = 0;
    model_.reset(llama_model_load_from_file(path.c_str(), params));
    tessera::require(model_ != nullptr, "model", path, "a GGUF file that llama.cpp loads", "check the path");
  }
  llama_model* get() const { return model_.get(); }
  const llama_vocab* vocabulary() const { return llama_model_get_vocab(get()); }

  /// A context of so many cells whose batches have at most 512 tokens; `observer` has an attach, or is null.
  template <class Observer>
  context_pointer context(int cells, int threads, Observer& observer, int sequences = 1) const {
    llama_context_params params = params_of(cells, threads, sequences);
    observer.attach(params);
    return made(params);
  }

  /// `begins`: with what the model puts before a text.
  std::vector<llama_token> tokens(const std::string& text, bool begins = false) const {
    std::vector<llama_token> made(text.size() + 8);
    const int count =
        llama_tokenize(vocabulary(), text.data(), int(text.size()), made.data(), int(made.size()), begins, true);
    tessera::require(count >= 0, "tokens of a text", count, "at least 0", "shorten it");
    made.resize(std::size_t(count));
    return made;
  }
  std::string piece(llama_token token) const {
    char text[256];
    return {text, std::size_t(std::max(0, llama_token_to_piece(vocabulary(), token, text, sizeof text, 0, false)))};
  }
  /// A user's turn as the model's chat template has it.
  std::string turn(const std::string& text, bool first) const {
    const llama_chat_message message{"user", text.c_str()};
    const char* const form = llama_model_chat_template(get(), nullptr);
    std::vector<char> made(text.size() + 1024);
    const int length =
        llama_chat_apply_template(form ? form : "chatml", &message, 1, true, made.data(), int(made.size()));
    tessera::require(length >= 0 && length <= int(made.size()), "chat template", "not applied",
                     "one that llama.cpp knows", "take another model");
    const std::string own(made.data(), std::size_t(length));
    const std::size_t begin = own.find("<|im_start|>user");
    return first || begin == std::string::npos ? own : "\n" + own.substr(begin);
  }

 private:
  struct model_freed {
    void operator()(llama_model* model) const { llama_model_free(model); }
  };
  static llama_context_params params_of(int cells, int threads, int sequences) {
    llama_context_params params = llama_context_default_params();
    params.n_ctx = std::uint32_t(cells);
    params.n_batch = params.n_ubatch = 512;
    params.n_seq_max = std::uint32_t(sequences);
    params.n_threads = params.n_threads_batch = threads;
    params.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_ENABLED;
    return params;
  }
  context_pointer made(const llama_context_params& params) const {
    context_pointer context(llama_init_from_model(get(), params));
    tessera::require(context != nullptr, "context", "not made", "one", "see llama.cpp's log");
    return context;
  }
  std::unique_ptr<llama_model, model_freed> model_;
};

/// llama.cpp by itself, with no callback: flash attention over cells of fp16, or none over cells of fp32.
struct plain_decoder {
  bool flash = true;
  llama_pos next = 0;
  void attach(llama_context_params& params) const {
    params.flash_attn_type = flash ? LLAMA_FLASH_ATTN_TYPE_ENABLED : LLAMA_FLASH_ATTN_TYPE_DISABLED;
    params.type_k = params.type_v = flash ? GGML_TYPE_F16 : GGML_TYPE_F32;
  }
  void decode(llama_context* context, const llama_batch& batch) {
    tessera::require(llama_decode(context, batch) == 0, "llama_decode", "failed", "0", "see its log");
    next += batch.n_tokens;
  }
  llama_pos next_position(llama_seq_id) const { return next; }
};

/// A batch whose memory it owns.
class token_batch {
 public:
  explicit token_batch(int most) : batch_(llama_batch_init(most, 0, 1)) { batch_.n_tokens = 0; }
  ~token_batch() { llama_batch_free(batch_); }
  token_batch(const token_batch&) = delete;
  token_batch& operator=(const token_batch&) = delete;
  void add(llama_token token, llama_pos position, llama_seq_id sequence, bool wants_logits) {
    const int i = batch_.n_tokens++;
    batch_.token[i] = token, batch_.pos[i] = position, batch_.n_seq_id[i] = 1, batch_.seq_id[i][0] = sequence;
    batch_.logits[i] = wants_logits;
  }
  void clear() { batch_.n_tokens = 0; }
  const llama_batch& get() const { return batch_; }

 private:
  llama_batch batch_;
};

/// Tokens of one sequence behind what it has, in batches of at most 512; logits of the last one.
template <class Attention>
void decode_text(Attention& attention, llama_context* context, const std::vector<llama_token>& tokens,
                 llama_seq_id sequence = 0) {
  for (std::size_t done = 0; done < tokens.size();) {
    const std::size_t count = std::min<std::size_t>(512, tokens.size() - done);
    token_batch batch(512);
    const llama_pos first = attention.next_position(sequence);
    for (std::size_t i = 0; i < count; ++i)
      batch.add(tokens[done + i], first + llama_pos(i), sequence, done + i + 1 == tokens.size());
    attention.decode(context, batch.get());
    done += count;
  }
}

inline llama_token best_token(llama_context* context, const llama_vocab* vocabulary) {
  const float* const logits = llama_get_logits_ith(context, -1);
  return llama_token(std::max_element(logits, logits + llama_vocab_n_tokens(vocabulary)) - logits);
}

}  // namespace tessera_llama
