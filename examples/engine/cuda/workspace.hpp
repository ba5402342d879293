// Memory that passes of a model over tokens work in.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <tessera/core/error.hpp>
#include <type_traits>
#include <vector>

#include "device.hpp"
#include "engine/config.hpp"
#include "model.hpp"

namespace engine::cuda {

/// Working memory for so many rows.
struct workspace {
  std::int32_t rows = 0;
  device_array<token_t> tokens;
  device_array<float> hidden, qkv, attended, gate_up;
  device_array<bf16> normed, q, k, v, rounded, activated;

  workspace() = default;
  workspace(const llama_config& config, std::int32_t count) : rows(count) {
    const auto make = [count](auto& array, std::int32_t width) {
      array = std::remove_reference_t<decltype(array)>(std::size_t(count) * std::size_t(width));
    };
    make(tokens, 1);
    make(hidden, config.hidden_size);
    make(normed, config.hidden_size);
    make(qkv, config.q_size() + 2 * config.kv_size());
    make(q, config.q_size());
    make(k, config.kv_size());
    make(v, config.kv_size());
    make(attended, config.q_size());
    make(rounded, config.q_size());
    make(gate_up, 2 * config.intermediate_size);
    make(activated, config.intermediate_size);
  }
};

/// What a pass over rows of several conversations needs beside it: the rows' positions, and of the rows whose next tokens are
/// wanted, hidden states, logits and best tokens. It grows.
struct packed_workspace {
  device_array<std::int32_t> positions;
  device_array<float> hidden, logits;
  device_array<token_t> best;

  void make_room(const llama_config& config, std::size_t rows, std::size_t wanted) {
    if (positions.size() < rows) positions = device_array<std::int32_t>(rows);
    if (best.size() >= wanted) return;
    hidden = {}, logits = {}, best = {};  // frees the old ones first
    hidden = device_array<float>(wanted * std::size_t(config.hidden_size));
    logits = device_array<float>(wanted * std::size_t(config.vocab_size));
    best = device_array<token_t>(wanted);
  }
  void fetch_best(std::vector<token_t>& tokens, cudaStream_t stream) const {
    check(cudaMemcpyAsync(tokens.data(), best.data(), tokens.size() * sizeof(token_t), cudaMemcpyDeviceToHost, stream),
          "cudaMemcpyAsync");
  }
  /// Copies the wanted rows of `states` [rows, width] side by side into `hidden`; neighbours together.
  void gather(const float* states, std::span<const std::int32_t> wanted, std::int32_t width, cudaStream_t stream) {
    for (std::size_t i = 0, end; i < wanted.size(); i = end) {
      for (end = i + 1; end < wanted.size() && wanted[end] == wanted[end - 1] + 1;) ++end;
      check(cudaMemcpyAsync(hidden.data() + i * std::size_t(width), states + std::int64_t(wanted[i]) * width,
                            (end - i) * std::size_t(width) * sizeof(float), cudaMemcpyDeviceToDevice, stream),
            "cudaMemcpyAsync");
    }
  }
};

/// Errors   no tokens, or other ones than the model's; a position for another number of them; wanted rows that do not ascend.
inline void require_packed(const llama_config& config, const packed_rows& rows) {
  const auto require_rows = [&](bool holds, const char* what, std::int64_t given, const std::string& allowed) {
    tessera::require(holds, what, given, allowed, "pass the rows of one pass");
  };
  require_rows(!rows.tokens.empty() && rows.positions.size() == rows.tokens.size(), "positions of a pass",
               std::int64_t(rows.positions.size()), "one for each of its tokens, at least 1");
  for (const token_t token : rows.tokens) {
    if (token < 0 || token >= config.vocab_size)
      tessera::fail("token id", token, "below " + std::to_string(config.vocab_size),
                    "pass ids of the model's vocabulary");
  }
  std::int64_t before = -1;
  for (const std::int32_t row : rows.wanted) {
    require_rows(row > before && std::size_t(row) < rows.tokens.size(), "wanted row", row,
                 "rows of the pass, ascending");
    before = row;
  }
}

}  // namespace engine::cuda
