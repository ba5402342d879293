// Policies that the CPU runs and a GPU does not.
#pragma once

#include "../core/config.hpp"

TESSERA_NAMESPACE_BEGIN

/// A policy, stage or layout that runs on the host alone has `static constexpr bool host_only = true;`.
template <class Policy>
concept host_only_policy = requires { requires Policy::host_only; };

/// Whether none of these policies is `host_only`.
template <class... Policies>
inline constexpr bool runs_on_devices = !(... || host_only_policy<Policies>);

/// The CUDA backend's first check of a recipe.
template <class Policy>
constexpr bool check_runs_on_devices() {
  static_assert(
      runs_on_devices<Policy>,
      "tessera: the CUDA backend does not run this: one of its policies says host_only; take the CPU's cache");
  return true;
}

TESSERA_NAMESPACE_END
