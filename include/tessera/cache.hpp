// A whole KV cache of one model on the CPU: a recipe over layers and sequences, for engines that have no cache.
#pragma once

#include "backend/cpu/backend.hpp"
#include "runtime/turn/basic_cache.hpp"

TESSERA_NAMESPACE_BEGIN

/// The cache of a model on the CPU: `cache<snapkv<float, 128>> kv(shape, recipe, std::make_shared<cpu::executor>())`.
/// basic_cache, in runtime/turn/basic_cache.hpp, has its calls; none of them takes a queue.
/// Threads  one thread calls a cache at a time; the work is spread over the executor. Copies are independent, and so
///          are caches that share an executor: each may be called by a thread of its own, whose stack has 48 KiB or
///          more. A child of fork() may go on with its parent's cache, on the calling thread alone.
template <class Recipe>
using cache = basic_cache<Recipe, cpu::backend<Recipe>>;

TESSERA_NAMESPACE_END
