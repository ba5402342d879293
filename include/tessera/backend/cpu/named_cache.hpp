// Caches by the name of their method: what the CMake target tessera::any has compiled.
#pragma once

#include <memory>
#include <string>

#include "../../runtime/any/any_cache.hpp"
#include "kernel/executor.hpp"

TESSERA_NAMESPACE_BEGIN

/// The cache of a published method, for heads of `dim` channels whose rows are stored as `element` ("fp16", "bf16",
/// "fp32"). Link tessera::any, which has the methods, head dims and elements that it was configured with.
/// Errors   a method, element or head dim that it does not have; an unknown parameter; a method that does not fit the
///          shape: tessera::error.
std::unique_ptr<any_cache> make_cache(const std::string& method, const std::string& element, index_t dim,
                                      const any_cache_request& request, std::shared_ptr<cpu::executor> workers);

/// Errors   a method that tessera::any does not have: tessera::error, with the names of those that it has.
void require_cache_method(const std::string& method);

/// The names of the methods that tessera::any has, in alphabetical order.
const host_vector<std::string>& cache_methods();

TESSERA_NAMESPACE_END
