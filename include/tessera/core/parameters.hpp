// Run-time parameters of policies: each policy shows them to a visitor by name.
#pragma once

#include "config.hpp"

TESSERA_NAMESPACE_BEGIN

/// A visitor that looks at nothing: what the concepts try `parameters` with.
struct ignore_parameters {
  template <class T>
  void operator()(const char*, T&, const char*) const {}
};

/// A policy that shows every run-time parameter: `static void parameters(self, visit)` calls
/// `visit(name, self.member, "what it means")` for each of them.
template <class P>
concept has_parameters = requires(P& policy) {
  P::parameters(policy, ignore_parameters{});
};

TESSERA_NAMESPACE_END
