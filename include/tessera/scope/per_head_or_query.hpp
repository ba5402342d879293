// Every kv_head chooses for itself, or every query head.
#pragma once

#include "../concepts/scope.hpp"
#include "../core/parameters.hpp"

TESSERA_NAMESPACE_BEGIN

/// Whose lists a turn's steps read.
enum class reading_head { kv_head, q_head };

/// By `per`: one list for each kv_head, by the scores of its whole group, or one for each query head, by its own. With
/// the second each list has the budget's tokens, and a group reads what any of its query heads does.
struct per_head_or_query {
  static constexpr const char* name = "per_head_or_query";

  reading_head per = reading_head::kv_head;

  bool by_query_head() const { return per == reading_head::q_head; }

  void check() const {}

  template <class Self, class Visit>
  static void parameters(Self& self, Visit&& visit) {
    visit("per", self.per, one_word_of{"kv_head or q_head"}, "whose own list a step reads");
  }
};

static_assert(check_scope<per_head_or_query>() && splitting_scope<per_head_or_query>);

TESSERA_NAMESPACE_END
