// The caches of the process behind their handles, and how errors reach Python.
#pragma once

#include <ATen/DeviceGuard.h>
#include <ATen/Parallel.h>
#include <dlfcn.h>
#include <torch/types.h>

#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <string>
#include <tessera/core/error.hpp>
#include <utility>
#include <vector>

#include "pages/any_pages.hpp"

#ifdef TESSERA_TORCH_CUDA
#include "torch_memory.hpp"
#else
namespace tessera_torch {
struct torch_memory {
  device_memory source() { return {}; }
  bool ran_out() { return false; }
};
}  // namespace tessera_torch
#endif

namespace tessera_torch {

using at::Tensor;

struct conversations {
  std::unique_ptr<torch_memory> memory;  // null on the CPU; outlives the cache
  c10::optional<at::Device> device;
  std::unique_ptr<tessera::any_cache> cache;
  decltype(&tessera_torch_copy) copy = nullptr;  // of the library that made the cache
  std::vector<index_t> ids;
  std::vector<bool> in_prompt;
  tessera::batch step;  // the one that was prepared last
  bool prepared = false;
  tessera::model_shape shape;
  c10::optional<Tensor> sinks;  // what shape.sink_logits points to

  conversations(c10::optional<at::Device> where, tessera::model_shape model, c10::optional<Tensor> sink_logits)
      : device(where), shape(std::move(model)), sinks(std::move(sink_logits)) {
    if (device && device->is_cuda()) memory = std::make_unique<torch_memory>();
  }
  device_memory source() { return memory ? memory->source() : device_memory{}; }

  /// The stream that is current, which uses the cache's memory from now on. Null on the CPU.
  void* stream() {
#ifdef TESSERA_TORCH_CUDA
    if (memory) {
      const auto current = c10::cuda::getCurrentCUDAStream(device->index());
      memory->used_by(current);
      return current.stream();
    }
#endif
    return nullptr;
  }
};

/// A method's operations over pages of an engine.
struct engine_pages {
  std::unique_ptr<any_pages> pages;
  index_t q_heads, kv_heads;
  at::ScalarType dtype;
  c10::optional<Tensor> sinks;  // what the shape's sink_logits point to

  bool takes(at::ScalarType given) const { return given == dtype; }
};

/// All caches of the process. One operator runs at a time: the caches share the threads of one executor.
struct registry {
  std::mutex lock;
  std::map<std::int64_t, conversations> all;
  std::map<std::int64_t, engine_pages> pages;
  std::int64_t next = 1;
  std::shared_ptr<tessera::cpu::executor> workers;
  bool ran_out = false;  // whether the operator that runs was refused memory on a device

  static registry& get() {
    static registry* one = new registry;  // never destroyed: Python may free caches while the process ends
    return *one;
  }
  Tensor add(conversations made) {
    all.emplace(next, std::move(made));
    return at::full({1}, next++, at::kLong);
  }
  Tensor add(engine_pages made) {
    pages.emplace(next, std::move(made));
    return at::full({1}, next++, at::kLong);
  }
  std::shared_ptr<tessera::cpu::executor> executor() {
    if (!workers) workers = std::make_shared<tessera::cpu::executor>(at::get_num_threads());
    return workers;
  }
  conversations& find(const Tensor& handle) {
    const auto found = all.find(handle.item<std::int64_t>());
    tessera::require(found != all.end(), "cache", handle.item<std::int64_t>(), "the handle of an open cache",
                     "make a new one");
    return found->second;
  }
  engine_pages& find_pages(const Tensor& handle) {
    const auto found = pages.find(handle.item<std::int64_t>());
    tessera::require(found != pages.end(), "pages", handle.item<std::int64_t>(), "the handle of open ones",
                     "make new ones");
    return found->second;
  }
};

/// Runs `body(registry)` alone. What the library throws reaches Python as ValueError with the library's sentence, memory
/// that ran out as torch.OutOfMemoryError.
template <class Body>
auto guarded(Body&& body) {
  registry& here = registry::get();
  std::lock_guard held(here.lock);
  here.ran_out = false;
  try {
    return body(here);
  } catch (const tessera::error& problem) {
    TORCH_CHECK_WITH(OutOfMemoryError, !here.ran_out, problem.what());
    TORCH_CHECK_VALUE(false, problem.what());
  } catch (const std::bad_alloc&) {
    TORCH_CHECK_WITH(OutOfMemoryError, false, "memory for the cache is used up; free some, and reset the cache");
  }
}

/// Runs `body()`, which may take memory for this cache, on its device.
template <class Body>
auto taking_memory(registry& all, conversations& here, Body&& body) {
  const at::OptionalDeviceGuard device(here.device);
  try {
    return body();
  } catch (...) {
    all.ran_out = here.memory && here.memory->ran_out();
    throw;
  }
}

/// What both kinds of libraries make theirs from; workers, sequences and tokens are to come.
inline cache_request request_of(std::int64_t layers, std::int64_t q_heads, std::int64_t kv_heads,
                                at::IntArrayRef sliding, std::int64_t window, double scale, double soft_cap,
                                c10::optional<std::int64_t> budget, const std::vector<std::string>& settings,
                                const c10::optional<Tensor>& sinks, at::ArrayRef<double> table) {
  cache_request request;
  request.shape = {index_t(layers), index_t(q_heads), index_t(kv_heads), index_t(window), {}};
  if (!sliding.empty()) request.shape.sliding.resize(std::size_t(layers));
  for (const std::int64_t layer : sliding) request.shape.sliding.at(std::size_t(layer)) = true;
  if (sinks) request.shape.sink_logits = sinks->data_ptr<float>();
  request.rule.scale = float(scale);
  request.rule.soft_cap = float(soft_cap);
  if (budget) request.budget = index_t(*budget);
  for (std::size_t i = 0; i + 1 < settings.size(); i += 2) request.settings.push_back({settings[i], settings[i + 1]});
  if (!table.empty()) request.table = std::make_shared<const std::vector<double>>(table.vec());
  return request;
}

/// The stream that is current on a tensor's device. Null on the CPU.
inline void* current_stream([[maybe_unused]] const Tensor& of) {
#ifdef TESSERA_TORCH_CUDA
  if (of.is_cuda()) return c10::cuda::getCurrentCUDAStream(of.device().index()).stream();
#endif
  return nullptr;
}

template <class Function>
Function symbol_of(const std::string& library, const char* name) {
  void* loaded = dlopen(library.c_str(), RTLD_NOW | RTLD_LOCAL);
  tessera::require(loaded != nullptr, "library", loaded ? "" : dlerror(), "one that the loader takes",
                   "delete it: it is built again");
  void* found = dlsym(loaded, name);
  tessera::require(found != nullptr, "library " + library, "without " + std::string(name), "a recipe's library",
                   "make it with TESSERA_TORCH_RECIPE");
  return reinterpret_cast<Function>(found);
}

}  // namespace tessera_torch
