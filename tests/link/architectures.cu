// Every kernel of a cache, compiled for every architecture that the headers promise. Nothing runs.
#include <tessera/attention/gathered_decode.hpp>
#include <tessera/backend/cuda/cache.cuh>
#include <tessera/budget/adaptive.hpp>
#include <tessera/layout/dense.hpp>
#include <tessera/schedule/once.hpp>
#include <tessera/scorer/exact_score.hpp>
#include <tessera/scorer/observation_window.hpp>
#include <tessera/selector/top_tokens.hpp>

using namespace tessera;
using everything = recipe<retain<observation_window, adaptive, top_tokens>, dense<bf16, 128>,
                          retrieve<exact_score, top_tokens>, gathered_decode, once>;

/// Makes every call of the cache, so that all of its kernels are compiled.
void make_every_call(cuda::cache<everything, bf16>& kv, const rows_view<const bf16>& rows, const rows_view<bf16>& out,
                     cudaStream_t stream) {
  const index_t id = kv.open(stream);
  kv.reserve(id, 1, stream);
  kv.prefill(0, id, rows, rows, rows, stream);
  kv.prefill_attention(0, id, rows, out, {}, stream);
  kv.end_layer(0, id, stream);
  kv.end_prefill(id, stream);
  const batch step = kv.prepare_step({id}, 1, stream);
  kv.begin_step(step, stream);
  kv.decode(0, step, rows, rows, rows, out, {}, stream);
  kv.close(kv.fork(id, stream), stream);
  kv.set_budget(64, stream);
}
