// The whole cache of one model on a GPU: a recipe over layers and sequences, the device's tessera::cache.
#pragma once

#include "../../runtime/turn/basic_cache.hpp"
#include "backend.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {

/// The cache of a model on one device: `cuda::cache<snapkv<bf16, 128>> kv(shape, recipe, {.sequences = 8, .tokens =
/// 131072})`. Its calls are those of basic_cache. Each gets the stream that it works in, one stream at a time.
///
/// `reserve` the prompt's length, so that its rows do not move between chunks. For each step, call `prepare_step` on
/// the host. Then call `begin_step`, and `decode` in every layer; these may be recorded in a graph. A recorded graph
/// can be replayed for every later batch with the same number of sequences and tokens and the same actions, because
/// ids, lengths, positions, plans and tables are read on the device. The layout's element type is fp16 or bf16, and so
/// are q, k and v. Attention is written as `Out`: fp32, fp16 or bf16. All pointers are device pointers.
/// Shapes   rows of a prompt are [1, tokens, heads, dim].
/// Errors   bad shapes, unknown sequences, steps out of order and pools without room: tessera::error before anything is
///          launched. The cache is then as it was. A step that was prepared and is never decoded leaves its sequences
///          unfinished: they can only be closed.
/// Memory   rows, and scratch of sequences * kv_heads * tokens scores. It is allocated when the cache is made, and
///          again by `set_budget` and `fit_memory`.
/// Limits: calls that return data to the host (`positions`, `bytes_read`, tracing) synchronise.
template <class Recipe, class Out = float>
using cache = basic_cache<Recipe, backend<Recipe, Out>>;

}  // namespace cuda
TESSERA_NAMESPACE_END
