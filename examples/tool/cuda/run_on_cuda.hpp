// The CUDA engine as the tool runs it.
#pragma once

#include <filesystem>
#include <memory>

#include "tool/backend.hpp"

namespace tool {

/// Errors: this machine has no CUDA device that can be used.
void require_cuda_device();

/// Loads a model's weights to the device. Errors: see engine::cuda::llama.
std::unique_ptr<runner> run_on_cuda(const std::filesystem::path& folder);

}  // namespace tool
