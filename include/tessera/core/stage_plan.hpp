// What a budget comes to for one conversation: how many tokens each stage handles, and how cheap an estimate must be.
#pragma once

#include "config.hpp"
#include "types.hpp"

TESSERA_NAMESPACE_BEGIN

/// Token counts per kv_head. Made when a conversation's first prompt ends; the host knows all of it, the device's lengths
/// only cap it: a head of n tokens has ceil(n / page) pages and reads at most n.
struct stage_plan {
  index_t capacity = 0;  ///< tokens that a head holds (or lets through) at most, what is decoded in a turn included
  index_t retained = 0;  ///< tokens that the first stage keeps, or lets through, when a prompt ends
  index_t read = 0;      ///< tokens that a step attends: the second stage's k
  double ratio = 1;  ///< capacity over the token budget, at least 1: how much less than all keys an estimate may read
};

TESSERA_NAMESPACE_END
