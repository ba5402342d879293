// A model's shape, and checks of the rows that callers pass.
#pragma once

#include <string>

#include "error.hpp"
#include "host/host_vector.hpp"
#include "views.hpp"

TESSERA_NAMESPACE_BEGIN

/// Checks the head dim of rows, where they have one.
template <class T>
void require_dim(const rows_view<T>& rows, index_t dim, const char* name) {
  if (rows.dim != 0 && rows.dim != dim) {
    fail(std::string("head dim of ") + name, rows.dim, std::to_string(dim), "pass rows of the layout's head dims");
  }
}

/// Errors   no heads, or query heads that form no whole groups: tessera::error.
inline void require_head_counts(index_t q_heads, index_t kv_heads) {
  if (kv_heads < 1) fail("kv_heads", kv_heads, "at least 1", "pass the model's head counts");
  if (q_heads >= 1 && q_heads % kv_heads == 0) return;
  fail("q_heads", q_heads, "a multiple of kv_heads, which is " + std::to_string(kv_heads),
       "pass the model's head counts");
}

/// What errors show of rows: [sequences, tokens, heads].
template <class T>
std::string shape_text(const rows_view<T>& rows) {
  return "[" + std::to_string(rows.sequences) + ", " + std::to_string(rows.tokens) + ", " + std::to_string(rows.heads) +
         "]";
}

/// Whether rows have as many sequences, tokens and heads as others.
template <class A, class B>
bool same_shape(const rows_view<A>& a, const rows_view<B>& b) {
  return a.sequences == b.sequences && a.tokens == b.tokens && a.heads == b.heads;
}

/// Errors   no memory, or another shape than `like`: tessera::error.
template <class A, class B>
void require_same_shape(const char* name, const rows_view<A>& rows, const rows_view<B>& like) {
  if (rows.data && same_shape(rows, like)) return;
  fail(name, rows.data ? shape_text(rows) : "null", shape_text(like), "give all rows of a call one shape, and memory");
}

/// Layers and heads; head dims and element type are the layout's.
struct model_shape {
  index_t layers = 0;
  index_t q_heads = 0;
  index_t kv_heads = 0;
  index_t window = 0;           ///< tokens that a sliding layer attends, in positions
  host_vector<bool> sliding{};  ///< [layers]: which layers slide (Gemma, gpt-oss); empty: none
  /// [layers, q_heads] where the cache computes, the caller's (gpt-oss); null: the recipe's rule has them, or none.
  const float* sink_logits = nullptr;
  /// [layers, q_heads, v_dim, hidden] where the cache computes, the caller's: what a value becomes behind attention.
  /// For scorers that weigh values by it; null: they weigh values as they are.
  const float* output_projection = nullptr;
  index_t hidden = 0;  ///< of output_projection
  /// [k_dim / 2], in radians per position: element d of a head turns with element d + k_dim / 2, by position times
  /// speed. For scorers that turn queries back; empty: such a recipe is refused.
  host_vector<float> rope_frequencies{};

  bool slides(index_t layer) const { return !sliding.empty() && sliding[std::size_t(layer)]; }

  void check() const {
    require(layers >= 1, "layers", layers, "at least 1", "pass the model's number of layers");
    require_head_counts(q_heads, kv_heads);
    require(sliding.empty() || index_t(sliding.size()) == layers, "layers that may slide", sliding.size(),
            "one for each layer, which are " + std::to_string(layers),
            "say of every layer whether it slides, or of none");
    require(sliding.empty() || window >= 1, "window", window, "at least 1 token",
            "pass how many tokens the sliding layers attend");
    require(!output_projection || hidden >= 1, "hidden", hidden, "at least 1, with an output projection",
            "pass how many elements a projected value has");
  }

  /// Errors   no speed for each pair of elements, or one that is not finite: tessera::error.
  void check_rope(index_t k_dim) const {
    require(index_t(rope_frequencies.size()) == k_dim / 2, "rope_frequencies", rope_frequencies.size(),
            std::to_string(k_dim / 2) + ", one for each pair of elements of a head",
            "pass how fast the model's RoPE turns them, in radians per position");
    for (const float speed : rope_frequencies) {
      require(speed - speed == 0, "rope_frequencies", speed, "finite numbers", "pass radians per position");
    }
  }

  /// Queries, keys and values of one call. Shapes: q [.., n_q, q_heads, k_dim], k, v [.., tokens, kv_heads, dim].
  template <class Q, class K, class V>
  void check_rows(const rows_view<Q>& q, const rows_view<K>& k, const rows_view<V>& v, index_t k_dim,
                  index_t v_dim) const {
    if (q.tokens > 0) require_dim(q, k_dim, "q");
    require_dim(k, k_dim, "k");
    require_dim(v, v_dim, "v");
    if (q.heads != q_heads && q.tokens != 0) {
      fail("heads of q", q.heads, std::to_string(q_heads), "pass [tokens, q_heads, head_dim]");
    }
    if (k.heads != kv_heads || v.heads != kv_heads) {
      fail("heads of k and v", std::to_string(k.heads) + " and " + std::to_string(v.heads), std::to_string(kv_heads),
           "pass [tokens, kv_heads, head_dim]");
    }
    require(k.data && v.data && (q.data || q.tokens <= 0), "memory of q, k and v", "null", "memory behind each",
            "pass the rows themselves");
    if (k.tokens != v.tokens) {
      fail("tokens of v", v.tokens, "those of k, which are " + std::to_string(k.tokens),
           "pass k and v of the same tokens");
    }
  }

  /// Outputs of queries. Shapes: out as q with v_dim, lse [sequences, tokens, q_heads], or no data.
  template <class Q, class Out>
  void check_output(const rows_view<Q>& q, const rows_view<Out>& out, const rows_view<float>& lse, index_t k_dim,
                    index_t v_dim) const {
    require_dim(q, k_dim, "q");
    require_dim(out, v_dim, "out");
    if (q.heads != q_heads) fail("heads of q", q.heads, std::to_string(q_heads), "pass [tokens, q_heads, head_dim]");
    require_same_shape("shape of out", out, q);
    if (lse.data) require_same_shape("shape of lse", lse, q);
  }
};

TESSERA_NAMESPACE_END
