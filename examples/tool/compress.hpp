// Runs one method over one layer's tensors, dumped from any engine.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <tessera/backend/cpu/kernel/executor.hpp>
#include <vector>

#include "backend.hpp"
#include "engine/files/safetensors.hpp"
#include "tool/methods/method_cache.hpp"

namespace tool {

struct compress_options {
  std::string method;
  std::optional<index_t> budget;
  std::vector<setting> settings;
  std::shared_ptr<tessera::cpu::executor> workers;
  backend where = backend::cpu;
  bool scores = false;                ///< write what the method ranked when the last prompt ended
  std::optional<float> rope_theta{};  ///< base of the model's RoPE, for a method that turns queries back
};

/// What a method made of a layer.
struct compressed {
  engine::safetensors_writer file;  ///< the output, ready to be written
  index_t kv_heads = 0, tokens = 0;
  std::int64_t kept = 0;    ///< tokens kept, summed over kv_heads
  std::int64_t ranked = 0;  ///< tokens whose scores are written
  offset_t bytes_full = 0, bytes_held = 0;
  read_count reads;
  std::vector<std::string> unused;  ///< tensors of the input that the method makes no use of
};

/// Compresses the prompt's cache, then runs the decode steps.
///
/// In     k, v [kv_heads, tokens, head_dim] F32, F16 or BF16, keys after RoPE; q [n_q, q_heads, head_dim], the queries
/// of
///        the last n_q prompt tokens (a method that looks at none needs none); optional boundaries [tokens] U8, 1 where a segment ends (a method that sees segments needs them);
///        optional output_projection [q_heads, head_dim, hidden], what a value becomes behind attention (criticalkv);
///        optional turns (or turn) I64 [t], the first row of each turn, ascending;
///        optional q_decode, k_decode, v_decode [steps, q_heads or kv_heads, head_dim], and boundaries_decode [steps] U8 where a
///        method's steps want them (sentencekv).
/// Out    keep.indptr I64 [kv_heads + 1], keep.indices I32, attend.indptr I64 [steps * kv_heads + 1], attend.indices
/// I32,
///        out F32 [steps, q_heads, head_dim], lse F32 [steps, q_heads]; metadata: method, budget, every parameter (as the first turn's plan has it),
///        bytes_full, bytes_held (after the prompt), bytes_read_per_step. On request scores.indptr I64 [kv_heads + 1], or
///        [q_heads + 1] where query heads choose apart,
///        scores.positions I32 and scores.values F32: the tokens that competed when the last turn's prompt ended, with the
///        scores that the selector saw. Tokens that stay in any case (a window) are not among them; none are where the
///        budget covers everything. Of a method that keeps blocks of segments segments.block_size I32, one entry a segment of
///        the tokens before the last turn's window: the size of its blocks, 0 where it was dropped.
///        Of a method that leaves elements of vectors out packed.k and packed.v F32 [kv_heads, tokens, head_dim]: after the prompt,
///        the stored vectors unpacked and rotated back, newest ones that are whole among them.
///        Of a method whose heads share pages pages.used and pages.reserved I64 [groups], when the last prompt has ended.
///        Of a method whose prompts attend lines, of the last turn: lines.rows I32, the rows by whose attention they were chosen;
///        lines.vertical.indptr I64 [q_heads + 1] and .indices I32, positions of keys; lines.slash.indptr and .indices, how far
///        keys lie behind the query; lines.dense_rows I32, rows that attend everything, if there are any; prefill_out F32
///        [rows of the turn, q_heads, head_dim], prefill_lse F32 [rows of the turn, q_heads]. It needs q of all tokens. Where
///        query heads of a group read apart, attend.* has steps * q_heads rows.
/// Errors tessera::error where a method needs rope_theta and there is none; where scores are asked of a method or a backend that has none; on a missing tensor, a wrong shape or type, NaN or infinity, and whatever the method rejects.
compressed compress(const engine::safetensors_file& in, const compress_options& options);

}  // namespace tool
