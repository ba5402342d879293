// The numbers that decode attention is tuned by, and the shared memory that they take.
#pragma once

#include "../../device/copy.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {

/// How a block of the decode kernel stages K and V.
struct decode_tuning {
  int warps = 8;    ///< of a block; each stages and reads tiles of its own
  int tokens = 16;  ///< of a warp's tile, 16 or 32
  int stages = 3;   ///< tiles of a warp's ring, one of which is being read
  int blocks = 1;   ///< wanted on a multiprocessor
};

namespace detail {

inline constexpr int rows_per_block = 16;  // query rows of a matrix product

TESSERA_HD constexpr int stage_bytes(const decode_tuning& tuning, int k_dim, int v_dim) {
  return tuning.tokens * (staged_rows{k_dim / 8}.bytes() + staged_rows{v_dim / 8}.bytes());
}
/// Floats of one partial output row in shared memory: 8 apart modulo the 32 banks.
TESSERA_HD constexpr int merge_pitch(int v_dim) { return v_dim + 8; }
/// One warp's ring, which its partial output takes over at the end.
TESSERA_HD constexpr int warp_bytes(const decode_tuning& tuning, int k_dim, int v_dim) {
  const int ring = tuning.stages * stage_bytes(tuning, k_dim, v_dim);
  const int merge = rows_per_block * (merge_pitch(v_dim) * 4 + 8);
  return ((ring > merge ? ring : merge) + 127) / 128 * 128;
}
TESSERA_HD constexpr int decode_shared_bytes(const decode_tuning& tuning, int k_dim, int v_dim) {
  return tuning.warps * warp_bytes(tuning, k_dim, v_dim);
}

/// What the device code of this pass is compiled for; the host asks the loaded kernel (`cudaFuncAttributes::ptxVersion`).
#ifdef __CUDA_ARCH__
inline constexpr int compiled_capability = __CUDA_ARCH__ / 10;
#else
inline constexpr int compiled_capability = 90;
#endif

}  // namespace detail

/// Tuned on sm_90 (H200, CUDA 13.0); the others follow from their shared memory and have not been timed.
TESSERA_HD constexpr decode_tuning decode_tuning_for(int k_dim, int v_dim, int compute_capability) {
  // Bytes that rings may take on one multiprocessor; the rest is 4 KiB of row ends, as much of a merge's shares, and the
  // system's.
  const bool small = compute_capability == 86 || compute_capability == 89 || compute_capability >= 120;
  const int shared = (small ? 89 : compute_capability < 89 ? 152 : 212) * 1024;
  decode_tuning tuning;
  tuning.tokens = k_dim + v_dim <= 128 ? 32 : 16;
  for (tuning.warps = 8; tuning.warps > 1; tuning.warps /= 2) {
    for (tuning.stages = 4; tuning.stages > (tuning.warps == 8 ? 2 : 1); --tuning.stages) {
      if (detail::decode_shared_bytes(tuning, k_dim, v_dim) <= shared) return tuning;
    }
  }
  return tuning;
}

}  // namespace cuda
TESSERA_NAMESPACE_END
