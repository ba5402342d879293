// Methods and mixtures by name.
#include <stdexcept>

#include "methods/support/any_cache.hpp"

namespace methods_test {

namespace {

const std::vector<entry>& entries() {
  static const std::vector<entry> all = [] {
    auto result = published_entries();
    const auto mixed = mixture_entries();
    result.insert(result.end(), mixed.begin(), mixed.end());
    return result;
  }();
  return all;
}

const entry& find(const std::string& method) {
  for (const entry& known : entries()) {
    if (known.name == method) return known;
  }
  throw std::out_of_range(method);
}

std::vector<std::string> names_of(const std::vector<entry>& list) {
  std::vector<std::string> names;
  for (const entry& known : list) names.push_back(known.name);
  return names;
}

}  // namespace

std::unique_ptr<any_cache> make_cache(const settings& chosen, const tessera::model_shape& shape,
                                      std::shared_ptr<tessera::cpu::executor> workers) {
  return find(chosen.method).make(chosen, shape, std::move(workers));
}

const traits& traits_of(const std::string& method) { return find(method).made_of; }
std::vector<number> numbers_of(const std::string& method) { return find(method).numbers(); }

std::vector<std::string> published_methods() { return names_of(published_entries()); }
std::vector<std::string> mixed_methods() { return names_of(mixture_entries()); }
std::vector<std::string> all_methods() { return names_of(entries()); }

}  // namespace methods_test
