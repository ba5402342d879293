// A cache of any method behind one interface, so that tests are compiled once and not once for every recipe.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include <tessera/backend/cpu/kernel/executor.hpp>
#include <tessera/core/logit_rule.hpp>
#include <tessera/core/prompt/prompt_lines.hpp>
#include <tessera/core/views.hpp>

#include "support/calls/called_cache.hpp"
#include "support/calls/numbers.hpp"

namespace methods_test {

using tessera::index_t;
using tessera::offset_t;

/// All caches here have K and V of this many fp32 elements.
inline constexpr int dim = 64;

/// What a method is run with; `values` by the parameter's name.
struct settings {
  std::string method;
  index_t budget = 0;
  std::map<std::string, double> values{};
  tessera::logit_rule rule{};

  double value(const std::string& name, double otherwise) const {
    const auto found = values.find(name);
    return found == values.end() ? otherwise : found->second;
  }
  index_t count(const std::string& name, index_t otherwise) const { return index_t(value(name, otherwise)); }
};

class any_cache : public support::called_cache {
 public:
  std::unique_ptr<support::called_cache> copy() const final { return clone(); }
  virtual std::unique_ptr<any_cache> clone() const = 0;
  using called_cache::decode;
  /// A layer of these sequences' step, which layer 0 prepares.
  virtual void decode(index_t layer, const std::vector<index_t>& ids, const rows& q, const rows& k, const rows& v,
                      const results& out, const results& lse) = 0;
  /// Writes nonsense over the keys and values of all stored positions of a head but `but`.
  virtual void overwrite(index_t layer, index_t id, index_t head, const std::vector<index_t>& but) = 0;
  virtual offset_t full_bytes(index_t tokens) const = 0;
  /// Lines of prompts are written down from now on; of the last chunk of a layer.
  virtual void trace_lines() = 0;
  virtual tessera::prompt_lines lines(index_t layer, index_t id) const = 0;
};

/// What a method is made of, as far as the reference knows; `other`: a policy that it does not know.
struct traits {
  enum class first { none, window, accumulated, position, other };
  enum class share { uniform, pyramid, adaptive, other };
  enum class second { none, exact, hsa, quest, sparq, other };
  first scorer = first::none;
  share budget = share::uniform;
  second reads = second::none;
  bool blocks = false, each_step = false, filters = false, plans = false;
  bool by_layer = false;                         // a layer chooses when its prompt ends
  bool before_step = false;                      // makes room before a step reads
  bool pages = false;                            // reads whole pages, whatever `unit` says
  bool rounds = false;                           // rows are stored rounded: equal keys may get different scores
  bool whole_blocks = false;                     // a step reads the first and the last block, so at least two
  bool estimate = false;                         // a step reads an estimate of the keys, and the budget pays for it
  bool segments = false, step_segments = false;  // which prompts, and steps, must come with
  index_t window = 32, pool = 7;                 // the method's own defaults

  bool has_reference() const { return scorer != first::other && budget != share::other && reads != second::other; }
  /// Whether the budget is one for a step's estimate and its attention.
  bool pays_for_estimates() const { return plans || (estimate && scorer == first::none); }
};

using support::number;

/// A method or mixture that tests can make by its name.
struct entry {
  std::string name;
  traits made_of;
  std::vector<number> (*numbers)();
  std::unique_ptr<any_cache> (*make)(const settings&, const tessera::model_shape&,
                                     std::shared_ptr<tessera::cpu::executor>);
};

/// Throws as the cache does.
std::unique_ptr<any_cache> make_cache(const settings& chosen, const tessera::model_shape& shape,
                                      std::shared_ptr<tessera::cpu::executor> workers);
const traits& traits_of(const std::string& method);
std::vector<number> numbers_of(const std::string& method);

/// One for every header of include/tessera/methods: CMake makes the list (registry.cpp.in).
std::vector<entry> published_entries();
/// Those of mixtures.hpp.
std::vector<entry> mixture_entries();

std::vector<std::string> published_methods();
std::vector<std::string> mixed_methods();
/// Both.
std::vector<std::string> all_methods();

}  // namespace methods_test
