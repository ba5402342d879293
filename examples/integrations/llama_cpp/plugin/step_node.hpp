// A node FLASH_ATTN_EXT with the rows of a step, as its tensors show it. They say nothing of sequences and positions:
// the mask says which cells a row sees, and that is all.
#pragma once

#include <ggml.h>

#include <charconv>
#include <cstring>
#include <string_view>

#include <tessera/core/error.hpp>
#include <tessera/core/types.hpp>

#include "read_options.hpp"

namespace tessera_plugin {

/// The tensor whose memory a view shows.
inline const ggml_tensor* root_of(const ggml_tensor* tensor) { return tensor->view_src ? tensor->view_src : tensor; }

/// The layer of a tensor of llama.cpp's memory, `cache_k_l<layer>` or `cache_v_l<layer>`; -1 of another one.
inline int layer_of_cache(const ggml_tensor* root) {
  const std::string_view name = root->name;
  if (!name.starts_with("cache_k_l") && !name.starts_with("cache_v_l")) return -1;
  int layer = -1;
  std::from_chars(name.data() + 9, name.data() + name.size(), layer);
  return layer;
}

struct step_node {
  const ggml_tensor *q, *k, *v, *mask;
  ggml_tensor* out;
  float scale = 0, soft_cap = 0;

  explicit step_node(ggml_tensor* node)
      : q(node->src[0]), k(node->src[1]), v(node->src[2]), mask(node->src[3]), out(node) {
    std::memcpy(&scale, node->op_params, sizeof scale);
    std::memcpy(&soft_cap, reinterpret_cast<const char*>(node->op_params) + 2 * sizeof(float), sizeof soft_cap);
  }

  index_t rows() const { return index_t(q->ne[1]); }  ///< of a stream
  index_t streams() const { return index_t(q->ne[3]); }
  index_t heads() const { return index_t(q->ne[2]); }
  index_t kv_heads() const { return index_t(k->ne[2]); }
  index_t cells() const { return index_t(k->ne[1]); }
  index_t dim() const { return index_t(k->ne[0]); }
  const char* key(index_t stream, index_t head, index_t cell) const {
    return static_cast<const char*>(k->data) + stream * k->nb[3] + head * k->nb[2] + cell * k->nb[1];
  }
  const ggml_fp16_t* mask_row(index_t stream, index_t row) const {
    return reinterpret_cast<const ggml_fp16_t*>(static_cast<const char*>(mask->data) + stream * mask->nb[3] +
                                                row * mask->nb[1]);
  }
};

/// Whether the node is one of a step over llama.cpp's memory, in a form that is read here. llama.cpp computes the others
/// itself.
inline bool is_claimed(const read_options& options, const ggml_tensor* t) {
  if (options.method == read_method::everything || t->op != GGML_OP_FLASH_ATTN_EXT) return false;
  const ggml_tensor *q = t->src[0], *k = t->src[1], *v = t->src[2], *mask = t->src[3];
  if (!q || !k || !v || !mask || t->src[4]) return false;  // src[4]: learned sinks
  if (q->ne[1] > options.step_tokens) return false;
  float alibi = 0;
  std::memcpy(&alibi, reinterpret_cast<const char*>(t->op_params) + sizeof(float), sizeof alibi);
  const auto aligned = [](const ggml_tensor* rows, std::size_t element) {
    return rows->nb[0] == element && rows->nb[1] % element == 0 && rows->nb[2] % element == 0;
  };
  const std::int64_t dim = k->ne[0];
  const bool known_dim = dim == 64 || dim == 80 || dim == 96 || dim == 128 || dim == 192 || dim == 256;
  const int layer = layer_of_cache(root_of(k));
  return alibi == 0 && known_dim && v->ne[0] == dim && q->ne[0] == dim && q->type == GGML_TYPE_F32 &&
         t->type == GGML_TYPE_F32 && k->type == GGML_TYPE_F16 && v->type == GGML_TYPE_F16 &&
         mask->type == GGML_TYPE_F16 && mask->ne[2] == 1 && mask->ne[3] == q->ne[3] && k->ne[3] == q->ne[3] &&
         v->ne[3] == q->ne[3] && q->ne[2] % k->ne[2] == 0 && v->ne[2] == k->ne[2] && aligned(q, 4) && aligned(k, 2) &&
         aligned(v, 2) && layer >= options.dense_layers;
}

/// Whether the node writes rows of llama.cpp's memory. `quest` claims these: so it knows whose bounds have changed.
inline bool is_claimed_write(const read_options& options, const ggml_tensor* t) {
  if (options.method != read_method::quest || t->op != GGML_OP_SET_ROWS) return false;
  const ggml_tensor *rows = t->src[0], *indices = t->src[1];
  return t->view_src && layer_of_cache(root_of(t)) >= options.dense_layers && t->type == GGML_TYPE_F16 &&
         rows->type == GGML_TYPE_F32 && rows->nb[0] == 4 && t->nb[0] == 2 && rows->ne[2] == 1 && rows->ne[3] == 1 &&
         (indices->type == GGML_TYPE_I64 || indices->type == GGML_TYPE_I32);
}

}  // namespace tessera_plugin
