// What the benchmarks of a whole model share: its shape, clocks, and a record of what was measured.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "engine/cuda/device.hpp"
#include "engine/cuda/model.hpp"
#include "tessera/core/error.hpp"
#include "tool/methods/registry.hpp"
#include "tool/methods/values.hpp"

namespace model_bench {

using engine::cuda::check;
using tessera::index_t;

/// Llama-3.1-8B, or as many layers of it.
inline engine::llama_config llama_8b(int layers) {
  engine::llama_config config{};
  config.hidden_size = 4096;
  config.intermediate_size = 14336;
  config.num_hidden_layers = layers;
  config.num_attention_heads = 32;
  config.num_key_value_heads = 8;
  config.head_dim = 128;
  config.vocab_size = 128256;
  config.max_position_embeddings = 1 << 24;  // no limit here
  config.rms_norm_eps = 1e-5f;
  config.rope_theta = 5e5;
  config.rope_scaling = engine::llama3_rope{8, 1, 4, 8192};
  return config;
}

inline std::vector<index_t> parse_counts(const std::string& name, const std::string& value) {
  std::vector<index_t> counts;
  for (const auto& text : tool::parse_list(name, value)) counts.push_back(index_t(tool::parse_count(name, text, 1)));
  return counts;
}

/// Options in pairs of a name and a value; take(name, value) is told each. Errors: a name alone.
template <class Take>
void parse_pairs(int count, char** arguments, const Take& take) {
  for (int i = 1; i < count; i += 2) {
    const std::string name = arguments[i];
    tessera::require(i + 1 < count, name, "without a value", "a value", "pass --name value");
    take(name, std::string(arguments[i + 1]));
  }
}

/// Bytes of the device that are not free.
inline double used_bytes() {
  std::size_t free = 0, total = 0;
  check(cudaMemGetInfo(&free, &total), "cudaMemGetInfo");
  return double(total - free);
}

inline double now_ms() {
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

/// Tokens of any ids, the same for the same seed.
inline std::vector<engine::token_t> random_prompt(index_t tokens, std::uint64_t seed) {
  std::vector<engine::token_t> prompt;
  prompt.reserve(std::size_t(tokens));
  for (index_t i = 0; i < tokens; ++i) {
    seed += 0x9e3779b97f4a7c15u;
    std::uint64_t word = (seed ^ (seed >> 30)) * 0xbf58476d1ce4e5b9u;
    word = (word ^ (word >> 27)) * 0x94d049bb133111ebu;
    prompt.push_back(engine::token_t((word ^ (word >> 31)) % 128256));
  }
  return prompt;
}

/// Entries as Google Benchmark writes them, in a file that is whole after each.
class record {
 public:
  record(const std::string& program, const std::string& model, const std::string& time, std::string file)
      : file_(std::move(file)) {
    cudaDeviceProp device{};
    int driver = 0, runtime = 0;
    check(cudaGetDeviceProperties(&device, 0), "cudaGetDeviceProperties");
    check(cudaDriverGetVersion(&driver), "cudaDriverGetVersion");
    check(cudaRuntimeGetVersion(&runtime), "cudaRuntimeGetVersion");
    all_["context"] = {
        {"executable", program},
        {"device", std::string(device.name) + ", " + std::to_string(device.multiProcessorCount) + " multiprocessors"},
        {"driver", driver},
        {"runtime", runtime},
        {"model", model},
        {"time", time}};
    all_["benchmarks"] = nlohmann::ordered_json::array();
  }

  /// `more`: what else the entry says.
  void add(const std::string& name, double ms, const nlohmann::ordered_json& more) {
    nlohmann::ordered_json made{{"name", name},    {"run_name", name}, {"run_type", "iteration"}, {"iterations", 1},
                                {"real_time", ms}, {"cpu_time", ms},   {"time_unit", "ms"}};
    made.update(more);
    all_["benchmarks"].push_back(made);
    if (!file_.empty()) std::ofstream(file_) << all_.dump(1) << "\n";
  }

 private:
  std::string file_;
  nlohmann::ordered_json all_;
};

/// Runs `body`; false and a line with the reason where it throws.
template <class Body>
bool attempt(const std::string& name, const Body& body) {
  try {
    body();
    return true;
  } catch (const tessera::error& problem) {
    std::printf("%-28s %s\n", name.c_str(), problem.what());
    std::fflush(stdout);
    return false;
  }
}

/// What a benchmark's main returns: 0, or 1 where rows have no figure. `run()` returns how many.
template <class Run>
int exit_status(const char* program, const Run& run) {
  try {
    engine::cuda::require_device();
    const int missing = run();
    if (missing == 0) return 0;
    std::fprintf(stderr, "%s: %d rows have no figure; the reasons stand above\n", program, missing);
    return 1;
  } catch (const std::exception& problem) {
    std::fprintf(stderr, "%s: %s\n", program, problem.what());
    return 2;
  }
}

}  // namespace model_bench
