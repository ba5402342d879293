// A whole decode step of a model of Llama-3.1-8B's shape with random weights: time between tokens and device memory by
// context and method, through the example engine and the tool's caches. One conversation, or several at once; bf16.
//
//   bench_decode_step [--methods full,snapkv] [--budget 2048] [--contexts 32768,131072] [--steps 50] [--batch 1]
//                     [--prompts 2048,32768] [--json FILE]
//
// The prompt's keys and values are random numbers that are put into the cache without running the model over them; then
// every step runs the whole model: one graph launch a token, timed from the host's call to the next token on the host.
// With --prompts nothing is decoded: the model runs over prompts of such lengths, from the host's call to the logits.
// Contexts whose cache would not fit beside the weights are measured with 8 and with 4 layers and continued to 32 by a
// straight line; their entries say so.
#include <cuda_runtime.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <fstream>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "engine/cuda/device.hpp"
#include "engine/cuda/model.hpp"
#include "engine/cuda/ops.hpp"
#include "tessera/core/error.hpp"
#include "tool/backend.hpp"
#include "tool/methods/registry.hpp"
#include "tool/methods/values.hpp"

namespace {

using engine::cuda::check;
using tessera::index_t;

constexpr int few_layers = 8, fewer_layers = 4;

engine::llama_config llama_8b(int layers) {
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

struct options {
  std::vector<std::string> methods{"full", "snapkv", "exact_topk"};
  std::vector<index_t> contexts{1024, 32768, 65536, 131072, 262144, 524288, 1048576};
  index_t budget = 2048;
  int steps = 50, layers = 32, batch = 1;
  std::vector<index_t> prompts;
  std::string json;
};

std::vector<index_t> parse_counts(const std::string& name, const std::string& value) {
  std::vector<index_t> counts;
  for (const auto& text : tool::parse_list(name, value)) counts.push_back(index_t(tool::parse_count(name, text, 1)));
  return counts;
}

options parse(int count, char** arguments) {
  options given;
  for (int i = 1; i < count; i += 2) {
    const std::string name = arguments[i];
    tessera::require(i + 1 < count, name, "without a value", "a value", "pass --name value");
    const std::string value = arguments[i + 1];
    if (name == "--methods") {
      given.methods = tool::parse_list(name, value);
    } else if (name == "--contexts") {
      given.contexts = parse_counts(name, value);
    } else if (name == "--prompts") {
      given.prompts = parse_counts(name, value);
    } else if (name == "--budget") {
      given.budget = index_t(tool::parse_count(name, value, 1));
    } else if (name == "--steps") {
      given.steps = int(tool::parse_count(name, value, 3, 100000));
    } else if (name == "--layers") {
      given.layers = int(tool::parse_count(name, value, fewer_layers, 32));
    } else if (name == "--batch") {
      given.batch = int(tool::parse_count(name, value, 1, 8));
    } else if (name == "--json") {
      given.json = value;
    } else {
      tessera::fail("option", name, "--methods, --contexts, --prompts, --budget, --steps, --layers, --batch or --json",
                    "see this file's head");
    }
  }
  return given;
}

double used_bytes() {
  std::size_t free = 0, total = 0;
  check(cudaMemGetInfo(&free, &total), "cudaMemGetInfo");
  return double(total - free);
}

double now_ms() {
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

struct measured {
  double median_ms = 0, fastest_ms = 0, slowest_ms = 0, prefill_end_ms = 0;
  double peak_bytes = 0;   ///< device memory in use over what was in use before the cache, plus the weights
  double cache_bytes = 0;  ///< what the cache says it holds after the prompt
  double full_bytes = 0, read_bytes = 0;
};

/// A cache whose reads nobody counts: counting asks the device for the lengths of every layer after each step.
class uncounted final : public engine::cuda::kv_cache {
 public:
  explicit uncounted(engine::cuda::kv_cache& cache) : cache_(cache) {}

  engine::cuda::element type() const override { return cache_.type(); }
  int conversations() const override { return cache_.conversations(); }
  void select(int conversation) override { cache_.select(conversation); }
  void reserve(std::int64_t tokens, cudaStream_t stream) override { cache_.reserve(tokens, stream); }
  void prefill(int layer, const void* q, const void* k, const void* v, int tokens, float* out,
               cudaStream_t stream) override {
    cache_.prefill(layer, q, k, v, tokens, out, stream);
  }
  void observe(int layer, const void* q, const void* k, const void* v, int tokens, cudaStream_t stream) override {
    cache_.observe(layer, q, k, v, tokens, stream);
  }
  void end_prefill(cudaStream_t stream) override { cache_.end_prefill(stream); }
  void begin_step(int tokens, cudaStream_t stream) override { cache_.begin_step(tokens, stream); }
  int step_actions() const override { return cache_.step_actions(); }
  void begin_step_on_device(int tokens, cudaStream_t stream) override { cache_.begin_step_on_device(tokens, stream); }
  void decode(int layer, const void* q, const void* k, const void* v, int tokens, float* out,
              cudaStream_t stream) override {
    cache_.decode(layer, q, k, v, tokens, out, stream);
  }
  const std::int32_t* step_position() const override { return cache_.step_position(); }
  std::int64_t next_position() const override { return cache_.next_position(); }

 private:
  engine::cuda::kv_cache& cache_;
};

/// Puts random keys and values of a prompt into every layer. The queries are those that the method looks at. Of a text in
/// `segments` one of 20 tokens ends one.
void fill_prompt(engine::cuda::kv_cache& cache, const engine::llama_config& config, index_t context, bool segments,
                 cudaStream_t stream) {
  constexpr index_t chunk = 8192;
  const auto rows = std::size_t(std::min(chunk, context));
  engine::cuda::device_array<tessera::bf16> q(rows * std::size_t(config.q_size())),
      k(rows * std::size_t(config.kv_size())), v(rows * std::size_t(config.kv_size()));
  cache.reserve(context, stream);
  std::uint64_t seed = 1;
  for (index_t done = 0; done < context; done += chunk) {
    const index_t tokens = std::min(chunk, context - done);
    std::vector<std::uint8_t> ends(segments ? std::size_t(tokens) : 0);
    for (std::size_t i = 0; i < ends.size(); ++i) ends[i] = ((std::uint64_t(done) + i) * 2654435761u >> 12) % 20 == 0;
    cache.begin_chunk(ends);
    engine::cuda::fill_random(q.data(), cache.type(), std::int64_t(q.size()), 1.7f, seed++, stream);
    for (int layer = 0; layer < config.num_hidden_layers; ++layer) {
      engine::cuda::fill_random(k.data(), cache.type(), std::int64_t(k.size()), 1.7f, seed++, stream);
      engine::cuda::fill_random(v.data(), cache.type(), std::int64_t(v.size()), 1.7f, seed++, stream);
      cache.observe(layer, q.data(), k.data(), v.data(), tokens, stream);
    }
  }
  check(cudaStreamSynchronize(stream), "filling the cache");
}

tool::cache_request request_of(const engine::llama_config& config, const tool::method_info& method, index_t context,
                               const options& given) {
  tool::cache_request request;
  request.shape = {config.num_hidden_layers, config.num_attention_heads, config.num_key_value_heads};
  request.head_dim = config.head_dim;
  request.element = tool::element_type::bf16;
  if (method.has_budget) request.budget = given.budget;
  request.conversations = given.batch;
  request.tokens = context + index_t(given.steps) + 10;
  // What RocketKV keeps of these contexts is far less than the context: its index need not be made for all of it.
  if (method.name == "rocketkv") request.index_tokens = std::min<index_t>(request.tokens, 16384);
  return request;
}

/// The time of a whole prompt of random tokens, the second of two: the first one loads kernels. In the tool's chunks.
double prompt_ms(engine::cuda::llama& model, const tool::method_info& method, index_t tokens, const options& given) {
  std::vector<engine::token_t> prompt;
  for (index_t i = 0; i < tokens; ++i) prompt.push_back(engine::token_t(1 + std::int64_t(i) * 7919 % 100000));
  engine::prefill_options in_chunks;
  in_chunks.chunk = 2048;
  double time = 0;
  for (int run = 0; run < 2; ++run) {
    const auto cache = tool::make_cache(method, tool::backend::cuda, request_of(model.config(), method, tokens, given));
    const double begin = now_ms();
    cache->announce(tokens);
    model.prefill(prompt, *cache->on_device(), in_chunks);
    time = now_ms() - begin;
  }
  return time;
}

measured measure(engine::cuda::llama& model, const tool::method_info& method, index_t context, const options& given) {
  const engine::llama_config& config = model.config();
  const tool::cache_request request = request_of(config, method, context, given);
  const double before = used_bytes();
  const auto cache = tool::make_cache(method, tool::backend::cuda, request);
  engine::cuda::kv_cache& on_device = *cache->on_device();
  measured result;
  double most = used_bytes();
  for (int conversation = 0; conversation < given.batch; ++conversation) {
    on_device.select(conversation);
    fill_prompt(on_device, config, context, method.needs_segments, model.stream());
    const double start = now_ms();
    on_device.end_prefill(model.stream());
    check(cudaStreamSynchronize(model.stream()), "ending the prompt");
    result.prefill_end_ms += now_ms() - start;
  }
  most = std::max(most, used_bytes());
  result.cache_bytes = double(cache->bytes());
  result.full_bytes = double(cache->full_bytes(context)) * given.batch;

  std::vector<double> times;
  std::vector<engine::token_t> tokens(std::size_t(given.batch), 1);
  uncounted timed(on_device);
  for (int step = 0; step < given.steps + 5; ++step) {  // the first ones load kernels and record the graph
    const double begin = now_ms();
    tokens = model.next(tokens, timed);
    times.push_back(now_ms() - begin);
  }
  most = std::max(most, used_bytes());
  model.next(tokens, on_device);
  times.erase(times.begin(), times.begin() + 5);
  std::sort(times.begin(), times.end());
  result.median_ms = times[times.size() / 2];
  result.fastest_ms = times.front();
  result.slowest_ms = times.back();
  result.read_bytes = double(cache->reads().bytes) / cache->reads().steps;
  result.peak_bytes = most - before + double(model.weight_bytes());
  return result;
}

/// The straight line through two numbers of layers, at `layers`.
double continued(double few, double fewer, int layers) {
  const double slope = (few - fewer) / (few_layers - fewer_layers);
  return few + slope * (layers - few_layers);
}

/// The fastest and the slowest step are left out: a line through two extremes means nothing.
measured extrapolated(const measured& few, const measured& fewer, int layers) {
  measured result;
  for (const auto member : {&measured::median_ms, &measured::prefill_end_ms, &measured::peak_bytes,
                            &measured::cache_bytes, &measured::full_bytes, &measured::read_bytes})
    result.*member = continued(few.*member, fewer.*member, layers);
  return result;
}

/// Whether weights and an uncompressed cache of so many tokens fit, with a margin for what the method needs.
bool fits(int layers, index_t context, int batch) {
  std::size_t free = 0, total = 0;
  check(cudaMemGetInfo(&free, &total), "cudaMemGetInfo");
  const double weights = 2.2e9 + layers * 436.3e6,
               cache = (layers + 1.0) * context * batch * (8.0 * (2 * 128 * 2 + 8)) * 1.02;
  return weights + cache + 6e9 < double(total);
}

std::string text_of(const cudaDeviceProp& device) {
  return std::string(device.name) + ", " + std::to_string(device.multiProcessorCount) + " multiprocessors";
}

nlohmann::ordered_json entry(const std::string& name, const measured& found, bool is_extrapolated, int layers) {
  nlohmann::ordered_json made{{"name", name},
                              {"run_name", name},
                              {"run_type", "iteration"},
                              {"iterations", 1},
                              {"real_time", found.median_ms},
                              {"cpu_time", found.median_ms},
                              {"time_unit", "ms"}};
  if (!is_extrapolated) {
    made["fastest_ms"] = found.fastest_ms;
    made["slowest_ms"] = found.slowest_ms;
  }
  made["end_of_prompt_ms"] = found.prefill_end_ms;
  made["peak_bytes"] = found.peak_bytes;
  made["cache_bytes"] = found.cache_bytes;
  made["full_cache_bytes"] = found.full_bytes;
  made["bytes_read_per_step"] = found.read_bytes;
  made["layers"] = layers;
  made["extrapolated"] = is_extrapolated;
  return made;
}

void run(const options& given) {
  engine::cuda::require_device();
  cudaDeviceProp device{};
  int driver = 0, runtime = 0;
  check(cudaGetDeviceProperties(&device, 0), "cudaGetDeviceProperties");
  check(cudaDriverGetVersion(&driver), "cudaDriverGetVersion");
  check(cudaRuntimeGetVersion(&runtime), "cudaRuntimeGetVersion");
  nlohmann::ordered_json all;
  all["context"] = {
      {"executable", "bench_decode_step"},
      {"device", text_of(device)},
      {"driver", driver},
      {"runtime", runtime},
      {"model", "Llama-3.1-8B shapes, random bf16 weights, batch " + std::to_string(given.batch) + ", " +
                    std::to_string(given.layers) + " layers"},
      {"time", "median over " + std::to_string(given.steps) + " steps, host to host, one graph launch each"}};
  all["benchmarks"] = nlohmann::ordered_json::array();
  std::printf("%-28s %10s %10s %10s %9s %9s %9s\n", "method/context", "ms/token", "fastest", "slowest", "peak GiB",
              "cache GiB", "read GiB");
  const auto report = [&](const std::string& name, const measured& found, bool is_extrapolated) {
    constexpr double gib = 1 << 30;
    const auto ms = [&](double value) {
      return is_extrapolated ? std::string("-") : std::to_string(value).substr(0, 6);
    };
    std::printf("%-28s %10.3f %10s %10s %9.2f %9.2f %9.3f%s\n", name.c_str(), found.median_ms,
                ms(found.fastest_ms).c_str(), ms(found.slowest_ms).c_str(), found.peak_bytes / gib,
                found.cache_bytes / gib, found.read_bytes / gib,
                is_extrapolated ? "  extrapolated from 8 and 4 layers" : "");
    std::fflush(stdout);
    all["benchmarks"].push_back(entry(name, found, is_extrapolated, given.layers));
    if (!given.json.empty()) std::ofstream(given.json) << all.dump(1) << "\n";
  };
  const auto name_of = [&](const tool::method_info& method, index_t context) {
    return method.name + (method.has_budget ? "_" + std::to_string(given.budget) : "") + "/" + std::to_string(context) +
           (given.batch > 1 ? "/B" + std::to_string(given.batch) : "");
  };
  const auto attempt = [&](const std::string& name, const auto& body) {
    try {
      body();
    } catch (const tessera::error& problem) {
      std::printf("%-28s %s\n", name.c_str(), problem.what());
      std::fflush(stdout);
    }
  };

  if (!given.prompts.empty()) {
    auto model = engine::cuda::llama::random(llama_8b(given.layers), 1);
    for (const index_t tokens : given.prompts) {
      for (const std::string& method : given.methods) {
        const std::string name = "prompt/" + method + "/" + std::to_string(tokens);
        attempt(name, [&] {
          measured found;
          found.median_ms = prompt_ms(model, tool::find_method(method), tokens, given);
          report(name, found, false);
        });
      }
    }
    return;
  }
  std::vector<std::pair<const tool::method_info*, index_t>> later;
  {
    auto model = engine::cuda::llama::random(llama_8b(given.layers), 1);
    for (const index_t context : given.contexts) {
      for (const std::string& name : given.methods) {
        const tool::method_info& method = tool::find_method(name);
        if (!fits(given.layers, context, given.batch)) {
          later.push_back({&method, context});
          continue;
        }
        attempt(name_of(method, context),
                [&] { report(name_of(method, context), measure(model, method, context, given), false); });
      }
    }
  }
  if (later.empty()) return;
  std::vector<measured> fewer(later.size()), few(later.size());
  std::vector<bool> done(later.size(), false);
  for (const int layers : {fewer_layers, few_layers}) {
    auto model = engine::cuda::llama::random(llama_8b(layers), 1);
    for (std::size_t i = 0; i < later.size(); ++i) {
      attempt(name_of(*later[i].first, later[i].second), [&] {
        (layers == few_layers ? few : fewer)[i] = measure(model, *later[i].first, later[i].second, given);
        done[i] = layers == few_layers && fewer[i].median_ms > 0;
      });
    }
  }
  for (std::size_t i = 0; i < later.size(); ++i) {
    if (done[i]) {
      report(name_of(*later[i].first, later[i].second), extrapolated(few[i], fewer[i], given.layers), true);
    }
  }
}

}  // namespace

int main(int count, char** arguments) {
  try {
    run(parse(count, arguments));
    return 0;
  } catch (const std::exception& problem) {
    std::fprintf(stderr, "bench_decode_step: %s\n", problem.what());
    return 2;
  }
}
