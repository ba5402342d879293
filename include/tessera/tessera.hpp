// Machinery only: core, concepts, recipe and the cache. Policies and methods are included one by one.
#pragma once

#include "cache.hpp"
#include "core/logit_rule.hpp"
#include "core/selection.hpp"
#include "core/views.hpp"
#include "recipe.hpp"
