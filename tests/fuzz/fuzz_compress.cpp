// Any bytes as the input of `tessera compress`: a result, or a tessera::error.
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <tessera/core/error.hpp>

#include "engine/files/safetensors.hpp"
#include "tool/compress.hpp"
#include "tool/methods/registry.hpp"

namespace {

// Larger inputs find nothing that smaller ones do not, and accumulating scores is quadratic in the tokens.
constexpr std::size_t most_bytes = std::size_t(1) << 16;

std::int64_t tokens_in(const engine::safetensors_file& file) {
  std::int64_t most = 0;
  for (const auto& [name, tensor] : file.tensors()) {
    for (const std::int64_t size : tensor.shape) most = std::max(most, size);
  }
  return most;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size < 2 || size > most_bytes) return 0;
  static const auto workers = std::make_shared<tessera::cpu::executor>(1);
  // The first two bytes choose the method, whether its scores are written, and its budget; the rest is the file.
  const auto& method = tool::methods()[data[0] % tool::methods().size()];
  tool::compress_options options;
  options.method = method.name;
  options.budget = tessera::index_t(data[1]);
  options.workers = workers;
  options.scores = method.ranks && data[0] / tool::methods().size() % 2 == 1;
  for (const auto& parameter : method.parameters) {
    if (parameter.name == "window") options.settings.push_back({"window", std::to_string(data[1] / 4)});
  }
  try {
    const auto file = engine::safetensors_file::parse(std::as_bytes(std::span(data + 2, size - 2)));
    if (tokens_in(file) > 4096) return 0;
    (void)tool::compress(file, options);
  } catch (const tessera::error&) {
  }
  return 0;
}
