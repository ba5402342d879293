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
template class tessera::cuda::cache<everything, bf16>;
