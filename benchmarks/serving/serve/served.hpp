// What the program asks of a method, and what it gets.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "engine/cuda/model.hpp"
#include "requests.hpp"
#include "residents.hpp"
#include "statistics.hpp"

namespace serving {

struct serving_case {
  engine::cuda::llama& model;
  const std::vector<conversation>& conversations;
  double memory = 0;  ///< bytes of the device for everything that a cache takes
  double share = 0;   ///< of the tokens, for methods with a budget
  scheduler_options options{};
  /// Called behind each pass: figures, running and waiting conversations.
  std::function<void(const serving_statistics&, int, int)> show{};
};

struct outcome {
  serving_statistics counts;
  tessera::index_t sequences = 0;  ///< that the cache was made for
  double pool_bytes = 0;           ///< of the pages
  double other_bytes = 0;          ///< of the rest of the cache when it was made: indexes, packed rows, tables, scratch
  double most_bytes = 0;           ///< that the cache took in all at any time, seen behind passes
  double peak_pool_bytes = 0;      ///< of pages in use
  double launch_seconds = 0;       ///< until the host had launched passes without a chunk, all together
};

outcome serve_full(const serving_case& given);
outcome serve_snapkv(const serving_case& given);
outcome serve_tangram(const serving_case& given);
outcome serve_rocketkv_mt(const serving_case& given);
outcome serve_mosaickv(const serving_case& given);

struct served_method {
  const char* name;
  outcome (*serve)(const serving_case&);
};
inline const std::vector<served_method>& served_methods() {
  static const std::vector<served_method> all{{"full", serve_full},
                                              {"snapkv", serve_snapkv},
                                              {"tangram", serve_tangram},
                                              {"rocketkv_mt", serve_rocketkv_mt},
                                              {"mosaickv", serve_mosaickv}};
  return all;
}
inline const served_method& find_served(const std::string& name) {
  std::string known;
  for (const served_method& entry : served_methods()) {
    if (entry.name == name) return entry;
    known += (known.empty() ? "" : ", ") + std::string(entry.name);
  }
  tessera::fail("method", name, "one of " + known, "leave it out of --methods");
}

}  // namespace serving
