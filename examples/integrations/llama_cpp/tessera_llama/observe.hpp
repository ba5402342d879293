// llama.cpp's attention as its callback shows it: the node FLASH_ATTN_EXT of every layer, with queries, cells and output where they lie.
#pragma once

#include <ggml-backend.h>
#include <ggml.h>
#include <llama.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include <tessera/core/error.hpp>
#include <tessera/core/host/host_vector.hpp>
#include <tessera/core/views.hpp>

namespace tessera_llama {

using tessera::index_t;
using tessera::offset_t;

/// Refuses a model whose attention, or memory, is not what this integration reads. Errors: tessera::error.
inline void require_model(const llama_model* model) {
  const auto refuse = [](const char* what) {
    tessera::fail("model", what, "a decoder with full attention in every layer and plain RoPE", "take another model");
  };
  tessera::require(model != nullptr, "model", "null", "a loaded one", "check the file's path");
  if (llama_model_is_recurrent(model) || llama_model_is_hybrid(model)) refuse("one with recurrent layers");
  if (llama_model_has_encoder(model)) refuse("one with an encoder");
  if (llama_model_n_swa(model) > 0) refuse("one with sliding layers");
  const llama_rope_type rope = llama_model_rope_type(model);
  if (rope == LLAMA_ROPE_TYPE_MROPE || rope == LLAMA_ROPE_TYPE_IMROPE || rope == LLAMA_ROPE_TYPE_VISION)
    refuse("one whose positions have several parts");
}

/// What tells a model from others: its description, parameters and bytes.
inline std::string name_of_model(const llama_model* model) {
  char text[256] = {};
  llama_model_desc(model, text, sizeof text);
  return std::string(text) + ", " + std::to_string(llama_model_n_params(model)) + " parameters, " +
         std::to_string(llama_model_size(model)) + " bytes";
}

/// Errors   a tensor in a device's memory: tessera::error.
inline void require_host(const ggml_tensor* tensor) {
  const ggml_tensor* const own = tensor->view_src ? tensor->view_src : tensor;
  tessera::require(own->buffer && ggml_backend_buffer_is_host(own->buffer), "memory of the attention", "a device's",
                   "the host's", "load the model with n_gpu_layers = 0");
}

/// Errors   a batch that is not one pass of tokens with one sequence and a position each: tessera::error.
inline void require_batch(const llama_context* context, const llama_batch& batch) {
  tessera::require(batch.n_tokens >= 1 && batch.n_tokens <= int(llama_n_ubatch(context)), "tokens of a batch",
                   batch.n_tokens, "1 to n_ubatch, which is " + std::to_string(llama_n_ubatch(context)),
                   "hand a prompt over in chunks");
  for (int i = 0; i < batch.n_tokens; ++i) {
    tessera::require(batch.n_seq_id && batch.pos && batch.n_seq_id[i] == 1, "sequences of a token",
                     batch.n_seq_id ? batch.n_seq_id[i] : 0, "1, with a position",
                     "give each token its sequence and position");
    const llama_seq_id id = batch.seq_id[i][0];
    tessera::require(id >= 0 && id < int(llama_n_seq_max(context)), "sequence of a token", id,
                     "0 to " + std::to_string(llama_n_seq_max(context) - 1),
                     "make the context with a larger n_seq_max");
  }
}

/// One layer's attention in a pass through the model.
struct attention_node {
  tessera::rows_view<const float> q;  ///< [tokens, q_heads, dim], after RoPE
  tessera::rows_view<float> out;      ///< [tokens, q_heads, v_dim]; its reader runs later
  const ggml_tensor* k = nullptr;     ///< [dim, cells, kv_heads] of llama.cpp's own memory, the new tokens' among them;
                                      ///< where k is quantised, q and k may be turned by one rotation
  const ggml_tensor* v = nullptr;
  const ggml_tensor* mask = nullptr;  ///< [cells, tokens], fp16: 0 where a token sees a cell
  float scale = 0, soft_cap = 0;

  /// Errors   a node that this does not read: tessera::error.
  static attention_node of(ggml_tensor* t) {
    attention_node node;
    const ggml_tensor &q = *t->src[0], &k = *t->src[1], &v = *t->src[2];
    float params[3];
    std::memcpy(params, t->op_params, sizeof params);
    node.scale = params[0], node.soft_cap = params[2];
    tessera::require(params[1] == 0, "ALiBi's slope", params[1], "0", "take a model with RoPE");
    tessera::require(t->src[4] == nullptr, "attention sinks", "learned ones", "none", "take a model without them");
    tessera::require(q.type == GGML_TYPE_F32, "type of queries", ggml_type_name(q.type), "f32", "run on the CPU");
    tessera::require(q.ne[3] == 1 && k.ne[3] == 1, "streams of the memory", q.ne[3], "1",
                     "make the context with kv_unified");
    tessera::require(q.nb[0] == 4 && k.nb[0] == ggml_type_size(k.type) && v.nb[0] == ggml_type_size(v.type),
                     "channels of a row", "apart", "side by side", "make the context with flash attention");
    for (const ggml_tensor* rows : {t->src[0], t->src[1], t->src[2], t->src[3], t})
      if (rows) require_host(rows);
    const auto of_floats = [](std::size_t bytes) { return offset_t(bytes / sizeof(float)); };
    node.q = {static_cast<const float*>(q.data),
              0,
              of_floats(q.nb[1]),
              of_floats(q.nb[2]),
              1,
              index_t(q.ne[1]),
              index_t(q.ne[2]),
              index_t(q.ne[0])};
    node.out = {static_cast<float*>(t->data),
                0,
                of_floats(t->nb[2]),
                of_floats(t->nb[1]),
                1,
                index_t(t->ne[2]),
                index_t(t->ne[1]),
                index_t(t->ne[0])};
    node.k = &k, node.v = &v, node.mask = t->src[3];
    return node;
  }

  index_t kv_heads() const { return index_t(k->ne[2]); }
};

/// Errors   cells of other types than f16 and f32: tessera::error.
inline void require_plain_cells(const attention_node& node) {
  for (const ggml_tensor* cells : {node.k, node.v}) {
    tessera::require(cells->type == GGML_TYPE_F16 || cells->type == GGML_TYPE_F32, "type of cells",
                     ggml_type_name(cells->type), "f16 or f32", "make the context with type_k and type_v of f16");
  }
}

/// Rows of some plain cells in fp32, [cells, kv_heads, dim], in `memory`.
inline tessera::rows_view<const float> rows_of_cells(const ggml_tensor& cells, const std::vector<std::int64_t>& which,
                                                     std::vector<float>& memory) {
  const std::int64_t heads = cells.ne[2], dim = cells.ne[0];
  memory.resize(which.size() * std::size_t(heads * dim));
  float* to = memory.data();
  for (const std::int64_t cell : which) {
    for (std::int64_t head = 0; head < heads; ++head, to += dim) {
      const char* row =
          static_cast<const char*>(cells.data) + cell * std::int64_t(cells.nb[1]) + head * std::int64_t(cells.nb[2]);
      if (cells.type == GGML_TYPE_F16)
        ggml_fp16_to_fp32_row(reinterpret_cast<const ggml_fp16_t*>(row), to, dim);
      else
        std::memcpy(to, row, std::size_t(dim) * sizeof(float));
    }
  }
  return tessera::nhd_rows(static_cast<const float*>(memory.data()), index_t(which.size()), index_t(heads),
                           index_t(dim));
}

/// Follows passes of one context through its model. Whoever derives from it gets every layer's attention node, and may write its output.
/// Exceptions do not pass through llama.cpp: the pass ends, and `end_pass` throws what was said.
class graph_observer {
 public:
  /// Sets the context's callback and what it relies on. Call it before llama_init_from_model; this object must outlive the context.
  void attach(llama_context_params& params) {
    params.cb_eval = &graph_observer::callback;
    params.cb_eval_user_data = this;
    params.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_ENABLED;  // else there is no such node
    params.attention_type = LLAMA_ATTENTION_TYPE_CAUSAL;
    params.kv_unified = true;  // one stream: tokens stay in the batch's order
    params.n_batch = params.n_ubatch = std::min(params.n_batch, params.n_ubatch);  // a batch is one pass
  }
  graph_observer(const graph_observer&) = delete;
  graph_observer& operator=(const graph_observer&) = delete;

 protected:
  explicit graph_observer(const llama_model* model)
      : layers_((require_model(model), llama_model_n_layer(model))), model_name_(tessera_llama::name_of_model(model)) {}
  ~graph_observer() = default;

  virtual void see(index_t layer, const attention_node& node) = 0;

  void begin_pass() { watches_ = true, layer_ = 0, cells_.clear(), indices_ = nullptr, problem_.clear(); }
  /// `status`: what llama_decode said. Errors: what a layer's `see` threw; a pass that llama.cpp could not make; a pass without the
  /// attention nodes: tessera::error.
  void end_pass(int status) {
    watches_ = false;
    if (!problem_.empty()) throw tessera::error(problem_);
    tessera::require(status == 0, "llama_decode", status, "0",
                     status == 1 ? "free cells of the context, or give it more" : "see its log");
    tessera::require(layer_ == layers_, "attention nodes of a pass", layer_,
                     std::to_string(layers_) + ", one for each layer",
                     "make the context with flash attention, as attach does");
  }
  index_t layers() const { return layers_; }
  const std::string& model_name() const { return model_name_; }
  /// Errors   saved bytes of another model: tessera::error.
  void require_same_model(const std::string& saved) const {
    tessera::require(saved == model_name_, "model of a saved sequence", "'" + saved + "'", "'" + model_name_ + "'",
                     "load that model");
  }
  /// The cells of the pass's tokens, in the batch's order.
  const std::vector<std::int64_t>& cells() const { return cells_; }

 private:
  static bool callback(ggml_tensor* t, bool ask, void* self) {
    return static_cast<graph_observer*>(self)->answer(t, ask);
  }

  bool answer(ggml_tensor* t, bool ask) {
    if (!watches_) return !ask;
    if (ask && t->op == GGML_OP_SET_ROWS && !indices_) indices_ = t->src[1];
    if (t->op != GGML_OP_FLASH_ATTN_EXT) return !ask;
    if (ask) return problem_.empty();
    try {
      const attention_node node = attention_node::of(t);
      if (layer_ == 0) note_cells(node);
      see(layer_++, node);
      return true;
    } catch (const std::exception& failed) {
      problem_ = failed.what();
    } catch (...) {
      problem_ = "what a layer threw is no std::exception; expected one; throw tessera::error";
    }
    return false;
  }
  void note_cells(const attention_node& node) {
    const std::int64_t tokens = node.q.tokens;
    tessera::require(indices_ && indices_->ne[0] == tokens, "cells of the new tokens", "not written as rows",
                     "one index for each token",
                     "take a llama.cpp whose memory is written by SET_ROWS, as that of 2026-11");
    require_host(indices_);
    for (std::int64_t i = 0; i < tokens; ++i) {
      const std::int64_t cell = indices_->type == GGML_TYPE_I64 ? static_cast<const std::int64_t*>(indices_->data)[i]
                                                                : static_cast<const std::int32_t*>(indices_->data)[i];
      // Indices count from the first stream on, the node's cells from its own.
      tessera::require(cell >= 0 && cell < node.k->ne[1], "cell of a new token", cell,
                       "0 to " + std::to_string(node.k->ne[1] - 1), "make the context with kv_unified");
      cells_.push_back(cell);
    }
  }

  index_t layers_, layer_ = 0;
  std::string model_name_;
  bool watches_ = false;
  const ggml_tensor* indices_ = nullptr;
  std::vector<std::int64_t> cells_;
  std::string problem_;
};

}  // namespace tessera_llama
