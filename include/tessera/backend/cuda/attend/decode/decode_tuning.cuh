// The numbers that decode attention is tuned by, how it stages rows, and the shared memory that they take.
#pragma once

#include <type_traits>

#include "../../../../core/views.hpp"
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

/// How a view's rows lie in shared memory: as they are stored, fp8 with its scales behind it; or, of any other
/// encoding, decoded.
template <class View>
struct decode_format {
  using encoding_type = typename View::encoding_type;
  using stored_type = typename encoding_type::stored_type;
  static constexpr bool is_fp8 = std::is_same_v<stored_type, fp8>, decoded = !View::is_raw && !is_fp8;
  static constexpr bool scaled = is_fp8 && encoding_type::scaled;
  static constexpr int element_bytes = is_fp8 ? 1 : 2;
  static constexpr staged_rows k_rows{View::k_dim * element_bytes / 16}, v_rows{View::v_dim * element_bytes / 16};
  static constexpr int row_bytes = (View::k_dim + View::v_dim) * element_bytes;  // K and V, without padding
  static constexpr int token_bytes = k_rows.bytes() + v_rows.bytes() + (scaled ? 2 * int(sizeof(float)) : 0);
};

template <class View>
TESSERA_HD constexpr int stage_bytes(const decode_tuning& tuning) {
  return tuning.tokens * decode_format<View>::token_bytes;
}
/// Floats of one partial output row in shared memory: 8 apart modulo the 32 banks.
TESSERA_HD constexpr int merge_pitch(int v_dim) { return v_dim + 8; }
/// One warp's ring, which its partial output takes over at the end.
template <class View>
TESSERA_HD constexpr int warp_bytes(const decode_tuning& tuning) {
  const int ring = tuning.stages * stage_bytes<View>(tuning);
  const int merge = rows_per_block * (merge_pitch(View::v_dim) * 4 + 8);
  return ((ring > merge ? ring : merge) + 127) / 128 * 128;
}
template <class View>
TESSERA_HD constexpr int decode_shared_bytes(const decode_tuning& tuning) {
  return tuning.warps * warp_bytes<View>(tuning);
}

/// What the device code of this pass is compiled for; the host asks the loaded kernel
/// (`cudaFuncAttributes::ptxVersion`).
#ifdef __CUDA_ARCH__
inline constexpr int compiled_capability = __CUDA_ARCH__ / 10;
#else
inline constexpr int compiled_capability = 90;
#endif

}  // namespace detail

/// Tuned on sm_90 (H200, CUDA 13.0); the others follow from their shared memory and have not been timed.
template <class View>
TESSERA_HD constexpr decode_tuning decode_tuning_for(int compute_capability) {
  // Bytes that rings may take on one multiprocessor; the rest is 4 KiB of row ends, as much of a merge's shares, and
  // the system's.
  const bool small_chip = compute_capability == 86 || compute_capability == 89 || compute_capability >= 120;
  const int shared = (small_chip ? 89 : compute_capability < 89 ? 152 : 212) * 1024;
  decode_tuning tuning;
  tuning.tokens = detail::decode_format<View>::row_bytes <= 256 ? 32 : 16;
  for (tuning.warps = 8; tuning.warps > 1; tuning.warps /= 2) {
    for (tuning.stages = 4; tuning.stages > (tuning.warps == 8 ? 2 : 1); --tuning.stages) {
      if (detail::decode_shared_bytes<View>(tuning) <= shared) return tuning;
    }
  }
  return tuning;
}

namespace detail {

/// The tuning of the code that is being compiled.
template <class View>
struct decode_config {
  static constexpr decode_tuning tuning = decode_tuning_for<View>(compiled_capability);
  static constexpr int warps = tuning.warps, tokens = tuning.tokens, stages = tuning.stages;
  static constexpr int threads = warps * 32, tile = warps * tokens;
};

}  // namespace detail
}  // namespace cuda
TESSERA_NAMESPACE_END
